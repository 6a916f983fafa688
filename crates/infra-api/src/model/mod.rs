//! API objects, one module per kind: request bodies (`…Spec`) and response bodies.

mod attachments;
mod budgets;
mod capacity;
mod disk_options;
mod events;
mod health;
mod hosts;
mod labels;
mod list;
mod moves;
mod nodes;
mod pools;
mod snapshots;
mod suspensions;
mod transfers;
mod volumes;

pub use attachments::{Access, Attachment, AttachmentSpec, AttachmentState, FormatToken};
pub use budgets::{Budget, BudgetExcess, BudgetLimit, BudgetSpec, ClassLimits, ClassUsage, Usage};
pub use capacity::{Capacity, CapacityQuery};
pub use disk_options::{DetectZeroes, DiskCache, DiskDiscard, DiskIo, DiskOptions};
pub use events::{Change, Event, EventKind};
pub use health::{Health, HypervisorHealth};
pub use hosts::{Host, PoolHosts};
pub use labels::Labels;
pub use list::List;
pub use moves::{Drain, DrainSpec, Move, MoveChoice, MovePhase, MoveSpec, Undrained};
pub use nodes::{Node, NodeRef, NodeSpec, NodeState};
pub use pools::{CephPool, EngineKind, OnFull, Pool, PoolSpec};
pub use snapshots::{Snapshot, SnapshotSpec};
pub use suspensions::{Suspension, SuspensionSpec};
pub use transfers::{Adoption, Import, Release, Released, ResumePoint};
pub use volumes::{
    AntiAffinity, Condition, ConditionCause, Owner, Placement, Qos, Volume, VolumeSize, VolumeSource,
    VolumeSpec, VolumeState,
};
