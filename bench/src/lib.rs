//! Benches in a running lab (its folder is in `NESTOR_LAB`). Each result is compared with a floor that is measured in the
//! same run: the same work one tier below, without Nestor's tier in between.

pub mod benches;
mod cost;
mod fleet;
mod floor;
pub mod instant;
mod objects;
mod observed;
pub mod plot;
pub mod report;
pub mod split_cpus;
mod standalone;
mod stats;
pub mod suite;
mod synthetic;
mod usage;
pub mod work;
