//! Embedded storage infra server: pools, volumes and the disks of VMs behind a REST API.
//!
//! | module | content |
//! | --- | --- |
//! | [`api`] | HTTP handlers; translation only |
//! | [`service`] | operations: locks, intents, repair |
//! | [`catalog`] | durable state (SQLite or PostgreSQL) |
//! | [`lease`] | until when an active server may act on disks |
//! | [`budget`] | whether a budget allows a request (pure) |
//! | [`scope`] | which volumes and snapshots a client reaches (pure) |
//! | [`placement`] | pool selection for new volumes (pure) |
//! | [`engine`] | storage of bytes in a pool |
//! | `host_disks` | disks of the host that become pools |
//! | [`hypervisor`] | attaching disks to VMs |
//! | [`backup`] | backups of the catalog, and their restoration |
//! | [`recover`] | rebuilding a lost catalog from the pools |
//! | [`standby`] | several servers on one database: the passive ones |
//! | `systemd` | messages to systemd: ready, stopping, watchdog |
//! | [`cli`] | command line: `serve`, `pki` and the client commands |

pub mod api;
pub mod app;
pub mod audit;
pub mod backup;
mod blocking;
pub mod budget;
pub mod catalog;
pub mod cli;
pub mod clock;
pub mod engine;
mod fail_points;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod host_disks;
pub mod hypervisor;
pub mod lease;
mod lease_end;
pub mod metrics;
pub mod placement;
mod random;
pub mod recover;
mod safety;
pub mod scope;
pub mod service;
#[cfg(test)]
mod simulation;
pub mod standby;
mod systemd;
