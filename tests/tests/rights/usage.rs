//! The audit logs show that Nestor's programs request what their roles grant.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use lab::audit::{Audit, Entry, Mark};
use lab::rights::{Right, granted};
use tests::console::Console;
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// The roles of Nestor's own programs, with the end of the account's name. The sidecars' roles follow their manifests.
const MANAGEMENT: [(&str, &[&str]); 10] = [
    ("ClusterRole nestor:mgmt-csi", &[":mgmt-csi"]),
    ("ClusterRole nestor:vm-status-writer", &[":mgmt-csi"]),
    ("Role nestor:capacity-writer", &[":mgmt-csi"]),
    ("Role nestor:vm-guests-writer", &[":mgmt-csi"]),
    ("Role nestor:leader-election", &[":mgmt-csi", ":vm-operator-shim"]),
    ("ClusterRole nestor:vm-operator-shim", &[":vm-operator-shim"]),
    ("ClusterRole nestor:nestor-console", &[":nestor-console"]),
    ("Role ACCOUNT", &[":gc-csi-g1", ":gc-csi-g2"]),
    ("ClusterRole nestor:class-reader", &[":gc-csi-g1", ":gc-csi-g2"]),
    ("Role nestor:capacity-reader", &[":gc-csi-g1", ":gc-csi-g2"]),
];
const GUEST: [(&str, &[&str]); 2] = [
    ("ClusterRole nestor:gc-csi-controller", &[":gc-csi-controller"]),
    ("Role nestor:gc-csi-controller", &[":gc-csi-controller"]),
];

/// Rights that only a fault, an option or `kubectl nestor` uses: role, resource and verb, and the module that causes the use or
/// why there is none.
const NOT_ALWAYS: [(&str, &str, &str, &str); 44] = [
    (
        "ClusterRole nestor:mgmt-csi",
        "persistentvolumes",
        "patch",
        "static_provisioning: a volume without a record",
    ),
    ("ClusterRole nestor:mgmt-csi", "persistentvolumeclaims", "get", "fairness: the cache is late"),
    ("ClusterRole nestor:mgmt-csi", "persistentvolumeclaims/status", "patch", "health"),
    ("ClusterRole nestor:mgmt-csi", "volumesnapshotcontents", "get", "snapshot_ownership"),
    (
        "ClusterRole nestor:mgmt-csi",
        "volumeattachments",
        "get",
        "crash: the disk of an earlier VolumeAttachment",
    ),
    ("ClusterRole nestor:mgmt-csi", "volumeattachments", "delete", "repair"),
    ("ClusterRole nestor:mgmt-csi", "serviceaccounts", "list", "credentials: --guest-accounts"),
    ("ClusterRole nestor:mgmt-csi", "storagebudgets/status", "patch", "budget"),
    ("ClusterRole nestor:mgmt-csi", "storagepools", "create", "pools"),
    ("ClusterRole nestor:mgmt-csi", "storagepools", "update", "pools"),
    ("ClusterRole nestor:mgmt-csi", "storagepools", "delete", "pools"),
    ("ClusterRole nestor:mgmt-csi", "events", "create", "attach"),
    ("ClusterRole nestor:mgmt-csi", "events", "patch", "attach: an event that repeats"),
    ("Role nestor:capacity-writer", "csistoragecapacities", "patch", "topology"),
    ("Role nestor:capacity-writer", "csistoragecapacities", "delete", "topology"),
    ("Role nestor:leader-election", "leases", "get", "ha: the cache of the Lease is late"),
    ("Role nestor:leader-election", "leases", "list", "ha"),
    ("Role nestor:leader-election", "leases", "watch", "ha"),
    ("Role nestor:leader-election", "leases", "create", "ha"),
    ("Role nestor:leader-election", "leases", "update", "ha"),
    ("ClusterRole nestor:vm-operator-shim", "events", "create", "fairness"),
    ("Role ACCOUNT", "persistentvolumeclaims", "get", "dynamic: before a refusal"),
    ("Role ACCOUNT", "volumesnapshots", "get", "snapshot"),
    ("Role ACCOUNT", "volumesnapshots", "patch", "guest_deletion"),
    ("Role ACCOUNT", "virtualmachines", "get", "attach: before a refusal"),
    ("Role ACCOUNT", "volumeattachments", "get", "plugin"),
    ("Role ACCOUNT", "volumeattachments", "list", "plugin"),
    ("Role ACCOUNT", "secrets", "get", "credentials"),
    ("Role ACCOUNT", "events", "create", "repair: orphans"),
    ("Role ACCOUNT", "events", "patch", "repair: orphans"),
    ("ClusterRole nestor:class-reader", "storageclasses", "get", "plugin"),
    ("ClusterRole nestor:gc-csi-controller", "persistentvolumeclaims", "get", "repair: orphans"),
    ("ClusterRole nestor:gc-csi-controller", "pods", "list", "metadata: --sync-pods"),
    ("ClusterRole nestor:gc-csi-controller", "pods", "watch", "metadata: --sync-pods"),
    ("ClusterRole nestor:gc-csi-controller", "events", "patch", "attach: an event that repeats"),
    ("Role nestor:gc-csi-controller", "leases", "get", "ha: the cache of the Lease is late"),
    ("Role nestor:gc-csi-controller", "leases", "list", "ha"),
    ("Role nestor:gc-csi-controller", "leases", "watch", "ha"),
    ("Role nestor:gc-csi-controller", "leases", "create", "ha"),
    ("Role nestor:gc-csi-controller", "leases", "update", "ha"),
    ("ClusterRole nestor:gc-csi-controller", "nodes", "get", "repair"),
    ("ClusterRole nestor:gc-csi-controller", "nodes", "patch", "topology"),
    ("ClusterRole nestor:gc-csi-controller", "volumeattachments", "get", "late_removal"),
    ("ClusterRole nestor:gc-csi-controller", "volumesnapshotcontents", "get", "snapshot"),
];

/// Group, resource with its subresource, and verb of a request, with the account.
type Requested = (String, String, String, String);

fn requested(entry: Entry) -> Requested {
    let group = if entry.group.is_empty() { "core".to_owned() } else { entry.group };
    let resource = match entry.subresource.as_str() {
        "" => entry.resource,
        subresource => format!("{}/{subresource}", entry.resource),
    };
    (entry.user, group, resource, entry.verb)
}

/// The permitted requests of service accounts since the cluster started.
fn all_requests(audit: &Audit) -> Result<BTreeSet<Requested>> {
    let mut all = BTreeSet::new();
    audit.visit(Mark::START, |entry| {
        if entry.user.starts_with("system:serviceaccount:") && entry.code != 403 {
            all.insert(requested(entry));
        }
    })?;
    Ok(all)
}

fn is_used(right: &Right, accounts: &[&str], requests: &BTreeSet<Requested>) -> bool {
    requests.iter().any(|(user, group, resource, verb)| {
        accounts.iter().any(|account| user.ends_with(account))
            && (group, resource, verb) == (&right.group, &right.resource, &right.verb)
    })
}

fn is_excused(right: &Right) -> bool {
    let is_it = |(role, resource, verb): (&str, &str, &str)| {
        (role, resource, verb) == (right.role.as_str(), right.resource.as_str(), right.verb.as_str())
    };
    NOT_ALWAYS.iter().any(|(role, resource, verb, _)| is_it((role, resource, verb)))
}

/// The rights of these roles that no request used.
fn unused(roles: &[(&str, &[&str])], requests: &BTreeSet<Requested>) -> Result<Vec<Right>> {
    let accounts =
        |right: &Right| roles.iter().find(|(role, _)| *role == right.role).map(|(_, accounts)| *accounts);
    let is_unused =
        |right: &Right| accounts(right).is_some_and(|accounts| !is_used(right, accounts, requests));
    Ok(granted()?.into_iter().filter(is_unused).collect())
}

/// Uses the rights that need no fault.
async fn use_rights(s: &Scenario) -> Result<()> {
    let console = Console::start(s).await?;
    let (node, volume) = (s.node().await?, s.bound_claim("data").await?);
    s.driver.publish(&volume, &node.name).await?;
    s.wait_for_event("data", &["attached to VirtualMachine", &node.name]).await?;
    s.driver.unpublish(&volume, &node.name).await?;
    s.annotate_as_proven_off(&node.name).await?;
    eventually("the annotation of a VM that runs is removed", PATIENCE, || {
        s.is_proven_off(&node.name, false)
    })
    .await?;
    s.driver.expand(&volume, 8 << 20).await?;
    let snapshot = s.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
    s.driver.delete_snapshot(&snapshot).await?;
    // The volume of a call without a claim is deleted at once.
    s.driver.delete(&s.volume().await?).await?;
    console.process.stop().await.map(drop)
}

#[test]
fn every_excuse_is_for_a_right() -> Result<()> {
    let granted = granted()?;
    for (role, resource, verb, why) in NOT_ALWAYS {
        let found = granted
            .iter()
            .any(|right| right.role == role && right.resource == resource && right.verb == verb);
        ensure!(found && !why.is_empty(), "{role} does not grant {verb} of {resource}: remove the excuse");
    }
    Ok(())
}

#[tokio::test]
async fn every_right_of_nestors_programs_is_used() -> Result<()> {
    run(|s| async move {
        use_rights(&s).await?;
        let management = all_requests(&s.lab.audit()?)?;
        let guest = all_requests(&s.lab.guest_audit("g1")?)?;
        let all = [unused(&MANAGEMENT, &management)?, unused(&GUEST, &guest)?].concat();
        let (excused, unused): (Vec<Right>, Vec<Right>) = all.into_iter().partition(is_excused);
        for right in excused {
            println!("not used so far: {} {} of {}", right.role, right.verb, right.resource);
        }
        ensure!(unused.is_empty(), "no request uses {unused:#?}: remove these rights");
        Ok(())
    })
    .await
}
