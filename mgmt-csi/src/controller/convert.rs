//! Conversion of the storage infra's objects to CSI messages.

use std::collections::HashMap;

use crds::names::ATTRIBUTE_CLUSTER_ID;
use csi::proto;
use csi::proto::volume_content_source::{SnapshotSource, Type as Content, VolumeSource as FromVolume};
use infra_api::{GUEST_LABEL, Volume, VolumeSource};

use crate::infra::{Message, condition_message};

pub(super) fn to_proto(volume: &Volume) -> proto::Volume {
    proto::Volume {
        capacity_bytes: bytes(volume.capacity_bytes),
        volume_id: volume.id.to_string(),
        content_source: volume.source.as_ref().map(write_source),
        volume_context: context(volume),
        ..Default::default()
    }
}

/// Attributes of the PersistentVolume: the guest that was recorded at the volume's creation, which a repeated request keeps.
fn context(volume: &Volume) -> HashMap<String, String> {
    let guest = volume.labels.get(GUEST_LABEL).cloned();
    guest.map(|guest| (ATTRIBUTE_CLUSTER_ID.to_owned(), guest)).into_iter().collect()
}

pub(super) fn condition(volume: &Volume) -> proto::VolumeCondition {
    let abnormal = condition_message(&volume.condition);
    proto::VolumeCondition {
        abnormal: abnormal.is_some(),
        message: abnormal.as_ref().map_or("the volume is healthy", Message::guest).to_owned(),
    }
}

pub(super) fn bytes(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

pub(super) fn write_source(source: &VolumeSource) -> proto::VolumeContentSource {
    let content = match source {
        VolumeSource::Snapshot(id) => Content::Snapshot(SnapshotSource { snapshot_id: id.to_string() }),
        VolumeSource::Volume(id) => Content::Volume(FromVolume { volume_id: id.to_string() }),
    };
    proto::VolumeContentSource { r#type: Some(content) }
}
