//! Process basics of Nestor's programs: the frame of `main` with signals and exit codes, supervised background tasks,
//! logs, durations, tables, and text that is safe to log. Nothing here knows Kubernetes or storage.

pub mod duration;
pub mod memory;
pub mod process;
pub mod supervise;
pub mod table;
pub mod telemetry;
pub mod text;
