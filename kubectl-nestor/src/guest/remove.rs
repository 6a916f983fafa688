//! `kubectl nestor guest remove`: revokes the credential, decides about the volumes, and deletes the rest.

use std::time::Duration;

use clap::Args;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume};
use kube::ResourceExt;
use kube::api::DynamicObject;
use process_kit::duration;
use tokio::time::{Instant, sleep};

use super::accounts::{self, Account};
use super::api::{self, HELM, MANAGED_BY};
use super::blockers::{Volumes, blockers, kept};
use super::inventory::{self, Inventory};
use super::objects::{self, Request, Stage, objects, stage};
use super::{MANAGEMENT, MANAGER, namespace};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::render::print;

/// Interval between two reads of what is being deleted.
const INTERVAL: Duration = Duration::from_secs(1);

/// Flags of `guest remove`.
#[derive(Debug, Clone, Args)]
pub struct RemoveArgs {
    /// The guest: name of its ServiceAccount. Its namespace is --namespace, or that of the only account with this name.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What becomes of its volumes. [default: refuse if there are any]
    #[arg(long, value_name = "WHAT", value_enum)]
    pub volumes: Option<Volumes>,
    /// Confirm --volumes delete.
    #[arg(long, requires = "volumes")]
    pub yes: bool,
    /// Time limit for the deletion of its snapshots and volumes, each.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse_timeout)]
    pub timeout: Duration,
}

/// Runs `guest remove`.
pub async fn run(clusters: &Clusters, namespace: Option<&str>, args: &RemoveArgs) -> Result<(), Error> {
    let cluster = clusters.management_for("guest remove")?;
    let account = accounts::find(cluster, &args.name, namespace).await?;
    refuse_unsuitable(&account, args)?;
    let removal = Removal { cluster, account, args };
    removal.refuse_if_blocked(&removal.inventory().await?)?;
    removal.delete(&[Stage::Revoke, Stage::Rights]).await?;
    // What the guest did until then.
    removal.refuse_if_blocked(&removal.inventory().await?)?;
    if args.volumes == Some(Volumes::Delete) {
        removal.delete_volumes().await?;
    }
    removal.delete(&[Stage::Policies]).await?;
    let left = removal.inventory().await?;
    removal.delete_budget(&left).await?;
    let fate = removal.delete_namespace().await?;
    print(&removal.report(&left, &fate))
}

fn refuse_unsuitable(account: &Account, args: &RemoveArgs) -> Result<(), Error> {
    let key = account.key();
    if account.managed_by.as_deref() == Some(HELM) {
        return Err(Error::Refused(format!(
            "guest {key} belongs to a Helm release: remove it from `guests` in the values of nestor-management instead"
        )));
    }
    if args.volumes == Some(Volumes::Delete) && !args.yes {
        return Err(Error::Refused(format!(
            "--volumes delete deletes the snapshots and claims of guest {key}, and with them volumes whose reclaim policy is Delete: \
             add --yes to confirm"
        )));
    }
    Ok(())
}

/// What became of the namespace.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Deleted,
    /// With the reason.
    Kept(String),
}

struct Removal<'a> {
    cluster: &'a Cluster,
    account: Account,
    args: &'a RemoveArgs,
}

impl Removal<'_> {
    async fn inventory(&self) -> Result<Inventory, Error> {
        inventory::read(self.cluster, &self.account).await
    }

    fn manifests(&self) -> guest_manifests::Guest {
        guest_manifests::Guest {
            namespace: self.account.namespace.clone(),
            account: self.account.name.clone(),
            cluster_object: self.account.name.clone(),
            cluster_id: self.account.cluster_id.clone(),
            classes: Vec::new(),
            takes_unlabelled_vms: false,
            system_namespace: self.account.system_namespace.clone(),
        }
    }

    fn refuse_if_blocked(&self, inventory: &Inventory) -> Result<(), Error> {
        let blockers = blockers(&inventory.found, self.args.volumes);
        if blockers.is_empty() {
            return Ok(());
        }
        Err(Error::Refused(format!("guest {} still has {}", self.account.key(), blockers.join("; "))))
    }

    /// Deletes the objects of these stages.
    async fn delete(&self, stages: &[Stage]) -> Result<(), Error> {
        let manifests = self.manifests();
        let request = Request { manifests, limits: None, has_namespace: false, has_kubevirt: true };
        let all = objects(&request)?;
        for wanted in stages {
            for object in all.iter().filter(|object| stage(object) == Some(*wanted)) {
                api::delete(&self.cluster.client, object).await?;
            }
        }
        Ok(())
    }

    /// Deletes the snapshots, and then the claims; waits until they are gone with the volumes that are deleted with them.
    async fn delete_volumes(&self) -> Result<(), Error> {
        for snapshot in &self.inventory().await?.snapshots {
            api::delete(&self.cluster.client, snapshot).await?;
        }
        self.await_gone(|inventory| inventory.found.snapshots.clone()).await?;
        for claim in &self.inventory().await?.claims {
            let namespace = Some(self.account.namespace.as_str());
            let mut object = api::named("v1", "PersistentVolumeClaim", namespace, &claim.name_any());
            object.metadata.uid = claim.uid();
            api::delete(&self.cluster.client, &object).await?;
        }
        self.await_gone(being_deleted).await
    }

    /// Waits until nothing is left of what `left` names.
    async fn await_gone(&self, left: impl Fn(&Inventory) -> Vec<String>) -> Result<(), Error> {
        let deadline = Instant::now() + self.args.timeout;
        loop {
            let left = left(&self.inventory().await?);
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.still_there(&left));
            }
            sleep(INTERVAL).await;
        }
    }

    fn still_there(&self, left: &[String]) -> Error {
        Error::Refused(format!(
            "the credential of guest {} is revoked, but after {} {} of its objects are still being deleted, among them {}: see its \
             events and whether mgmt-csi and the storage infra run, then run the command again",
            self.account.key(),
            duration::show(self.args.timeout),
            left.len(),
            left[0]
        ))
    }

    /// Deletes the StorageBudget, unless there are volumes that it counts.
    async fn delete_budget(&self, left: &Inventory) -> Result<(), Error> {
        if !left.volumes.is_empty() || self.keeps() {
            return Ok(());
        }
        let name = objects::budget_name(&self.manifests());
        let budget = api::named("nestor.dev/v1alpha1", "StorageBudget", None, &name);
        api::delete(&self.cluster.client, &budget).await
    }

    fn keeps(&self) -> bool {
        self.args.volumes == Some(Volumes::Keep)
    }

    /// Deletes the account: with its namespace, or alone. An interrupted removal is found by the account.
    async fn delete_namespace(&self) -> Result<Fate, Error> {
        let name = &self.account.namespace;
        let namespaces = self.cluster.all::<Namespace>();
        let found = namespaces.get_metadata_opt(name).await;
        let found = found.map_err(|error| Error::request(MANAGEMENT, format!("Namespace {name}"), &error))?;
        let manager = found.as_ref().and_then(|found| found.labels().get(MANAGED_BY));
        let is_own = manager.is_some_and(|by| by == MANAGER);
        let fate = match self.reason_to_keep(is_own).await? {
            Some(why) => Fate::Kept(why),
            None => Fate::Deleted,
        };
        let mut object: DynamicObject = api::named("v1", "Namespace", None, name);
        object.metadata.uid = found.and_then(|found| found.metadata.uid);
        match fate {
            Fate::Deleted => api::delete(&self.cluster.client, &object).await?,
            Fate::Kept(_) => self.delete(&[Stage::Account]).await?,
        }
        Ok(fate)
    }

    async fn reason_to_keep(&self, is_own: bool) -> Result<Option<String>, Error> {
        if self.keeps() {
            return Ok(Some("--volumes keep".to_owned()));
        }
        if !is_own {
            return Ok(Some("`guest add` did not create it".to_owned()));
        }
        let foreign = namespace::foreign(self.cluster, &self.account.namespace, &self.account.name).await?;
        Ok(foreign.first().map(|first| format!("it has other objects, such as {first}")))
    }

    fn report(&self, left: &Inventory, fate: &Fate) -> String {
        let Account { name, namespace, cluster_id, .. } = &self.account;
        let fate = match fate {
            Fate::Deleted => format!("Its namespace {namespace} is being deleted."),
            Fate::Kept(why) => format!("Its namespace {namespace} is kept: {why}."),
        };
        let volumes = match kept(&left.found) {
            Some(what) => format!(
                "\n{what} are kept. They still count in its budget, which is kept, too. `kubectl nestor guest add {name} --namespace \
                 {namespace} --cluster-id {cluster_id}` gives them to the guest again."
            ),
            None => String::new(),
        };
        format!("Guest {name} with the cluster ID {cluster_id} is removed. {fate}{volumes}\n")
    }
}

/// Claims, and PersistentVolumes that are deleted with them.
fn being_deleted(inventory: &Inventory) -> Vec<String> {
    let volumes = inventory.volumes.iter().filter(|volume| is_deleted_with_claim(volume));
    let volumes = volumes.map(|volume| format!("PersistentVolume {}", volume.name_any()));
    let claims = inventory.found.claims.iter().map(|claim| format!("PersistentVolumeClaim {claim}"));
    claims.chain(volumes).collect()
}

fn is_deleted_with_claim(volume: &PersistentVolume) -> bool {
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
    policy == Some("Delete") && phase != Some("Available")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::accounts::tests::account;
    use super::*;

    fn args(volumes: Option<Volumes>, yes: bool) -> RemoveArgs {
        RemoveArgs { name: "shop".to_owned(), volumes, yes, timeout: INTERVAL }
    }

    #[test]
    fn deletions_are_confirmed_and_helms_guests_are_left_alone() {
        let mut guest = account("shop", "guest-shop", "id-1");
        assert!(refuse_unsuitable(&guest, &args(None, false)).is_ok());
        assert!(refuse_unsuitable(&guest, &args(Some(Volumes::Keep), false)).is_ok());
        assert!(refuse_unsuitable(&guest, &args(Some(Volumes::Delete), true)).is_ok());
        let why = refuse_unsuitable(&guest, &args(Some(Volumes::Delete), false)).unwrap_err().to_string();
        assert!(why.contains("--yes"), "{why}");
        guest.managed_by = Some(HELM.to_owned());
        let why = refuse_unsuitable(&guest, &args(None, false)).unwrap_err().to_string();
        assert!(why.contains("`guests`"), "{why}");
    }

    #[test]
    fn the_reclaim_policy_decides_about_a_volume() {
        let volume = |policy: &str, phase: &str| -> PersistentVolume {
            let spec = json!({"persistentVolumeReclaimPolicy": policy});
            serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": {"phase": phase}})).unwrap()
        };
        assert!(is_deleted_with_claim(&volume("Delete", "Released")));
        assert!(!is_deleted_with_claim(&volume("Retain", "Released")));
        assert!(!is_deleted_with_claim(&volume("Delete", "Available")));
    }
}
