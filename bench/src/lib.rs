//! Benches over a lab that is up (its folder is in `NESTOR_LAB`). What is measured is set against a floor that
//! is measured in the same run: the same work one tier further down, without Nestor's tier in between.

pub mod apart;
pub mod benches;
mod cost;
mod fleet;
mod floor;
pub mod instant;
mod objects;
mod parts;
pub mod plot;
pub mod report;
mod seen;
mod stats;
pub mod work;
