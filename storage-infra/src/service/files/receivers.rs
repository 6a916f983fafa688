//! The streams of imports that are being received: one per volume. A new one ends the earlier one, whose client is gone
//! or has given up.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use infra_api::VolumeId;
use process_kit::keyed_lock::{KeyGuard, KeyedLock};
use tokio_util::sync::CancellationToken;

/// The streams that are being received.
#[derive(Default)]
pub(in crate::service) struct Receivers {
    running: KeyedLock<VolumeId>,
    latest: Mutex<HashMap<VolumeId, CancellationToken>>,
    stop: CancellationToken,
}

/// The right to receive the stream of a volume.
pub(in crate::service) struct Turn {
    /// Cancelled when the stream must end.
    pub(in crate::service) ended: CancellationToken,
    _running: KeyGuard<VolumeId>,
}

impl Receivers {
    fn latest(&self) -> MutexGuard<'_, HashMap<VolumeId, CancellationToken>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the stream of a volume that is being received, and waits until this one may be.
    pub(in crate::service) async fn begin(&self, id: &VolumeId) -> Turn {
        let ended = self.stop.child_token();
        if let Some(earlier) = self.latest().insert(id.clone(), ended.clone()) {
            earlier.cancel();
        }
        Turn { ended, _running: self.running.lock(id.clone()).await }
    }

    /// Ends the stream of a volume, and waits until it has ended.
    pub(in crate::service) async fn end(&self, id: &VolumeId) {
        let latest = self.latest().remove(id);
        if let Some(latest) = latest {
            latest.cancel();
            drop(self.running.lock(id.clone()).await);
        }
    }

    /// Ends all streams.
    pub(super) fn end_all(&self) {
        self.stop.cancel();
    }

    /// Forgets a stream that has ended, unless a later one has begun.
    pub(in crate::service) fn forget(&self, id: &VolumeId, turn: &Turn) {
        let mut latest = self.latest();
        // A later stream has cancelled this one.
        if !turn.ended.is_cancelled() {
            latest.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_later_stream_ends_the_earlier_one_and_begins_after_it() {
        let (receivers, id) = (Arc::new(Receivers::default()), VolumeId::new("v").unwrap());
        let first = receivers.begin(&id).await;
        let (later, name) = (receivers.clone(), id.clone());
        let second = tokio::spawn(async move { later.begin(&name).await });
        first.ended.cancelled().await;
        assert!(!second.is_finished());
        receivers.forget(&id, &first);
        drop(first);
        let second = second.await.unwrap();
        assert!(!second.ended.is_cancelled());
        let (deleter, name) = (receivers.clone(), id.clone());
        let end = tokio::spawn(async move { deleter.end(&name).await });
        second.ended.cancelled().await;
        drop(second);
        end.await.unwrap();
        receivers.end(&id).await;
    }
}
