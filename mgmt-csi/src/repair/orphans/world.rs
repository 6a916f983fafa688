//! Everything that orphans are found in, read once.

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
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::infra::{ReadError, StorageInfra, snapshot_id};
use crate::repair::strays::machines;

/// How long the infra may take for one answer.
const ANSWER: Duration = Duration::from_secs(60);

/// A PersistentVolume with its status.
pub(super) type Volume = Object<PersistentVolumeSpec, PersistentVolumeStatus>;

/// Both sides, as they are.
pub(super) struct World {
    pub(super) now: Timestamp,
    /// By how much the clocks of the API server and of the infra may differ.
    pub(super) clock_skew: Duration,
    pub(super) claims: Vec<PersistentVolumeClaim>,
    pub(super) volumes: Vec<Volume>,
    pub(super) orders: Vec<VolumeAttachment>,
    /// None where the cluster has no such objects.
    pub(super) machines: Option<Vec<VirtualMachine>>,
    /// The snapshots of the infra that VolumeSnapshotContents of this driver stand for, or will once they are taken.
    pub(super) known_snapshots: HashSet<SnapshotId>,
    pub(super) infra_volumes: Vec<InfraVolume>,
    pub(super) infra_snapshots: Vec<Snapshot>,
    pub(super) attachments: Vec<Attachment>,
}

impl World {
    /// Reads the infra first: what was made before that is known to the cluster by then, if it ever will be.
    pub(super) async fn read(
        client: &Client,
        infra: &dyn StorageInfra,
        clock_skew: Duration,
    ) -> anyhow::Result<Self> {
        let infra_volumes =
            pages(async |after: Option<&str>| infra.list_volumes(None, after, Instant::now() + ANSWER).await);
        let infra_volumes = infra_volumes.await?;
        let infra_snapshots = pages(async |after: Option<&str>| {
            infra.list_snapshots(None, None, after, Instant::now() + ANSWER).await
        });
        let infra_snapshots = infra_snapshots.await?;
        let attachments = infra.list_attachments(None, Instant::now() + ANSWER).await?;
        let volumes = ApiResource::erase::<PersistentVolume>(&());
        Ok(Self {
            claims: all(Api::all(client.clone()), "PersistentVolumeClaims").await?,
            volumes: all(Api::all_with(client.clone(), &volumes), "PersistentVolumes").await?,
            orders: all(Api::all(client.clone()), "VolumeAttachments").await?,
            machines: machines(client, None).await.map_err(|error| anyhow!("cannot read {error}"))?,
            known_snapshots: known_snapshots(client).await?,
            infra_volumes,
            infra_snapshots,
            attachments,
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
    Ok(list.map_err(|error| anyhow!("cannot read {what}: {}", chain(&error)))?.items)
}

/// Where snapshots are not served, there are none.
async fn known_snapshots(client: &Client) -> anyhow::Result<HashSet<SnapshotId>> {
    let gvk = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::from_gvk(&gvk));
    match api.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items.iter().flat_map(snapshots_of).collect()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(HashSet::new()),
        Err(error) => Err(anyhow!("cannot read VolumeSnapshotContents: {}", chain(&error))),
    }
}

/// The ids that a content's snapshot has, or gets.
fn snapshots_of(content: &DynamicObject) -> Vec<SnapshotId> {
    if content.data["spec"]["driver"] != MANAGEMENT_DRIVER {
        return Vec::new();
    }
    let handles =
        [&content.data["status"]["snapshotHandle"], &content.data["spec"]["source"]["snapshotHandle"]];
    let handles = handles.into_iter().filter_map(|handle| SnapshotId::new(handle.as_str()?).ok());
    // csi-snapshotter names a snapshot after its VolumeSnapshot, as `--snapshot-name-prefix` is by default.
    let uid = content.data["spec"]["volumeSnapshotRef"]["uid"].as_str();
    let coming = uid.map(|uid| snapshot_id(&format!("snapshot-{uid}")));
    handles.chain(coming).collect()
}
