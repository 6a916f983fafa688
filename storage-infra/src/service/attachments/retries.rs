//! Backoff for failed attachment operations. The delay grows while the error stays the same; a client's request or a
//! change of the volume resets it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::{AttachmentId, VolumeId};
use tokio::time::Instant;

/// First delay.
const FIRST_DELAY: Duration = Duration::from_secs(15);
/// Maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(600);

/// A failed operation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failed {
    volume: VolumeId,
    why: String,
    delay: Duration,
    not_before: Instant,
}

/// Failed operations by attachment.
#[derive(Default)]
pub(in crate::service) struct Retries(Mutex<HashMap<AttachmentId, Failed>>);

impl Retries {
    fn table(&self) -> MutexGuard<'_, HashMap<AttachmentId, Failed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a retry is due.
    pub(super) fn is_due(&self, id: &AttachmentId, now: Instant) -> bool {
        self.table().get(id).is_none_or(|failed| failed.not_before <= now)
    }

    /// Records a failure. True if the error differs from the last one.
    pub(super) fn failed(&self, id: &AttachmentId, volume: &VolumeId, why: &str, now: Instant) -> bool {
        let mut table = self.table();
        let known = table.get(id).filter(|known| known.why == why);
        let (is_new, delay) = match known {
            Some(known) => (false, (known.delay * 2).min(MAX_DELAY)),
            None => (true, FIRST_DELAY),
        };
        let failed = Failed { volume: volume.clone(), why: why.to_owned(), delay, not_before: now + delay };
        table.insert(id.clone(), failed);
        is_new
    }

    /// Removes an attachment's failure: it succeeded or ended.
    pub(super) fn forget(&self, id: &AttachmentId) {
        self.table().remove(id);
    }

    /// Makes failed operations on a volume due, because the volume changed.
    pub(in crate::service) fn changed(&self, volume: &VolumeId) {
        let now = Instant::now();
        for failed in self.table().values_mut().filter(|failed| failed.volume == *volume) {
            (failed.delay, failed.not_before) = (FIRST_DELAY, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_grows_and_only_a_different_error_is_new() {
        let (retries, now) = (Retries::default(), Instant::now());
        let (id, volume) = (AttachmentId::new("a").unwrap(), VolumeId::new("v").unwrap());
        assert!(retries.is_due(&id, now));
        assert!(retries.failed(&id, &volume, "why", now));
        assert!(!retries.is_due(&id, now) && retries.is_due(&id, now + FIRST_DELAY));
        assert!(!retries.failed(&id, &volume, "why", now));
        assert!(!retries.is_due(&id, now + FIRST_DELAY) && retries.is_due(&id, now + 2 * FIRST_DELAY));
        for _ in 0..20 {
            retries.failed(&id, &volume, "why", now);
        }
        assert!(retries.is_due(&id, now + MAX_DELAY));
        retries.changed(&volume);
        assert!(retries.is_due(&id, Instant::now()));
        assert!(retries.failed(&id, &volume, "another", now));
        retries.forget(&id);
        assert!(retries.is_due(&id, now));
    }
}
