//! Tests of the Node service with the real program, sockets, loop devices and mounts. Need root and the commands in the
//! driver's image.
#![allow(clippy::unwrap_used)]

mod crash;
mod duplicate_uuids;
mod expansion;
mod foreign_signatures;
mod formatting;
mod lifecycle;
mod lost_writes;
mod refusals;
mod resilience;
mod serving;
mod test_node;
mod two_driver_names;
