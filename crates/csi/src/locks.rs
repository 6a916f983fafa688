//! Volume locks: one operation at a time per volume. Concurrent calls receive ABORTED, which sidecars retry with backoff (CSI
//! specification, "Concurrency").

use process_kit::keyed_lock::{KeyGuard, KeyedLock};

use crate::Status;

/// Volumes with a running operation. Clones share the locks.
#[derive(Debug, Clone, Default)]
pub struct VolumeLocks(KeyedLock<String>);

/// Lock of a volume; released on drop.
pub type VolumeGuard = KeyGuard<String>;

impl VolumeLocks {
    /// Locks the volume; returns ABORTED if it is locked.
    pub fn acquire(&self, key: &str) -> Result<VolumeGuard, Status> {
        self.0.try_lock(key.to_owned()).ok_or_else(|| {
            Status::aborted(format!("another operation on volume {key} is in progress: retry later"))
        })
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
