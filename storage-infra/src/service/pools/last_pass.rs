//! Whether the result of the last full pass over a pool's files still holds, so that an idle pool is not listed again
//! and again.
//!
//! A pass compares the entries of the pool's directory with the catalog. Its result holds while neither changes. The
//! catalog counts its changes. A filesystem sets the times of a directory whenever an entry is added, renamed or
//! removed, but with limited resolution: a change shortly after an earlier one may leave the times as they are.
//! Therefore only a pass counts that started long enough after its version of the directory was first seen.
//!
//! Some network filesystems do not maintain these times, and a repair of an unmounted filesystem may keep them. So no
//! pass counts for longer than its caller's maximum age.

use std::time::Duration;

use tokio::time::Instant;

/// Coarsest resolution of directory times in a filesystem for Linux: FAT's, and more than those of ext3 and NFSv2.
const RESOLUTION: Duration = Duration::from_secs(2);

/// The last full pass over the files of a pool or of all pools, at a version of type `V`.
#[derive(Debug)]
pub(in crate::service) struct LastPass<V> {
    /// The last version that was seen, and when it was seen first.
    seen: Option<(V, Instant)>,
    /// The version before the last completed pass, and when that pass started.
    pass: Option<(V, Instant)>,
}

impl<V> Default for LastPass<V> {
    fn default() -> Self {
        Self { seen: None, pass: None }
    }
}

impl<V: PartialEq + Clone> LastPass<V> {
    /// Whether the last pass still holds, by the version that was read just before `now`.
    pub(in crate::service) fn holds(&mut self, version: &V, now: Instant, max_age: Duration) -> bool {
        let first_seen = match &self.seen {
            Some((seen, since)) if seen == version => *since,
            _ => now,
        };
        self.seen = Some((version.clone(), first_seen));
        self.pass.as_ref().is_some_and(|(of, started)| {
            of == version && *started >= first_seen + RESOLUTION && *started + max_age > now
        })
    }

    /// Records a completed pass. Its version was read, and checked by [`LastPass::holds`], before it started.
    pub(in crate::service) fn completed(&mut self, version: V, started: Instant) {
        self.pass = Some((version, started));
    }

    /// Forgets the last pass, because the pool was not available.
    pub(in crate::service) fn forget(&mut self) {
        self.pass = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(60);

    /// Checks at this second, and passes if the last pass does not hold; returns whether it held.
    fn check(last: &mut LastPass<u64>, start: Instant, second: f64, version: u64) -> bool {
        let now = start + Duration::from_secs_f64(second);
        let holds = last.holds(&version, now, MAX_AGE);
        if !holds {
            last.completed(version, now);
        }
        holds
    }

    #[test]
    fn a_pass_holds_until_the_version_changes() {
        let (mut last, start) = (LastPass::default(), Instant::now());
        assert!(!check(&mut last, start, 0.0, 1), "there was no pass");
        assert!(!check(&mut last, start, 2.0, 1), "the first pass may have missed a change in the same tick");
        assert!(check(&mut last, start, 4.0, 1));
        assert!(check(&mut last, start, 6.0, 1));
        assert!(!check(&mut last, start, 8.0, 2));
    }

    #[test]
    fn a_pass_soon_after_a_change_does_not_count() {
        let (mut last, start) = (LastPass::default(), Instant::now());
        for (second, holds) in [(0.0, false), (0.5, false), (1.9, false), (2.0, false), (2.1, true)] {
            assert_eq!(check(&mut last, start, second, 1), holds, "{second}");
        }
    }

    #[test]
    fn a_version_that_returns_is_seen_anew() {
        let (mut last, start) = (LastPass::default(), Instant::now());
        for (second, version) in [(0.0, 1), (2.0, 1), (4.0, 2), (5.0, 1), (6.0, 1)] {
            assert!(!check(&mut last, start, second, version), "{second}");
        }
    }

    #[test]
    fn no_pass_holds_after_the_pool_was_not_available() {
        let (mut last, start) = (LastPass::default(), Instant::now());
        for (second, holds) in [(0.0, false), (2.0, false), (4.0, true)] {
            assert_eq!(check(&mut last, start, second, 1), holds);
        }
        last.forget();
        assert!(!check(&mut last, start, 6.0, 1));
    }

    #[test]
    fn no_pass_holds_for_longer_than_the_maximum_age() {
        let (mut last, start) = (LastPass::default(), Instant::now());
        check(&mut last, start, 0.0, 1);
        check(&mut last, start, 2.0, 1);
        assert!(check(&mut last, start, 61.9, 1));
        assert!(!check(&mut last, start, 62.0, 1));
        assert!(check(&mut last, start, 64.0, 1));
    }
}
