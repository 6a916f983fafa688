//! Accounts of volumes: keeps the account and class of each volume in the storage infra equal to the guest and StorageClass
//! that its PersistentVolume records. A new volume has both from its creation; they differ after the platform team assigned
//! the volume to another guest, and for volumes that were not created for a claim.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crds::names::ATTRIBUTE_CLUSTER_ID;
use infra_api::{Account, Owner, Volume, VolumeId};
use kube_kit::informer::Change;
use kube_kit::partial::PersistentVolume;
use kube_kit::queue::{NextAction, Queue, Retry};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cluster::{self, Cluster, Volumes};
use crate::infra::{InfraEvent, LimitError, ReadError, StorageInfra};
use crate::ownership::recorded_owner;

/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent checks.
const CONCURRENT_CHECKS: usize = 8;

/// What to check.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Check {
    All,
    One(VolumeId),
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all volumes of the storage infra"),
            Self::One(id) => write!(f, "volume {id} of the storage infra"),
        }
    }
}

/// Why a check must be retried.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error("failed to read its account: {0}")]
    Read(#[from] ReadError),
    #[error("failed to set its account: {0}")]
    Set(#[from] LimitError),
}

/// The reconciler of the accounts of volumes.
#[derive(Debug)]
pub struct VolumeOwners {
    volumes: Volumes,
    checks: Queue<Check>,
}

impl VolumeOwners {
    /// Reconciles the volumes of this cluster.
    pub fn new(cluster: &Cluster) -> Self {
        Self { volumes: cluster.volumes(), checks: Queue::default() }
    }

    /// Checks a volume whenever what its PersistentVolume records changes.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let checks = self.checks.clone();
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            let Some(new) = change.new else { return };
            let is_known = match change.old {
                Some(old) => recorded(old) == recorded(new),
                // The attribute is what the volume was created with.
                None => attribute(new).is_some() && recorded_owner(new) == attribute(new),
            };
            if let (false, Some(Ok(id))) = (is_known, cluster::handle(&new.spec).map(VolumeId::new)) {
                checks.push(Check::One(id));
            }
        })
    }

    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let checks = self.checks.clone();
        move |event| {
            if event == InfraEvent::Resync {
                checks.push(Check::All);
            }
        }
    }

    /// Reconciles until `stop`. Only the leader runs this.
    pub async fn run(&self, infra: &dyn StorageInfra, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => return,
            () = self.volumes.informer().synced() => {}
        }
        let worker = self.checks.worker("volume-owners");
        self.checks.push(Check::All);
        let check = |check| async move {
            match check {
                Check::All => self.check_all(infra).await,
                Check::One(id) => self.check(infra, &id).await,
            }
        };
        worker.run(CONCURRENT_CHECKS, Retry::default(), stop, check).await;
    }

    async fn check_all(&self, infra: &dyn StorageInfra) -> Result<NextAction, CheckError> {
        let mut next: Option<String> = None;
        loop {
            let page = infra.list_volumes(None, next.as_deref(), Instant::now() + TIMEOUT).await?;
            for volume in page.items.iter().filter(|volume| self.desired(volume).is_some()) {
                self.checks.push(Check::One(volume.id.clone()));
            }
            next = page.next;
            if next.is_none() {
                return Ok(NextAction::AwaitChange);
            }
        }
    }

    async fn check(&self, infra: &dyn StorageInfra, id: &VolumeId) -> Result<NextAction, CheckError> {
        let deadline = Instant::now() + TIMEOUT;
        let volume = infra.get_volume(id, deadline).await?;
        if let Some(owner) = volume.and_then(|volume| self.desired(&volume)) {
            infra.set_owner(id, &owner, deadline).await?;
            tracing::info!(volume = %id, account = %owner.account, class = owner.class, "set the account");
        }
        Ok(NextAction::AwaitChange)
    }

    /// Whom a volume counts for by its PersistentVolumes, if that differs from the storage infra.
    fn desired(&self, volume: &Volume) -> Option<Owner> {
        let owner = owner(&self.volumes.of_volume(&volume.id), &volume.owner)?;
        (owner != volume.owner).then_some(owner)
    }
}

/// Whom a volume counts for; None if no PersistentVolume says so. The one that was created with the volume counts, else the
/// first by name, but no sibling: a share leaves the account as it is. A PersistentVolume without a class does not change
/// the class.
fn owner(volumes: &[Arc<PersistentVolume>], now: &Owner) -> Option<Owner> {
    let own = volumes.iter().filter(|volume| !cluster::is_sibling(&volume.spec));
    let volume = own.min_by_key(|volume| (attribute(volume).is_none(), volume.metadata.name.clone()))?;
    let (guest, class) = recorded(volume);
    let account = Account::new(guest?).ok()?;
    let class = class.filter(|class| !class.is_empty()).unwrap_or(&now.class);
    Some(Owner { account, class: class.to_owned() })
}

/// The recorded guest and class of a volume.
fn recorded(volume: &PersistentVolume) -> (Option<&str>, Option<&str>) {
    (recorded_owner(volume), volume.spec.storage_class_name.as_deref())
}

/// The guest for whose claim the volume was created.
fn attribute(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.csi.as_ref()?.attribute(ATTRIBUTE_CLUSTER_ID)
}

#[cfg(test)]
mod tests {
    use crds::names::{ATTRIBUTE_SIBLING_OF, LABEL_CLUSTER_ID};
    use serde_json::{Value, json};

    use super::*;

    fn volume(name: &str, attributes: Value, labels: Value, class: &str) -> Arc<PersistentVolume> {
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "storageClassName": class,
                    "csi": {"driver": "mgmt.csi.nestor.dev", "volumeHandle": "v", "volumeAttributes": attributes},
                },
            }))
            .unwrap(),
        )
    }

    fn of(volumes: &[Arc<PersistentVolume>]) -> Option<(String, String)> {
        let now = Owner { account: Account::default(), class: "before".into() };
        owner(volumes, &now).map(|owner| (owner.account.to_string(), owner.class))
    }

    #[test]
    fn a_volume_counts_for_the_guest_that_its_persistent_volume_records() {
        let made_for = |guest: &str| json!({ATTRIBUTE_CLUSTER_ID: guest});
        let label = |guest: &str| json!({LABEL_CLUSTER_ID: guest});
        let expected = |account: &str, class: &str| Some((account.to_owned(), class.to_owned()));
        let own = [volume("z", made_for("a"), json!(null), "gold")];
        assert_eq!(of(&own), expected("a", "gold"));
        let reassigned = volume("z", made_for("a"), label("b"), "gold");
        assert_eq!(of(&[reassigned]), expected("b", "gold"));
        let by_hand = volume("s", json!({}), label("c"), "");
        assert_eq!(of(&[by_hand.clone(), own[0].clone()]), expected("a", "gold"));
        assert_eq!(of(&[by_hand]), expected("c", "before"));
        let sibling =
            volume("s", json!({ATTRIBUTE_CLUSTER_ID: "", ATTRIBUTE_SIBLING_OF: "z"}), json!(null), "");
        assert_eq!(of(&[sibling.clone(), own[0].clone()]), expected("a", "gold"));
        assert_eq!(of(&[sibling]), None);
        assert_eq!(of(&[volume("n", made_for(""), json!(null), "gold")]), expected("", "gold"));
        assert_eq!(of(&[volume("u", json!({}), json!(null), "gold")]), None);
        assert_eq!(of(&[]), None);
    }
}
