//! `kubectl nestor guest`: accounts of guests in the management cluster.

pub mod rotate;

use clap::Subcommand;

use crate::clusters::Clusters;
use crate::error::Error;

/// Commands about guests.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Revoke all tokens of a guest's account, and issue a new one.
    #[command(
        after_help = "Mounted volumes are not affected. gc-csi has no access to the management cluster from the \
                            revocation until kubelet has updated the token in its pods, by default within two minutes."
    )]
    Rotate(rotate::RotateArgs),
}

/// Runs a command. Returns whether everything is healthy.
pub async fn run(clusters: &Clusters, command: &GuestCommand) -> Result<bool, Error> {
    match command {
        GuestCommand::Rotate(args) => rotate::run(clusters, args).await.map(|()| true),
    }
}
