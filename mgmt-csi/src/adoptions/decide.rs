//! Decision about one PersistentVolume, without I/O: the file that should become its volume.

use crds::names::{ANNOTATION_ADOPT_FILE, ANNOTATION_ADOPTED_FILE, LABEL_CLUSTER_ID};
use infra_api::{Account, Adoption, Owner, Qos, VolumeId};
use kube_kit::partial::PersistentVolume;

use crate::cluster;
use crate::ownership::recorded_owner;

/// What a PersistentVolume asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// This file becomes this volume.
    Adopt(VolumeId, Adoption),
    /// Its annotation or another field is wrong.
    Refused(String),
}

/// The file that should become the volume of a PersistentVolume. None if there is none, or if it was adopted.
pub(super) fn wanted(volume: &PersistentVolume) -> Option<Wanted> {
    let annotations = volume.metadata.annotations.as_ref()?;
    let file = annotations.get(ANNOTATION_ADOPT_FILE)?;
    let handle = cluster::handle(&volume.spec)?;
    let is_over = annotations.get(ANNOTATION_ADOPTED_FILE) == Some(file);
    if is_over || volume.metadata.deletion_timestamp.is_some() {
        return None;
    }
    Some(
        adoption(volume, handle, file)
            .map_or_else(Wanted::Refused, |(id, adoption)| Wanted::Adopt(id, adoption)),
    )
}

fn adoption(volume: &PersistentVolume, handle: &str, file: &str) -> Result<(VolumeId, Adoption), String> {
    let id = VolumeId::new(handle)
        .map_err(|error| format!("spec.csi.volumeHandle {handle:?} is no ID of a volume: {error}"))?;
    if !file.starts_with('/') && !file.starts_with("rbd:") {
        return Err(format!(
            "the annotation {ANNOTATION_ADOPT_FILE} must be an absolute path on the host of the storage infra, or \
             rbd:POOL[/NAMESPACE]/IMAGE, but is {file:?}"
        ));
    }
    let guest = recorded_owner(volume).unwrap_or_default();
    let account = Account::new(guest)
        .map_err(|error| format!("the label {LABEL_CLUSTER_ID} is no cluster ID: {error}"))?;
    let class = volume.spec.storage_class_name.clone().unwrap_or_default();
    let owner = Owner { account, class };
    Ok((id, Adoption { path: file.to_owned(), pool: None, qos: Qos::default(), shareable: false, owner }))
}

/// What to say if an adopted volume has another size than its PersistentVolume.
pub(super) fn size_differs(volume: &PersistentVolume, bytes: u64) -> Option<String> {
    let capacity = volume.spec.capacity.filter(|capacity| *capacity != bytes)?;
    Some(format!(
        "spec.capacity.storage is {capacity} bytes, but the adopted file has {bytes}: delete this PersistentVolume, which keeps \
         the volume with the reclaim policy Retain, and create it with the right capacity"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn volume(annotations: Value) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "annotations": annotations, "labels": {LABEL_CLUSTER_ID: "g1"}},
            "spec": {
                "capacity": {"storage": "16Mi"}, "storageClassName": "gold",
                "csi": {"driver": "mgmt.csi.nestor.dev", "volumeHandle": "v"},
            },
        }))
        .unwrap()
    }

    fn refused(volume: &PersistentVolume) -> String {
        match wanted(volume) {
            Some(Wanted::Refused(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_is_adopted_for_the_guest_and_class_of_the_persistent_volume() {
        for path in ["/a.img", "rbd:vms/disk-1"] {
            let Some(Wanted::Adopt(id, adoption)) = wanted(&volume(json!({ANNOTATION_ADOPT_FILE: path})))
            else {
                panic!("not adopted");
            };
            assert_eq!((id.as_str(), adoption.path.as_str()), ("v", path));
            assert_eq!((adoption.owner.account.as_str(), adoption.owner.class.as_str()), ("g1", "gold"));
        }
    }

    #[test]
    fn a_file_is_adopted_once_and_only_by_a_volume_of_this_driver_that_stays() {
        assert_eq!(wanted(&volume(json!({}))), None);
        let both = json!({ANNOTATION_ADOPT_FILE: "/a.img", ANNOTATION_ADOPTED_FILE: "/a.img"});
        assert_eq!(wanted(&volume(both)), None);
        let mut others = [(); 2].map(|()| volume(json!({ANNOTATION_ADOPT_FILE: "/a.img"})));
        others[0].spec.csi.as_mut().unwrap().driver = "other".to_owned();
        others[1].metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        for other in others {
            assert_eq!(wanted(&other), None);
        }
    }

    #[test]
    fn another_file_than_the_adopted_one_is_tried_so_that_the_refusal_is_seen() {
        let other = json!({ANNOTATION_ADOPT_FILE: "/b.img", ANNOTATION_ADOPTED_FILE: "/a.img"});
        assert!(matches!(wanted(&volume(other)), Some(Wanted::Adopt(..))));
    }

    #[test]
    fn wrong_fields_are_refused_with_what_is_wrong() {
        assert!(refused(&volume(json!({ANNOTATION_ADOPT_FILE: "a.img"}))).contains("absolute path"));
        let mut bad = volume(json!({ANNOTATION_ADOPT_FILE: "/a.img"}));
        bad.spec.csi.as_mut().unwrap().volume_handle = "no id!".to_owned();
        assert!(refused(&bad).contains("volumeHandle"));
    }

    #[test]
    fn another_size_is_reported() {
        let volume = volume(json!({}));
        assert_eq!(size_differs(&volume, 16 << 20), None);
        assert!(size_differs(&volume, 8 << 20).unwrap().contains("8388608"));
    }
}
