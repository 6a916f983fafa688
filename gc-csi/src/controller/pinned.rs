//! Pin checks of calls: whether the handle still leads to the management PersistentVolume that the guest's
//! PersistentVolume is pinned to.

use std::collections::HashMap;

use crds::names::MANAGEMENT_VOLUME;
use csi::Status;
use tokio::time::Instant;

use super::service::Controller;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::ApiError;
use crate::pin::Pin;
use crds::names::{ClaimName, VmName};

/// Why a volume is neither changed nor copied.
#[derive(Debug, thiserror::Error)]
pub(super) enum PinError {
    /// The management claim is bound to another PersistentVolume.
    #[error(transparent)]
    Replaced(Incompatible),
    /// The management claim could not be read.
    #[error("failed to read which management PersistentVolume volume {volume} is bound to: {source}")]
    Unknown {
        /// The volume.
        volume: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Volumes of the guest whose pins can be checked.
pub(super) trait PinnedVolumes {
    /// Requirements of the guest's PersistentVolumes with this handle.
    fn requirements_of(&self, handle: &ClaimName) -> Vec<PvRequirements>;

    /// Checks the pins of these PersistentVolumes by the cache.
    fn check_cached_pins(&self, handle: &ClaimName, volumes: &[PvRequirements]) -> Result<(), Incompatible>;

    /// Waits for a cache that is as new as the claim and the VMs in the API server.
    async fn refresh(&self, claim: &ClaimName, vms: &[&VmName], deadline: Instant) -> Result<(), ApiError>;
}

impl PinnedVolumes for Controller {
    fn requirements_of(&self, handle: &ClaimName) -> Vec<PvRequirements> {
        self.guest.requirements_of(handle)
    }

    fn check_cached_pins(&self, handle: &ClaimName, volumes: &[PvRequirements]) -> Result<(), Incompatible> {
        self.management.claims.check_pins_of(handle, volumes)
    }

    async fn refresh(&self, claim: &ClaimName, vms: &[&VmName], deadline: Instant) -> Result<(), ApiError> {
        self.management.entries.refresh(claim, vms, deadline).await
    }
}

/// The pin of a call with volume context; `volumes` are all PersistentVolumes of the handle.
pub(super) fn pin_of_call(
    context: &HashMap<String, String>,
    volumes: &[PvRequirements],
) -> Result<Pin, Status> {
    let attribute = context.get(MANAGEMENT_VOLUME).map(String::as_str);
    let pins = volumes.iter().map(|volume| (volume.volume.as_deref().unwrap_or_default(), &volume.pin));
    Pin::of_call(attribute, pins).map_err(|error| Status::failed_precondition(error.to_string()))
}

/// Checks the pins of all PersistentVolumes of a handle, for a call without volume context. Before it refuses, waits for
/// a current cache: another replica may have just created the volume.
pub(super) async fn check_pin(
    pinned: &impl PinnedVolumes,
    volume: &ClaimName,
    deadline: Instant,
) -> Result<(), PinError> {
    let volumes = pinned.requirements_of(volume);
    if pinned.check_cached_pins(volume, &volumes).is_ok() {
        return Ok(());
    }
    let unknown = |source| PinError::Unknown { volume: volume.to_owned(), source };
    pinned.refresh(volume, &[], deadline).await.map_err(unknown)?;
    pinned.check_cached_pins(volume, &volumes).map_err(PinError::Replaced)
}
