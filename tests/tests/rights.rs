//! Least rights: each right is used, and its removal breaks something that is reported; what guests read names nothing of
//! others; forged events change no answer; `/metrics` by authentication.

mod events;
mod metrics;
mod removal;
mod shared;
mod texts;
mod usage;
