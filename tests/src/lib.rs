//! What the black-box tests share. They run over one lab that is up (`cargo lab up`; its folder is in
//! `NESTOR_LAB`), each with names of its own, so that they can run side by side.
//!
//! A test is a [`run`] of a [`Scenario`]: its objects are found by the scenario's name, removed when it ends,
//! however it ends, and it fails when either tier or the infra holds anything of it afterwards.

pub mod bytes;
pub mod chart;
pub mod containerd;
pub mod crash;
pub mod driver;
pub mod facts;
pub mod fake_infra;
pub mod guest;
pub mod http_proxy;
pub mod hypervisor;
pub mod infra_data;
pub mod link;
pub mod local_pod;
pub mod management;
mod orders;
pub mod place;
pub mod pods;
pub mod pools;
pub mod program;
pub mod records;
mod scenario;
mod scheduled;
mod second_guest;
mod sizes;
mod snapshots;
mod stateful;
pub mod writer;

use std::time::Duration;

pub use lab::wait::eventually;
pub use orders::Orders;
pub use scenario::{Frozen, Scenario, alone, run};
pub use second_guest::SecondGuest;
pub use sizes::requested;
pub use snapshots::{from_claim, from_snapshot};

/// How long anything that should happen may take: generous, since a test machine may be building too.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// One mebibyte, in bytes.
pub const MIB: i64 = 1 << 20;

/// A name that no other test has.
pub fn unique(first: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{first}-{}", &random[..8])
}
