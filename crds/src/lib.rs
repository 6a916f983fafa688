//! The objects of the management cluster that both drivers and the VM Operator speak through,
//! and the names, labels and annotations that every part must derive in the same way.
//!
//! Nothing here does I/O. The CustomResourceDefinitions under `crds/yaml/` are generated from these
//! types by `cargo lab generate`.

pub mod generate;
pub mod names;
mod virtual_machine;
mod volume_attachment;

pub use virtual_machine::{
    MOST_VOLUMES, PersistentVolumeClaimSource, VIRTUAL_MACHINE_GROUP, VIRTUAL_MACHINE_VERSIONS,
    VirtualMachine, VirtualMachineSpec, VirtualMachineStatus, VirtualMachineVolume,
    VirtualMachineVolumeStatus, newest_virtual_machine_version, node_uuid, virtual_machine_resource,
};
pub use volume_attachment::{AttachError, VolumeAttachment, VolumeAttachmentSpec, VolumeAttachmentStatus};
