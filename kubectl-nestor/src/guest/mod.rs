//! `kubectl nestor guest`: guests in the management cluster. What is applied, and what blocks a removal, is decided in `objects` and
//! `blockers`, without I/O.

pub(crate) mod accounts;
pub mod add;
mod api;
mod blockers;
mod inventory;
pub mod list;
mod namespace;
mod objects;
mod output;
mod overview;
mod present;
pub mod remove;
pub mod rotate;
mod secret;
pub mod show;

use clap::Subcommand;

use crate::cli::{Connection, ListArgs};
use crate::clusters::Clusters;
use crate::error::Error;

/// Cluster, for errors.
const MANAGEMENT: &str = "management";
/// Field manager, and value of the label `app.kubernetes.io/managed-by` of what `guest add` creates.
const MANAGER: &str = "kubectl-nestor";

/// Commands about guests.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Create or change a guest: namespace, account, rights, admission policies and budget.
    #[command(
        after_help = "The management namespace is --namespace, by default guest-NAME. The cluster ID is --cluster-id, by default \
                      that of the existing account or a new UUID. A repetition changes only what differs, and keeps what no \
                      flag names."
    )]
    Add(add::AddArgs),
    /// List the guests, with what they use.
    List(ListArgs),
    /// Show one guest, and its problems.
    Show(show::ShowArgs),
    /// Remove a guest, unless something of it still exists.
    #[command(
        after_help = "The guest's credential is revoked first. A repetition continues an interrupted removal. The namespace is \
                      deleted only if `guest add` created it and nothing else is in it."
    )]
    Remove(remove::RemoveArgs),
    /// Revoke all tokens of a guest's account, and issue a new one.
    #[command(
        after_help = "Mounted volumes are not affected. gc-csi has no access to the management cluster from the \
                            revocation until kubelet has updated the token in its pods, by default within two minutes."
    )]
    Rotate(rotate::RotateArgs),
}

/// Runs a command. Returns whether everything is healthy.
pub async fn run(clusters: &Clusters, flags: &Connection, command: &GuestCommand) -> Result<bool, Error> {
    let namespace = flags.management_namespace.as_deref();
    match command {
        GuestCommand::Add(args) => add::run(clusters, flags, args).await.map(|()| true),
        GuestCommand::List(args) => list::run(clusters, args.output).await.map(|()| true),
        GuestCommand::Show(args) => show::run(clusters, namespace, args).await,
        GuestCommand::Remove(args) => remove::run(clusters, namespace, args).await.map(|()| true),
        GuestCommand::Rotate(args) => rotate::run(clusters, args).await.map(|()| true),
    }
}
