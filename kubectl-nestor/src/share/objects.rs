//! Objects of a share, without I/O: the sibling PersistentVolume and its claim in the management cluster, and the PersistentVolume
//! that names this claim in the guest.

use std::collections::BTreeMap;

use crds::names::{
    ATTRIBUTE_CLUSTER_ID, ATTRIBUTE_SIBLING_OF, FINALIZER_ATTACHED, GUEST_DRIVER, LABEL_SHARE_PREFIX,
    MANAGEMENT_DRIVER, MANAGEMENT_VOLUME,
};
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeClaimSpec, PersistentVolumeSpec, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube_kit::informer::Key;

use super::guests::Guest;
use crate::lists::read::guest_of;

/// What is shared, and with whom.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// The owner's PersistentVolume.
    pub(super) owner: PersistentVolume,
    pub(super) guest: Guest,
    pub(super) is_read_only: bool,
    /// Name of the sibling PersistentVolume.
    pub(super) name: String,
    /// The claim in the namespace of the guest.
    pub(super) claim: Key,
}

impl Share {
    /// The mode in labels.
    pub(super) fn mode(&self) -> &'static str {
        if self.is_read_only { "ro" } else { "rw" }
    }

    /// The label that shares a volume with the guest.
    pub(super) fn label(&self) -> BTreeMap<String, String> {
        [(share_label(&self.guest.id), self.mode().to_owned())].into()
    }

    /// The volume handle.
    pub(super) fn handle(&self) -> &str {
        csi(&self.owner).map_or("", |csi| &csi.volume_handle)
    }

    /// The sibling's claim. It has no class, so that nobody can expand it: the owner expands the volume.
    pub(super) fn management_claim(&self) -> PersistentVolumeClaim {
        let spec = self.owner.spec.clone().unwrap_or_default();
        PersistentVolumeClaim {
            metadata: ObjectMeta {
                name: Some(self.claim.name.clone()),
                namespace: Some(self.claim.namespace.clone()),
                labels: Some(self.label()),
                finalizers: Some(vec![FINALIZER_ATTACHED.to_owned()]),
                ..Default::default()
            },
            spec: Some(PersistentVolumeClaimSpec {
                access_modes: spec.access_modes,
                resources: Some(VolumeResourceRequirements { requests: spec.capacity, limits: None }),
                storage_class_name: Some(String::new()),
                volume_mode: spec.volume_mode,
                volume_name: Some(self.name.clone()),
                ..Default::default()
            }),
            status: None,
        }
    }

    /// The sibling, bound to the claim with this UID. It is no guest's, and its deletion never deletes the volume.
    pub(super) fn management_volume(&self, claim_uid: Option<String>) -> PersistentVolume {
        let owner = self.owner.spec.clone().unwrap_or_default();
        let attributes = [
            (ATTRIBUTE_CLUSTER_ID.to_owned(), String::new()),
            (ATTRIBUTE_SIBLING_OF.to_owned(), self.owner.name_any()),
        ];
        PersistentVolume {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                labels: Some(self.label()),
                ..Default::default()
            },
            spec: Some(PersistentVolumeSpec {
                access_modes: owner.access_modes,
                capacity: owner.capacity,
                claim_ref: Some(ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("PersistentVolumeClaim".to_owned()),
                    namespace: Some(self.claim.namespace.clone()),
                    name: Some(self.claim.name.clone()),
                    uid: claim_uid,
                    ..Default::default()
                }),
                csi: Some(CSIPersistentVolumeSource {
                    driver: MANAGEMENT_DRIVER.to_owned(),
                    volume_handle: self.handle().to_owned(),
                    volume_attributes: Some(attributes.into()),
                    ..Default::default()
                }),
                node_affinity: owner.node_affinity,
                persistent_volume_reclaim_policy: Some("Retain".to_owned()),
                storage_class_name: Some(String::new()),
                volume_mode: owner.volume_mode,
                ..Default::default()
            }),
            status: None,
        }
    }
}

/// The PersistentVolume of the guest that names a management claim, pinned to the claim's PersistentVolume.
pub(super) fn guest_volume(
    claim: &str,
    management: &PersistentVolume,
    is_read_only: bool,
) -> PersistentVolume {
    let spec = management.spec.clone().unwrap_or_default();
    let pin = (MANAGEMENT_VOLUME.to_owned(), management.name_any());
    PersistentVolume {
        metadata: ObjectMeta { name: Some(claim.to_owned()), ..Default::default() },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: spec.capacity,
            csi: Some(CSIPersistentVolumeSource {
                driver: GUEST_DRIVER.to_owned(),
                volume_handle: claim.to_owned(),
                read_only: is_read_only.then_some(true),
                volume_attributes: Some([pin].into()),
                ..Default::default()
            }),
            persistent_volume_reclaim_policy: Some("Retain".to_owned()),
            storage_class_name: Some(String::new()),
            volume_mode: spec.volume_mode,
            ..Default::default()
        }),
        status: None,
    }
}

/// Key of the label that shares a volume with a guest.
pub(super) fn share_label(guest: &str) -> String {
    format!("{LABEL_SHARE_PREFIX}{guest}")
}

/// The volume of this driver.
fn csi(volume: &PersistentVolume) -> Option<&CSIPersistentVolumeSource> {
    volume.spec.as_ref()?.csi.as_ref().filter(|csi| csi.driver == MANAGEMENT_DRIVER)
}

/// The claim that a PersistentVolume is bound to or reserved for.
pub(super) fn claim_of(volume: &PersistentVolume) -> Option<(Key, Option<&str>)> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some((Key::new(claim.namespace.clone()?, claim.name.clone()?), claim.uid.as_deref()))
}

/// The PersistentVolume of which this one is a sibling.
pub(crate) fn sibling_of(volume: &PersistentVolume) -> Option<&str> {
    csi(volume)?.volume_attributes.as_ref()?.get(ATTRIBUTE_SIBLING_OF).map(String::as_str)
}

/// Why the volume of a claim can't be shared with a guest; None if it can.
pub(super) fn reason_to_refuse(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    guest: &str,
) -> Option<String> {
    let (key, name) = (Key::of(claim), volume.name_any());
    let is_bound =
        claim_of(volume).is_some_and(|(bound, uid)| bound == key && uid == claim.metadata.uid.as_deref());
    if claim.metadata.deletion_timestamp.is_some() || volume.metadata.deletion_timestamp.is_some() {
        return Some(format!(
            "PersistentVolumeClaim {key} is being deleted: its volume can't be shared any more"
        ));
    }
    if !is_bound {
        return Some(format!(
            "PersistentVolume {name} is not bound to PersistentVolumeClaim {key}: repeat the command when it is"
        ));
    }
    if csi(volume).is_none() {
        return Some(format!(
            "PersistentVolume {name} of {key} does not belong to driver {MANAGEMENT_DRIVER}"
        ));
    }
    if let Some(owner) = sibling_of(volume) {
        return Some(format!(
            "PersistentVolumeClaim {key} is itself a share: share the claim of PersistentVolume {owner} instead"
        ));
    }
    (guest_of(volume) == Some(guest))
        .then(|| format!("the volume of PersistentVolumeClaim {key} is guest {guest}'s own: use that claim"))
}

/// Why a PersistentVolume with the name of the sibling is not that of this share; None if it is.
pub(super) fn reason_to_keep(existing: &PersistentVolume, share: &Share) -> Option<String> {
    let is_of_volume = csi(existing).is_some_and(|csi| csi.volume_handle == share.handle());
    if !is_of_volume || sibling_of(existing).is_none() {
        let text = "is a share of an earlier volume of this claim: end it with `kubectl nestor unshare`, then repeat";
        return Some(format!("PersistentVolume {} {text}", share.name));
    }
    let (bound, _) = claim_of(existing)?;
    (bound != share.claim).then(|| {
        format!(
            "the volume is shared with guest {} as PersistentVolumeClaim {bound} already, not as {}: use that claim, or end \
             the share first with `kubectl nestor unshare`",
            share.guest.id, share.claim
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn owner(attributes: Value) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "pvc-1"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "volumeMode": "Block",
                "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "nestor",
                "csi": {"driver": MANAGEMENT_DRIVER, "volumeHandle": "v", "volumeAttributes": attributes},
                "claimRef": {"namespace": "guest-1", "name": "data", "uid": "u"},
            },
        }))
        .unwrap()
    }

    fn claim() -> PersistentVolumeClaim {
        let metadata = json!({"name": "data", "namespace": "guest-1", "uid": "u"});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"volumeName": "pvc-1"}})).unwrap()
    }

    fn share(is_read_only: bool) -> Share {
        Share {
            owner: owner(json!({ATTRIBUTE_CLUSTER_ID: "g1"})),
            guest: Guest { id: "g2".to_owned(), namespace: "guest-2".to_owned() },
            is_read_only,
            name: "share-1".to_owned(),
            claim: Key::new("guest-2", "shared"),
        }
    }

    #[test]
    fn a_sibling_names_the_same_volume_and_never_deletes_it() {
        let volume = serde_json::to_value(share(true).management_volume(Some("u2".to_owned()))).unwrap();
        assert_eq!(volume["metadata"]["labels"], json!({"share.nestor.dev/g2": "ro"}));
        let spec = &volume["spec"];
        assert_eq!(spec["persistentVolumeReclaimPolicy"], "Retain");
        assert_eq!((&spec["csi"]["volumeHandle"], &spec["volumeMode"]), (&json!("v"), &json!("Block")));
        let attributes = json!({"nestor.dev/cluster-id": "", "nestor.dev/sibling-of": "pvc-1"});
        assert_eq!(spec["csi"]["volumeAttributes"], attributes);
        assert_eq!((&spec["claimRef"]["name"], &spec["claimRef"]["uid"]), (&json!("shared"), &json!("u2")));

        let claim = serde_json::to_value(share(false).management_claim()).unwrap();
        assert_eq!(claim["metadata"]["labels"], json!({"share.nestor.dev/g2": "rw"}));
        assert_eq!(
            (&claim["spec"]["volumeName"], &claim["spec"]["storageClassName"]),
            (&json!("share-1"), &json!(""))
        );
        assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "1Gi");
    }

    #[test]
    fn the_guests_volume_is_pinned_and_read_only_like_the_share() {
        let share = share(true);
        let sibling = share.management_volume(None);
        let volume = serde_json::to_value(guest_volume("shared", &sibling, true)).unwrap();
        let csi = &volume["spec"]["csi"];
        assert_eq!((&csi["volumeHandle"], &csi["readOnly"]), (&json!("shared"), &json!(true)));
        assert_eq!(csi["volumeAttributes"], json!({"nestor.dev/management-pv": "share-1"}));
        let writable = serde_json::to_value(guest_volume("shared", &sibling, false)).unwrap();
        assert_eq!(writable["spec"]["csi"].get("readOnly"), None);
    }

    #[test]
    fn only_a_bound_volume_of_another_guest_is_shared() {
        let volume = owner(json!({ATTRIBUTE_CLUSTER_ID: "g1"}));
        assert_eq!(reason_to_refuse(&claim(), &volume, "g2"), None);
        assert!(reason_to_refuse(&claim(), &volume, "g1").is_some_and(|why| why.contains("g1's own")));
        let mut replaced = claim();
        replaced.metadata.uid = Some("another".to_owned());
        assert!(reason_to_refuse(&replaced, &volume, "g2").is_some_and(|why| why.contains("not bound")));
        let sibling = owner(json!({ATTRIBUTE_SIBLING_OF: "pvc-0"}));
        assert!(reason_to_refuse(&claim(), &sibling, "g2").is_some_and(|why| why.contains("pvc-0")));
        let mut foreign = volume.clone();
        foreign.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned();
        assert!(reason_to_refuse(&claim(), &foreign, "g2").is_some_and(|why| why.contains("driver")));
    }

    #[test]
    fn an_existing_sibling_is_kept_unless_it_is_of_another_volume_or_claim() {
        let share = share(false);
        let sibling = share.management_volume(Some("u2".to_owned()));
        assert_eq!(reason_to_keep(&sibling, &share), None);
        let renamed = Share { claim: Key::new("guest-2", "other"), ..share.clone() };
        assert!(reason_to_keep(&sibling, &renamed).is_some_and(|why| why.contains("guest-2/shared already")));
        let mut earlier = sibling;
        earlier.spec.as_mut().unwrap().csi.as_mut().unwrap().volume_handle = "old".to_owned();
        assert!(reason_to_keep(&earlier, &share).is_some_and(|why| why.contains("earlier volume")));
    }
}
