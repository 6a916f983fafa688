//! Controller plugin of the guest driver. It maps guest volumes to claims and to volume entries of VirtualMachines in
//! the management cluster. The node plugin is the crate `gc-csi-node`.

mod compatibility;
pub mod controller;
mod credential;
mod events;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guest;
mod management;
mod pin;
mod reconcile;
mod vm_operator;
pub mod vm_volumes;
