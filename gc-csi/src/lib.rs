//! Controller plugin of the guest driver: it maps volumes of the guest cluster to claims and volume entries of
//! VirtualMachines in the management cluster. The node plugin is the crate `gc-csi-node`.

mod compatibility;
pub mod controller;
mod guest;
pub mod machine;
mod management;
mod pin;
mod reconcile;
mod vm_operator;
