//! The Node service of the guest driver.

use tokio_util::sync::CancellationToken;

/// Flags of `gc-csi node`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Serves until `stop`.
pub async fn run(_args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    stop.cancelled().await;
    Ok(())
}
