//! Guest VolumeSnapshotContents: whether a snapshot is still requested.

use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube_kit::client::chain;

use super::Guest;
use crate::management::snapshots::GROUP;

impl Guest {
    /// Whether a VolumeSnapshotContent exists and is not being deleted. It is read only when a snapshot is created or
    /// stuck, so there is no watch. If it can't be read, it counts as existing.
    pub(crate) async fn has_live_content(&self, content: &str) -> bool {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", "VolumeSnapshotContent"));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &kind);
        match api.get_metadata_opt(content).await {
            Ok(found) => found.is_some_and(|found| found.metadata.deletion_timestamp.is_none()),
            Err(error) => {
                tracing::warn!(
                    content,
                    "failed to read the guest's VolumeSnapshotContent: {}",
                    chain(&error)
                );
                true
            }
        }
    }
}
