//! Guest VolumeAttachments (`storage.k8s.io`) by node. Those of drivers that this process does not serve count too: an
//! earlier driver's may be for one of our disks.

use std::sync::Arc;

use crds::names::{ClaimName, VmName};
use futures::future::try_join_all;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::health::Check;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::VolumeAttachment;
use kube_kit::queue::Queue;
use tokio_util::sync::CancellationToken;

use crate::guest::{self, Guest, attachment_name};
use crate::management::volume_entries::{KeepReason, MayRemove};

/// A guest VolumeAttachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct K8sAttachment {
    pub(super) name: String,
    /// Handle of the volume; None if the PersistentVolume is missing, not cached yet, or another driver's. It may then
    /// be for any volume.
    pub(super) handle: Option<ClaimName>,
    /// Name of the guest PersistentVolume; empty for inline volumes.
    pub(super) volume: String,
    /// Whether csi-attacher reported the disk as attached.
    pub(super) attached: bool,
    pub(super) deleting: bool,
}

/// Informer of guest VolumeAttachments.
#[derive(Clone)]
pub(crate) struct K8sAttachments {
    api: Api<VolumeAttachment>,
    informer: Informer<VolumeAttachment>,
    by_node: Arc<Index>,
    guest: Guest,
}

impl K8sAttachments {
    /// Starts the informer, which pushes the node of each VolumeAttachment that changes to `changed`.
    pub(super) fn start(
        client: &Client,
        guest: Guest,
        check: Check,
        stop: &CancellationToken,
        changed: Queue<VmName>,
    ) -> Self {
        let by_node = Arc::new(Index::default());
        let index = by_node.clone();
        let informer = Informer::builder("guest VolumeAttachments", Api::all(client.clone()))
            .trim(trim)
            .on_change(move |change| {
                let node = |k8s_attachment: &Arc<VolumeAttachment>| k8s_attachment.node_name.clone();
                index.put(change.key, change.new.map(node).map(Key::cluster));
                for node in [change.old.map(node), change.new.map(node)].into_iter().flatten() {
                    changed.push(VmName::new(node));
                }
            })
            .start(check, stop.clone());
        Self { api: Api::all(client.clone()), informer, by_node, guest }
    }

    /// Waits for the first list.
    pub(super) async fn synced(&self) {
        self.informer.synced().await;
    }

    /// The VolumeAttachments of a node, from the cache.
    pub(super) fn on_node(&self, node: &VmName) -> Vec<K8sAttachment> {
        let keys = self.by_node.members(&Key::cluster(node.as_str()));
        keys.iter()
            .filter_map(|key| self.informer.get(key))
            .map(|k8s_attachment| self.convert(&k8s_attachment))
            .collect()
    }

    /// The VolumeAttachments of a node, read from the API server, for decisions about disks.
    pub(super) async fn list_live(&self, node: &VmName) -> Result<Vec<K8sAttachment>, String> {
        let list = self.api.list(&ListParams::default()).await;
        let list =
            list.map_err(|error| format!("failed to list the guest's VolumeAttachments: {}", chain(&error)))?;
        let here = list.items.iter().filter(|k8s_attachment| k8s_attachment.node_name == node.as_str());
        Ok(here.map(|k8s_attachment| self.convert(k8s_attachment)).collect())
    }

    /// Whether a VolumeAttachment exists and is not being deleted, read from the API server.
    pub(super) async fn is_live(&self, name: &str) -> Result<bool, String> {
        let read = self.api.get_opt(name).await;
        let k8s_attachment =
            read.map_err(|error| format!("failed to read guest VolumeAttachment {name}: {}", chain(&error)))?;
        Ok(k8s_attachment.is_some_and(|k8s_attachment| k8s_attachment.metadata.deletion_timestamp.is_none()))
    }

    /// Check that no VolumeAttachment requests a volume on a node, read from the API server.
    pub(crate) fn may_remove(&self, handle: &ClaimName, node: &VmName) -> MayRemove {
        let (k8s_attachments, handle, node) = (self.clone(), handle.clone(), node.clone());
        Arc::new(move || {
            let (k8s_attachments, handle, node) = (k8s_attachments.clone(), handle.clone(), node.clone());
            Box::pin(async move {
                let live_attachment =
                    k8s_attachments.live_attachment(&handle, &node).await.map_err(KeepReason::Unknown)?;
                live_attachment.map_or(Ok(()), |name| Err(KeepReason::Requested(name)))
            })
        })
    }

    /// Name of the VolumeAttachment that requests a volume on a node, read from the API server. Kubernetes derives the
    /// name; one that was created manually has another name, which is taken from the cache.
    async fn live_attachment(&self, handle: &ClaimName, node: &VmName) -> Result<Option<String>, String> {
        let drivers = &self.guest.drivers;
        let mut names: Vec<String> =
            drivers.iter().map(|driver| attachment_name(handle, node, driver)).collect();
        let cached = self
            .on_node(node)
            .into_iter()
            .filter(|k8s_attachment| k8s_attachment.handle.as_ref() == Some(handle));
        names.extend(cached.map(|k8s_attachment| k8s_attachment.name));
        names.sort_unstable();
        names.dedup();
        let is_live = try_join_all(names.iter().map(|name| self.is_live(name))).await?;
        Ok(names.into_iter().zip(is_live).find(|(_, is_live)| *is_live).map(|(name, _)| name))
    }

    fn convert(&self, k8s_attachment: &VolumeAttachment) -> K8sAttachment {
        let source = &k8s_attachment.source;
        let inline = source.inline.as_ref().filter(|csi| self.guest.drivers.contains(&csi.driver));
        let volume = source.persistent_volume_name.clone().unwrap_or_default();
        let named = || {
            let volume = self.guest.volumes.get(&Key::cluster(volume.clone()))?;
            guest::handle(&volume)
        };
        K8sAttachment {
            name: k8s_attachment.metadata.name.clone().unwrap_or_default(),
            handle: inline.map(|csi| ClaimName::new(&csi.volume_handle)).or_else(named),
            attached: k8s_attachment.attached,
            deleting: k8s_attachment.metadata.deletion_timestamp.is_some(),
            volume,
        }
    }
}

/// Keeps only the identity of the metadata.
fn trim(k8s_attachment: &mut VolumeAttachment) {
    k8s_attachment.metadata.annotations = None;
    k8s_attachment.metadata.labels = None;
    k8s_attachment.metadata.finalizers = None;
    k8s_attachment.metadata.owner_references = None;
}
