//! CSI driver for the management cluster: creates volumes in the storage infra for csi-provisioner, and attaches them to
//! VMs for `VolumeAttachment`s, and to hosts for csi-attacher.

mod adoptions;
pub mod app;
pub mod attachment;
pub mod budgets;
pub mod capacity;
mod changes;
pub mod claims;
mod clients;
pub mod cluster;
pub mod controller;
mod event_reason;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guest_credentials;
pub mod infra;
pub mod nodes;
pub mod ownership;
pub mod pools;
pub mod repair;
pub mod traces;
mod virtual_machines;
mod vm_api;
mod vm_parts;
pub mod volume_attachment;
