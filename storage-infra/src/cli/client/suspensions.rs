//! Arguments of suspensions.

use clap::Args;
use infra_api::SuspensionSpec;

/// A suspension.
#[derive(Debug, Args)]
pub(in crate::cli) struct SuspensionArgs {
    /// Why: shown to operators who find the volume suspended.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Pause the VMs that have a disk of it attached, as a whole, until it is resumed. Without it, an attached volume is not
    /// suspended.
    #[arg(long)]
    pause_nodes: bool,
}

impl From<SuspensionArgs> for SuspensionSpec {
    fn from(SuspensionArgs { reason, pause_nodes }: SuspensionArgs) -> Self {
        Self { reason, pause_nodes }
    }
}
