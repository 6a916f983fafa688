//! Console: a web page of the management cluster's guests, volumes, attaches, pools and events. It only reads: it watches the
//! management API, lists the pools of the storage infra, and answers GET only.

pub mod app;
pub mod decide;
pub mod feed;
pub mod first_seen;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod infra;
pub mod overview;
pub mod pools;
pub mod watches;
pub mod web;
