//! Helpers of the black-box tests. The tests use one running lab (`cargo lab up`; its folder is in `NESTOR_LAB`) with
//! unique object names, so that they can run in parallel.
//!
//! A test is a [`run`] of a [`Scenario`]. The scenario removes its objects when the test ends, and the test fails if
//! either tier or the storage infra still holds any of them.

pub mod accounts;
mod backing;
pub mod browser;
mod budgets;
pub mod bytes;
pub mod chart;
mod cleanup;
pub mod collector;
pub mod console;
pub mod crash;
pub mod docs;
pub mod driver;
mod events;
pub mod fake_infra;
pub mod guest;
pub mod guest_token;
pub mod http_proxy;
pub mod hypervisor;
pub mod images;
pub mod infra_cli;
pub mod infra_data;
pub mod infra_pki;
pub mod inventory;
mod k8s_attachments;
pub mod kubectl_plugin;
mod leftovers;
pub mod local_pod;
pub mod machine;
pub mod management;
pub mod nodes;
mod objects;
pub mod onboarding;
pub mod own_namespace;
pub mod own_pool;
mod paused_process;
pub mod perses;
pub mod pods;
mod pools;
pub mod program;
pub mod prometheus;
pub mod records;
mod scenario;
mod scheduled;
pub mod script;
mod second_guest;
mod sizes;
mod snapshots;
mod stateful;
pub mod tcp_proxy;
pub mod tenants;
pub mod undisturbed;
pub mod writer_vm;

use std::time::Duration;

pub use cleanup::{Alone, alone, run, run_alone};
pub use k8s_attachments::K8sAttachments;
pub use lab::wait::eventually;
pub use paused_process::PausedProcess;
pub use scenario::Scenario;
pub use second_guest::SecondGuest;
pub use sizes::requested;
pub use snapshots::{from_claim, from_snapshot};

/// Timeout of most waits: generous, because the host may be building at the same time.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// One mebibyte, in bytes.
pub const MIB: i64 = 1 << 20;

/// A unique name with this prefix.
pub fn unique(first: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{first}-{}", &random[..8])
}
