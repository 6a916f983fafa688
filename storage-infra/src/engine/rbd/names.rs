//! Names of images.

use infra_api::{SnapshotId, VolumeId};

use crate::engine::Object;

/// Name of the marker image.
pub(super) const MARKER: &str = "_nestor-pool";

pub(super) fn image_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => id.to_string(),
        Object::Snapshot(id) => format!("_snapshot.{id}"),
    }
}

pub(super) fn part_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => format!("_incomplete-volume.{id}"),
        Object::Snapshot(id) => format!("_incomplete-snapshot.{id}"),
    }
}

/// The object whose complete image has this name.
pub(super) fn object_of(name: &str) -> Option<Object> {
    match name.strip_prefix("_snapshot.") {
        Some(id) => SnapshotId::new(id).ok().map(Object::Snapshot),
        None => VolumeId::new(name).ok().map(Object::Volume),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_of_images_do_not_collide() {
        let volume = Object::Volume(VolumeId::new("x").unwrap());
        let snapshot = Object::Snapshot(SnapshotId::new("x").unwrap());
        let names = [&volume, &snapshot].map(|one| [image_name(one), part_name(one)]).concat();
        let unique: HashSet<&String> = names.iter().collect();
        assert_eq!(unique.len(), 4);
        assert_eq!(object_of("x"), Some(volume));
        assert_eq!(object_of("_snapshot.x"), Some(snapshot));
        for other in [MARKER, "_incomplete-volume.x", "_deleted.x.1"] {
            assert_eq!(object_of(other), None, "{other}");
        }
    }
}
