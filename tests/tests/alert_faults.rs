//! Alerts fire on the faults that take longer than those of `alerts`, and clear.

use anyhow::Result;
use futures::future::FutureExt;

use crate::alerts::faults::{SLOW, fire_and_clear};
use crate::alerts::site::in_lab;

#[tokio::test]
async fn each_slow_fault_is_noticed_and_its_mend() -> Result<()> {
    in_lab(|site| fire_and_clear(site, &SLOW).boxed()).await
}
