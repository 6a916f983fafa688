//! The removal of a right breaks what the reference says, with an error that names the right: writes of a guest, and a read of
//! mgmt-csi. The module `right_removal` removes all rights.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use tests::driver::new_volume;
use tests::own_namespace::OwnNamespace;
use tests::program::Controller;
use tests::tenants::Tenant;
use tests::{MIB, PATIENCE, Scenario, eventually, run, run_alone, unique};

/// A guest with its gc-csi, a volume, a snapshot and a VM.
struct Guest {
    tenant: Tenant,
    namespace: OwnNamespace,
    controller: Controller,
    volume: String,
    snapshot: String,
    node: String,
}

/// The operation that needs a right.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Create,
    Expand,
    Publish,
    Snapshot,
    DeleteSnapshot,
    Delete,
}

/// Rights of a guest's account that its writes need: resource, verb, and the operation that fails without.
const WRITES: [(&str, &str, Operation); 6] = [
    ("persistentvolumeclaims", "create", Operation::Create),
    ("persistentvolumeclaims", "patch", Operation::Expand),
    ("virtualmachines", "patch", Operation::Publish),
    ("volumesnapshots", "create", Operation::Snapshot),
    ("volumesnapshots", "delete", Operation::DeleteSnapshot),
    ("persistentvolumeclaims", "delete", Operation::Delete),
];

impl Guest {
    async fn create(s: &Scenario) -> Result<Self> {
        let namespace = s.own_namespace().await?;
        let tenant = s.tenant(&namespace).await?;
        let node = s.node_in(&namespace, &tenant.cluster_id).await?.name;
        let controller = tenant.start(s, &[]).await?;
        let volume =
            controller.driver.create(new_volume(&unique("volume"), 4 * MIB, "nestor")).await?.volume_id;
        let snapshot = controller.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
        Ok(Self { tenant, namespace, controller, volume, snapshot, node })
    }

    /// Runs an operation; returns the message of its error.
    async fn run(&self, operation: Operation) -> Result<(), String> {
        let driver = &self.controller.driver;
        let outcome = match operation {
            Operation::Create => {
                driver.create(new_volume(&unique("volume"), 4 * MIB, "nestor")).await.map(drop)
            }
            Operation::Expand => driver.expand(&self.volume, 8 * MIB).await.map(drop),
            Operation::Publish => driver.publish(&self.volume, &self.node).await.map(drop),
            Operation::Snapshot => {
                driver.snapshot(&unique("snapshot"), &self.volume, "nestor").await.map(drop)
            }
            Operation::DeleteSnapshot => driver.delete_snapshot(&self.snapshot).await,
            Operation::Delete => driver.delete(&self.volume).await,
        };
        outcome.map_err(|status| status.message().to_owned())
    }

    fn roles(&self, s: &Scenario) -> Api<Role> {
        Api::namespaced(s.management.clone(), &self.namespace.name)
    }

    fn role(&self) -> String {
        format!("gc-csi-{}", self.tenant.name)
    }

    /// Waits until the account has a right, or not: the API server needs a moment to apply the change of a role.
    async fn has_right(&self, (resource, verb): (&str, &str), expected: bool) -> Result<()> {
        let group = match resource {
            "persistentvolumeclaims" => "",
            "volumesnapshots" => "snapshot.storage.k8s.io",
            _ => crds::VIRTUAL_MACHINE_GROUP,
        };
        let review: SelfSubjectAccessReview =
            serde_json::from_value(json!({"spec": {"resourceAttributes": {
                "namespace": self.namespace.name, "group": group, "resource": resource, "verb": verb,
            }}}))?;
        let api: Api<SelfSubjectAccessReview> = Api::all(self.tenant.client.clone());
        eventually(&format!("{verb} of {resource} is permitted: {expected}"), PATIENCE, || async {
            let allowed =
                api.create(&PostParams::default(), &review).await?.status.is_some_and(|one| one.allowed);
            Ok(if allowed == expected { Ok(()) } else { Err(format!("{allowed}")) })
        })
        .await
    }

    async fn set_rules(&self, s: &Scenario, rules: &[PolicyRule]) -> Result<()> {
        let patch = Patch::Merge(json!({"rules": rules}));
        self.roles(s).patch(&self.role(), &PatchParams::default(), &patch).await?;
        Ok(())
    }
}

/// The rules without one verb of one resource.
fn without(rules: &[PolicyRule], resource: &str, verb: &str) -> Vec<PolicyRule> {
    let mut rules = rules.to_vec();
    for rule in &mut rules {
        if rule.resources.iter().flatten().any(|one| one == resource) {
            rule.verbs.retain(|one| one != verb);
        }
    }
    rules.retain(|rule| !rule.verbs.is_empty());
    rules
}

#[test]
fn each_right_has_one_test_of_its_removal() -> Result<()> {
    let faults = crate::right_removal::table::faults()?;
    ensure!(faults.is_empty(), "tests/tests/right_removal/table.rs: {faults:#?}");
    Ok(())
}

#[tokio::test]
async fn each_write_of_a_guest_needs_its_right() -> Result<()> {
    run(|s| async move {
        let guest = Guest::create(&s).await?;
        let rules = guest.roles(&s).get(&guest.role()).await?.rules.context("the role has no rules")?;
        for (resource, verb, operation) in WRITES {
            let left = without(&rules, resource, verb);
            ensure!(left != rules, "the role does not grant {verb} of {resource}");
            guest.set_rules(&s, &left).await?;
            guest.has_right((resource, verb), false).await?;
            let refused = guest.run(operation).await;
            let denied = format!("cannot {verb} resource \"{resource}\"");
            let is_clear = refused.as_ref().is_err_and(|message| message.contains(&denied));
            ensure!(is_clear, "{operation:?} without the right to {verb} {resource}: {refused:?}");
            guest.set_rules(&s, &rules).await?;
            guest.has_right((resource, verb), true).await?;
            eventually(&format!("{operation:?} succeeds again"), PATIENCE, || async {
                Ok(guest.run(operation).await)
            })
            .await?;
            if matches!(operation, Operation::Publish) {
                guest.controller.driver.unpublish(&guest.volume, &guest.node).await?;
            }
        }
        guest.controller.stop().await
    })
    .await
}

/// Replaces the rules of mgmt-csi's role.
async fn set_rules_of_mgmt_csi(s: &Scenario, rules: &[PolicyRule]) -> Result<()> {
    let roles: Api<ClusterRole> = Api::all(s.management.clone());
    let patch = Patch::Merge(json!({"rules": rules}));
    roles.patch("nestor:mgmt-csi", &PatchParams::default(), &patch).await?;
    Ok(())
}

#[tokio::test]
async fn mgmt_csi_needs_the_right_to_read_whose_a_snapshot_is() -> Result<()> {
    run_alone(|s| async move {
        let volume = s.volume().await?;
        let roles: Api<ClusterRole> = Api::all(s.management.clone());
        let rules = roles.get("nestor:mgmt-csi").await?.rules.context("the role has no rules")?;
        set_rules_of_mgmt_csi(&s, &without(&rules, "volumesnapshots", "get")).await?;
        let name = unique("snapshot");
        let take = || s.driver.snapshot(&name, &volume, "nestor");
        let outcome = eventually("CreateSnapshot fails", PATIENCE, || async {
            Ok(match take().await {
                Err(status) if status.message().contains("failed to read VolumeSnapshot") => Ok(status),
                Err(status) => Err(status.to_string()),
                // The API server needs a moment to apply the change of the role.
                Ok(snapshot) => {
                    s.driver.delete_snapshot(&snapshot.snapshot_id).await?;
                    Err("it succeeded".to_owned())
                }
            })
        })
        .await;
        set_rules_of_mgmt_csi(&s, &rules).await?;
        let refused = outcome?;
        let taken = eventually("CreateSnapshot succeeds again", PATIENCE, || async {
            Ok(take().await.map_err(|status| status.to_string()))
        })
        .await?;
        s.driver.delete_snapshot(&taken.snapshot_id).await?;
        // The answer of the API server, with mgmt-csi's account, is for the platform team.
        ensure!(!refused.message().contains("system:serviceaccount"), "{refused}");
        Ok(())
    })
    .await
}
