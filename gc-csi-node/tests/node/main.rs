//! The Node service from outside: the real binary, its real sockets, real loop devices and mounts.
//! Needs root, and the tools that the driver's image has.
#![allow(clippy::unwrap_used)]

mod copies;
mod crash;
mod formatting;
mod growth;
mod lifecycle;
mod machine;
mod refusals;
mod resilience;
mod serving;
mod two_names;
mod writes;
