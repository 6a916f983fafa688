//! Alerts fire on faults, and clear after the mend.

use anyhow::Result;
use futures::future::FutureExt;

use crate::alerts::site::in_lab;

mod credentials;
mod drift;
pub(crate) mod faults;
mod fleet;
mod leaders;
mod links;
mod moves;
mod node;
mod pools;
mod programs;
mod storage;

use faults::{QUICK, SLOW, fire_and_clear};

#[tokio::test]
async fn each_quick_fault_is_noticed_and_its_mend() -> Result<()> {
    in_lab(|site| fire_and_clear(site, &QUICK).boxed()).await
}

#[tokio::test]
async fn each_slow_fault_is_noticed_and_its_mend() -> Result<()> {
    in_lab(|site| fire_and_clear(site, &SLOW).boxed()).await
}
