//! Hypervisors: what runs virtual machines.

use clap::Subcommand;

use super::ClientArgs;
use crate::cli::output;

/// What to do with hypervisors.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum HypervisorVerb {
    /// Say that a hypervisor is on another host from now on, and that nothing runs on the one before.
    ForgetHost {
        /// The server's name for it.
        name: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Does one verb.
pub(super) async fn run(verb: HypervisorVerb) -> anyhow::Result<()> {
    match verb {
        HypervisorVerb::ForgetHost { name, client } => {
            client.connect()?.forget_host(&name).await?;
            output::done(client.output, &format!("the host that {name} was on is forgotten"))
        }
    }
}
