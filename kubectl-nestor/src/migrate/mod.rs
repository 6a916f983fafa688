//! `kubectl nestor migrate-kubevirt`: volumes of kubevirt-csi become those of Nestor, in place, and back. What is done next is decided
//! in `decide`, without I/O, from the objects alone, so that an interrupted migration continues.

mod apply;
mod decide;
mod read;

use clap::Args;
use serde::Serialize;

use crate::cli::Format;
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::guest::accounts;
use crate::render::{format, print};
use decide::{Direction, Guest, Step};

/// The driver whose volumes are migrated.
pub(crate) const KUBEVIRT_CSI: &str = "csi.kubevirt.io";

/// Flags of `migrate-kubevirt`.
#[derive(Debug, Clone, Args)]
pub struct MigrateArgs {
    /// The guest: name of its ServiceAccount in the management cluster. Its namespace must be that of its VirtualMachines.
    #[arg(long, value_name = "NAME")]
    pub guest: String,
    /// PersistentVolumes of the guest. [default: all of the driver csi.kubevirt.io]
    #[arg(value_name = "PV")]
    pub volumes: Vec<String>,
    /// Give the volumes back to kubevirt-csi.
    #[arg(long)]
    pub revert: bool,
    /// Print what would be done, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// What was done, or would be, with one volume.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Outcome {
    volume: String,
    /// Steps, in their order.
    steps: Vec<String>,
    /// Why it is not migrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    /// What has to be known about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// A migration: both clusters, and the guest.
struct Migration<'a> {
    guest: &'a Cluster,
    management: &'a Cluster,
    identity: Guest,
    direction: Direction,
}

/// Runs the command. Returns whether all volumes are migrated, or would be.
pub async fn run(clusters: &Clusters, namespace: Option<&str>, args: &MigrateArgs) -> Result<bool, Error> {
    let management = clusters.management_for("migrate-kubevirt")?;
    let guest = clusters.guest_for("migrate-kubevirt")?;
    let account = accounts::find(management, &args.guest, namespace).await?;
    let identity = Guest { cluster_id: account.cluster_id, namespace: account.namespace };
    let direction = if args.revert { Direction::Back } else { Direction::Forth };
    let migration = Migration { guest, management, identity, direction };
    migration.refuse_while_drivers_run().await?;
    let mut outcomes = Vec::new();
    for name in migration.names(&args.volumes).await? {
        outcomes.push(migration.migrate(&name, args.dry_run).await?);
    }
    print(&format(args.output, &outcomes, |_| text(&outcomes, args))?)?;
    Ok(outcomes.iter().all(|one| one.refused.is_none()))
}

impl Migration<'_> {
    /// Takes the steps of a volume, reading its objects again before each.
    async fn migrate(&self, name: &str, dry_run: bool) -> Result<Outcome, Error> {
        let mut outcome = Outcome { volume: name.to_owned(), steps: Vec::new(), refused: None, note: None };
        loop {
            let volume = self.volume(name).await?;
            outcome.note = decide::note(&volume, self.direction).or(outcome.note);
            let steps = match decide::steps(&volume, &self.identity, self.direction) {
                Ok(steps) => steps,
                Err(why) => {
                    outcome.refused = Some(why);
                    return Ok(outcome);
                }
            };
            if dry_run {
                outcome.steps = steps.iter().map(Step::describe).collect();
                return Ok(outcome);
            }
            let Some(step) = steps.into_iter().next() else { return Ok(outcome) };
            outcome.steps.push(step.describe());
            fail_point::around_async(|| Some(format!("migrate.{}", step.name())), self.apply(&volume, &step))
                .await?;
        }
    }
}

fn text(outcomes: &[Outcome], args: &MigrateArgs) -> String {
    let mut text = String::new();
    for one in outcomes {
        let state = match (&one.refused, one.steps.is_empty(), args.dry_run) {
            (Some(_), _, _) => "refused",
            (None, true, _) => "nothing to do",
            (None, false, true) => "would be migrated",
            (None, false, false) => "migrated",
        };
        text += &format!("PersistentVolume {}: {state}\n", one.volume);
        text.extend(one.steps.iter().map(|step| format!("  {step}\n")));
        text.extend(one.refused.iter().chain(&one.note).map(|why| format!("  {why}\n")));
    }
    if outcomes.is_empty() {
        text += &format!("The guest has no PersistentVolumes of the driver {KUBEVIRT_CSI}.\n");
    }
    text
}
