//! Reads what exists of a guest in the management cluster.

use std::collections::BTreeSet;

use crds::VolumeAttachment;
use crds::names::{LABEL_CLUSTER_ID, LABEL_SHARE_PREFIX};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Resource, ResourceExt};

use super::accounts::Account;
use super::blockers::Found;
use crate::clusters::Cluster;
use crate::error::Error;
use crate::lists::read;
use crate::share::objects::sibling_of;

/// The objects of a guest.
pub(super) struct Inventory {
    pub(super) claims: Vec<PersistentVolumeClaim>,
    pub(super) snapshots: Vec<DynamicObject>,
    /// PersistentVolumes with its data.
    pub(super) volumes: Vec<PersistentVolume>,
    pub(super) found: Found,
}

/// Reads the inventory of a guest.
pub(super) async fn read(cluster: &Cluster, account: &Account) -> Result<Inventory, Error> {
    let label = format!("{LABEL_CLUSTER_ID}={}", account.cluster_id);
    let claims = cluster.claims_of(&account.namespace);
    let claims = read::list(cluster, claims, "PersistentVolumeClaims", Some(&label)).await?;
    let snapshots = snapshots(cluster, &account.namespace, &label).await?;
    let vms = read::labelled_machines(cluster, &label).await?;
    let attachments: Api<VolumeAttachment> = Api::namespaced(cluster.client.clone(), &account.namespace);
    let attachments = read::list(cluster, attachments, "VolumeAttachments", None).await?;
    let all: Vec<PersistentVolume> = read::list(cluster, cluster.all(), "PersistentVolumes", None).await?;
    let claim_names: BTreeSet<String> = claims.iter().map(ResourceExt::name_any).collect();
    let found = Found {
        claims: names(&claims),
        snapshots: names(&snapshots),
        vms: vms.iter().map(key).collect(),
        attached: attached(&attachments, &claim_names),
        ..shares(&all, &account.cluster_id)
    };
    let is_own = |volume: &PersistentVolume| read::guest_of(volume) == Some(account.cluster_id.as_str());
    let volumes = all.into_iter().filter(is_own).collect();
    Ok(Inventory { claims, snapshots, volumes, found })
}

/// VolumeSnapshots with a label; none without their API.
async fn snapshots(cluster: &Cluster, namespace: &str, label: &str) -> Result<Vec<DynamicObject>, Error> {
    let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshot");
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, &resource);
    let first = api.list_metadata(&kube::api::ListParams::default().labels(label).limit(1)).await;
    match first {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Vec::new()),
        _ => read::list(cluster, api, "VolumeSnapshots", Some(label)).await,
    }
}

fn names<K: ResourceExt>(objects: &[K]) -> Vec<String> {
    objects.iter().map(ResourceExt::name_any).collect()
}

fn key<K: Resource>(object: &K) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

fn attached(attachments: &[VolumeAttachment], claims: &BTreeSet<String>) -> Vec<String> {
    let is_attached = |one: &&VolumeAttachment| one.status.as_ref().is_some_and(|status| status.attached);
    let of = attachments.iter().filter(is_attached).map(|one| one.spec.volume_name.to_string());
    of.filter(|claim| claims.contains(claim)).collect()
}

/// A guest's PersistentVolumes, and those that it shares with others or others with it.
fn shares(all: &[PersistentVolume], cluster_id: &str) -> Found {
    let (own, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|volume| read::guest_of(volume) == Some(cluster_id));
    let label = format!("{LABEL_SHARE_PREFIX}{cluster_id}");
    let volumes: Vec<String> = own.iter().map(|volume| volume.name_any()).collect();
    let has_siblings = |name: &str| others.iter().any(|other| sibling_of(other) == Some(name));
    let is_lent = |volume: &&PersistentVolume| {
        let by_label = |key: &String| key.starts_with(LABEL_SHARE_PREFIX) && *key != label;
        volume.labels().keys().any(by_label) || has_siblings(&volume.name_any())
    };
    Found {
        lent: own.iter().copied().filter(is_lent).map(ResourceExt::name_any).collect(),
        borrowed: others
            .iter()
            .filter(|volume| volume.labels().contains_key(&label))
            .map(|volume| volume.name_any())
            .collect(),
        volumes,
        ..Found::default()
    }
}

#[cfg(test)]
mod tests {
    use crds::names::{ATTRIBUTE_CLUSTER_ID, ATTRIBUTE_SIBLING_OF, MANAGEMENT_DRIVER};
    use serde_json::{Value, json};

    use super::*;

    fn volume(name: &str, attributes: &Value, labels: &Value) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"csi": {
                "driver": MANAGEMENT_DRIVER, "volumeHandle": "h", "volumeAttributes": attributes,
            }},
        }))
        .unwrap()
    }

    #[test]
    fn volumes_are_found_by_their_record_and_shares_on_both_sides() {
        let of = |guest: &str| json!({ATTRIBUTE_CLUSTER_ID: guest});
        let all = [
            volume("own", &of("id-1"), &json!({})),
            volume("lent", &of("id-1"), &json!({})),
            volume("labelled", &of("id-1"), &json!({"share.nestor.dev/id-2": "ro"})),
            volume(
                "sibling",
                &json!({ATTRIBUTE_SIBLING_OF: "lent"}),
                &json!({"share.nestor.dev/id-2": "rw"}),
            ),
            volume("borrowed", &json!({ATTRIBUTE_SIBLING_OF: "x"}), &json!({"share.nestor.dev/id-1": "rw"})),
            volume("foreign", &of("id-2"), &json!({})),
            volume("given", &of("id-1"), &json!({LABEL_CLUSTER_ID: "id-2"})),
        ];
        let found = shares(&all, "id-1");
        assert_eq!(found.volumes, ["own", "lent", "labelled"]);
        assert_eq!(
            (found.lent, found.borrowed),
            (vec!["lent".into(), "labelled".into()], vec!["borrowed".into()])
        );
    }
}
