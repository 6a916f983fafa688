//! Between the model's small states and the real objects: each rule here is asked with the objects that the parts would
//! have, and its answer is made small again. Rules are pure, so what they answered once is remembered.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use crds::names::{self, ANNOTATION_VOLUMES_CONFIRMED, FINALIZER_DETACH};
use crds::{VirtualMachine, VolumeAttachment, VolumeAttachmentStatus};
use gc_csi::machine::{self, Begin, Change, Committed, Leaving};
use infra_api::{
    Access, AttachmentId, AttachmentSpec, AttachmentState, Labels, NodeRef, NodeSpec, Placement, PoolName,
    ProblemCode, Qos, VolumeId, VolumeSpec, VolumeState,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_kit::informer::Key;
use mgmt_csi::attach::decide::{self, Step, View};
use mgmt_csi::attach::failure::Failure;
use mgmt_csi::infra::{AttachError, DetachError, PluggedDisk, Trouble, attachment_id, is_namesake};
use serde_json::{Value, json};
use storage_infra::catalog::{AttachmentRow, Blank, NodeRow, VolumeRow};
use storage_infra::service::admission::{Admission, Facts, Wish, admit};
use uuid::Uuid;
use vm_operator_shim::machine::Machine as ShimMachine;
use vm_operator_shim::plan::{must_be_confirmed, plan};

use crate::state::*;

const NAMESPACE: &str = "guest";
const CLAIM: &str = "data";
const DISK: Uuid = Uuid::from_u128(0xd15c);
const API_VERSION: &str = "vmoperator.vmware.com/v1alpha5";
const NOW: &str = "2026-01-01T00:00:00Z";

/// Values that states refer to by number.
struct Kept<T>(Mutex<Vec<T>>);

impl<T: Clone + PartialEq> Kept<T> {
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

static TOLD: Kept<Vec<Value>> = Kept::new();
static STATUS: Kept<Option<VolumeAttachmentStatus>> = Kept::new();
static TEXTS: Kept<String> = Kept::new();

/// The empty `status.volumes`.
pub fn nothing_told() -> Ref {
    TOLD.put(Vec::new())
}

/// The status of an order that nobody has answered.
pub fn unanswered() -> Ref {
    STATUS.put(None)
}

macro_rules! remembered {
    ($key:ty => $answer:ty, $asked:expr, $rule:expr) => {{
        thread_local!(static MEMORY: RefCell<HashMap<$key, $answer>> = RefCell::default());
        remember(&MEMORY, $asked, $rule)
    }};
}

fn remember<K: Hash + Eq + Copy, V: Copy>(
    memory: &'static std::thread::LocalKey<RefCell<HashMap<K, V>>>,
    asked: K,
    rule: impl FnOnce(K) -> V,
) -> V {
    if let Some(answer) = memory.with_borrow(|memory| memory.get(&asked).copied()) {
        return answer;
    }
    let answer = rule(asked);
    memory.with_borrow_mut(|memory| memory.insert(asked, answer));
    answer
}

fn name(machine: Machine) -> String {
    format!("vm-{machine}")
}

fn node(machine: Machine) -> Uuid {
    Uuid::from_u128(machine as u128 + 1)
}

fn uid(uid: Uid) -> String {
    Uuid::from_u128(0x1000 + u128::from(uid)).to_string()
}

fn key(machine: Machine) -> Key {
    Key::new(NAMESPACE, names::volume_attachment(&name(machine), CLAIM))
}

fn id(machine: Machine, of: Uid) -> AttachmentId {
    attachment_id(&key(machine), &uid(of))
}

fn spec(machine: Machine) -> AttachmentSpec {
    let volume = VolumeId::new("volume").expect("a legal id");
    AttachmentSpec { volume, node: node(machine), read_only: false, access: Access::SingleNode }
}

fn time() -> Time {
    Time(NOW.parse().expect("a legal time"))
}

fn document(machine: Machine, vm: Vm, resource_version: &str) -> Value {
    let entry = json!({"name": names::volume_entry(CLAIM), "persistentVolumeClaim": {"claimName": CLAIM}});
    json!({
        "apiVersion": API_VERSION, "kind": "VirtualMachine",
        "metadata": {
            "name": name(machine), "namespace": NAMESPACE, "uid": format!("uid-of-{}", name(machine)),
            "generation": vm.generation, "resourceVersion": resource_version,
            "annotations": {ANNOTATION_VOLUMES_CONFIRMED: vm.confirmed.to_string()},
        },
        "spec": {"volumes": if vm.entry { vec![entry] } else { Vec::new() }},
        "status": {"instanceUUID": node(machine).to_string(), "volumes": TOLD.get(vm.told)},
    })
}

fn object<T: serde::de::DeserializeOwned>(document: Value) -> T {
    serde_json::from_value(document).expect("the object is as its type says")
}

fn virtual_machine(machine: Machine, vm: Vm) -> VirtualMachine {
    object(document(machine, vm, "1"))
}

fn committed(machine: Machine, generation: u8) -> Committed {
    Committed { uid: format!("uid-of-{}", name(machine)), generation: generation.into() }
}

// ---- gc-csi ----

/// [`machine::begin`].
pub fn begin(at: Machine, vm: Vm, other: Vm) -> Begin {
    remembered!((Machine, Vm, Vm) => Begin, (at, vm, other), |(at, vm, other)| {
        let entry = names::volume_entry(CLAIM);
        let is_elsewhere = machine::holds(&virtual_machine(1 - at, other), CLAIM, &entry);
        machine::begin(&virtual_machine(at, vm), CLAIM, false, is_elsewhere)
    })
}

/// [`machine::may_be_added`].
pub fn may_be_added(at: Machine, vm: Vm) -> bool {
    remembered!((Machine, Vm) => bool, (at, vm), |(at, vm)| {
        machine::may_be_added(Some(&virtual_machine(at, vm)), CLAIM, &names::volume_entry(CLAIM))
    })
}

/// [`machine::is_involved`].
pub fn is_involved(at: Machine, vm: Vm) -> bool {
    remembered!((Machine, Vm) => bool, (at, vm), |(at, vm)| {
        machine::is_involved(&virtual_machine(at, vm), CLAIM, &names::volume_entry(CLAIM))
    })
}

/// What a change comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patched {
    /// There is nothing to change in the machine as it was seen.
    Nothing,
    /// The API server takes the patch; whether the entry is there then.
    Entry(bool),
    /// The API server takes the patch, which says that the entry was found.
    Confirmed,
    /// The machine is not as it was seen.
    Refused,
    /// An earlier use has not ended.
    Leaving,
}

/// [`machine::plan`] on a machine as it was seen, carried out on the machine as it is; without the guard of its removals
/// where that rule is broken.
pub fn patch(at: Machine, base: Seen, kind: Kind, now: Vm, guarded: bool) -> Patched {
    type Asked = (Machine, Seen, Kind, Vm, bool);
    const GUARDS: [&str; 2] = ["/metadata/generation", "/metadata/annotations/nestor.dev~1volumes-confirmed"];
    remembered!(Asked => Patched, (at, base, kind, now, guarded), |(at, base, kind, now, guarded)| {
        let name = names::volume_entry(CLAIM);
        let change = match kind {
            Kind::Publish => Change::Add { name, claim: CLAIM.to_owned(), read_only: false, multi_writer: false },
            Kind::Unpublish => Change::Remove { name },
        };
        let version = if base.fresh { "now" } else { "then" };
        let seen: VirtualMachine = object(document(at, base.vm, version));
        let mut plan = machine::plan(&self::name(at), &seen, &[change]);
        if !guarded && kind == Kind::Unpublish {
            plan.operations.retain(|operation| !GUARDS.contains(&operation.path().as_str()));
        }
        if plan.refused.iter().any(Option::is_some) {
            return Patched::Leaving;
        }
        if plan.operations.is_empty() {
            return Patched::Nothing;
        }
        let mut stored = document(at, now, "now");
        let annotations = stored["metadata"]["annotations"].clone();
        let patched = json_patch::patch(&mut stored, &plan.operations);
        match patched {
            Ok(()) if stored["metadata"]["annotations"] != annotations => Patched::Confirmed,
            // The API server refuses two entries of one name.
            Ok(()) => match stored["spec"]["volumes"].as_array().map_or(0, Vec::len) {
                0 => Patched::Entry(false),
                1 => Patched::Entry(true),
                _ => Patched::Refused,
            },
            Err(_) => Patched::Refused,
        }
    })
}

/// The error that a machine tells of its disk.
pub fn told_error(told: Ref) -> Option<Ref> {
    TOLD.get(told).iter().find_map(|entry| entry["error"].as_str().map(|text| TEXTS.put(text.to_owned())))
}

/// [`machine::attached`] and [`machine::detached`]: whether the call ended, and if so whether well.
pub fn ended(at: Machine, kind: Kind, vm: Vm, since: u8, known: Option<Ref>) -> Option<bool> {
    type Asked = (Machine, Kind, Vm, u8, Option<Ref>);
    remembered!(Asked => Option<bool>, (at, kind, vm, since, known), |(at, kind, vm, since, known)| {
        let (vm, since) = (virtual_machine(at, vm), committed(at, since));
        let (entry, known) = (names::volume_entry(CLAIM), known.map(|known| TEXTS.get(known)));
        match kind {
            Kind::Publish => machine::attached(&vm, &since, &entry, known.as_ref()).map(|it| it.is_ok()),
            Kind::Unpublish => {
                let leaving = Leaving { entry: &entry, disk: None, known: known.as_ref() };
                machine::detached(Some(&vm), &since, leaving).map(|it| it.is_ok())
            }
        }
    })
}

// ---- the VM Operator ----

fn volume_attachment(machine: Machine, order: Order) -> VolumeAttachment {
    let owner = json!({
        "apiVersion": API_VERSION, "kind": "VirtualMachine", "name": name(machine),
        "uid": format!("uid-of-{}", name(machine)),
    });
    let mut made: VolumeAttachment = object(json!({
        "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
        "metadata": {
            "name": key(machine).name, "namespace": NAMESPACE, "uid": uid(order.uid), "ownerReferences": [owner],
            "finalizers": if order.held { vec![FINALIZER_DETACH] } else { Vec::new() },
            "deletionTimestamp": order.deleting.then_some(NOW),
        },
        "spec": {"nodeUUID": node(machine).to_string(), "volumeName": CLAIM},
    }));
    made.status = STATUS.get(order.status);
    made
}

/// The first write of [`plan`] that is due, and [`must_be_confirmed`]: orders come before the status.
pub fn shim_write(at: Machine, vm: Seen, order: Option<Order>) -> Option<(ShimWrite, bool)> {
    type Asked = (Machine, Seen, Option<Order>);
    remembered!(Asked => Option<(ShimWrite, bool)>, (at, vm, order), |(at, vm, order)| {
        let machine: ShimMachine = object(document(at, vm.vm, "1"));
        let orders: Vec<Arc<VolumeAttachment>> =
            order.iter().map(|order| Arc::new(volume_attachment(at, *order))).collect();
        let plan = plan(&machine, API_VERSION, &orders, &BTreeMap::new());
        let is_confirmed = must_be_confirmed(&machine, &plan);
        if let Some(delete) = plan.delete.first() {
            assert_eq!(delete.metadata.uid, order.map(|order| uid(order.uid)), "only what was seen is deleted");
            return order.map(|order| (ShimWrite::Delete(order.uid), is_confirmed));
        }
        if let Some(create) = plan.create.first() {
            assert_eq!(create.metadata.finalizers.as_deref(), Some(&[FINALIZER_DETACH.to_owned()][..]));
            return Some((ShimWrite::Create, is_confirmed));
        }
        plan.status.map(|told| (ShimWrite::Tell { told: TOLD.put(told), fresh: vm.fresh }, false))
    })
}

// ---- mgmt-csi ----

/// What mgmt-csi does next, as the model carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Asks the infra.
    Ask(Uid, Ask),
    /// Does a write, or reads the order.
    Do(Doing),
    /// Ends the pass.
    End,
}

fn infra(machine: Machine, learned: Learned) -> decide::Infra {
    use decide::Infra;
    let trouble = || Trouble::Failed("trouble".to_owned());
    match learned {
        Learned::Unasked => Infra::Unasked,
        Learned::Asked => Infra::Asked,
        Learned::Plugged => {
            Infra::Plugged(PluggedDisk { uuid: DISK, blank_attestation: None, format_token: None })
        }
        Learned::Ended => Infra::Ended,
        Learned::Namesake(uid) => Infra::Namesake(id(machine, uid)),
        Learned::Over(uid) => Infra::Over(id(machine, uid)),
        Learned::Unplugged => Infra::Unplugged,
        Learned::Clear => Infra::Clear,
        Learned::InUse => Infra::Failed(Failure::from(AttachError::InUse("in use".to_owned()))),
        Learned::AttachTrouble => Infra::Failed(Failure::from(AttachError::Trouble(trouble()))),
        Learned::DetachTrouble => Infra::Failed(Failure::from(DetachError(trouble()))),
    }
}

/// [`decide::decide`] for an order, as it was seen; [`decide::decide_gone`] where it is gone or another.
pub fn decide(at: Machine, pass: Pass, order: Option<Order>) -> Next {
    remembered!((Machine, Pass, Option<Order>) => Next, (at, pass, order), |(at, pass, order)| {
        let learned = infra(at, pass.learned);
        let Some(order) = order else {
            return match decide::decide_gone(&learned) {
                Step::Unplug => Next::Ask(pass.uid, Ask::Delete),
                _ => Next::End,
            };
        };
        let view = View {
            deleting: order.deleting,
            held: order.held,
            generation: 1,
            fresh: false,
            status: STATUS.get(order.status).unwrap_or_default(),
            target: Ok(spec(at)),
            infra: learned,
        };
        let earlier = |other: &AttachmentId| match pass.learned {
            Learned::Namesake(uid) | Learned::Over(uid) if id(at, uid) == *other => uid,
            learned => panic!("{other} is not what was learned: {learned:?}"),
        };
        match decide::decide(&view, &time()) {
            Step::Hold => Next::Do(Doing::Hold),
            Step::Plug { spec: asked, replaces } => {
                assert_eq!(asked, spec(at));
                Next::Ask(pass.uid, Ask::Put(replaces.as_ref().map(earlier)))
            }
            Step::Unplug => Next::Ask(pass.uid, Ask::Delete),
            Step::Look => Next::Do(Doing::Look),
            Step::Confirm(other) => Next::Do(Doing::Confirm(earlier(&other))),
            Step::UnplugEarlier(other) => Next::Ask(earlier(&other), Ask::Delete),
            Step::Report(status) => Next::Do(Doing::Report(STATUS.put(Some(status)))),
            Step::Renew => Next::Do(Doing::Renew),
            Step::Release => Next::Do(Doing::Release),
            Step::Settle | Step::Done | Step::Retry(_) => Next::End,
        }
    })
}

/// [`is_namesake`].
pub fn is_other_order_of_name(machine: Machine, mine: Uid, row: (Machine, Uid)) -> bool {
    type Asked = (Machine, Uid, (Machine, Uid));
    remembered!(Asked => bool, (machine, mine, row), |(machine, mine, row)| {
        is_namesake(&id(row.0, row.1), &key(machine), &uid(mine))
    })
}

// ---- the infra ----

/// What the infra says to a wish for an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admitted {
    /// It is there.
    There,
    /// It is to be made.
    New,
    /// It takes the place of that one.
    Instead(Uid),
    /// No.
    Refused(Learned),
}

fn row(row: &Row) -> AttachmentRow {
    let AttachmentSpec { volume, node, read_only, access } = spec(row.machine);
    let state = match row.state {
        RowState::Attaching => AttachmentState::Attaching,
        RowState::Attached => AttachmentState::Attached,
        RowState::Detaching => AttachmentState::Detaching,
    };
    let id = id(row.machine, row.uid);
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
        spec: VolumeSpec {
            capacity_bytes: 1 << 20,
            limit_bytes: None,
            placement: Placement::default(),
            source: None,
            qos: Qos::default(),
            shareable: false,
            labels: Labels::new(),
        },
        created_at: NOW.to_owned(),
        family: DISK,
        copying: false,
        qos: Qos::default(),
        qos_due: false,
        format_token: "00000000-0000-0000-0000-000000000001".parse().expect("a UUID"),
        written: true,
    }
}

/// [`admit`], by what the catalog has.
pub fn admission(at: Machine, of: Uid, replaces: Option<Uid>, catalog: &Infra) -> Admitted {
    let wanted = id(at, of);
    let (own, others): (Vec<AttachmentRow>, Vec<AttachmentRow>) =
        catalog.rows.iter().map(row).partition(|row| row.id == wanted);
    let node_spec = |machine| NodeSpec {
        name: name(machine),
        hypervisor: "hypervisor".to_owned(),
        zone: None,
        labels: Labels::new(),
    };
    let facts = Facts {
        row: own.into_iter().next(),
        ended: catalog.ended.contains(&(at, of)),
        volume: Some(volume()),
        node: Some(NodeRow { uuid: node(at), spec: node_spec(at) }),
        copies: Vec::new(),
        other_nodes: others.iter().map(|row| NodeRef { uuid: row.node, name: String::new() }).collect(),
        others,
    };
    let earlier = replaces.map(|uid| id(at, uid));
    let wish = Wish { id: &wanted, spec: &spec(at), replaces: earlier.as_ref() };
    match (admit(wish, &facts, NOW), replaces) {
        (Ok(Admission::There(_)), _) => Admitted::There,
        (Ok(Admission::New(_)), _) => Admitted::New,
        (Ok(Admission::Instead { .. }), Some(earlier)) => Admitted::Instead(earlier),
        (Ok(Admission::Instead { of, .. }), None) => panic!("took the disk of {of} unasked"),
        (Err(failure), _) => Admitted::Refused(match failure.code() {
            ProblemCode::InUse => Learned::InUse,
            ProblemCode::Ended => Learned::Ended,
            ProblemCode::Unavailable => Learned::AttachTrouble,
            other => panic!("the model has no such failure: {other}: {failure}"),
        }),
    }
}
