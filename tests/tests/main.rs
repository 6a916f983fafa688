//! The black-box tests, one module for each capability. They are one program, since linking them takes longer than most
//! of them; `cargo lab test` runs one module after the other, so that those which count requests or stop parts are not
//! disturbed by others.

#![allow(clippy::print_stdout, reason = "what was measured is told")]

mod access_modes;
mod attach;
mod bad_input;
mod charts;
mod clone;
mod crash;
mod disturb_parts;
mod dynamic;
mod etcd_restore;
mod expand;
mod fairness;
mod formatting;
mod guest_deletion;
mod ha;
mod health;
mod identity;
mod images;
mod infra_crash;
mod late_removal;
mod legacy;
mod limits;
mod metadata;
mod metrics;
mod modify;
mod node;
mod node_loss;
mod partition;
mod pool_lock;
mod proven_off;
mod reclaim_policy;
mod repair;
mod requests;
mod snapshot;
mod snapshot_ownership;
mod soak;
mod space;
mod stale_leader;
mod static_provisioning;
mod supervision;
mod topology;
mod vm_operator;
