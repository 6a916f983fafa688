//! What each part knows, has and does.

use std::collections::BTreeSet;

/// How many machines want the volume, and there is one order at most for each.
pub const MACHINES: usize = 2;
/// How many there are of gc-csi and of mgmt-csi.
pub const REPLICAS: usize = 2;

/// A machine, by its place.
pub type Machine = usize;
/// One of the replicas, by its place.
pub type Replica = usize;
/// UID of an order: its rank among those of its machine that anybody still knows.
pub type Uid = u8;
/// A text or status kept in `Kept`.
pub type Ref = u8;

/// A `VirtualMachine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vm {
    /// Whether the claim is in `spec.volumes`.
    pub entry: bool,
    /// Rank of `metadata.generation`.
    pub generation: u8,
    /// Rank of the annotation that an attach changes when it finds its entry.
    pub confirmed: u8,
    /// `status.volumes`.
    pub told: Ref,
}

/// A machine as somebody last saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seen {
    /// The machine.
    pub vm: Vm,
    /// Whether its `resourceVersion` is still the present one.
    pub fresh: bool,
}

/// A `VolumeAttachment` of nestor.dev.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Order {
    /// `metadata.uid`.
    pub uid: Uid,
    /// Whether it has a `deletionTimestamp`.
    pub deleting: bool,
    /// Whether it has the finalizer.
    pub held: bool,
    /// `status`.
    pub status: Ref,
}

/// What the management API has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Api {
    /// The machines.
    pub vms: [Vm; MACHINES],
    /// The order for each, if there is one.
    pub orders: [Option<Order>; MACHINES],
}

/// The guest's `storage.k8s.io/VolumeAttachment` for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Wish {
    /// There is none.
    None,
    /// It is to be attached.
    Pending,
    /// csi-attacher was told that it is attached.
    Attached,
    /// It is being deleted, and csi-attacher calls for a detach.
    Leaving,
}

/// What a call to gc-csi is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `ControllerPublishVolume`.
    Publish,
    /// `ControllerUnpublishVolume`.
    Unpublish,
}

/// Who waits for what becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Caller {
    /// The csi-attacher that leads.
    Leader,
    /// A csi-attacher that led, and was paused, or whose VolumeAttachment is another by now. Nobody hears the answer.
    Former,
    /// The repair of gc-csi itself.
    Repair,
    /// Nobody.
    Nobody,
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// It has not looked at the machine yet.
    Begins,
    /// The entry may not be put in before an earlier use is over.
    ToAdd,
    /// A change is planned on a machine as it was seen.
    Commit {
        /// The machine.
        base: Seen,
        /// Whether it was read from the API.
        live: bool,
    },
    /// The change is in since this generation.
    Wait {
        /// Rank of the generation.
        since: u8,
        /// The error that was told before.
        known: Option<Ref>,
    },
}

/// A call to a replica of gc-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    /// What for.
    pub kind: Kind,
    /// Who waits for it.
    pub caller: Caller,
    /// How far it is.
    pub stage: Stage,
}

/// A replica of gc-csi.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GcCsi {
    /// Its informer.
    pub vms: [Seen; MACHINES],
    /// Calls, one at most for each machine.
    pub calls: [Option<Call>; MACHINES],
}

/// A write of the VM Operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShimWrite {
    /// Create the order.
    Create,
    /// Delete the order of this UID.
    Delete(Uid),
    /// Write the status onto the machine as it was seen.
    Tell {
        /// The status.
        told: Ref,
        /// Whether the machine is still the one that was seen.
        fresh: bool,
    },
}

/// The VM Operator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shim {
    /// Its informer of machines.
    pub vms: [Seen; MACHINES],
    /// Its informer of orders.
    pub orders: [Option<Order>; MACHINES],
}

/// What a pass of mgmt-csi has learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Learned {
    /// As the variants of [`mgmt_csi::attach::decide::Infra`].
    Unasked,
    /// The infra was asked to plug.
    Asked,
    /// It has plugged.
    Plugged,
    /// The id is over.
    Ended,
    /// An order of the same name has the disk.
    Namesake(Uid),
    /// That one is over.
    Over(Uid),
    /// The disk is gone.
    Unplugged,
    /// Those of earlier orders too.
    Clear,
    /// Another machine has the volume.
    InUse,
    /// The attach failed without saying what is.
    AttachTrouble,
    /// So did the detach.
    DetachTrouble,
}

/// What a pass of mgmt-csi is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Doing {
    /// Waiting for the infra.
    Infra,
    /// Asking the infra for a namesake.
    Look,
    /// Writing an answer.
    Report(Ref),
    /// Adding the finalizer.
    Hold,
    /// Dropping the finalizer.
    Release,
    /// Deleting the order.
    Renew,
    /// Reading the order from the API.
    Confirm(Uid),
}

/// A pass of mgmt-csi over an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    /// The order's UID when it began.
    pub uid: Uid,
    /// What was learned.
    pub learned: Learned,
    /// What it is doing.
    pub doing: Doing,
}

/// A replica of mgmt-csi. The first one is the leader; the other one goes on with what it began as such.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MgmtCsi {
    /// Its informer of orders.
    pub orders: [Option<Order>; MACHINES],
    /// Its passes, by machine.
    pub passes: [Option<Pass>; MACHINES],
}

/// A request to the infra.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// The replica that waits for the answer, if it still does.
    pub from: Option<Replica>,
    /// The machine.
    pub machine: Machine,
    /// The order's UID, which is the attachment's id together with the machine.
    pub uid: Uid,
    /// What is asked.
    pub ask: Ask,
    /// Whether the infra has taken it, and works on it.
    pub taken: bool,
}

/// What the infra can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ask {
    /// Attach, and perhaps instead of another.
    Put(Option<Uid>),
    /// Detach.
    Delete,
}

/// How far an attachment is in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowState {
    /// To be plugged.
    Attaching,
    /// Plugged.
    Attached,
    /// To be unplugged.
    Detaching,
}

/// An attachment in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// The machine.
    pub machine: Machine,
    /// The order's UID.
    pub uid: Uid,
    /// How far it is.
    pub state: RowState,
}

/// The infra.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Infra {
    /// Attachments.
    pub rows: BTreeSet<Row>,
    /// Ids that are over.
    pub ended: BTreeSet<(Machine, Uid)>,
    /// In which machines the disk really is.
    pub plugged: [bool; MACHINES],
    /// The attachment that is being worked on with the volume's lock held, after the effect and before the note of it.
    pub working: Option<(Machine, Uid)>,
    /// Requests on their way or under way.
    pub requests: BTreeSet<Request>,
}
