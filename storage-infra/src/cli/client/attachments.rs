//! Attachment commands.

use std::time::Duration;

use clap::Subcommand;
use infra_api::AttachmentId;
use process_kit::duration;

use super::ClientArgs;
use crate::cli::output;

/// Attachment commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum AttachmentCommand {
    /// List all attachments.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Detach a disk and delete its attachment.
    Delete {
        /// ID of the attachment.
        id: AttachmentId,
        /// The node is out of service: power its virtual machine off if it does not release the disk.
        #[arg(long)]
        fence: bool,
        /// How long to wait for completion.
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_timeout)]
        timeout: Duration,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Runs an attachment command.
pub(super) async fn run(command: AttachmentCommand) -> anyhow::Result<()> {
    match command {
        AttachmentCommand::List { client } => {
            output::many(client.output, &client.connect()?.list_attachments(None, None).await?)
        }
        AttachmentCommand::Delete { id, fence, timeout, client } => {
            let server = client.connect()?;
            match fence {
                true => server.fence(&id, timeout).await?,
                false => server.detach(&id, timeout).await?,
            }
            output::done(client.output, &format!("attachment {id} deleted"))
        }
    }
}
