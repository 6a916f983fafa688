//! Inventory of the management cluster and the storage infra, read once per list of orphans.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::anyhow;
use crds::names::MANAGEMENT_DRIVER;
use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Attachment, List, Snapshot, SnapshotId, Volume as InfraVolume};
use k8s_openapi::api::core::v1::PersistentVolumeStatus;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::{GroupVersionKind, Object};
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::infra::{ReadError, StorageInfra, snapshot_id};
use crate::repair::dangling::list_vms;

/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A PersistentVolume with its status.
pub(super) type Volume = Object<PersistentVolumeSpec, PersistentVolumeStatus>;

/// All objects of both sides.
pub(super) struct Inventory {
    pub(super) now: Timestamp,
    /// Maximum clock skew between the API server and the storage infra.
    pub(super) clock_skew: Duration,
    pub(super) claims: Vec<PersistentVolumeClaim>,
    pub(super) volumes: Vec<Volume>,
    pub(super) attachments: Vec<VolumeAttachment>,
    /// None if the cluster does not serve VirtualMachines.
    pub(super) vms: Option<Vec<VirtualMachine>>,
    /// IDs of the snapshots of all VolumeSnapshotContents of this driver, including those not taken yet.
    pub(super) known_snapshots: HashSet<SnapshotId>,
    pub(super) infra_volumes: Vec<InfraVolume>,
    pub(super) infra_snapshots: Vec<Snapshot>,
    pub(super) infra_attachments: Vec<Attachment>,
}

impl Inventory {
    /// Reads the storage infra first, so that the later lists of the cluster include the objects that refer to it.
    pub(super) async fn read(
        client: &Client,
        infra: &dyn StorageInfra,
        clock_skew: Duration,
    ) -> anyhow::Result<Self> {
        let infra_volumes = pages(async |after: Option<&str>| {
            infra.list_volumes(None, after, Instant::now() + TIMEOUT).await
        });
        let infra_volumes = infra_volumes.await?;
        let infra_snapshots = pages(async |after: Option<&str>| {
            infra.list_snapshots(None, None, after, Instant::now() + TIMEOUT).await
        });
        let infra_snapshots = infra_snapshots.await?;
        let infra_attachments = infra.list_attachments(None, Instant::now() + TIMEOUT).await?;
        let volumes = ApiResource::erase::<PersistentVolume>(&());
        Ok(Self {
            claims: all(Api::all(client.clone()), "PersistentVolumeClaims").await?,
            volumes: all(Api::all_with(client.clone(), &volumes), "PersistentVolumes").await?,
            attachments: all(Api::all(client.clone()), "VolumeAttachments").await?,
            vms: list_vms(client, None).await.map_err(|error| anyhow!("failed to list {error}"))?,
            known_snapshots: known_snapshots(client).await?,
            infra_volumes,
            infra_snapshots,
            infra_attachments,
            clock_skew,
            now: Timestamp::now(),
        })
    }
}

async fn pages<T>(
    page: impl AsyncFn(Option<&str>) -> Result<List<T>, ReadError>,
) -> Result<Vec<T>, ReadError> {
    let (mut all, mut next) = (Vec::new(), None::<String>);
    loop {
        let List { items, next: after } = page(next.as_deref()).await?;
        all.extend(items);
        next = after;
        if next.is_none() {
            return Ok(all);
        }
    }
}

async fn all<K>(api: Api<K>, what: &str) -> anyhow::Result<Vec<K>>
where
    K: DeserializeOwned + Clone + std::fmt::Debug,
{
    let list = api.list(&ListParams::default()).await;
    Ok(list.map_err(|error| anyhow!("failed to list {what}: {}", chain(&error)))?.items)
}

/// Empty if the cluster does not serve VolumeSnapshotContents.
async fn known_snapshots(client: &Client) -> anyhow::Result<HashSet<SnapshotId>> {
    let gvk = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::from_gvk(&gvk));
    match api.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items.iter().flat_map(snapshots_of).collect()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(HashSet::new()),
        Err(error) => Err(anyhow!("failed to list VolumeSnapshotContents: {}", chain(&error))),
    }
}

/// The IDs that the snapshot of a content has, or will have.
fn snapshots_of(content: &DynamicObject) -> Vec<SnapshotId> {
    if content.data["spec"]["driver"] != MANAGEMENT_DRIVER {
        return Vec::new();
    }
    let handles =
        [&content.data["status"]["snapshotHandle"], &content.data["spec"]["source"]["snapshotHandle"]];
    let handles = handles.into_iter().filter_map(|handle| SnapshotId::new(handle.as_str()?).ok());
    // csi-snapshotter derives the name from the UID of the VolumeSnapshot, with the default `--snapshot-name-prefix`.
    let uid = content.data["spec"]["volumeSnapshotRef"]["uid"].as_str();
    let coming = uid.map(|uid| snapshot_id(&format!("snapshot-{uid}").into()));
    handles.chain(coming).collect()
}
