//! The web page: HTML that is rendered here, and a stream of events. Every response forbids markup, scripts and connections
//! from elsewhere.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod guard;
mod page;
mod query;
mod site;
mod stream;

pub use guard::Hosts;
pub use site::{Site, serve};
