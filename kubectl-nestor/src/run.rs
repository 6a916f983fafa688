//! Dispatch of the subcommands.

use clap::CommandFactory;

use crate::cli::{Cli, Command};
use crate::clusters::Clusters;
use crate::config::Config;
use crate::error::Error;
use crate::{bundle, check, guest, lists, migrate, render, share, trace};

/// Runs a command. Returns whether everything is healthy.
pub async fn run(cli: Cli) -> Result<bool, Error> {
    if let Command::Completion { shell } = cli.command {
        return completion(shell).map(|()| true);
    }
    let connection = cli.connection();
    let clusters = Clusters::connect(Config::load(&connection)?).await?;
    match &cli.command {
        Command::Trace(args) => trace::run(&clusters, args).await,
        Command::Volumes(args) => lists::volumes::run(&clusters, args.output).await,
        Command::Vms(args) => lists::vms::run(&clusters, args.output).await,
        Command::Attachments(args) => lists::attachments::run(&clusters, args.output).await,
        Command::Pools(args) => lists::pools::run(&clusters, args).await,
        Command::Usage(args) => lists::usage::run(&clusters, args.output).await,
        Command::Orphans(args) => lists::orphans::run(&clusters, args.output).await,
        Command::Share(args) => share::share(&clusters, args).await,
        Command::Unshare(args) => share::unshare(&clusters, args).await,
        Command::Check(args) => check::run(&clusters, args.output).await,
        Command::Guest { command } => guest::run(&clusters, &connection, command).await,
        Command::MigrateKubevirt(args) => {
            migrate::run(&clusters, connection.management_namespace.as_deref(), args).await
        }
        Command::Bundle(args) => bundle::run(&clusters, args).await,
        Command::Completion { .. } => Ok(true),
    }
}

fn completion(shell: clap_complete::Shell) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kubectl-nestor", &mut script);
    render::print(&String::from_utf8_lossy(&script))
}
