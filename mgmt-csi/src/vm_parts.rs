//! The parts that attach volumes to VirtualMachines. They run only where the management cluster has some (`vm_api`).

use kube_kit::health::Health;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::PersistentVolumeClaim;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::attachment::{AttachController, RunningAttachController};
use crate::clients::Clients;
use crate::cluster::Volumes;
use crate::infra::InfraEvent;
use crate::nodes::{self, Nodes};
use crate::repair::Repair;
use crate::volume_attachment::{Attachments, Shared};

/// The parts, not started yet.
pub(crate) struct VmParts {
    pub(crate) attach: AttachController,
    pub(crate) nodes: Nodes,
    pub(crate) repair: Repair,
}

/// The parts, with their watches started.
pub(crate) struct RunningVmParts {
    attach: RunningAttachController,
    nodes: (Nodes, nodes::Context),
    repair: (Repair, Shared),
}

impl VmParts {
    /// Handlers for storage infra events.
    pub(crate) fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let (repair, attach, nodes) =
            (self.repair.on_infra_event(), self.attach.on_infra_event(), self.nodes.on_infra_event());
        move |event| {
            repair(event);
            attach(event);
            nodes(event);
        }
    }

    /// Starts the watches, which run until `stop`. Calls `on_release` with a claim that a VolumeAttachment no longer holds. None
    /// if `stop` came first.
    pub(crate) async fn start(
        self,
        clients: Clients,
        caches: (Informer<PersistentVolumeClaim>, Volumes),
        on_release: impl Fn(&Key) + Send + Sync + 'static,
        ready: &Health,
        stop: CancellationToken,
    ) -> Option<RunningVmParts> {
        let Self { attach, nodes, repair } = self;
        let attach = attach.start(clients, caches, (on_release, nodes.on_vm()), ready, stop).await?;
        let (shared, context) = (attach.shared(), attach.nodes());
        Some(RunningVmParts { attach, nodes: (nodes, context), repair: (repair, shared) })
    }
}

impl RunningVmParts {
    /// The VolumeAttachments, which hold their claims.
    pub(crate) fn attachments(&self) -> Attachments {
        self.attach.attachments()
    }

    /// Attaches and repairs until `stop`. Only the leader runs this. VolumeAttachments in backoff are retried as soon as
    /// `infra_back` is notified.
    pub(crate) async fn run(&self, infra_back: &Notify, stop: &CancellationToken) {
        let (nodes, context) = &self.nodes;
        let (repair, shared) = &self.repair;
        let attach = self.attach.run(infra_back, repair.run(shared, stop.clone()));
        tokio::join!(attach, self.attach.record_guests(), nodes.run(context, stop.clone()));
    }
}
