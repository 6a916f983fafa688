//! Controller toolkit on top of kube: clients, informers, mutation cache, work queues, leader election, Events, logs, metrics,
//! health checks and process setup. Contains nothing about storage.

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
