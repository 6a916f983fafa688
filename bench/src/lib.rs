//! Benches over a lab that is up (its folder is in `NESTOR_LAB`). What is measured is set against a floor that
//! is measured in the same run: the same work one tier further down, without Nestor's tier in between.

pub mod attach;
pub mod create;
pub mod memory;
pub mod report;
mod requests;
mod stats;
