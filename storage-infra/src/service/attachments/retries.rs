//! When work on an attachment that failed is tried again by itself: soon at first, then less and less often, for as long as it
//! fails in the same way. Whoever asks for it, or a change to its volume, lets it be tried at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use infra_api::{AttachmentId, VolumeId};

/// The first pause.
const FIRST: Duration = Duration::from_secs(15);
/// The longest.
const LONGEST: Duration = Duration::from_secs(600);

/// Work that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failed {
    volume: VolumeId,
    why: String,
    pause: Duration,
    not_before: Instant,
}

/// All work on attachments that failed when it was last done.
#[derive(Default)]
pub(in crate::service) struct Retries(Mutex<HashMap<AttachmentId, Failed>>);

impl Retries {
    fn table(&self) -> MutexGuard<'_, HashMap<AttachmentId, Failed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is to be tried now.
    pub(super) fn is_due(&self, id: &AttachmentId, now: Instant) -> bool {
        self.table().get(id).is_none_or(|failed| failed.not_before <= now)
    }

    /// Notes a failure. True where it is not the one that is known.
    pub(super) fn failed(&self, id: &AttachmentId, volume: &VolumeId, why: &str, now: Instant) -> bool {
        let mut table = self.table();
        let known = table.get(id).filter(|known| known.why == why);
        let (is_new, pause) = match known {
            Some(known) => (false, (known.pause * 2).min(LONGEST)),
            None => (true, FIRST),
        };
        let failed = Failed { volume: volume.clone(), why: why.to_owned(), pause, not_before: now + pause };
        table.insert(id.clone(), failed);
        is_new
    }

    /// Forgets an attachment's failure: it succeeded, or is over.
    pub(super) fn forget(&self, id: &AttachmentId) {
        self.table().remove(id);
    }

    /// Lets what failed on a volume be tried at once, since something about the volume changed.
    pub(in crate::service) fn changed(&self, volume: &VolumeId) {
        let now = Instant::now();
        for failed in self.table().values_mut().filter(|failed| failed.volume == *volume) {
            (failed.pause, failed.not_before) = (FIRST, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_again_waits_longer_and_is_new_only_where_it_fails_otherwise() {
        let (retries, now) = (Retries::default(), Instant::now());
        let (id, volume) = (AttachmentId::new("a").unwrap(), VolumeId::new("v").unwrap());
        assert!(retries.is_due(&id, now));
        assert!(retries.failed(&id, &volume, "why", now));
        assert!(!retries.is_due(&id, now) && retries.is_due(&id, now + FIRST));
        assert!(!retries.failed(&id, &volume, "why", now));
        assert!(!retries.is_due(&id, now + FIRST) && retries.is_due(&id, now + 2 * FIRST));
        for _ in 0..20 {
            retries.failed(&id, &volume, "why", now);
        }
        assert!(retries.is_due(&id, now + LONGEST));
        retries.changed(&volume);
        assert!(retries.is_due(&id, Instant::now()));
        assert!(retries.failed(&id, &volume, "another", now));
        retries.forget(&id);
        assert!(retries.is_due(&id, now));
    }
}
