//! Names of the files of a pool.

use infra_api::{SnapshotId, VolumeId};

use crate::engine::Object;

/// Name of the marker file. No volume can have it: IDs start with a letter or digit.
pub(crate) const MARKER: &str = ".nestor-pool";

/// Suffixes of incomplete files, which the epoch of their server follows.
pub(super) const VOLUME_PART: &str = "vpart";
pub(super) const SNAPSHOT_PART: &str = "spart";

/// Name of the complete file of an object.
pub(super) fn file_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => format!("{id}.raw"),
        Object::Snapshot(id) => format!("{id}.snap"),
    }
}

/// The object whose complete file has this name.
pub(crate) fn object_of(name: &str) -> Option<Object> {
    let volume = || VolumeId::new(name.strip_suffix(".raw")?).ok().map(Object::Volume);
    let snapshot = || SnapshotId::new(name.strip_suffix(".snap")?).ok().map(Object::Snapshot);
    volume().or_else(snapshot)
}

/// Name of the file that a server of this epoch gives an incomplete object. Two servers never write to one name.
pub(super) fn part_name(object: &Object, epoch: Option<i64>) -> String {
    let name = match object {
        Object::Volume(id) => format!("{id}.{VOLUME_PART}"),
        Object::Snapshot(id) => format!("{id}.{SNAPSHOT_PART}"),
    };
    epoch.map_or(name.clone(), |epoch| format!("{name}-{epoch}"))
}

/// The object whose incomplete file has this name, and the epoch of the server that made it.
pub(super) fn part_of(name: &str) -> Option<(Object, Option<i64>)> {
    let (id, suffix) = name.rsplit_once('.')?;
    let (kind, epoch) = match suffix.split_once('-') {
        None => (suffix, None),
        Some((kind, epoch)) => (kind, Some(epoch.parse().ok()?)),
    };
    let object = match kind {
        VOLUME_PART => Object::Volume(VolumeId::new(id).ok()?),
        SNAPSHOT_PART => Object::Snapshot(SnapshotId::new(id).ok()?),
        _ => return None,
    };
    (part_name(&object, epoch) == name).then_some((object, epoch))
}
