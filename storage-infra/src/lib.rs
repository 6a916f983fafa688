//! The embedded storage infra: pools, volumes, and the disks of virtual machines, behind a REST API.
//!
//! | room | what |
//! | --- | --- |
//! | [`api`] | HTTP in and out; translation only |
//! | [`service`] | the use cases: locks, intents, repair |
//! | [`catalog`] | what must not be forgotten (SQLite) |
//! | [`placement`] | where a volume goes (pure) |
//! | [`engine`] | how a pool keeps bytes |
//! | [`hypervisor`] | how a disk gets into a virtual machine |
//! | [`recover`] | how a lost catalog is made again |
//! | [`cli`] | the command line: `serve`, `pki`, and the client's verbs |

pub mod api;
pub mod app;
pub mod audit;
pub mod catalog;
pub mod cli;
pub mod engine;
pub mod hypervisor;
pub mod metrics;
pub mod placement;
mod points;
pub mod recover;
pub mod service;
