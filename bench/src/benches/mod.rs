//! What is measured, a file each.

pub mod attach;
pub mod blocked;
pub mod burst;
pub mod copy;
pub mod create;
pub mod delete;
pub mod extents;
pub mod fairness;
pub mod heal;
pub mod idle;
pub mod lifecycle;
pub mod memory;
pub mod recovery;
pub mod scale;
