//! VM Operator shim: replaces the VM Operator where none is installed. It creates and deletes `VolumeAttachment`s from
//! `VirtualMachine.spec.volumes`, and copies their status to `VirtualMachine.status.volumes`.

pub mod app;
mod attach_limiter;
mod attachments;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod machines;
mod missing_claims;
pub mod plan;
mod reconcile;
mod traces;
pub mod vm;
