//! Guests that `kubectl nestor guest` adds, shows and removes in the management cluster.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, ServiceAccount};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tests::kubectl_plugin::Answer;
use tests::onboarding::{Onboarded, live};
use tests::tenants::new_claim;
use tests::{PATIENCE, Scenario, chart, eventually, run, unique};

/// Waits until the namespace of a guest is gone.
async fn namespace_gone(s: &Scenario, guest: &Onboarded) -> Result<()> {
    eventually(&format!("namespace {} gone", guest.namespace.name), PATIENCE, || async {
        let left = guest.found_namespace(s).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
    })
    .await
}

/// The outcome of each object that `guest add` applied.
fn outcomes(added: &Value) -> Result<Vec<(String, String)>> {
    let changes = added["changes"].as_array().context("no changes")?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(changes.iter().map(|change| (text(&change["object"]), text(&change["outcome"]))).collect())
}

/// Checks that each object is unchanged.
fn is_unchanged(added: &Value) -> Result<()> {
    let outcomes = outcomes(added)?;
    ensure!(outcomes.len() > 10, "{outcomes:?}");
    ensure!(outcomes.iter().all(|(_, outcome)| outcome == "unchanged"), "{outcomes:?}");
    Ok(())
}

/// Waits until the account is refused a claim of a class that it may not use, and checks that it may use the other.
async fn may_use_only(s: &Scenario, guest: &Onboarded, allowed: &str, foreign: &str) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest.client(s).await?, &guest.namespace.name);
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let claim = |class: &str| {
        serde_json::from_value::<PersistentVolumeClaim>(json!({
            "metadata": {"name": unique("try"), "labels": {names::LABEL_CLUSTER_ID: guest.cluster_id}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": "4Mi"}},
            },
        }))
    };
    eventually(&format!("class {foreign} is refused"), PATIENCE, || async {
        Ok(match claims.create(&dry_run, &claim(foreign)?).await {
            Err(kube::Error::Api(status)) if status.message.contains("may not use StorageClass") => Ok(()),
            other => Err(format!("{:?}", other.map(|claim| claim.metadata))),
        })
    })
    .await?;
    claims.create(&dry_run, &claim(allowed)?).await.context("the allowed class")?;
    Ok(())
}

#[tokio::test]
async fn a_new_guest_has_an_account_policies_a_budget_and_volumes() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        let answer = guest.add(&s, &["--class", "nestor", "--budget", "1Gi", "--deletion", "Delete"]).await?;
        answer.expect(0, &[": created", &guest.cluster_id, "helm install"]);
        let values = guest.written("guest-values")?;
        ensure!(values["clusterId"] == guest.cluster_id.as_str(), "{values}");
        ensure!(values["management"]["namespace"] == guest.namespace.name.as_str(), "{values}");
        let controller = json!({"onGuestDeletion": "Delete", "clusterObject": guest.name});
        ensure!(values["controller"] == controller, "{values}");
        let mode = std::fs::metadata(guest.file("management-secret"))?.permissions().mode();
        ensure!(mode & 0o077 == 0, "others can read the token: {mode:o}");

        may_use_only(&s, &guest, "nestor", "nestor-retain").await?;
        s.has_condition(&guest.budget(), "True", "Applied").await?;
        let gc_csi = guest.start(&s).await?;
        let claim = new_claim(&gc_csi.driver).await?;
        let status = guest.namespace.claims().get(&claim).await?.status.unwrap_or_default();
        ensure!(status.phase.as_deref() == Some("Bound"), "{status:?}");

        let shown = guest.run(&s, "show", &[]).await?;
        shown.expect(1, &["nestor", "of 1Gi", "no VirtualMachine has the label"]);
        let node = s.node_in(&guest.namespace, &guest.cluster_id).await?;
        guest.run(&s, "show", &[]).await?.expect(0, &[&node.name, "1, of them 0 Released"]);
        let listed = list(&s).await?;
        let own = listed.iter().find(|one| one["name"] == guest.name.as_str()).context("not listed")?;
        ensure!(own["claims"] == 1 && own["volumes"] == 1 && own["classes"] == json!(["nestor"]), "{own}");
        gc_csi.stop().await
    })
    .await
}

/// What `guest list -o json` prints.
async fn list(s: &Scenario) -> Result<Vec<Value>> {
    let answer = tests::kubectl_plugin::on_management(s, &["guest", "list", "-o", "json"]).await?;
    answer.expect(0, &[]);
    Ok(serde_json::from_str(&answer.out)?)
}

#[tokio::test]
async fn a_repetition_changes_what_its_flags_name_and_nothing_else() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        guest.add(&s, &["--class", "missing"]).await?.expect_refusal(&["named missing", "nestor-retain"]);
        ensure!(guest.found_namespace(&s).await?.is_none(), "the namespace was created");
        let first = outcomes(&guest.added(&s, &[]).await?)?;
        ensure!(first.iter().all(|(_, outcome)| outcome == "created"), "{first:?}");
        is_unchanged(&guest.added(&s, &[]).await?)?;

        let changed = outcomes(&guest.added(&s, &["--class", "nestor,nestor-retain"]).await?)?;
        let changed: Vec<_> = changed.iter().filter(|(_, outcome)| outcome != "unchanged").collect();
        ensure!(
            changed.iter().all(|(title, _)| title.starts_with("ValidatingAdmissionPolicy ")),
            "{changed:?}"
        );
        ensure!(
            changed.len() == 3,
            "the policies of claims, classes and snapshots name classes: {changed:?}"
        );
        // Without --class, the classes stay.
        is_unchanged(&guest.added(&s, &[]).await?)?;
        guest.add(&s, &[]).await?.expect(0, &[]);
        may_use_only(&s, &guest, "nestor-retain", "nestor-shareable").await?;

        let other = guest.run(&s, "add", &["--cluster-id", "another"]).await?;
        other.expect_refusal(&[&guest.cluster_id, "--cluster-id"]);
        Ok(())
    })
    .await
}

/// The objects of `guest add --dry-run -o yaml`.
async fn printed(s: &Scenario, guest: &Onboarded, more: &[&str]) -> Result<Vec<Value>> {
    let answer = guest.add(s, &[more, &["--dry-run", "-o", "yaml"]].concat()).await?;
    answer.expect(0, &[]);
    Ok(serde_saphyr::from_multiple(&answer.out)?)
}

/// What an object has, without what the cluster adds over time.
async fn content(s: &Scenario, manifest: &Value) -> Result<Value> {
    let what = chart::kind_and_name(manifest);
    let object: DynamicObject = live(s, manifest).await?.with_context(|| format!("{what} does not exist"))?;
    let mut data = object.data.clone();
    if let Some(fields) = data.as_object_mut() {
        fields.remove("status");
        // The token.
        fields.remove("data");
    }
    Ok(json!({"what": what, "labels": object.labels(), "data": data}))
}

#[tokio::test]
async fn the_printed_objects_are_those_that_are_created() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        let flags = ["--class", "nestor", "--budget", "1Gi", "--budget-volumes", "7"];
        let objects = printed(&s, &guest, &flags).await?;
        for object in &objects {
            ensure!(live(&s, object).await?.is_none(), "{} exists", chart::kind_and_name(object));
        }
        for object in &objects {
            chart::apply(&s.management, object, false).await?;
        }
        let mut before = Vec::new();
        for object in &objects {
            before.push(content(&s, object).await?);
        }
        let added = outcomes(&guest.added(&s, &flags).await?)?;
        ensure!(added.len() == objects.len(), "{added:?}");
        for (object, before) in objects.iter().zip(before) {
            let after = content(&s, object).await?;
            ensure!(after == before, "{after:#}\nis not what was printed: {before:#}");
        }
        ensure!(printed(&s, &guest, &flags).await? == objects, "the printed objects changed");
        Ok(())
    })
    .await
}

/// Checks that a command was refused, and that the account still exists.
async fn refused(s: &Scenario, guest: &Onboarded, answer: &Answer, texts: &[&str]) -> Result<()> {
    answer.expect_refusal(texts);
    ensure!(guest.has_account(s).await?, "the account was removed");
    Ok(())
}

/// A volume of the guest with a snapshot: name of its claim, and its ID in the storage infra.
async fn volume_with_snapshot(s: &Scenario, guest: &Onboarded) -> Result<(String, VolumeId)> {
    let gc_csi = guest.start(s).await?;
    let claim = new_claim(&gc_csi.driver).await?;
    gc_csi.driver.snapshot(&unique("snapshot"), &claim, "nestor").await?;
    let volume = guest.namespace.volume_of(&claim).await?;
    gc_csi.stop().await?;
    Ok((claim, volume))
}

#[tokio::test]
async fn a_guest_with_volumes_is_removed_only_when_told_what_becomes_of_them() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        guest.add(&s, &["--budget", "1Gi"]).await?.expect(0, &[]);
        let (claim, volume) = volume_with_snapshot(&s, &guest).await?;
        let answer = guest.run(&s, "remove", &[]).await?;
        let texts =
            ["1 PersistentVolumeClaims", &claim, "1 VolumeSnapshots", "--volumes keep", "--volumes delete"];
        refused(&s, &guest, &answer, &texts).await?;
        let answer = guest.run(&s, "remove", &["--volumes", "delete"]).await?;
        refused(&s, &guest, &answer, &["--yes"]).await?;

        let client = guest.client(&s).await?;
        let kept = guest.run(&s, "remove", &["--volumes", "keep"]).await?;
        kept.expect(0, &["is removed", "1 PersistentVolumeClaims", &guest.cluster_id]);
        ensure!(!guest.has_account(&s).await?, "the account exists");
        is_revoked(&guest, &client).await?;
        ensure!(guest.namespace.claims().get_opt(&claim).await?.is_some(), "the claim is gone");
        ensure!(s.infra.get_volume(&volume).await?.is_some(), "the volume is gone");
        ensure!(s.budgets().get_opt(&guest.budget()).await?.is_some(), "the budget is gone");
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": format!("claims.{}.{}.nestor.dev", guest.name, guest.namespace.name)},
        });
        ensure!(live(&s, &policy).await?.is_none(), "the policy exists");

        guest.add(&s, &[]).await?.expect(0, &[]);
        let deleted = guest.run(&s, "remove", &["--volumes", "delete", "--yes"]).await?;
        deleted.expect(0, &["is removed", "is being deleted"]);
        namespace_gone(&s, &guest).await?;
        s.infra_forgets(&[volume]).await?;
        ensure!(s.budgets().get_opt(&guest.budget()).await?.is_none(), "the budget exists");
        guest.run(&s, "remove", &[]).await?.expect_refusal(&["does not exist", &guest.name]);
        Ok(())
    })
    .await
}

/// Waits until the API server refuses the token of a client, also from its cache.
async fn is_revoked(guest: &Onboarded, client: &kube::Client) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &guest.namespace.name);
    eventually("the token is refused", PATIENCE, || async {
        Ok(match claims.list(&ListParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 401 => Ok(()),
            other => Err(format!("{:?}", other.map(|list| list.items.len()))),
        })
    })
    .await
}

#[tokio::test]
async fn a_volume_that_its_class_retains_is_kept_with_the_budget() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        guest.add(&s, &["--budget", "1Gi"]).await?.expect(0, &[]);
        let (claim, volume) = volume_with_snapshot(&s, &guest).await?;
        let claim = guest.namespace.claims().get(&claim).await?;
        let name = claim.spec.and_then(|spec| spec.volume_name).context("not bound")?;
        set_policy(&s, &name, "Retain").await?;
        let answer = guest.run(&s, "remove", &["--volumes", "delete", "--yes"]).await?;
        answer.expect(0, &["1 PersistentVolumes", &name, "budget, which is kept"]);
        namespace_gone(&s, &guest).await?;
        ensure!(s.phase_of_volume(&name).await? == "Released", "the volume is not Released");
        ensure!(s.budgets().get_opt(&guest.budget()).await?.is_some(), "the budget is gone");
        set_policy(&s, &name, "Delete").await?;
        s.infra_forgets(&[volume]).await
    })
    .await
}

async fn set_policy(s: &Scenario, volume: &str, policy: &str) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": policy}}));
    s.volumes().patch(volume, &PatchParams::default(), &patch).await?;
    Ok(())
}

#[tokio::test]
async fn vms_block_a_removal_and_foreign_objects_keep_the_namespace() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        guest.add(&s, &[]).await?.expect(0, &[]);
        let node = s.node_in(&guest.namespace, &guest.cluster_id).await?;
        let answer = guest.run(&s, "remove", &["--volumes", "delete", "--yes"]).await?;
        refused(&s, &guest, &answer, &["1 VirtualMachines", &node.name]).await?;
        guest.namespace.vms().delete(&node.name, &Default::default()).await?;
        eventually("the VM is gone", PATIENCE, || async {
            let left = guest.namespace.vms().get_opt(&node.name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
        })
        .await?;

        let maps: Api<ConfigMap> = Api::namespaced(s.management.clone(), &guest.namespace.name);
        let map = serde_json::from_value(json!({"metadata": {"name": "settings"}}))?;
        maps.create(&PostParams::default(), &map).await?;
        guest.run(&s, "remove", &[]).await?.expect(0, &["is kept", "ConfigMap settings"]);
        ensure!(!guest.has_account(&s).await?, "the account exists");
        maps.get("settings").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn guests_of_one_namespace_are_added_on_request_and_removed_one_by_one() -> Result<()> {
    run(|s| async move {
        let one = s.onboarded()?;
        one.add(&s, &[]).await?.expect(0, &[]);
        let two = s.onboarded_in(&one.namespace)?;
        two.add(&s, &[]).await?.expect_refusal(&["--shared-namespace", &one.name]);
        two.add(&s, &["--shared-namespace"]).await?.expect(0, &[]);
        let (claim, _) = volume_with_snapshot(&s, &two).await?;

        one.run(&s, "remove", &["--volumes", "delete", "--yes"]).await?.expect(0, &["is kept"]);
        ensure!(!one.has_account(&s).await? && two.has_account(&s).await?, "the wrong account was removed");
        ensure!(
            two.namespace.claims().get_opt(&claim).await?.is_some(),
            "a claim of the other guest is gone"
        );
        let gc_csi = two.start(&s).await?;
        new_claim(&gc_csi.driver).await.context("the remaining guest")?;
        gc_csi.stop().await
    })
    .await
}

#[tokio::test]
async fn unknown_guests_and_those_of_helm_are_refused() -> Result<()> {
    run(|s| async move {
        let guest = s.onboarded()?;
        for command in ["show", "remove"] {
            guest.run(&s, command, &[]).await?.expect_refusal(&[&guest.name, "does not exist"]);
        }
        // The namespace existed before, so it is not deleted with the guest.
        let metadata = json!({"metadata": {"name": guest.namespace.name}});
        let namespaces: Api<Namespace> = Api::all(s.management.clone());
        namespaces.create(&PostParams::default(), &serde_json::from_value(metadata)?).await?;
        guest.add(&s, &[]).await?.expect(0, &[]);
        label_by(&s, &guest, json!("Helm")).await?;
        guest.add(&s, &[]).await?.expect_refusal(&["Helm", "`guests`"]);
        let answer = guest.run(&s, "remove", &[]).await?;
        refused(&s, &guest, &answer, &["Helm", "`guests`"]).await?;
        label_by(&s, &guest, Value::Null).await?;
        guest.run(&s, "remove", &[]).await?.expect(0, &["did not create it"]);
        ensure!(guest.found_namespace(&s).await?.is_some(), "the namespace was deleted");
        Ok(())
    })
    .await
}

/// Sets or removes the label with which an account names the tool that manages it.
async fn label_by(s: &Scenario, guest: &Onboarded, tool: Value) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(s.management.clone(), &guest.namespace.name);
    let patch = Patch::Merge(json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": tool}}}));
    accounts.patch(&guest.name, &PatchParams::default(), &patch).await?;
    Ok(())
}
