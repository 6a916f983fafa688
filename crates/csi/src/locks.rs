//! Volume locks: one operation at a time per volume. Concurrent calls receive ABORTED, which sidecars retry with backoff (CSI
//! specification, "Concurrency").

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Status;

/// Volumes with a running operation.
#[derive(Debug, Clone, Default)]
pub struct VolumeLocks(Arc<Mutex<HashSet<String>>>);

/// Lock of a volume; released on drop.
#[derive(Debug)]
pub struct VolumeGuard {
    locks: VolumeLocks,
    key: String,
}

impl VolumeLocks {
    /// Locks the volume; returns ABORTED if it is locked.
    pub fn acquire(&self, key: &str) -> Result<VolumeGuard, Status> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.insert(key.to_owned()) {
            return Err(Status::aborted(format!(
                "another operation on volume {key} is in progress: retry later"
            )));
        }
        Ok(VolumeGuard { locks: self.clone(), key: key.to_owned() })
    }
}

impl Drop for VolumeGuard {
    fn drop(&mut self) {
        self.locks.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_locked_until_its_guard_is_dropped() {
        let locks = VolumeLocks::default();
        let guard = locks.acquire("a").unwrap();
        assert_eq!(locks.acquire("a").unwrap_err().code(), tonic::Code::Aborted);
        assert!(locks.acquire("b").is_ok());
        drop(guard);
        assert!(locks.acquire("a").is_ok());
    }
}
