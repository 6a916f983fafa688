//! One operation at a time per volume. A second one is told ABORTED, which the sidecars take as "wait
//! and try again" (CSI specification, "Concurrency").

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Status;

/// The volumes that have an operation under way.
#[derive(Debug, Clone, Default)]
pub struct VolumeLocks(Arc<Mutex<HashSet<String>>>);

/// Holds a volume until dropped.
#[derive(Debug)]
pub struct VolumeGuard {
    locks: VolumeLocks,
    key: String,
}

impl VolumeLocks {
    /// Takes the volume, or answers ABORTED when it is taken.
    pub fn acquire(&self, key: &str) -> Result<VolumeGuard, Status> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.insert(key.to_owned()) {
            return Err(Status::aborted(format!(
                "an operation for volume {key} is already under way: try again later"
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
    fn a_volume_is_held_until_its_guard_is_dropped() {
        let locks = VolumeLocks::default();
        let guard = locks.acquire("a").unwrap();
        assert_eq!(locks.acquire("a").unwrap_err().code(), tonic::Code::Aborted);
        assert!(locks.acquire("b").is_ok());
        drop(guard);
        assert!(locks.acquire("a").is_ok());
    }
}
