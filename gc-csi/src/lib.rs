//! Nestor's CSI driver for guest clusters. The controller turns volumes of the guest into claims and
//! disks of the management cluster; the node plugin, inside each virtual machine, turns disks into mounts.

pub mod controller;
mod fit;
mod guest;
pub mod machine;
mod management;
pub mod node;
mod pin;
mod reconcile;
mod vm_operator;
