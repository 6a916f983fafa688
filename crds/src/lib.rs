//! Custom resources, names, labels and annotations shared by the drivers, the VM Operator shim and the tests.
//!
//! No I/O. `cargo lab generate` writes the CustomResourceDefinitions under `crds/yaml/` from these types.

#[macro_use]
mod reason;
pub mod anti_affinity;
pub mod generate;
pub mod kubevirt;
pub mod names;
mod storage_budget;
mod storage_pool;
mod virtual_machine;
mod volume_attachment;

pub use storage_budget::{
    BudgetReason, BudgetUsage, ClassBudget, ClassUsage, StorageBudget, StorageBudgetSpec, StorageBudgetStatus,
};
pub use storage_pool::{PoolReason, StoragePool, StoragePoolSpec, StoragePoolStatus};
pub use virtual_machine::{
    MAX_VOLUMES, PersistentVolumeClaimSource, VIRTUAL_MACHINE_GROUP, VIRTUAL_MACHINE_VERSIONS,
    VirtualMachine, VirtualMachineSpec, VirtualMachineStatus, VirtualMachineVolume,
    VirtualMachineVolumeStatus, newest_virtual_machine_version, node_uuid, virtual_machine_resource,
};
pub use volume_attachment::{
    AttachError, AttachReason, VolumeAttachment, VolumeAttachmentSpec, VolumeAttachmentStatus,
};
