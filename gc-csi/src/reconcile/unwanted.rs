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
const BEHIND: Duration = Duration::from_secs(5);
/// How long a claim may take to be gone.
const GONE: Duration = Duration::from_secs(30);

/// Removes what is not wanted any more.
pub(super) struct Unwanted {
    guest: Guest,
    management: Management,
}

impl Unwanted {
    pub(super) fn new(guest: Guest, management: Management) -> Self {
        Self { guest, management }
    }

    /// Looks whether the management claim of this name is still wanted, unless it has a volume.
    pub(super) async fn reconcile(&self, name: &str) -> Result<Next, String> {
        let Some(waiting) = self.management.waiting_claim(name) else { return Ok(Next::Wait) };
        // What was given out once is not deleted without being asked for, whatever became of it below.
        if !self.guest.volumes_of(name).is_empty() {
            return Ok(Next::Wait);
        }
        if self.guest.wants_volume(&waiting.guest_claim, &waiting.csi_name).await? {
            let is_seen = self.guest.claims.get(&waiting.guest_claim).is_some();
            return Ok(if is_seen { Next::Wait } else { Next::After(BEHIND) });
        }
        let outcome = self.management.abandon_claim(&waiting.csi_name, Instant::now() + GONE).await;
        if outcome.map_err(|error| error.to_string())? == Abandoned::Gone {
            tracing::info!(
                claim = name,
                guest_claim = %waiting.guest_claim,
                "deleted a claim that had no volume yet: the guest's claim is gone"
            );
        }
        Ok(Next::Wait)
    }
}
