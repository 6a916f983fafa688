//! Remedies: from the text of an error or event to the next thing to do.
//!
//! The texts are those of Nestor's programs, of the sidecars and of Kubernetes. The first match counts, so specific texts
//! are first.

/// Phrases of an error, all of which must occur (without regard to case), and what to do.
const REMEDIES: [(&[&str], &str); 35] = [
    (
        &["exceeded quota"],
        "delete volumes that are not needed, or ask the platform team to raise the ResourceQuota of the \
         guest's namespace",
    ),
    (
        &["storage budget of guest"],
        "delete volumes or snapshots that are not needed, also Released PersistentVolumes, or ask the platform \
         team to raise the StorageBudget (docs/guides/budgets.md)",
    ),
    (
        &["use classes with the same policy"],
        "use a guest StorageClass and a management StorageClass with the same reclaimPolicy \
         (docs/guides/reclaim-policy.md)",
    ),
    (
        &["managementstorageclass", "is missing"],
        "set the parameter managementStorageClass in the guest's StorageClass",
    ),
    (
        &["storageclass", "does not exist"],
        "create that StorageClass in the management cluster, or correct managementStorageClass in the \
         guest's StorageClass",
    ),
    (&["storageclass", "not found"], "create that StorageClass, or correct the name in the claim"),
    (
        &["too little free space"],
        "platform team: free space or add a pool (`storage-infra capacity`, `storage-infra pool list`)",
    ),
    (
        &["same anti-affinity group"],
        "use a StorageClass with antiAffinity: preferred, or ask the platform team for another pool (docs/guides/pools.md)",
    ),
    (
        &["labels do not match"],
        "platform team: label a pool for the StorageClass, or correct the class's pool parameters \
         (`storage-infra pool list`)",
    ),
    (
        &["no pool for"],
        "platform team: add a pool, or correct the StorageClass (`storage-infra pool list`, `storage-infra \
         capacity`)",
    ),
    (
        &["claimattachedtwice"],
        "remove one of the two entries of this claim from the VirtualMachine's spec.volumes",
    ),
    (
        &["attachmentnotowned"],
        "delete the VolumeAttachment that the message names; it belongs to an earlier VirtualMachine",
    ),
    (&["toomanyvolumes"], "move pods to another node: the VM has no free slot"),
    (&["toomanydisks"], "move pods to another node: the VM has no free slot"),
    (
        &["suspended the volume"],
        "wait until the platform team resumes the volume, or ask them why (docs/guides/suspend.md); platform team: \
         `storage-infra volume show` and `pool show` have the reason",
    ),
    (
        &["nodenotrunning"],
        "start the VM, or taint its Node out-of-service if it will not return (docs/guides/node-loss.md)",
    ),
    (
        &["nodenotfound"],
        "see the events of the VirtualMachine: mgmt-csi registers it once a hypervisor has a VM with its biosUUID \
         (docs/guides/machines.md)",
    ),
    (
        &["volumeinuse"],
        "delete the pod that uses the volume on the other VM, or wait until it is detached there; if that \
         node is lost, see docs/guides/node-loss.md",
    ),
    (
        &["is attached to virtualmachine"],
        "delete the pod that uses the volume on the other VM, or wait until it is detached there; if that \
         node is lost, see docs/guides/node-loss.md",
    ),
    (
        &["multi-attach error"],
        "delete the pod that uses the volume on the other node, or wait until it is detached there",
    ),
    (&["there is no virtualmachine"], "give the Node and its VirtualMachine the same name"),
    (&["claimnotfound"], "restore the management claim, or delete the pods that use the volume"),
    (
        &["claimterminating"],
        "the claim is being deleted in the management cluster: restore the volume from its \
         PersistentVolume or a snapshot",
    ),
    (&["claimnotbound"], "look at the management claim's events: it is not bound"),
    (
        &["guestunknown"],
        "platform team: label the VirtualMachine nestor.dev/cluster-id=ID (docs/guides/upgrade.md)",
    ),
    (
        &["neither of the", "nor shared with it"],
        "use a volume of this guest; platform team: share the volume by a label of its PersistentVolume \
         (docs/guides/static-volumes.md)",
    ),
    (&["foreignvolume"], "use a claim whose StorageClass has the provisioner mgmt.csi.nestor.dev"),
    (
        &["volumenotfound"],
        "restore the PersistentVolume in the management cluster; `storage-infra volume list` shows whether \
         the bytes exist",
    ),
    (&["pinned to"], "see \"Pin a PersistentVolume to its bytes\" in docs/guides/static-volumes.md"),
    (
        &["detachfailed"],
        "recover or power off the VM; if it will not return, taint its Node out-of-service \
         (docs/guides/node-loss.md)",
    ),
    (
        &["not attested blank"],
        "see docs/explanation/formatting.md: the disk is not formatted because it may hold data",
    ),
    (
        &["timed out waiting"],
        "check that the VM Operator (or vm-operator-shim) and mgmt-csi run in the management cluster",
    ),
    (&["did not answer"], "check the connection from gc-csi to the management API; the call is retried"),
    (&["forbidden"], "platform team: grant the right that the message names (`kubectl nestor check`)"),
    (
        &["the management cluster refused"],
        "platform team: grant the right that the message names (`kubectl nestor check`)",
    ),
];

/// The next thing to do about an error.
pub fn remedy(text: &str) -> Option<&'static str> {
    let text = text.to_lowercase();
    let is_match = |phrases: &[&str]| phrases.iter().all(|phrase| text.contains(phrase));
    REMEDIES.iter().find(|(phrases, _)| is_match(phrases)).map(|(_, action)| *action)
}

/// The same, or a pointer to the reference.
pub fn remedy_or_reference(text: &str) -> &'static str {
    remedy(text).unwrap_or("see the message; docs/reference/errors.md lists causes and actions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_errors_have_a_remedy() {
        for (text, part) in [
            ("persistentvolumeclaims \"a\" is forbidden: exceeded quota: q, requested: 1", "ResourceQuota"),
            ("management StorageClass gold does not exist", "managementStorageClass"),
            ("no pool for 5Gi: p: too little free space", "free space"),
            ("no pool: holds a volume of the same anti-affinity group", "preferred"),
            ("the storage budget of guest g allows 1Gi: 1Gi used, 1Gi more requested", "StorageBudget"),
            ("VolumeInUse: it is attached to VM x", "other VM"),
            ("VolumeSuspended: the platform team suspended the volume", "resumes the volume"),
            (
                "NotShared: the volume is neither of the guest of VM x nor shared with it; use a",
                "share the volume",
            ),
            ("pods is forbidden: User x cannot list", "grant the right"),
        ] {
            assert!(remedy(text).is_some_and(|remedy| remedy.contains(part)), "{text}");
        }
        assert_eq!(remedy("something else"), None);
    }
}
