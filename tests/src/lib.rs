//! What the black-box tests share. They run over one lab that is up (`cargo lab up`; its folder is in
//! `NESTOR_LAB`), each with names of its own, so that they can run side by side.
//!
//! A test is a [`run`] of a [`Scenario`]: its objects are found by the scenario's name, removed when it ends,
//! however it ends, and it fails when either tier or the infra holds anything of it afterwards.

pub mod driver;
pub mod fake_infra;
pub mod guest;
pub mod management;
pub mod pods;
pub mod program;
mod scenario;

use std::time::Duration;

pub use lab::wait::eventually;
pub use scenario::{Scenario, alone, run};

/// How long anything that should happen may take: generous, since a test machine may be building too.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// One mebibyte, in bytes.
pub const MIB: i64 = 1 << 20;

/// A name that no other test has.
pub fn unique(first: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{first}-{}", &random[..8])
}
