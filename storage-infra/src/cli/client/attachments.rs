//! Attachments: disks in virtual machines.

use std::time::Duration;

use clap::Subcommand;
use infra_api::AttachmentId;

use super::ClientArgs;
use crate::cli::output;

/// What to do with attachments.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum AttachmentVerb {
    /// Show all attachments.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Unplug a disk.
    Delete {
        /// The attachment's id.
        id: AttachmentId,
        /// The machine is lost: switch it off where it does not let go of the disk.
        #[arg(long)]
        fence: bool,
        /// How long to wait, in seconds.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Does one verb.
pub(super) async fn run(verb: AttachmentVerb) -> anyhow::Result<()> {
    match verb {
        AttachmentVerb::List { client } => {
            output::many(client.output, &client.connect()?.list_attachments(None, None).await?)
        }
        AttachmentVerb::Delete { id, fence, timeout, client } => {
            let (server, timeout) = (client.connect()?, Duration::from_secs(timeout));
            match fence {
                true => server.fence(&id, timeout).await?,
                false => server.detach(&id, timeout).await?,
            }
            output::done(client.output, &format!("attachment {id} deleted"))
        }
    }
}
