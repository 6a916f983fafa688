//! What every Nestor controller needs around kube: a client, informers with waits, keyed work queues,
//! leader election, events, telemetry, health, and a `main` that ends well. Nothing here knows storage.

pub mod client;
pub mod events;
mod fail_points;
pub mod fair;
pub mod health;
pub mod http;
pub mod index;
pub mod informer;
pub mod latest;
pub mod lean;
pub mod lease;
pub mod quantity;
pub mod queue;
pub mod versions;
