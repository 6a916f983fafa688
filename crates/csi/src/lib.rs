//! The CSI protocol as both drivers speak it: messages, socket, identity, and the checks that every
//! request needs before a driver thinks about it. Nothing here knows Kubernetes objects or storage.

pub mod capability;
pub mod client;
mod connections;
pub mod deadline;
pub mod identity;
pub mod locks;
pub mod metrics;
pub mod page;
pub mod registration;
pub mod request;
pub mod server;

/// The messages and services of the Container Storage Interface.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    tonic::include_proto!("csi.v1");
}

pub use tonic::Status;
