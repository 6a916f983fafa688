//! `kubectl nestor guest show`.

use clap::Args;
use jiff::Timestamp;
use process_kit::text::one_line;
use serde::Serialize;

use super::accounts;
use super::list::{bytes, classes};
use super::overview::{self, Guest, joined, problems};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::error::Error;
use crate::lists::{of_limit, or_dash};
use crate::render::{format, print};

/// Flags of `guest show`.
#[derive(Debug, Clone, Args)]
pub struct ShowArgs {
    /// The guest: name of its ServiceAccount. Its namespace is --namespace, or that of the only account with this name.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// A guest with its problems.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    guest: Guest,
    problems: Vec<String>,
}

/// Runs `guest show`. Returns whether there are no problems.
pub async fn run(clusters: &Clusters, namespace: Option<&str>, args: &ShowArgs) -> Result<bool, Error> {
    let cluster = clusters.management_for("guest show")?;
    let account = accounts::find(cluster, &args.name, namespace).await?;
    let guests = overview::guests(cluster, &[account]).await?;
    let now = Timestamp::now();
    let shown: Vec<Shown> =
        guests.into_iter().map(|guest| Shown { problems: problems(&guest, now), guest }).collect();
    for one in &shown {
        print(&format(args.output, one, |_| text(one))?)?;
    }
    Ok(shown.iter().all(|one| one.problems.is_empty()))
}

fn text(shown: &Shown) -> String {
    let fields = fields(&shown.guest).into_iter();
    let lines: String = fields.map(|(name, value)| format!("{name:<15}{}\n", one_line(&value))).collect();
    let problems: String =
        shown.problems.iter().map(|problem| format!("problem: {}\n", one_line(problem))).collect();
    lines + &problems
}

fn fields(guest: &Guest) -> Vec<(&'static str, String)> {
    let budget = guest.budget.as_ref();
    let volumes = budget.map(|budget| of_limit(budget.used_volumes, budget.max_volumes));
    let snapshots = budget.map(|budget| of_limit(budget.used_snapshots, budget.max_snapshots));
    let vms = if guest.vms.is_empty() { "-".to_owned() } else { joined(&guest.vms) };
    vec![
        ("name", guest.name.clone()),
        ("namespace", guest.namespace.clone()),
        ("cluster ID", guest.cluster_id.clone()),
        ("managed by", or_dash(guest.managed_by.clone())),
        ("classes", classes(guest)),
        ("budget", or_dash(budget.map(|budget| budget.name.clone()))),
        ("  bytes", or_dash(budget.map(bytes))),
        ("  volumes", or_dash(volumes)),
        ("  snapshots", or_dash(snapshots)),
        ("claims", guest.claims.to_string()),
        ("volumes", format!("{}, of them {} Released", guest.volumes, guest.released)),
        ("VMs", vms),
        ("token expires", or_dash(guest.token_expires.map(|time| time.to_string()))),
    ]
}
