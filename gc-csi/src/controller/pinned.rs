//! What a call is pinned to: the bytes that its volume stands for, which need not be those that its handle leads to now.

use std::collections::HashMap;

use crds::names::MANAGEMENT_VOLUME;
use csi::Status;
use tokio::time::Instant;

use super::service::Controller;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::ApiError;
use crate::pin::Pin;

/// Why nothing is done to, or made of, a volume.
#[derive(Debug, thiserror::Error)]
pub(super) enum PinError {
    /// Its handle leads to other bytes.
    #[error(transparent)]
    Replaced(Incompatible),
    /// The management cluster does not say where it leads.
    #[error("cannot tell to which management PersistentVolume volume {volume} leads: {source}")]
    Unknown {
        /// The volume.
        volume: String,
        /// What the API said.
        source: ApiError,
    },
}

impl Controller {
    /// The pin of a call that brings its PersistentVolume's attributes along; `volumes` are all of the handle.
    pub(super) fn pin(
        &self,
        context: &HashMap<String, String>,
        volumes: &[PvRequirements],
    ) -> Result<Pin, Status> {
        let attribute = context.get(MANAGEMENT_VOLUME).map(String::as_str);
        Pin::of_call(attribute, volumes).map_err(|error| Status::failed_precondition(error.to_string()))
    }

    /// Refuses a call by the handle alone where that leads to other bytes than the guest's volumes of it stand for. Only on
    /// what is so now: another replica may have made the volume just before.
    pub(super) async fn check_pin(&self, volume: &str, deadline: Instant) -> Result<(), PinError> {
        let volumes = self.guest.requirements_of(volume);
        if self.management.check_pins_of(volume, &volumes).is_ok() {
            return Ok(());
        }
        let unknown = |source| PinError::Unknown { volume: volume.to_owned(), source };
        self.management.refresh_cache(volume, &[], deadline).await.map_err(unknown)?;
        self.management.check_pins_of(volume, &volumes).map_err(PinError::Replaced)
    }
}
