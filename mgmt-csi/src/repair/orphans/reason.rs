//! Reasons of orphans.

use std::fmt;

use crate::repair::decide::LeaveReason;

crds::reasons! {
    /// Why an object is an orphan. gc-csi writes the first two to claims.
    pub(super) enum OrphanReason {
        VolumeGone,
        ClaimLost,
        Retained,
        Released,
        NoPersistentVolume,
        NoSnapshotContent,
        NoVolumeAttachment,
    }
}

/// Reason in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    Orphan(OrphanReason),
    /// Why a dangling attachment is left alone.
    Leave(LeaveReason),
    /// A reason of a newer gc-csi.
    Other(String),
}

impl Reason {
    /// The reason in the annotation of an orphaned claim.
    pub(super) fn of_annotation(text: Option<&str>) -> Self {
        let known = [OrphanReason::VolumeGone, OrphanReason::ClaimLost];
        let text = text.unwrap_or(OrphanReason::VolumeGone.as_str());
        let reason = known.into_iter().find(|reason| reason.as_str() == text);
        reason.map_or_else(|| Self::Other(text.to_owned()), Self::Orphan)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Orphan(reason) => f.write_str(reason.as_str()),
            Self::Leave(reason) => f.write_str(reason.as_str()),
            Self::Other(text) => f.write_str(text),
        }
    }
}
