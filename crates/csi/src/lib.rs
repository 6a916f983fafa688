//! CSI protocol for both drivers: messages, socket server, Identity service, request validation, volume locks and metrics.
//! Contains nothing about Kubernetes objects or storage.

pub mod capability;
pub mod client;
mod codec;
mod connections;
pub mod deadline;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod identity;
pub mod locks;
pub mod metrics;
mod objects;
pub mod page;
pub mod registration;
pub mod request;
pub mod self_check;
pub mod server;

/// Messages and services of the Container Storage Interface.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    tonic::include_proto!("csi.v1");
}

/// Decoding and encoding of messages.
pub use prost::Message;
pub use tonic::Status;
