//! Record of the guest of each VM: the label `nestor.dev/cluster-id` as it was first observed, by the UID of the VM, in a
//! ConfigMap that no guest can write. Guests may patch their VMs, so the present label proves nothing. Guests cannot create
//! VMs: the platform team or the VM Operator does, with the label.
//!
//! Only the leader writes the record; every replica reads it. To accept a changed label, the platform team removes the entry.
//! The size of an object is limited, so VMs beyond [`CAPACITY`] are not recorded, and cannot attach anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crds::{VirtualMachine, VolumeAttachment};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::labels::managed_by;
use kube_kit::mutation_cache::MutationCache;
use kube_kit::queue::{NextAction, Queue, Retry};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{UnlabelledVms, VmGuest};
use crate::event_reason::EventReason;
use crate::virtual_machines::{self, is_owner, label, owner_key};

/// Name of the ConfigMap.
pub(crate) const CONFIG_MAP: &str = "nestor-vm-guests";

/// Maximum size of the record in bytes, as [`size`] counts them: below 1.5 MiB, the limit of a request to etcd.
const CAPACITY: usize = 1_500_000;

/// Delay before a retry after a conflict: the cache lags behind the write of another client.
const CACHE_LAG: Duration = Duration::from_millis(300);

type Guests = BTreeMap<String, String>;
/// Entries to write, by the UID of the VM; None removes one.
type Changes<'a> = BTreeMap<&'a str, Option<&'a str>>;

/// The record could not be written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write ConfigMap {key}, the record of the guests of VMs: {reason}")]
pub(crate) struct RecordError {
    key: Key,
    reason: String,
}

/// The guests of VMs.
#[derive(Clone)]
pub(crate) struct VmGuests {
    vms: Informer<VirtualMachine>,
    /// None: labels are not recorded, and count as they are.
    record: Option<Arc<Record>>,
    /// What to do with VMs without a label.
    pub(crate) unlabelled: UnlabelledVms,
}

/// The ConfigMap.
struct Record {
    key: Key,
    client: Client,
    objects: MutationCache<ConfigMap>,
}

impl VmGuests {
    /// Guests of these VMs, by their labels alone.
    pub(crate) fn by_label(vms: Informer<VirtualMachine>, unlabelled: UnlabelledVms) -> Self {
        Self { vms, record: None, unlabelled }
    }

    /// Guests of these VMs as recorded in `namespace`. Whenever the record changes, pushes to `queue`, and calls `changed` with
    /// the UIDs of the VMs whose entries changed.
    pub(crate) fn recorded(
        self,
        client: &Client,
        namespace: &str,
        queue: &Queue<Key>,
        (ready, stop): (&Health, &CancellationToken),
        changed: impl Fn(&BTreeSet<&str>) + Send + Sync + 'static,
    ) -> Self {
        let key = Key::new(namespace, CONFIG_MAP);
        let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
        let only = watcher::Config::default().fields(&format!("metadata.name={CONFIG_MAP}"));
        let builder = Informer::builder("ConfigMap of VM guests", api).config(only);
        let objects = MutationCache::new(builder.informer());
        let record = Arc::new(Record { key, client: client.clone(), objects });
        let (observed, queue) = (record.clone(), queue.clone());
        let observe = move |change: &Change<'_, ConfigMap>| {
            observed.objects.observe(change);
            queue.push(change.key.clone());
            changed(&differing(entries(change.old), entries(change.new)));
        };
        builder.on_change(observe).start(ready.check("vm-guests", "not started yet"), stop.clone());
        Self { record: Some(record), ..self }
    }

    /// The VMs.
    pub(crate) fn vms(&self) -> &Informer<VirtualMachine> {
        &self.vms
    }

    /// The guest of the VM of a VolumeAttachment. One without a VM was created by hand, which no guest can.
    pub(crate) fn of(&self, attachment: &VolumeAttachment) -> VmGuest {
        let Some(key) = owner_key(attachment) else { return VmGuest::Unlabelled };
        match self.vms.get(&key).filter(|vm| is_owner(vm, attachment)) {
            Some(vm) => self.of_vm(&vm),
            None => VmGuest::Unknown,
        }
    }

    fn of_vm(&self, vm: &VirtualMachine) -> VmGuest {
        let Some(record) = &self.record else {
            return label(vm).map_or(VmGuest::Unlabelled, |guest| VmGuest::Guest(guest.to_owned()));
        };
        guest(vm, entries(record.objects.get(&record.key).as_ref()))
    }

    /// Waits for the first lists.
    pub(crate) async fn synced(&self) {
        self.vms.synced().await;
        if let Some(record) = &self.record {
            record.objects.informer().synced().await;
        }
    }

    /// Records the guests of new VMs until `stop`. Only the leader runs this.
    pub(crate) async fn run(&self, queue: &Queue<Key>, events: &Events, stop: CancellationToken) {
        let Some(record) = &self.record else { return };
        let worker = queue.worker("vm-guests");
        tokio::select! {
            () = stop.cancelled() => return,
            () = self.synced() => {}
        }
        queue.push(record.key.clone());
        let write = |_| async { self.write(record, events).await };
        worker.run(1, Retry::default(), stop, write).await;
    }

    async fn write(&self, record: &Record, events: &Events) -> Result<NextAction, RecordError> {
        let object = record.objects.get(&record.key);
        let recorded = entries(object.as_ref());
        let vms = self.vms.list();
        vms.iter().filter(|vm| is_relabelled(vm, recorded)).for_each(|vm| record.report(vm, events));
        let (changes, excluded) = fitting(recorded, changes(recorded, vms.iter().map(|vm| &**vm)));
        if !changes.is_empty() {
            return record.write(object.as_deref(), &changes).await;
        }
        match excluded {
            0 => Ok(NextAction::AwaitChange),
            _ => Err(record.error(format!("it is full; {excluded} VMs are not recorded"))),
        }
    }
}

impl Record {
    /// Writes changes, unless the ConfigMap has changed since `before`.
    async fn write(
        &self,
        before: Option<&ConfigMap>,
        changes: &Changes<'_>,
    ) -> Result<NextAction, RecordError> {
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), &self.key.namespace);
        let written = match before {
            Some(before) => {
                let version = &before.metadata.resource_version;
                let patch = json!({"metadata": {"resourceVersion": version}, "data": changes});
                api.patch(CONFIG_MAP, &PatchParams::default(), &Patch::Merge(patch)).await
            }
            None => api.create(&PostParams::default(), &self.new_object(changes)).await,
        };
        match written {
            Ok(written) => {
                self.objects.created(written);
                tracing::info!(changes = changes.len(), "recorded the guests of VMs");
                Ok(NextAction::AwaitChange)
            }
            // The cache lags behind the write of another client.
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {
                Ok(NextAction::RequeueAfter(CACHE_LAG))
            }
            Err(error) => Err(self.error(chain(&error))),
        }
    }

    fn error(&self, reason: String) -> RecordError {
        RecordError { key: self.key.clone(), reason }
    }

    fn new_object(&self, changes: &Changes<'_>) -> ConfigMap {
        let data = changes.iter().filter_map(|(uid, guest)| Some(((*uid).to_owned(), (*guest)?.to_owned())));
        let mut object = ConfigMap { data: Some(data.collect()), ..Default::default() };
        object.metadata.name = Some(CONFIG_MAP.to_owned());
        object.metadata.labels = Some(managed_by("mgmt-csi"));
        object
    }

    /// Emits an event for a VM whose label was changed.
    fn report(&self, vm: &VirtualMachine, events: &Events) {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        let note = format!(
            "the label {} of this VM differs from its first value, which remains in effect; to accept the change, remove the key \
             {uid} from ConfigMap {} in the management cluster",
            crds::names::LABEL_CLUSTER_ID,
            self.key
        );
        let about = virtual_machines::reference(vm);
        events.warning_once(about, "Watch", EventReason::GuestLabelChanged.as_str(), note);
    }
}

/// The entries of the ConfigMap; none if it does not exist.
fn entries(object: Option<&Arc<ConfigMap>>) -> &Guests {
    static NONE: Guests = Guests::new();
    object.and_then(|object| object.data.as_ref()).unwrap_or(&NONE)
}

/// The guest of a VM with this record.
fn guest(vm: &VirtualMachine, recorded: &Guests) -> VmGuest {
    let uid = vm.metadata.uid.as_deref().unwrap_or_default();
    match (recorded.get(uid), label(vm)) {
        (Some(guest), _) => VmGuest::Guest(guest.clone()),
        (None, None) => VmGuest::Unlabelled,
        (None, Some(guest)) if size(recorded) + entry_size(uid, guest) > CAPACITY => VmGuest::Unrecordable,
        (None, Some(_)) => VmGuest::Unknown,
    }
}

/// Bytes of a record.
fn size(recorded: &Guests) -> usize {
    recorded.iter().map(|(uid, guest)| entry_size(uid, guest)).sum()
}

/// Bytes of an entry in etcd: its key is also in `managedFields`.
fn entry_size(uid: &str, guest: &str) -> usize {
    2 * uid.len() + guest.len() + 16
}

/// The changes for which the record has space, and the number of the others.
fn fitting<'a>(recorded: &Guests, mut changes: Changes<'a>) -> (Changes<'a>, usize) {
    let kept = recorded.iter().filter(|(uid, _)| !changes.contains_key(uid.as_str()));
    let mut size: usize = kept.map(|(uid, guest)| entry_size(uid, guest)).sum();
    let all = changes.len();
    changes.retain(|uid, guest| {
        let Some(guest) = guest else { return true };
        size += entry_size(uid, guest);
        size <= CAPACITY
    });
    let excluded = all - changes.len();
    (changes, excluded)
}

/// Changes of the record: VMs that are new or newly labelled, and those that are gone.
fn changes<'a>(recorded: &'a Guests, vms: impl Iterator<Item = &'a VirtualMachine>) -> Changes<'a> {
    let mut changes: Changes<'_> = recorded.keys().map(|uid| (uid.as_str(), None)).collect();
    for vm in vms {
        let Some(uid) = vm.metadata.uid.as_deref() else { continue };
        if recorded.contains_key(uid) {
            changes.remove(uid);
        } else if let Some(guest) = label(vm) {
            changes.insert(uid, Some(guest));
        }
    }
    changes
}

fn is_relabelled(vm: &VirtualMachine, recorded: &Guests) -> bool {
    let recorded = vm.metadata.uid.as_ref().and_then(|uid| recorded.get(uid));
    recorded.is_some_and(|guest| label(vm) != Some(guest.as_str()))
}

/// The keys whose values differ.
fn differing<'a>(old: &'a Guests, new: &'a Guests) -> BTreeSet<&'a str> {
    let changed = new.iter().filter(|(uid, guest)| old.get(*uid) != Some(guest)).map(|(uid, _)| uid);
    changed.chain(old.keys().filter(|uid| !new.contains_key(*uid))).map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(uid: &str, label: Option<&str>) -> VirtualMachine {
        let labels = json!({crds::names::LABEL_CLUSTER_ID: label});
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
            "metadata": {"name": uid, "namespace": "n", "uid": uid, "labels": label.map(|_| labels)},
        }))
        .unwrap()
    }

    fn guests(pairs: &[(&str, &str)]) -> Guests {
        pairs.iter().map(|(uid, guest)| ((*uid).to_owned(), (*guest).to_owned())).collect()
    }

    #[test]
    fn the_first_label_is_recorded_and_a_later_one_is_not() {
        let vms = [
            vm("new", Some("a")),
            vm("relabelled", Some("b")),
            vm("unlabelled", None),
            vm("empty", Some("")),
        ];
        let recorded = guests(&[("relabelled", "a"), ("gone", "a")]);
        let found = changes(&recorded, vms.iter());
        assert_eq!(found, [("new", Some("a")), ("gone", None)].into());
        assert!(is_relabelled(&vms[1], &recorded) && !is_relabelled(&vms[0], &recorded));
        let removed = vm("relabelled", None);
        assert!(is_relabelled(&removed, &recorded) && changes(&recorded, [&removed].into_iter()).len() == 1);
    }

    #[test]
    fn a_label_counts_once_it_is_recorded() {
        let (recorded, empty) = (guests(&[("u", "a")]), Guests::new());
        assert_eq!(guest(&vm("u", Some("b")), &recorded), VmGuest::Guest("a".into()));
        assert_eq!(guest(&vm("u", None), &recorded), VmGuest::Guest("a".into()));
        assert_eq!(guest(&vm("u", Some("a")), &empty), VmGuest::Unknown);
        assert_eq!(guest(&vm("u", None), &empty), VmGuest::Unlabelled);
        assert_eq!(guest(&vm("u", Some("")), &empty), VmGuest::Unlabelled);
    }

    #[test]
    fn a_full_record_takes_only_removals() {
        let id = |number| format!("{number:036}");
        let count = CAPACITY / entry_size(&id(0), &id(0));
        assert_eq!(count, 12_096);
        let full: Guests = (0..count).map(|number| (id(number), id(0))).collect();
        let vms: Vec<_> = [id(1), id(count), id(count + 1)].iter().map(|uid| vm(uid, Some(&id(0)))).collect();
        assert_eq!(guest(&vms[1], &full), VmGuest::Unrecordable);
        assert_eq!(guest(&vms[0], &full), VmGuest::Guest(id(0)));

        let (added, guest, removed) = (id(count), id(0), id(7));
        let of = |changes: &[(&str, Option<&str>)]| {
            let (fitting, excluded) = fitting(&full, changes.iter().copied().collect());
            (fitting.len(), excluded)
        };
        let (add, remove) = ((added.as_str(), Some(guest.as_str())), (removed.as_str(), None));
        assert_eq!(of(&[add]), (0, 1));
        assert_eq!(of(&[add, remove]), (2, 0));
    }

    #[test]
    fn vms_whose_entry_changed_are_found() {
        let (old, new) =
            (guests(&[("a", "1"), ("b", "1"), ("c", "1")]), guests(&[("a", "1"), ("b", "2"), ("d", "1")]));
        assert_eq!(differing(&old, &new), ["b", "c", "d"].into());
    }
}
