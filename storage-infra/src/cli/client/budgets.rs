//! Budget commands. mgmt-csi sets budgets, from the StorageBudgets of the management cluster.

use clap::Subcommand;
use infra_api::Account;

use super::ClientArgs;
use crate::cli::output;

/// Budget commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum BudgetCommand {
    /// List the accounts that have a budget or use space, with what they use.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show what one account uses, in total and per class.
    Show {
        /// Name of the account: the cluster ID of a guest.
        account: Account,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Runs a budget command.
pub(super) async fn run(command: BudgetCommand) -> anyhow::Result<()> {
    match command {
        BudgetCommand::List { client } => {
            output::many(client.output, &client.connect()?.list_budgets().await?)
        }
        BudgetCommand::Show { account, client } => {
            let budget = client.connect()?.get_budget(&account).await?;
            output::budget(client.output, &budget)
        }
    }
}
