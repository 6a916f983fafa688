//! Whom a volume counts for.

use std::sync::Arc;

use infra_api::{ObjectKind, Owner, Problem, Volume, VolumeId};

use super::VolumeChanges;
use crate::catalog::Tx;
use crate::scope::Scope;
use crate::service::problems::{Failure, Result};

impl VolumeChanges {
    /// Sets whom a volume counts for. No budget refuses it: the account may be beyond its limits afterwards.
    pub async fn set_owner(self: &Arc<Self>, id: VolumeId, owner: Owner) -> Result<Volume> {
        owner.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Volume, &id))?;
        let changes = self.clone();
        self.core
            .run_to_completion(async move {
                // An expansion in progress was checked against the present owner's budget.
                let _lock = changes.core.lock_volume(&id).await;
                let name = id.clone();
                let set = move |tx: &Tx<'_>| -> Result<_> {
                    let row =
                        tx.volume(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &name))?;
                    let changed = row.owner != owner;
                    if changed {
                        tx.set_owner(&name, &owner)?;
                    }
                    Ok(changed)
                };
                changes.change_row(&id, set).await?;
                changes.volumes.get(&Scope::All, &id).await
            })
            .await
    }
}
