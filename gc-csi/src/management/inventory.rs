//! Inventory of the volumes that this guest owns or may use, from the cache.

use crds::names::{self, ClaimName, VmName};
use kube_kit::partial::PersistentVolumeClaim;

use super::claims::{Claims, is_bound, name_of};
use super::virtual_machines::VirtualMachines;

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume {
    /// Name of the management claim, which is the volume handle.
    pub(crate) claim: ClaimName,
    /// Capacity in bytes.
    pub(crate) capacity: u64,
    /// Names of the VMs that the volume is attached to.
    pub(crate) vms: Vec<VmName>,
    /// Why the volume is abnormal; None while it is healthy.
    pub(crate) abnormal: Option<String>,
}

/// All volumes that are bound, or still attached although their claim is no longer bound: csi-attacher compares this list
/// with its VolumeAttachments, so no attached volume may be missing.
pub(crate) fn volumes(claims: &Claims, vms: &VirtualMachines) -> Vec<Volume> {
    let attached = vms.attached_by_entry();
    let of = |claim: &PersistentVolumeClaim| {
        let name = name_of(claim)?;
        let attached = attached.get(&name.entry()).cloned().unwrap_or_default();
        listed(claim, attached).map(|volume| with_disk_failure(volume, vms))
    };
    claims.list_usable().iter().filter_map(|claim| of(claim)).collect()
}

/// The volume with this handle.
pub(crate) fn volume(claims: &Claims, vms: &VirtualMachines, handle: &ClaimName) -> Option<Volume> {
    let (claim, _) = claims.usable(handle)?;
    listed(&claim, vms.attached_to(handle)).map(|volume| with_disk_failure(volume, vms))
}

/// Adds what VMs report as wrong with the volume's disk, if its claim reports nothing.
fn with_disk_failure(mut volume: Volume, vms: &VirtualMachines) -> Volume {
    volume.abnormal = volume.abnormal.or_else(|| vms.disk_failure(&volume.claim));
    volume
}

fn listed(claim: &PersistentVolumeClaim, mut vms: Vec<VmName>) -> Option<Volume> {
    let name = name_of(claim)?;
    vms.sort_unstable();
    vms.dedup();
    let is_there = is_bound(claim) || !vms.is_empty();
    is_there.then(|| Volume {
        capacity: claim.status.capacity.unwrap_or_default(),
        abnormal: abnormal(claim),
        claim: name,
        vms,
    })
}

fn abnormal(claim: &PersistentVolumeClaim) -> Option<String> {
    let mut conditions = claim.status.conditions.iter();
    let reported = conditions
        .find(|reported| reported.type_ == names::CONDITION_HEALTHY && reported.status == "False")?;
    let message = reported.message.clone().filter(|message| !message.is_empty());
    Some(
        message.or_else(|| reported.reason.clone()).unwrap_or_else(|| "the volume is not healthy".to_owned()),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(status: serde_json::Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": {"name": "c"}, "status": status})).unwrap()
    }

    fn names(vms: &[&str]) -> Vec<VmName> {
        vms.iter().map(|name| VmName::new(*name)).collect()
    }

    #[test]
    fn volumes_that_are_bound_or_attached_are_listed() {
        let bound = claim(json!({"phase": "Bound", "capacity": {"storage": "1Mi"}}));
        let found = listed(&bound, names(&["b", "a"])).unwrap();
        assert_eq!((found.capacity, found.vms), (1 << 20, names(&["a", "b"])));
        assert_eq!(listed(&claim(json!({"phase": "Pending"})), Vec::new()), None);
        assert!(listed(&claim(json!({"phase": "Lost"})), names(&["a"])).is_some());
    }

    #[test]
    fn a_volume_is_abnormal_if_its_claim_is_not_healthy() {
        let reported = |status: &str, message: &str| {
            let condition = json!({"type": "nestor.dev/Healthy", "status": status, "reason": "PoolGone", "message": message});
            abnormal(&claim(json!({"phase": "Bound", "conditions": [condition]})))
        };
        assert_eq!(reported("False", "pool a is gone").as_deref(), Some("pool a is gone"));
        assert_eq!(reported("False", "").as_deref(), Some("PoolGone"));
        assert_eq!(reported("True", "healthy again"), None);
    }
}
