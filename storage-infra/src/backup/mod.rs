//! Backups of the catalog: written on demand or by schedule, verified, removed when there are newer ones, and restored.
//!
//! A backup never changes the catalog, and a restore never changes the backup or the pools. A restored catalog may be
//! older than the pools; the server detects that by the catalog's revision and the records in the pools, and removes
//! nothing there.

mod compare;
pub(crate) mod file;
mod restore;
mod retention;
mod schedule;

pub use file::{Backup, name_at, write};
pub use restore::{Options as RestoreOptions, Restore};
pub use schedule::{Schedule, run};
