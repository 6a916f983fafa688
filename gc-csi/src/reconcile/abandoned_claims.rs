//! Abandoned claims: management claims without a volume whose guest claim was deleted.
//!
//! csi-provisioner usually repeats CreateVolume until it gets a final error, also after the guest's claim was deleted,
//! and then nothing is left. But it never repeats the clone of a source that is being deleted, and it forgets its
//! pending calls when it restarts. The management claim would then stay, and could block the deletion of a source.

use std::time::Duration;

use crds::names::ClaimName;
use kube_kit::queue::NextAction;
use tokio::time::Instant;

use crate::guest::Guest;
use crate::management::Management;
use crate::management::provisioner::Abandoned;

/// Retry interval while the guest's informer lags; otherwise the deletion of the guest claim triggers the reconcile.
const CACHE_LAG_RETRY: Duration = Duration::from_secs(5);
/// How long to wait until a claim is deleted.
const DELETE_TIMEOUT: Duration = Duration::from_secs(30);

/// Deletes abandoned claims.
pub(super) struct AbandonedClaims {
    guest: Guest,
    management: Management,
}

impl AbandonedClaims {
    pub(super) fn new(guest: Guest, management: Management) -> Self {
        Self { guest, management }
    }

    /// Deletes the management claim of this name if it has no volume and its guest claim no longer exists.
    pub(super) async fn reconcile(&self, name: &ClaimName) -> Result<NextAction, String> {
        let Some(pending) = self.management.claims.pending(name) else { return Ok(NextAction::AwaitChange) };
        // A volume that has a guest PersistentVolume is deleted only by DeleteVolume.
        if !self.guest.volumes_of(name).is_empty() {
            return Ok(NextAction::AwaitChange);
        }
        if self.guest.has_claim_for(&pending.guest_claim, &pending.csi_name).await? {
            let is_cached = self.guest.claims.get(&pending.guest_claim).is_some();
            return Ok(if is_cached {
                NextAction::AwaitChange
            } else {
                NextAction::RequeueAfter(CACHE_LAG_RETRY)
            });
        }
        let outcome =
            self.management.provisioner.abandon(&pending.csi_name, Instant::now() + DELETE_TIMEOUT).await;
        if outcome.map_err(|error| error.to_string())? == Abandoned::Gone {
            tracing::info!(
                claim = name.as_str(),
                guest_claim = %pending.guest_claim,
                "deleted a management claim without a volume: the guest's claim no longer exists"
            );
        }
        Ok(NextAction::AwaitChange)
    }
}
