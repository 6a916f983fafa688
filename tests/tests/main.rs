//! Black-box tests, one module per capability. They are one program, because linking takes longer than most tests;
//! `cargo lab test` runs the modules one after the other, so that tests that count requests or stop components are not
//! disturbed.

#![allow(clippy::print_stdout, reason = "the tests print their measurements")]

mod access_modes;
mod alerts;
mod arm64;
mod attach;
mod backup;
mod bad_input;
mod charts;
mod clone;
mod crash;
mod deployed;
mod disturb_parts;
mod docs;
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
mod kubernetes_versions;
mod late_removal;
mod legacy;
mod limits;
mod metadata;
mod metrics;
mod modify;
mod node;
mod node_loss;
mod otel;
mod package;
mod partition;
mod plugin;
mod pool_lock;
mod proven_off;
mod reclaim_policy;
mod release;
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
mod upgrade;
mod vm_operator;
