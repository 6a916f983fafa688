//! Process basics of Nestor's programs: the frame of `main` with signals and exit codes, supervised background tasks,
//! keyed locks, logs, operations and their trace contexts, durations, tables, command-line flags, health checks, and text that is safe to log.
//! Nothing here knows Kubernetes or storage.

pub mod concurrent;
pub mod duration;
pub mod flags;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod health;
pub mod keyed_lock;
pub mod memory;
pub mod operation;
pub mod process;
pub mod size;
pub mod start_time;
pub mod supervise;
pub mod table;
pub mod telemetry;
pub mod text;
pub mod trace;
