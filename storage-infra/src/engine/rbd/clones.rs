//! Clones of images.

use std::collections::HashSet;
use std::sync::{MutexGuard, PoisonError};

use uuid::Uuid;

use super::RbdEngine;
use crate::engine::{EngineError, Result};
use crate::hypervisor::RbdImage;

/// Image metadata: number of clones between an image and the data that it shares.
const DEPTH: &str = "nestor-clone-depth";
/// Greatest number of clones that a read may have to follow. A deeper clone becomes independent.
const MAX_DEPTH: u64 = 8;
/// Prefix of the names of snapshots that the engine takes for clones.
const CLONE_POINT: &str = "nestor-";

impl RbdEngine {
    /// Clones an image into the incomplete image of an object.
    pub(super) fn clone_into(&self, from: &RbdImage, part: &RbdImage, bytes: u64) -> Result<()> {
        let point = format!("{CLONE_POINT}{}", Uuid::new_v4().simple());
        self.remove_abandoned(from)?;
        self.cloning().insert(point.clone());
        let cloned = self.ceph.clone_image(from, part, &point);
        self.cloning().remove(&point);
        cloned?;
        // The source may have been expanded and written to meanwhile: its data must not be cut off.
        if let Some(length) = self.ceph.size(part)?.filter(|length| *length > bytes) {
            return Err(EngineError::SourceExpanded(format!(
                "the image {from} was expanded from {bytes} to {length} bytes meanwhile; retry"
            )));
        }
        let parent = self.ceph.metadata(from, DEPTH)?.and_then(|text| text.parse().ok()).unwrap_or(0);
        let depth = parent + 1;
        if depth > MAX_DEPTH {
            self.ceph.flatten(part)?;
        }
        self.ceph.set_metadata(part, DEPTH, &if depth > MAX_DEPTH { 0 } else { depth }.to_string())
    }

    /// Removes snapshots that an interrupted clone left.
    pub(super) fn remove_abandoned(&self, image: &RbdImage) -> Result<()> {
        for snapshot in self.ceph.snapshots(image)?.iter().filter(|name| name.starts_with(CLONE_POINT)) {
            if !self.cloning().contains(snapshot) {
                self.ceph.remove_snapshot(image, snapshot)?;
            }
        }
        Ok(())
    }

    fn cloning(&self) -> MutexGuard<'_, HashSet<String>> {
        self.cloning.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
