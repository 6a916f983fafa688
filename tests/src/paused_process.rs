//! Processes that are paused and continue.

use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};

/// A paused process (SIGSTOP) that continues when this is dropped.
pub struct PausedProcess(Pid);

impl PausedProcess {
    pub(crate) fn stop(pid: Pid) -> Result<Self> {
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }
}

impl Drop for PausedProcess {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}
