//! Names and requests of tests.

use infra_api::{
    Access, Account, AttachmentId, AttachmentSpec, Labels, PoolName, SnapshotId, SnapshotSpec, VolumeId,
    VolumeSource, VolumeSpec,
};
use uuid::Uuid;

pub fn pool() -> PoolName {
    PoolName::new("pool").unwrap()
}

pub fn volume(id: &str) -> VolumeId {
    VolumeId::new(id).unwrap()
}

pub fn snapshot(id: &str) -> SnapshotId {
    SnapshotId::new(id).unwrap()
}

pub fn of(volume: &VolumeId) -> SnapshotSpec {
    SnapshotSpec { volume: volume.clone(), account: Account::default(), labels: Labels::new() }
}

/// A volume with a snapshot as its source.
pub fn restored(from: &SnapshotId, bytes: u64) -> VolumeSpec {
    VolumeSpec { source: Some(VolumeSource::Snapshot(from.clone())), ..size(bytes) }
}

/// A volume with another volume as its source.
pub fn cloned(from: &VolumeId, bytes: u64) -> VolumeSpec {
    VolumeSpec { source: Some(VolumeSource::Volume(from.clone())), ..size(bytes) }
}

pub fn attachment(id: &str) -> AttachmentId {
    AttachmentId::new(id).unwrap()
}

pub fn size(bytes: u64) -> VolumeSpec {
    VolumeSpec::of_size(bytes)
}

pub fn writer(id: &VolumeId, node: Uuid) -> AttachmentSpec {
    AttachmentSpec { volume: id.clone(), node, read_only: false, access: Access::SingleNode }
}

/// One of several writers.
pub fn sharer(id: &VolumeId, node: Uuid) -> AttachmentSpec {
    AttachmentSpec { volume: id.clone(), node, read_only: false, access: Access::MultiNode }
}

pub fn reader(id: &VolumeId, node: Uuid) -> AttachmentSpec {
    AttachmentSpec { volume: id.clone(), node, read_only: true, access: Access::MultiNodeReadOnly }
}
