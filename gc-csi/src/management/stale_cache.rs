//! Handling of informer caches that lag. Sidecars call any replica, and a call may follow one that another replica has
//! just answered; objects that were created or deleted by it must not be reported as missing or in the way.

use kube_kit::mutation_cache::catch_up;
use tokio::time::Instant;

use super::{ApiError, Management, is_object_name};

impl Management {
    /// Waits until the informers show a claim and VMs at least as new as the API server returns them now.
    pub(crate) async fn refresh_cache(
        &self,
        claim: &str,
        vms: &[&str],
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let mut is_current = true;
        // The guest chooses these names, and they become part of URLs: invalid names are skipped, no object can have
        // them.
        if is_object_name(claim) {
            let live = self.claims_api.get_opt(claim).await?;
            is_current &= catch_up(&self.claims, &self.key(claim), live.as_ref(), deadline).await;
        }
        for name in vms.iter().filter(|name| is_object_name(name)) {
            let live = self.vms_api.get_opt(name).await?;
            is_current &= catch_up(&self.vms, &self.key(name), live.as_ref(), deadline).await;
        }
        let lagging = || ApiError::Unavailable("the watch of the management cluster lags behind".to_owned());
        is_current.then_some(()).ok_or_else(lagging)
    }
}
