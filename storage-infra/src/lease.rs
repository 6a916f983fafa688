//! The lease of the active server: until when it may act on disks, by its own clock.
//!
//! The clock is `CLOCK_BOOTTIME`: it also runs while the process is stopped and while the machine sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

/// End of a lease that never ends.
const NEVER: u64 = u64::MAX;

/// The lease of a server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Lease(Arc<State>);

#[derive(Debug)]
struct State {
    /// Time of the end, by the clock.
    end: AtomicU64,
    lost: CancellationToken,
}

/// The server must not act on disks now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this server is not sure to be the active one: it could not renew its lease in the database in time. Nothing was changed; \
     retry: the active server goes on"
)]
pub struct NotActive;

impl Lease {
    /// The lease of the only server of a catalog.
    pub fn unlimited() -> Self {
        Self::ending(NEVER)
    }

    /// A lease that ended.
    pub fn ended() -> Self {
        Self::ending(0)
    }

    fn ending(end: u64) -> Self {
        Self(Arc::new(State { end: end.into(), lost: CancellationToken::new() }))
    }

    /// Extends the lease to this long after a time by [`clock`]. A lease that was lost remains so.
    pub fn extend(&self, since: Duration, length: Duration) {
        let end = u64::try_from((since + length).as_nanos()).unwrap_or(NEVER);
        self.0.end.fetch_max(end, Ordering::SeqCst);
    }

    /// Ends the lease for good: another server is active.
    pub fn lose(&self) {
        self.0.lost.cancel();
    }

    /// Waits until another server is active.
    pub async fn lost(&self) {
        self.0.lost.cancelled().await;
    }

    /// Whether another server is active.
    pub fn is_lost(&self) -> bool {
        self.0.lost.is_cancelled()
    }

    /// Fails unless the lease is valid now.
    pub fn check(&self) -> Result<(), NotActive> {
        let end = self.0.end.load(Ordering::SeqCst);
        let is_valid = end == NEVER || clock().as_nanos() < u128::from(end);
        if is_valid && !self.is_lost() { Ok(()) } else { Err(NotActive) }
    }
}

/// Time since the machine started.
pub fn clock() -> Duration {
    #[cfg(test)]
    if let Some(now) = crate::simulation::boottime() {
        return now;
    }
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_valid_until_its_end_and_never_again_once_it_is_lost() {
        let (lease, hour) = (Lease::ended(), Duration::from_secs(3600));
        assert_eq!(lease.check(), Err(NotActive));
        lease.extend(clock(), Duration::ZERO);
        assert_eq!(lease.check(), Err(NotActive));
        lease.extend(clock(), hour);
        assert_eq!(lease.check(), Ok(()));
        lease.extend(Duration::ZERO, Duration::ZERO);
        assert_eq!(lease.check(), Ok(()), "an older renewal does not shorten it");
        lease.lose();
        lease.extend(clock(), hour);
        assert_eq!(lease.check(), Err(NotActive));
        assert_eq!(Lease::unlimited().check(), Ok(()));
    }
}
