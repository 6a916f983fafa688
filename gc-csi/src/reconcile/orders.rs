//! What the guest orders to be attached: its built-in `VolumeAttachment`s by node. Those of drivers that this process does
//! not serve count, too: an earlier driver's may be for a disk of ours.

use std::sync::Arc;

use futures::future::try_join_all;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::health::Check;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::lean::VolumeAttachment;
use kube_kit::queue::Queue;
use tokio_util::sync::CancellationToken;

use crate::guest::{self, Guest, attachment_name};
use crate::management::commit::{MayLeave, Wanted};

/// One order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) name: String,
    /// The handle of the volume; None when that is gone, not seen yet, or another driver's, so that the order may be for
    /// any.
    pub(super) handle: Option<String>,
    /// The guest's PersistentVolume; empty where the order brings its own.
    pub(super) volume: String,
    /// Whether csi-attacher was told that the disk is there.
    pub(super) attached: bool,
    pub(super) deleting: bool,
}

/// The orders, watched.
#[derive(Clone)]
pub(crate) struct Orders {
    api: Api<VolumeAttachment>,
    informer: Informer<VolumeAttachment>,
    by_node: Arc<Index>,
    guest: Guest,
}

impl Orders {
    /// Starts the watch, which pushes the node of each order that changes.
    pub(super) fn start(
        client: &Client,
        guest: Guest,
        check: Check,
        stop: &CancellationToken,
        changed: Queue<String>,
    ) -> Self {
        let by_node = Arc::new(Index::default());
        let index = by_node.clone();
        let informer = Informer::builder("guest VolumeAttachments", Api::all(client.clone()))
            .trim(trim)
            .on_change(move |change| {
                let node = |order: &Arc<VolumeAttachment>| order.node_name.clone();
                index.put(change.key, change.new.map(node).map(Key::cluster));
                for node in [change.old.map(node), change.new.map(node)].into_iter().flatten() {
                    changed.push(node);
                }
            })
            .start(check, stop.clone());
        Self { api: Api::all(client.clone()), informer, by_node, guest }
    }

    /// Waits until all were read once.
    pub(super) async fn synced(&self) {
        self.informer.synced().await;
    }

    /// The orders for a node.
    pub(super) fn of(&self, node: &str) -> Vec<Order> {
        let keys = self.by_node.members(&Key::cluster(node));
        keys.iter().filter_map(|key| self.informer.get(key)).map(|order| self.read(&order)).collect()
    }

    /// The same as the guest's API says now: what is done about disks is not done on what was.
    pub(super) async fn now(&self, node: &str) -> Result<Vec<Order>, String> {
        let list = self.api.list(&ListParams::default()).await;
        let list =
            list.map_err(|error| format!("cannot read the guest's VolumeAttachments: {}", chain(&error)))?;
        let here = list.items.iter().filter(|order| order.node_name == node);
        Ok(here.map(|order| self.read(order)).collect())
    }

    /// Whether an order is there to stay, as the guest's API says now.
    pub(super) async fn stands(&self, name: &str) -> Result<bool, String> {
        let read = self.api.get_opt(name).await;
        let order =
            read.map_err(|error| format!("cannot read guest VolumeAttachment {name}: {}", chain(&error)))?;
        Ok(order.is_some_and(|order| order.metadata.deletion_timestamp.is_none()))
    }

    /// Whether a volume may leave a node: no order for it is there to stay, as the guest's API says now.
    pub(crate) fn may_leave(&self, handle: &str, node: &str) -> MayLeave {
        let (orders, handle, node) = (self.clone(), handle.to_owned(), node.to_owned());
        Arc::new(move || {
            let (orders, handle, node) = (orders.clone(), handle.clone(), node.clone());
            Box::pin(async move {
                let standing = orders.standing(&handle, &node).await.map_err(Wanted::Unknown)?;
                standing.map_or(Ok(()), |name| Err(Wanted::By(name)))
            })
        })
    }

    /// The order for a volume on a node that is there to stay, as the guest's API says now. It has the name that Kubernetes
    /// gives it; one that a person made has another, by which the watch shows it.
    async fn standing(&self, handle: &str, node: &str) -> Result<Option<String>, String> {
        let drivers = &self.guest.drivers;
        let mut names: Vec<String> =
            drivers.iter().map(|driver| attachment_name(handle, driver, node)).collect();
        let seen = self.of(node).into_iter().filter(|order| order.handle.as_deref() == Some(handle));
        names.extend(seen.map(|order| order.name));
        names.sort_unstable();
        names.dedup();
        let stands = try_join_all(names.iter().map(|name| self.stands(name))).await?;
        Ok(names.into_iter().zip(stands).find(|(_, stands)| *stands).map(|(name, _)| name))
    }

    fn read(&self, order: &VolumeAttachment) -> Order {
        let source = &order.source;
        let inline = source.inline.as_ref().filter(|csi| self.guest.drivers.contains(&csi.driver));
        let volume = source.persistent_volume_name.clone().unwrap_or_default();
        let named = || {
            let volume = self.guest.volumes.get(&Key::cluster(volume.clone()))?;
            guest::handle(&volume).map(str::to_owned)
        };
        Order {
            name: order.metadata.name.clone().unwrap_or_default(),
            handle: inline.map(|csi| csi.volume_handle.clone()).or_else(named),
            attached: order.attached,
            deleting: order.metadata.deletion_timestamp.is_some(),
            volume,
        }
    }
}

/// Keeps of the metadata who it is.
fn trim(order: &mut VolumeAttachment) {
    order.metadata.annotations = None;
    order.metadata.labels = None;
    order.metadata.finalizers = None;
    order.metadata.owner_references = None;
}
