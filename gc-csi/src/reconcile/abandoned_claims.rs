//! Management claims that have no volume yet, and that nobody in the guest waits for any more.
//!
//! csi-provisioner usually asks for a volume until it hears a final code, also when the guest's claim is gone, and then
//! nothing is left. But it never asks again for a clone whose source is being deleted, and forgets all that it was asking
//! for when it starts anew. What was made by then would stay, and keep a source from being deleted.

use std::time::Duration;

use kube_kit::queue::Next;
use tokio::time::Instant;

use crate::guest::Guest;
use crate::management::Management;
use crate::management::claims::Abandoned;

/// How soon it is looked again where the guest's watch is behind, which otherwise tells when a claim goes.
const CACHE_LAG_RETRY: Duration = Duration::from_secs(5);
/// How long a claim may take to be gone.
const DELETE_TIMEOUT: Duration = Duration::from_secs(30);

/// Removes what is not wanted any more.
pub(super) struct AbandonedClaims {
    guest: Guest,
    management: Management,
}

impl AbandonedClaims {
    pub(super) fn new(guest: Guest, management: Management) -> Self {
        Self { guest, management }
    }

    /// Looks whether the management claim of this name is still wanted, unless it has a volume.
    pub(super) async fn reconcile(&self, name: &str) -> Result<Next, String> {
        let Some(pending) = self.management.pending_claim(name) else { return Ok(Next::Wait) };
        // What was given out once is not deleted without being asked for, whatever became of it below.
        if !self.guest.volumes_of(name).is_empty() {
            return Ok(Next::Wait);
        }
        if self.guest.has_claim_for(&pending.guest_claim, &pending.csi_name).await? {
            let is_cached = self.guest.claims.get(&pending.guest_claim).is_some();
            return Ok(if is_cached { Next::Wait } else { Next::After(CACHE_LAG_RETRY) });
        }
        let outcome = self.management.abandon_claim(&pending.csi_name, Instant::now() + DELETE_TIMEOUT).await;
        if outcome.map_err(|error| error.to_string())? == Abandoned::Gone {
            tracing::info!(
                claim = name,
                guest_claim = %pending.guest_claim,
                "deleted a claim that had no volume yet: the guest's claim is gone"
            );
        }
        Ok(Next::Wait)
    }
}
