//! Stands in for the VM Operator where none is installed: `VirtualMachine.spec.volumes` becomes
//! `VolumeAttachment`s, and their answers become `VirtualMachine.status.volumes`. Nothing else.

mod absent;
mod allowance;
pub mod app;
mod attachments;
pub mod machine;
pub mod plan;
mod reconcile;
