//! Tests of the server as a process, one module per capability. They are one program, because linking takes longer than
//! most tests.

#![allow(clippy::print_stdout, reason = "tests show what they measured")]
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod accounts;
mod adopt;
mod attachments;
mod backup;
mod blank;
mod budgets;
mod conditions;
mod crash;
mod disks;
mod fencing;
mod files;
mod fuzz;
mod ha;
mod host_attach;
mod hosts;
mod moves;
mod nodes;
mod outside_hands;
mod pool_lock;
mod pools;
mod proven_off;
#[cfg(feature = "ceph-tests")]
mod rbd;
mod recover;
mod server;
mod snapshots;
mod space;
mod support;
mod suspensions;
mod systemd;
mod transfers;
mod volumes;
