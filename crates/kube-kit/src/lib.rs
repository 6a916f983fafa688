//! Controller toolkit on top of kube: clients, informers, mutation cache, work queues, leader election, Events, labels, metrics,
//! health checks and their HTTP endpoint. Contains nothing about storage.

pub mod api_versions;
pub mod client;
pub mod events;
mod fail_points;
pub mod fair;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod health;
pub mod http;
pub mod index;
pub mod informer;
pub mod labels;
pub mod lease;
pub mod mutation_cache;
pub mod pace;
pub mod partial;
pub mod quantity;
pub mod queue;
mod relist;
pub mod resource_version;
pub mod token;
