//! The lab: a management cluster, guest clusters, virtual machines, the storage infra and Nestor on one host, from
//! source.
//!
//! `cargo lab` is its command line ([`cli`]); tests and benches use [`Lab`] on a running lab.
//!
//! | to understand | read |
//! | --- | --- |
//! | what is built or downloaded first | [`cache`] |
//! | the start and the end of a lab | `up`, `down` |
//! | where a lab keeps its files, processes and state | [`run`], [`state`] |
//! | control planes, and what is applied to them | [`cluster`] |
//! | Nestor's components and the sidecars | `drivers`, [`infra`] |
//! | Nestor in pods, installed with helm | [`deployed`] |
//! | the Ceph cluster of a lab with the engine `rbd` | `ceph` |
//! | several hypervisor hosts, and the pools that they reach | [`host`] |
//! | KubeVirt, and the management cluster's node in a lab with it | `kubevirt` |
//! | VMs that are nodes, and the VirtualMachine objects | [`vm`], [`virtual_machines`] |
//! | `cargo lab test` | `verify` |
//! | `cargo lab generate` | [`generate`] |
//! | `cargo lab release` | [`release`] |

mod advisories;
pub mod architecture;
pub mod audit;
pub mod cache;
mod ceph;
pub mod cli;
pub mod cluster;
pub mod cluster_api;
pub mod containerd;
pub mod database;
mod demo;
pub mod deployed;
mod down;
mod drivers;
pub mod generate;
pub mod host;
mod host_node;
pub mod images;
pub mod infra;
pub mod kubeconfig;
mod kubevirt;
mod lab;
mod loop_nodes;
mod oci;
pub mod package;
pub mod pki;
pub mod ports;
pub mod process;
pub mod ready;
pub mod release;
pub mod rights;
pub mod run;
pub mod sanity;
mod schemathesis;
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
mod vms;
pub mod wait;

pub use ceph::{Ceph, Engine};
pub use demo::demo;
pub use drivers::Replica;
pub use host::Host;
pub use host_node::HostNode;
pub use kubevirt::{VmManager, qemu as kubevirt_qemu};
pub use lab::Lab;
pub use loop_nodes::{LoopNode, NodePlugin};
pub use settings::Setting;
pub use vms::Vm;
