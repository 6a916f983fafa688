//! The benches, one per file.

pub mod attach;
pub mod attach_kubevirt;
pub mod blocked;
pub mod burst;
pub mod copy;
pub mod create;
pub mod delete;
pub mod extents;
pub mod fairness;
pub mod idle;
pub mod io;
pub mod lifecycle;
pub mod memory;
pub mod pod;
pub mod rbd;
pub mod recovery;
pub mod retry;
pub mod scale;
pub mod sustain;
pub mod trace;
pub mod tracing;
