//! Whether the guest still wants a snapshot that is being taken.

use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube_kit::client::chain;

use super::Guest;
use crate::management::snapshots::GROUP;

impl Guest {
    /// Whether the VolumeSnapshotContent of this name is there to stay. It is read when a snapshot is begun or stuck, and
    /// by nothing else, so no watch is kept for it; where it can't be read, it is taken to be wanted.
    pub(crate) async fn has_live_content(&self, content: &str) -> bool {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", "VolumeSnapshotContent"));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &kind);
        match api.get_metadata_opt(content).await {
            Ok(found) => found.is_some_and(|found| found.metadata.deletion_timestamp.is_none()),
            Err(error) => {
                tracing::warn!(content, "cannot read the guest's VolumeSnapshotContent: {}", chain(&error));
                true
            }
        }
    }
}
