//! kubectl plugin: follows one volume through both clusters, lists and checks what belongs to Nestor, and collects support
//! bundles. It only reads, except to share a volume with another guest, and to manage guests.

pub mod bundle;
pub mod check;
pub mod cli;
pub mod clusters;
pub mod config;
pub mod diagnose;
pub mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod gather;
pub mod guest;
pub mod lists;
pub mod migrate;
pub mod render;
pub mod run;
pub mod share;
pub mod subject;
pub mod trace;
pub mod vm_api;
