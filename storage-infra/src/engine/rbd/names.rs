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

/// Prefix of the names of incomplete images.
const INCOMPLETE: &str = "_incomplete-";

/// Name of the image that a server of this epoch makes of an incomplete object. Two servers never write to one name.
pub(super) fn part_name(object: &Object, epoch: Option<i64>) -> String {
    let (kind, id) = match object {
        Object::Volume(id) => ("volume", id.as_str()),
        Object::Snapshot(id) => ("snapshot", id.as_str()),
    };
    match epoch {
        None => format!("{INCOMPLETE}{kind}.{id}"),
        Some(epoch) => format!("{INCOMPLETE}{epoch}-{kind}.{id}"),
    }
}

/// The object whose incomplete image has this name, and the epoch of the server that made it.
pub(super) fn part_of(name: &str) -> Option<(Object, Option<i64>)> {
    let (made, id) = name.strip_prefix(INCOMPLETE)?.split_once('.')?;
    let (epoch, kind) = match made.split_once('-') {
        None => (None, made),
        Some((epoch, kind)) => (Some(epoch.parse().ok()?), kind),
    };
    let object = match kind {
        "volume" => Object::Volume(VolumeId::new(id).ok()?),
        "snapshot" => Object::Snapshot(SnapshotId::new(id).ok()?),
        _ => return None,
    };
    (part_name(&object, epoch) == name).then_some((object, epoch))
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
        let epochs = [None, Some(1), Some(12)];
        let parts = |one: &Object| epochs.map(|epoch| part_name(one, epoch)).to_vec();
        let names = [&volume, &snapshot].map(|one| [vec![image_name(one)], parts(one)].concat()).concat();
        let unique: HashSet<&String> = names.iter().collect();
        assert_eq!(unique.len(), 8);
        for object in [&volume, &snapshot] {
            for epoch in epochs {
                assert_eq!(part_of(&part_name(object, epoch)), Some((object.clone(), epoch)));
            }
        }
        for other in ["x", "_incomplete-x-volume.x", "_incomplete-01-volume.x", "_incomplete-file.x"] {
            assert_eq!(part_of(other), None, "{other}");
        }
        assert_eq!(object_of("x"), Some(volume));
        assert_eq!(object_of("_snapshot.x"), Some(snapshot));
        for other in [MARKER, "_incomplete-volume.x", "_deleted.x.1"] {
            assert_eq!(object_of(other), None, "{other}");
        }
    }
}
