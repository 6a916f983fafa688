//! Management claims: guest volumes in the management cluster.

mod create;
mod delete;
mod expand;
mod modify;

use csi::request::Size;
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use tokio::time::Instant;

use super::Management;

pub use create::Source;
pub(crate) use create::{CreateError, NewClaim};
pub use delete::Abandoned;
pub(crate) use delete::{DeleteError, pending_for};
pub use expand::{CONDITION_RESIZE_FAILED, ExpandError};
pub use modify::{CONDITION_MODIFY_FAILED, ModifyError};

/// Volumes have whole MiB, which every layer can provide exactly.
const GRANULARITY: u64 = 1 << 20;

impl Management {
    /// Reclaim policy of a management StorageClass. Waits until `deadline` for a new class; None if it does not appear.
    pub async fn reclaim_policy(&self, class: &str, deadline: Instant) -> Option<String> {
        self.classes
            .wait_for(&Key::cluster(class), deadline, |class| {
                Some(class?.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()))
            })
            .await
    }

    /// Whether a management VolumeAttributesClass exists. Waits until `deadline` for a new class.
    async fn has_attributes_class(&self, class: &str, deadline: Instant) -> bool {
        let Some(classes) = &self.attributes_classes else { return false };
        classes.wait_for(&Key::cluster(class), deadline, |class| class.map(|_| ())).await.is_some()
    }

    /// Whether the management cluster serves VolumeAttributesClasses.
    pub fn has_attributes_classes(&self) -> bool {
        self.attributes_classes.is_some()
    }
}

/// The largest size that can be requested: Kubernetes can't represent a larger one.
const MAX_BYTES: u64 = i64::MAX.cast_unsigned() / GRANULARITY * GRANULARITY;

/// Why a range has no valid size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The limit is too small.
    #[error(
        "no volume of whole MiB has between {required} and {limit} bytes: leave at least 1 MiB between request and limit"
    )]
    Between {
        /// Bytes required.
        required: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The required size is too large.
    #[error("no volume can have {required} bytes: the largest that can be requested has {MAX_BYTES} bytes")]
    TooLarge {
        /// Bytes required.
        required: u64,
    },
}

/// The smallest whole number of MiB in the range, in bytes.
fn whole_mebibytes(size: Size) -> Result<u64, SizeError> {
    if size.required > MAX_BYTES {
        return Err(SizeError::TooLarge { required: size.required });
    }
    let bytes = size.required.max(1).next_multiple_of(GRANULARITY);
    match size.limit {
        Some(limit) if limit < bytes => Err(SizeError::Between { required: size.required, limit }),
        _ => Ok(bytes),
    }
}

/// The message of a claim's condition that is True.
fn condition<'a>(claim: &'a PersistentVolumeClaim, type_: &str) -> Option<&'a str> {
    let found = claim.status.conditions.iter().find(|one| one.type_ == type_ && one.status == "True")?;
    let message = found.message.as_deref().unwrap_or("no message");
    // csi-resizer puts the operation and the status code before the driver's message.
    Some(message.split_once(" desc = ").map_or(message, |(_, words)| words))
}

/// Whether a claim is bound to a volume.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == "Bound"
}

/// Whether a claim has a volume, or names one that it will be bound to, as after a restore from a backup.
fn has_volume(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) != "Pending" || claim.spec.volume_name.as_ref().is_some_and(|name| !name.is_empty())
}

/// Whether a claim is for a raw block volume.
pub fn is_block(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.volume_mode.as_deref() == Some("Block")
}

fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.phase.as_deref().unwrap_or("Pending")
}

fn volume_mode(block: bool) -> &'static str {
    if block { "Block" } else { "Filesystem" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_mebibytes_within_the_limit() {
        let size = |required, limit| whole_mebibytes(Size { required, limit });
        assert_eq!(size(1, None), Ok(GRANULARITY));
        assert_eq!(size(GRANULARITY, Some(GRANULARITY)), Ok(GRANULARITY));
        assert_eq!(size(1, Some(1000)), Err(SizeError::Between { required: 1, limit: 1000 }));
        assert_eq!(size(MAX_BYTES, None), Ok(9_223_372_036_853_727_232));
        for more in [MAX_BYTES + 1, i64::MAX.cast_unsigned()] {
            assert_eq!(size(more, Some(more)), Err(SizeError::TooLarge { required: more }));
        }
    }
}
