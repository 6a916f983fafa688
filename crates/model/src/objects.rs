//! Adapter between model states and the decision functions of the components: builds the real objects, calls the function, and
//! reduces its result to model types. The functions are pure, so results are memoized.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use crds::names::{self, ANNOTATION_VOLUMES_CONFIRMED, FINALIZER_DETACH};
use crds::{VolumeAttachment, VolumeAttachmentStatus};
use gc_csi::vm_volumes::{self, AttachStep, EntryChange, PendingDetach, Revision, VmApi};
use infra_api::{
    Access, AttachmentId, AttachmentSpec, AttachmentState, Labels, NodeRef, NodeSpec, Owner, PoolName,
    ProblemCode, Qos, VolumeId, VolumeSpec, VolumeState,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_kit::informer::Key;
use mgmt_csi::attachment::decide::{self, Inputs, Step};
use mgmt_csi::infra::{
    AttachError, AttachedDisk, DetachError, Indeterminate, Message, attachment_id, has_same_name,
};
use mgmt_csi::volume_attachment::failure::Failure;
use serde_json::{Value, json};
use storage_infra::catalog::{AttachmentRow, Blank, NodeRow, Origin, VolumeRow};
use storage_infra::service::admission::{Admission, AttachRequest, Facts, admit};
use uuid::Uuid;
use vm_operator_shim::plan::{needs_fresh_read, plan};
use vm_operator_shim::vm::Vm as ShimVm;

use crate::state::*;

const NAMESPACE: &str = "guest";
const CLAIM: &str = "data";
const DISK: Uuid = Uuid::from_u128(0xd15c);
const API_VERSION: &str = "vmoperator.vmware.com/v1alpha5";
const NOW: &str = "2026-01-01T00:00:00Z";

/// Interned values, to which states refer by number.
struct Interned<T>(Mutex<Vec<T>>);

impl<T: Clone + PartialEq> Interned<T> {
    const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn put(&self, value: T) -> Ref {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|one| *one == value).unwrap_or_else(|| {
            all.push(value);
            all.len() - 1
        });
        Ref::try_from(at).expect("there are few different texts and statuses")
    }

    fn get(&self, at: Ref) -> T {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(at)].clone()
    }
}

static VM_STATUS: Interned<Vec<Value>> = Interned::new();
static STATUS: Interned<Option<VolumeAttachmentStatus>> = Interned::new();
static TEXTS: Interned<String> = Interned::new();

/// The empty `status.volumes`.
pub fn empty_status() -> Ref {
    VM_STATUS.put(Vec::new())
}

/// The status of a new VolumeAttachment.
pub fn no_status() -> Ref {
    STATUS.put(None)
}

macro_rules! memoized {
    ($key:ty => $answer:ty, $input:expr, $rule:expr) => {{
        thread_local!(static MEMO: std::cell::RefCell<std::collections::HashMap<$key, $answer>> = std::cell::RefCell::default());
        $crate::objects::memoize(&MEMO, $input, $rule)
    }};
}
pub(crate) use memoized;

pub(crate) fn memoize<K: Hash + Eq + Copy, V: Copy>(
    memory: &'static std::thread::LocalKey<RefCell<HashMap<K, V>>>,
    input: K,
    rule: impl FnOnce(K) -> V,
) -> V {
    if let Some(answer) = memory.with_borrow(|memory| memory.get(&input).copied()) {
        return answer;
    }
    let answer = rule(input);
    memory.with_borrow_mut(|memory| memory.insert(input, answer));
    answer
}

fn name(vm_index: VmIndex) -> String {
    format!("vm-{vm_index}")
}

fn node(vm_index: VmIndex) -> Uuid {
    Uuid::from_u128(vm_index as u128 + 1)
}

fn uid(uid: Uid) -> String {
    Uuid::from_u128(0x1000 + u128::from(uid)).to_string()
}

fn key(vm_index: VmIndex) -> Key {
    Key::new(NAMESPACE, names::volume_attachment(&name(vm_index).into(), &CLAIM.into()))
}

fn id(vm_index: VmIndex, of: Uid) -> AttachmentId {
    attachment_id(&key(vm_index), &uid(of))
}

fn spec(vm_index: VmIndex) -> AttachmentSpec {
    let volume = VolumeId::new("volume").expect("a legal id");
    AttachmentSpec { volume, node: node(vm_index), read_only: false, access: Access::SingleNode }
}

fn time() -> Time {
    Time(NOW.parse().expect("a legal time"))
}

fn document(vm_index: VmIndex, vm: Vm, resource_version: &str) -> Value {
    let entry = json!({"name": names::volume_entry(CLAIM), "persistentVolumeClaim": {"claimName": CLAIM}});
    json!({
        "apiVersion": API_VERSION, "kind": "VirtualMachine",
        "metadata": {
            "name": name(vm_index), "namespace": NAMESPACE, "uid": format!("uid-of-{}", name(vm_index)),
            "generation": vm.generation, "resourceVersion": resource_version,
            "annotations": {ANNOTATION_VOLUMES_CONFIRMED: vm.confirmed.to_string()},
        },
        "spec": {"volumes": if vm.entry { vec![entry] } else { Vec::new() }},
        "status": {"instanceUUID": node(vm_index).to_string(), "volumes": VM_STATUS.get(vm.status)},
    })
}

fn object<T: serde::de::DeserializeOwned>(document: Value) -> T {
    serde_json::from_value(document).expect("the document matches the type")
}

fn virtual_machine(vm_index: VmIndex, vm: Vm) -> vm_volumes::Vm {
    object(document(vm_index, vm, "1"))
}

fn committed(vm_index: VmIndex, generation: u8) -> Revision {
    Revision { uid: format!("uid-of-{}", name(vm_index)), generation: generation.into() }
}

// ---- gc-csi ----

/// [`vm_volumes::decide_attach`].
pub fn decide_attach(at: VmIndex, vm: Vm, other: Vm) -> AttachStep {
    memoized!((VmIndex, Vm, Vm) => AttachStep, (at, vm, other), |(at, vm, other)| {
        let entry = names::volume_entry(CLAIM);
        let is_elsewhere = vm_volumes::uses_claim(&virtual_machine(1 - at, other), CLAIM, &entry);
        vm_volumes::decide_attach(&virtual_machine(at, vm), CLAIM, false, is_elsewhere, true)
    })
}

/// [`vm_volumes::can_add_entry`].
pub fn can_add_entry(at: VmIndex, vm: Vm) -> bool {
    memoized!((VmIndex, Vm) => bool, (at, vm), |(at, vm)| {
        vm_volumes::can_add_entry(Some(&virtual_machine(at, vm)), CLAIM, &names::volume_entry(CLAIM))
    })
}

/// [`vm_volumes::references_claim`].
pub fn references_claim(at: VmIndex, vm: Vm) -> bool {
    memoized!((VmIndex, Vm) => bool, (at, vm), |(at, vm)| {
        vm_volumes::references_claim(&virtual_machine(at, vm), CLAIM, &names::volume_entry(CLAIM))
    })
}

/// Result of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patched {
    /// The copy of the VM needs no change.
    Nothing,
    /// The API server accepts the patch; whether the entry exists afterwards.
    Entry(bool),
    /// The API server accepts the patch, which confirms the entry.
    Confirmed,
    /// The API server rejects the patch: the VM has changed.
    Refused,
    /// An earlier detach of the volume has not ended.
    Detaching,
}

/// [`vm_volumes::plan_patch`] on a copy of the VM, applied to the present VM; without the guard of removals if that rule is broken.
pub fn patch(at: VmIndex, base: CachedVm, kind: Kind, now: Vm, guarded: bool) -> Patched {
    type Input = (VmIndex, CachedVm, Kind, Vm, bool);
    const GUARDS: [&str; 2] = ["/metadata/generation", "/metadata/annotations/nestor.dev~1volumes-confirmed"];
    memoized!(Input => Patched, (at, base, kind, now, guarded), |(at, base, kind, now, guarded)| {
        let name = names::volume_entry(CLAIM);
        let change = match kind {
            Kind::Publish => EntryChange::Add { name, claim: CLAIM.to_owned(), read_only: false, multi_writer: false, serial: None },
            Kind::Unpublish => EntryChange::Remove { name },
        };
        let version = if base.is_current { "now" } else { "then" };
        let cached: vm_volumes::Vm = object(document(at, base.vm, version));
        let mut plan = vm_volumes::plan_patch(VmApi::VmOperator, &self::name(at), &cached, &[change]);
        if !guarded && kind == Kind::Unpublish {
            plan.operations.retain(|operation| !GUARDS.contains(&operation.path().as_str()));
        }
        if plan.refused.iter().any(Option::is_some) {
            return Patched::Detaching;
        }
        if plan.operations.is_empty() {
            return Patched::Nothing;
        }
        let mut stored = document(at, now, "now");
        let annotations = stored["metadata"]["annotations"].clone();
        let patched = json_patch::patch(&mut stored, &plan.operations);
        match patched {
            Ok(()) if stored["metadata"]["annotations"] != annotations => Patched::Confirmed,
            // The API server rejects two entries of one name.
            Ok(()) => match stored["spec"]["volumes"].as_array().map_or(0, Vec::len) {
                0 => Patched::Entry(false),
                1 => Patched::Entry(true),
                _ => Patched::Refused,
            },
            Err(_) => Patched::Refused,
        }
    })
}

/// The error in the status of the VM.
pub fn error_in_status(status: Ref) -> Option<Ref> {
    VM_STATUS
        .get(status)
        .iter()
        .find_map(|entry| entry["error"].as_str().map(|text| TEXTS.put(text.to_owned())))
}

/// [`vm_volumes::attach_result`] and [`vm_volumes::detach_result`]: whether the call has ended, and if so whether successfully.
pub fn call_result(at: VmIndex, kind: Kind, vm: Vm, since: u8, known: Option<Ref>) -> Option<bool> {
    type Input = (VmIndex, Kind, Vm, u8, Option<Ref>);
    memoized!(Input => Option<bool>, (at, kind, vm, since, known), |(at, kind, vm, since, known)| {
        let (vm, since) = (virtual_machine(at, vm), committed(at, since));
        let (entry, known) = (names::volume_entry(CLAIM), known.map(|known| TEXTS.get(known)));
        match kind {
            Kind::Publish => vm_volumes::attach_result(&vm, &since, &entry, known.as_ref()).map(|it| it.is_ok()),
            Kind::Unpublish => {
                let pending = PendingDetach { entry: &entry, disk: None, known: known.as_ref() };
                vm_volumes::detach_result(Some(&vm), &since, pending).map(|it| it.is_ok())
            }
        }
    })
}

// ---- the VM Operator ----

fn volume_attachment(vm_index: VmIndex, attachment: Attachment) -> VolumeAttachment {
    let owner = json!({
        "apiVersion": API_VERSION, "kind": "VirtualMachine", "name": name(vm_index),
        "uid": format!("uid-of-{}", name(vm_index)),
    });
    let mut made: VolumeAttachment = object(json!({
        "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
        "metadata": {
            "name": key(vm_index).name, "namespace": NAMESPACE, "uid": uid(attachment.uid), "ownerReferences": [owner],
            "finalizers": if attachment.has_finalizer { vec![FINALIZER_DETACH] } else { Vec::new() },
            "deletionTimestamp": attachment.deleting.then_some(NOW),
        },
        "spec": {"nodeUUID": node(vm_index).to_string(), "volumeName": CLAIM},
    }));
    made.status = STATUS.get(attachment.status);
    made
}

/// The first write of [`plan`], and [`needs_fresh_read`]. VolumeAttachments are written before the status.
pub fn shim_write(at: VmIndex, vm: CachedVm, attachment: Option<Attachment>) -> Option<(ShimWrite, bool)> {
    type Input = (VmIndex, CachedVm, Option<Attachment>);
    memoized!(Input => Option<(ShimWrite, bool)>, (at, vm, attachment), |(at, vm, attachment)| {
        let shim_vm: ShimVm = object(document(at, vm.vm, "1"));
        let attachments: Vec<Arc<VolumeAttachment>> =
            attachment.iter().map(|attachment| Arc::new(volume_attachment(at, *attachment))).collect();
        let plan = plan(&shim_vm, API_VERSION, &attachments, &BTreeMap::new());
        let needs_read = needs_fresh_read(&shim_vm, &plan);
        if let Some(delete) = plan.delete.first() {
            assert_eq!(delete.metadata.uid, attachment.map(|attachment| uid(attachment.uid)), "only the cached attachment is deleted");
            return attachment.map(|attachment| (ShimWrite::Delete(attachment.uid), needs_read));
        }
        if let Some(create) = plan.create.first() {
            assert_eq!(create.metadata.finalizers.as_deref(), Some(&[FINALIZER_DETACH.to_owned()][..]));
            return Some((ShimWrite::Create, needs_read));
        }
        plan.status.map(|status| (ShimWrite::WriteStatus { status: VM_STATUS.put(status), is_current: vm.is_current }, false))
    })
}

// ---- mgmt-csi ----

/// Next step of mgmt-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Calls the storage infra.
    Send(Uid, Operation),
    /// Writes or reads an object.
    Do(Activity),
    /// Ends the reconcile.
    End,
}

fn observed_by_mgmt(vm_index: VmIndex, observed: Observed) -> decide::Observed {
    let indeterminate = || Indeterminate::Failed(Message::own("timed out"));
    match observed {
        Observed::Unknown => decide::Observed::Unknown,
        Observed::AttachSent => decide::Observed::AttachSent,
        Observed::Attached => decide::Observed::Attached(AttachedDisk {
            uuid: DISK,
            blank_attestation: None,
            format_token: None,
        }),
        Observed::IdDeleted => decide::Observed::IdDeleted,
        Observed::SameName(uid) => decide::Observed::SameName(id(vm_index, uid)),
        Observed::Predecessor(uid) => decide::Observed::Predecessor(id(vm_index, uid)),
        Observed::Detached => decide::Observed::Detached,
        Observed::NoneAttached => decide::Observed::NoneAttached,
        Observed::InUse => decide::Observed::Failed(Failure::from(AttachError::InUse {
            message: Message::own("in use"),
            nodes: Vec::new(),
        })),
        Observed::AttachIndeterminate => {
            decide::Observed::Failed(Failure::from(AttachError::Indeterminate(indeterminate())))
        }
        Observed::DetachIndeterminate => {
            decide::Observed::Failed(Failure::from(DetachError(indeterminate())))
        }
    }
}

/// [`decide::decide`] for a cached VolumeAttachment; [`decide::decide_gone`] if it is gone or replaced.
pub fn decide(at: VmIndex, reconcile: Reconcile, attachment: Option<Attachment>) -> Next {
    memoized!((VmIndex, Reconcile, Option<Attachment>) => Next, (at, reconcile, attachment), |(at, reconcile, attachment)| {
        let observed = observed_by_mgmt(at, reconcile.observed);
        let Some(attachment) = attachment else {
            return match decide::decide_gone(&observed) {
                Step::Detach => Next::Send(reconcile.uid, Operation::Delete),
                _ => Next::End,
            };
        };
        let inputs = Inputs {
            deleting: attachment.deleting,
            has_finalizer: attachment.has_finalizer,
            generation: 1,
            is_new: false,
            status: STATUS.get(attachment.status).unwrap_or_default(),
            desired: Ok(spec(at)),
            observed,
        };
        let earlier = |other: &AttachmentId| match reconcile.observed {
            Observed::SameName(uid) | Observed::Predecessor(uid) if id(at, uid) == *other => uid,
            observed => panic!("{other} was not observed: {observed:?}"),
        };
        match decide::decide(&inputs, &time()) {
            Step::AddFinalizer => Next::Do(Activity::AddFinalizer),
            Step::Attach { spec: input, replaces } => {
                assert_eq!(input, spec(at));
                Next::Send(reconcile.uid, Operation::Put(replaces.as_ref().map(earlier)))
            }
            Step::Detach => Next::Send(reconcile.uid, Operation::Delete),
            Step::FindSameName => Next::Do(Activity::FindSameName),
            Step::ConfirmPredecessor(other) => Next::Do(Activity::ConfirmPredecessor(earlier(&other))),
            Step::DetachPredecessor(other) => Next::Send(earlier(&other), Operation::Delete),
            Step::WriteStatus(status) => Next::Do(Activity::WriteStatus(STATUS.put(Some(status)))),
            Step::Recreate => Next::Do(Activity::Recreate),
            Step::RemoveFinalizer => Next::Do(Activity::RemoveFinalizer),
            Step::AwaitCaches | Step::Done | Step::Retry(_) => Next::End,
        }
    })
}

/// [`has_same_name`].
pub fn has_same_name_in_infra(vm_index: VmIndex, own: Uid, row: (VmIndex, Uid)) -> bool {
    type Input = (VmIndex, Uid, (VmIndex, Uid));
    memoized!(Input => bool, (vm_index, own, row), |(vm_index, own, row)| {
        has_same_name(&id(row.0, row.1), &key(vm_index), &uid(own))
    })
}

// ---- storage-infra ----

/// Decision of storage-infra about a requested attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    /// It exists.
    Exists,
    /// It is created.
    New,
    /// It replaces this one.
    Replaces(Uid),
    /// It is refused.
    Refused(Observed),
}

fn row(row: &Row) -> AttachmentRow {
    let AttachmentSpec { volume, node, read_only, access } = spec(row.vm_index);
    let state = match row.state {
        RowState::Attaching => AttachmentState::Attaching,
        RowState::Attached => AttachmentState::Attached,
        RowState::Detaching => AttachmentState::Detaching,
    };
    let id = id(row.vm_index, row.uid);
    let created_at = NOW.to_owned();
    let blank = Blank::No;
    AttachmentRow { id, volume, node, read_only, access, state, message: None, created_at, blank }
}

fn volume() -> VolumeRow {
    VolumeRow {
        id: spec(0).volume,
        pool: PoolName::new("pool").expect("a legal name"),
        capacity: 1 << 20,
        grow_to: None,
        disk_uuid: DISK,
        state: VolumeState::Ready,
        spec: VolumeSpec::of_size(1 << 20),
        created_at: NOW.to_owned(),
        family: DISK,
        copying: false,
        qos: Qos::default(),
        qos_due: false,
        format_token: "00000000-0000-0000-0000-000000000001".parse().expect("a UUID"),
        written: true,
        owner: Owner::default(),
        origin: Origin::Created,
    }
}

/// [`admit`] with the contents of the catalog.
pub fn admission(at: VmIndex, of: Uid, replaces: Option<Uid>, catalog: &Infra) -> Admitted {
    let requested = id(at, of);
    let (own, others): (Vec<AttachmentRow>, Vec<AttachmentRow>) =
        catalog.rows.iter().map(row).partition(|row| row.id == requested);
    let node_spec = |vm_index| NodeSpec {
        name: name(vm_index),
        hypervisor: "hypervisor".to_owned(),
        zone: None,
        labels: Labels::new(),
    };
    let facts = Facts {
        row: own.into_iter().next(),
        ended: catalog.deleted_ids.contains(&(at, of)),
        volume: Some(volume()),
        node: Some(NodeRow { uuid: node(at), spec: node_spec(at) }),
        unreached: None,
        copies: Vec::new(),
        hold: None,
        other_nodes: others.iter().map(|row| NodeRef { uuid: row.node, name: String::new() }).collect(),
        others,
    };
    let earlier = replaces.map(|uid| id(at, uid));
    let request = AttachRequest { id: &requested, spec: &spec(at), replaces: earlier.as_ref() };
    match (admit(request, &facts, NOW), replaces) {
        (Ok(Admission::Exists(_)), _) => Admitted::Exists,
        (Ok(Admission::New(_)), _) => Admitted::New,
        (Ok(Admission::Replaces { .. }), Some(earlier)) => Admitted::Replaces(earlier),
        (Ok(Admission::Replaces { of, .. }), None) => {
            panic!("took over the disk of {of} without being asked")
        }
        (Err(failure), _) => Admitted::Refused(match failure.code() {
            ProblemCode::InUse => Observed::InUse,
            ProblemCode::Ended => Observed::IdDeleted,
            ProblemCode::Unavailable => Observed::AttachIndeterminate,
            other => panic!("the model has no such failure: {other}: {failure}"),
        }),
    }
}
