//! CSI driver for the management cluster: creates volumes in the storage infra for csi-provisioner, and attaches them to
//! VMs for `VolumeAttachment`s.

mod adoptions;
pub mod app;
pub mod attachment;
pub mod budgets;
pub mod capacity;
pub mod claims;
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
pub mod volume_attachment;
