//! Nestor's CSI driver for the management cluster: makes volumes in the storage infra for csi-provisioner,
//! and plugs them into virtual machines for `VolumeAttachment`s.

pub mod app;
pub mod attach;
pub mod capacity;
pub mod claims;
pub mod cluster;
pub mod controller;
pub mod infra;
pub mod repair;
