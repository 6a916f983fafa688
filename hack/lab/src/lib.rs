//! The lab: a management cluster, guest clusters, virtual machines, the storage infra and Nestor on one host, from
//! source.
//!
//! `cargo lab` is its command line; tests and benches use [`Lab`] on a running lab.

pub mod audit;
pub mod cache;
pub mod cli;
pub mod cluster;
pub mod containerd;
mod demo;
mod deployed;
mod down;
mod drivers;
pub mod images;
pub mod infra;
mod kubeconfig;
mod lab;
mod oci;
mod pki;
mod ports;
pub mod process;
mod ready;
pub mod run;
pub mod sanity;
mod session;
mod settings;
pub mod state;
mod status;
pub mod ui;
mod up;
mod verbs;
mod verify;
pub mod virtual_machines;
pub mod vm;
pub mod wait;

pub use drivers::Replica;
pub use lab::{Lab, LoopNode, NodePlugin, Vm};
pub use settings::Setting;
