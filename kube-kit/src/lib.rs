//! What every Nestor controller needs around kube: a client, informers with waits, keyed work queues,
//! events, telemetry, health, and a `main` that ends well. Nothing here knows storage.

pub mod client;
pub mod events;
pub mod health;
pub mod http;
pub mod index;
pub mod informer;
pub mod latest;
pub mod process;
pub mod queue;
pub mod telemetry;
pub mod versions;
