//! What the watches of this replica don't show yet. Calls come to any replica, and one follows another that was answered
//! by another replica just now; what that has made, or taken away, must not be called missing, or in the way.

use kube_kit::latest::catch_up;
use tokio::time::Instant;

use super::{ApiError, Management, is_object_name};

impl Management {
    /// Waits until the watches show a claim and VMs as the API server has them now, or later.
    pub(crate) async fn refresh_cache(
        &self,
        claim: &str,
        vms: &[&str],
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let mut is_current = true;
        // The names are the guest's words and become parts of URLs: one that no object can have, has none.
        if is_object_name(claim) {
            let live = self.claims_api.get_opt(claim).await?;
            is_current &= catch_up(&self.claims, &self.key(claim), live.as_ref(), deadline).await;
        }
        for name in vms.iter().filter(|name| is_object_name(name)) {
            let live = self.vms_api.get_opt(name).await?;
            is_current &= catch_up(&self.vms, &self.key(name), live.as_ref(), deadline).await;
        }
        let lagging = || ApiError::Unavailable("the watch of the management cluster is behind".to_owned());
        is_current.then_some(()).ok_or_else(lagging)
    }
}
