//! Watches of the management cluster, shared by all pages: a page makes no API request.

use std::sync::{Arc, OnceLock};

use crds::names::{
    ANNOTATION_GUEST_NAMESPACE, ANNOTATION_GUEST_PVC, ANNOTATION_ORPHANED_REASON, ANNOTATION_ORPHANED_SINCE,
    LABEL_CLUSTER_ID,
};
use crds::{
    VIRTUAL_MACHINE_GROUP, VirtualMachine, VolumeAttachment, newest_virtual_machine_version,
    virtual_machine_resource,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client};
use kube_kit::api_versions;
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim, identity, only};
use tokio_util::sync::CancellationToken;

use crate::feed::{EventRow, Feed};
use crate::first_seen::FirstSeen;
use crate::overview::waiting_entries;

/// Kinds whose Events are watched, by a field selector each.
const KINDS: [&str; 4] = ["PersistentVolumeClaim", "PersistentVolume", "VirtualMachine", "VolumeAttachment"];

/// Annotations of claims that a page shows.
const CLAIM_ANNOTATIONS: [&str; 4] =
    [ANNOTATION_GUEST_NAMESPACE, ANNOTATION_GUEST_PVC, ANNOTATION_ORPHANED_REASON, ANNOTATION_ORPHANED_SINCE];

/// The watched objects.
#[derive(Debug, Clone)]
pub struct Watches {
    /// Claims.
    pub claims: Informer<PersistentVolumeClaim>,
    /// PersistentVolumes.
    pub volumes: Informer<PersistentVolume>,
    /// VolumeAttachments.
    pub attachments: Informer<VolumeAttachment>,
    /// Events, by kind of their objects.
    pub events: Vec<Informer<Event>>,
    /// New Events.
    pub feed: Feed,
    /// When entries were first seen to wait.
    pub first_seen: Arc<FirstSeen>,
    /// Set as soon as the served version is known.
    vms: Arc<OnceLock<Informer<VirtualMachine>>>,
}

impl Watches {
    /// Starts all watches. `sources` has one check for each.
    pub fn start(client: &Client, sources: &Health, stop: &CancellationToken) -> Self {
        let feed = Feed::starting_at(Timestamp::now());
        let check = |name: &str| sources.check(name, "not read yet");
        let claims = Informer::builder("PersistentVolumeClaims", Api::all(client.clone())).trim(trim_claim);
        let volumes = Informer::builder("PersistentVolumes", Api::all(client.clone())).trim(trim_volume);
        let attachments =
            Informer::builder("VolumeAttachments", Api::all(client.clone())).trim(trim_attachment);
        let watches = Self {
            claims: claims.start(check("PersistentVolumeClaims"), stop.clone()),
            volumes: volumes.start(check("PersistentVolumes"), stop.clone()),
            attachments: attachments.start(check("VolumeAttachments"), stop.clone()),
            events: KINDS.map(|kind| watch_events(client, kind, &feed, sources, stop)).into(),
            feed,
            first_seen: Arc::default(),
            vms: Arc::default(),
        };
        watches.start_vms(client.clone(), sources, stop.clone());
        watches
    }

    /// The VirtualMachines; none before the version that the cluster serves is known.
    pub fn vms(&self) -> Vec<Arc<VirtualMachine>> {
        self.vms.get().map(Informer::list).unwrap_or_default()
    }

    fn start_vms(&self, client: Client, sources: &Health, stop: CancellationToken) {
        let check = sources.check("VirtualMachines", "not read yet");
        let (started, first_seen) = (self.vms.clone(), self.first_seen.clone());
        process_kit::supervise::background(
            "start of the watch of VirtualMachines",
            stop.clone(),
            async move {
                let choose = newest_virtual_machine_version;
                let version =
                    api_versions::wait_for_version(&client, VIRTUAL_MACHINE_GROUP, choose, &check, &stop);
                let Some(version) = version.await else { return };
                let api = Api::all_with(client, &virtual_machine_resource(version));
                let vms = Informer::builder(format!("VirtualMachines ({version})"), api)
                    .trim(trim_vm)
                    .on_change(move |change: &Change<'_, VirtualMachine>| observe(&first_seen, change))
                    .start(check, stop.clone());
                // Cannot fail: nothing else sets it.
                let _ = started.set(vms);
                stop.cancelled().await;
            },
        );
    }
}

fn observe(first_seen: &FirstSeen, change: &Change<'_, VirtualMachine>) {
    let waiting = change.new.map(|vm| waiting_entries(vm)).unwrap_or_default();
    first_seen.set(change.key, waiting, Timestamp::now());
}

fn watch_events(
    client: &Client,
    kind: &str,
    feed: &Feed,
    sources: &Health,
    stop: &CancellationToken,
) -> Informer<Event> {
    let name = format!("Events of {kind}s");
    let feed = feed.clone();
    Informer::<Event>::builder(&name, Api::all(client.clone()))
        .config(watcher::Config::default().fields(&format!("involvedObject.kind={kind}")))
        .trim(trim_event)
        .on_change(move |change: &Change<'_, Event>| {
            if let Some(row) = change.new.and_then(|event| EventRow::of(event)) {
                feed.publish(row);
            }
        })
        .start(sources.check(&name, "not read yet"), stop.clone())
}

/// Identity and times of an object, and its cluster ID.
fn trimmed(meta: &mut ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        creation_timestamp: meta.creation_timestamp.take(),
        deletion_timestamp: meta.deletion_timestamp.take(),
        labels: only(meta.labels.take(), LABEL_CLUSTER_ID),
        ..identity(meta)
    }
}

fn trim_vm(vm: &mut VirtualMachine) {
    vm.metadata = trimmed(&mut vm.metadata);
    for disk in vm.status.iter_mut().flat_map(|status| &mut status.volumes) {
        // Secrets of the volume do not belong into this process.
        (disk.format_token, disk.blank_attestation) = (None, None);
    }
}

fn trim_attachment(attachment: &mut VolumeAttachment) {
    attachment.metadata = trimmed(&mut attachment.metadata);
    if let Some(status) = &mut attachment.status {
        (status.format_token, status.blank_attestation) = (None, None);
    }
}

fn trim_claim(claim: &mut PersistentVolumeClaim) {
    let mut annotations = claim.metadata.annotations.take();
    if let Some(annotations) = &mut annotations {
        annotations.retain(|key, _| CLAIM_ANNOTATIONS.contains(&key.as_str()));
    }
    let annotations = annotations.filter(|kept| !kept.is_empty());
    claim.metadata = ObjectMeta { annotations, ..trimmed(&mut claim.metadata) };
}

fn trim_volume(volume: &mut PersistentVolume) {
    volume.metadata = trimmed(&mut volume.metadata);
    if let Some(csi) = &mut volume.spec.csi {
        csi.volume_attributes = Vec::new();
    }
}

fn trim_event(event: &mut Event) {
    let about = std::mem::take(&mut event.involved_object);
    *event = Event {
        metadata: trimmed(&mut event.metadata),
        involved_object: ObjectReference {
            kind: about.kind,
            namespace: about.namespace,
            name: about.name,
            ..Default::default()
        },
        type_: event.type_.take(),
        reason: event.reason.take(),
        message: event.message.take(),
        event_time: event.event_time.take(),
        last_timestamp: event.last_timestamp.take(),
        series: event.series.take(),
        ..Default::default()
    };
}

/// Key of the object that an Event is about.
pub fn about(event: &Event) -> (&str, Key) {
    let about = &event.involved_object;
    let key = Key::new(about.namespace.clone().unwrap_or_default(), about.name.clone().unwrap_or_default());
    (about.kind.as_deref().unwrap_or_default(), key)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_of_a_volume_are_dropped() {
        let mut vm: VirtualMachine = serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha6", "kind": "VirtualMachine",
            "metadata": {"name": "vm", "labels": {LABEL_CLUSTER_ID: "c", "x": "y"}, "annotations": {"a": "b"}},
            "spec": {}, "status": {"volumes": [{"name": "a", "formatToken": "secret", "blankAttestation": "id"}]},
        }))
        .unwrap();
        trim_vm(&mut vm);
        let text = json!(vm).to_string();
        assert!(!text.contains("secret") && !text.contains("\"id\"") && !text.contains("\"x\""), "{text}");
        let mut attachment: VolumeAttachment = serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment", "metadata": {"name": "a"},
            "spec": {"nodeUUID": "u", "volumeName": "c"}, "status": {"formatToken": "secret"},
        }))
        .unwrap();
        trim_attachment(&mut attachment);
        assert_eq!(attachment.status.unwrap().format_token, None);
    }

    #[test]
    fn a_trimmed_event_has_what_a_row_shows() {
        let mut event: Event = serde_json::from_value(json!({
            "metadata": {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "type": "Normal", "reason": "R", "message": "m", "action": "a", "reportingComponent": "c",
            "involvedObject": {"kind": "VirtualMachine", "namespace": "n", "name": "vm", "uid": "v"},
        }))
        .unwrap();
        let whole = EventRow::of(&event);
        trim_event(&mut event);
        assert_eq!(EventRow::of(&event), whole);
        assert_eq!(about(&event), ("VirtualMachine", Key::new("n", "vm")));
        assert_eq!(event.action, None);
    }
}
