//! Admission policies: what the account of a guest cannot write in the management cluster, although its Role permits it.
//! All other modules test what gc-csi needs, with the same policies.

mod account;

use anyhow::{Context, Result, ensure};
use crds::names;
use k8s_openapi::api::rbac::v1::RoleBinding;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tests::tenants::admission_policies;
use tests::{Scenario, run};

use account::{Account, Attempt, Kind, annotations, labels, owners, spec, stranger, with};

#[tokio::test]
async fn a_new_claim_has_the_guests_label_and_no_field_that_only_others_set() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let cluster = json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "name": account.guest.name, "uid": "u",
        });
        let long = "x".repeat(8193);
        for (patch, text) in [
            (labels(json!({names::LABEL_CLUSTER_ID: null})), "must have the label nestor.dev/cluster-id="),
            (labels(json!({names::LABEL_CLUSTER_ID: "another"})), "clusterId in the values of nestor-guest"),
            (labels(json!({"share.nestor.dev/another": "rw"})), "share.nestor.dev/another"),
            (labels(json!({"app.kubernetes.io/name": "x"})), "ask the platform team"),
            (annotations(json!({"nestor.dev/accessible-zones": "a"})), "nestor.dev/accessible-zones"),
            (annotations(json!({"backup.example/skip": "true"})), "backup.example/skip"),
            (annotations(json!({names::ANNOTATION_MADE_BY: "another"})), "nestor.dev/made-by must be"),
            (annotations(json!({names::ANNOTATION_RECLAIM_POLICY: "Delete"})), "must be Retain"),
            (annotations(json!({names::ANNOTATION_GUEST_PV: long})), "shorten them"),
            (annotations(json!({names::ANNOTATION_REQUESTED_ZONES: long})), "requested-zones"),
            (json!({"metadata": {"finalizers": ["example.com/keep"]}}), "finalizers"),
            (owners(json!([stranger()])), "the only ownerReference"),
            (owners(json!([cluster])), "nestor.dev/deleted-with"),
            (spec(json!({"volumeName": "pv-of-another"})), "remove spec.volumeName"),
            (spec(json!({"selector": {"matchLabels": {"a": "b"}}})), "spec.selector"),
            (
                spec(json!({"dataSourceRef": {"apiGroup": "example.com", "kind": "Populator", "name": "x"}})),
                "PersistentVolumeClaim or VolumeSnapshot",
            ),
            (spec(json!({"storageClassName": ""})), "may not use StorageClass"),
        ] {
            account.is_refused(Kind::Claim, Attempt::Create(with(account.claim(), &patch)), text).await?;
        }
        let owned = json!({"metadata": {
            "annotations": {names::ANNOTATION_DELETED_WITH: "u"}, "ownerReferences": [cluster],
        }});
        let snapshot =
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "of-a-guest"});
        for patch in [
            json!({}),
            owned,
            labels(json!({"team": "a"})),
            spec(json!({"dataSource": snapshot})),
            spec(json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "of-a-guest"}})),
            spec(json!({"volumeAttributesClassName": "gold"})),
        ] {
            account.is_permitted(Kind::Claim, Attempt::Create(with(account.claim(), &patch))).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_guest_changes_of_its_own_claims_only_what_gc_csi_changes() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let used = annotations(json!({"consumer.nestor.dev/another": "{}"}));
        let claim = account.made(Kind::Claim, account.claim(), json!({})).await?;
        let used = account.made(Kind::Claim, account.claim(), used).await?;
        let long = "x".repeat(8193);
        for (patch, text) in [
            (labels(json!({names::LABEL_CLUSTER_ID: "another"})), "nestor.dev/cluster-id"),
            (labels(json!({names::LABEL_CLUSTER_ID: null})), "nestor.dev/cluster-id"),
            (labels(json!({"share.nestor.dev/another": "ro"})), "only the platform team"),
            (annotations(json!({names::ANNOTATION_RECLAIM_POLICY: null})), "nestor.dev/reclaim-policy"),
            (annotations(json!({names::ANNOTATION_MADE_BY: null})), "nestor.dev/made-by"),
            (annotations(json!({names::ANNOTATION_GUEST_PODS: long})), "at most 8192"),
            (annotations(json!({account.record(): "{}"})), "its own claim"),
            (json!({"metadata": {"finalizers": null}}), "finalizers"),
            (owners(json!([stranger()])), "the only ownerReference"),
            (spec(json!({"volumeName": "pv-of-another"})), "only spec.resources"),
        ] {
            account.is_refused(Kind::Claim, Attempt::Patch(&claim, patch), text).await?;
        }
        account.is_refused(Kind::Claim, Attempt::Delete(&used), "consumer.nestor.dev/another").await?;
        let other = annotations(json!({"consumer.nestor.dev/another": null}));
        account.is_refused(Kind::Claim, Attempt::Patch(&used, other), "consumer.nestor.dev/another").await?;

        account.is_permitted(Kind::Claim, Attempt::Delete(&claim)).await?;
        let written = json!({"metadata": {
            "labels": {"team": "a"},
            "annotations": {
                names::ANNOTATION_GUEST_PODS: "[]", names::ANNOTATION_GUEST_RECLAIM_POLICY: "Retain",
                names::ANNOTATION_ORPHANED_SINCE: "now", names::ANNOTATION_ORPHANED_REASON: "VolumeGone",
                names::ANNOTATION_RETAINED_SINCE: "now", names::ANNOTATION_DELETION_TRACEPARENT: "00-1-2-01",
            },
        }});
        account.is_permitted(Kind::Claim, Attempt::Patch(&claim, written)).await
    })
    .await
}

#[tokio::test]
async fn claims_of_others_are_not_changed_and_only_the_use_of_a_shared_one_is_recorded() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let other = labels(json!({names::LABEL_CLUSTER_ID: "another"}));
        let foreign = account.made(Kind::Claim, account.claim(), other.clone()).await?;
        let share = labels(json!({names::LABEL_CLUSTER_ID: "another", account.share(): "ro"}));
        let shared = account.made(Kind::Claim, account.claim(), share.clone()).await?;
        let record = annotations(json!({account.record(): r#"{"pv":"pv-1","mode":"ro"}"#}));

        let own = account.guest.cluster_id.clone();
        for patch in [
            labels(json!({names::LABEL_CLUSTER_ID: own})),
            labels(json!({account.share(): "rw"})),
            labels(json!({"team": "a"})),
            annotations(json!({names::ANNOTATION_GUEST_PV: "pv-2"})),
            json!({"metadata": {"finalizers": null}}),
            owners(json!([stranger()])),
        ] {
            for claim in [&foreign, &shared] {
                account
                    .is_refused(Kind::Claim, Attempt::Patch(claim, patch.clone()), "not this guest's")
                    .await?;
            }
        }
        for claim in [&foreign, &shared] {
            account.is_refused(Kind::Claim, Attempt::Delete(claim), "not this guest's").await?;
        }
        let refused = Attempt::Patch(&foreign, record.clone());
        account.is_refused(Kind::Claim, refused, "ask the platform team to share the volume").await?;
        account.is_permitted(Kind::Claim, Attempt::Patch(&shared, record.clone())).await?;
        let unshared = account.made(Kind::Claim, account.claim(), with(other, &record)).await?;
        let removed = annotations(json!({account.record(): null}));
        account.is_permitted(Kind::Claim, Attempt::Patch(&unshared, removed)).await?;

        disowning(&account, share, &record).await
    })
    .await
}

/// An ownerReference to a new Cluster object.
async fn cluster(account: &Account, name: &str) -> Result<Value> {
    let uid = account.namespace.cluster(name, &[]).await?.uid();
    Ok(json!({"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "name": name, "uid": uid}))
}

/// The ownerReference of the owner's gc-csi is removed by a guest that has recorded its use, and no other one is.
async fn disowning(account: &Account, share: Value, record: &Value) -> Result<()> {
    let (cluster, keeper) = (cluster(account, "owner").await?, cluster(account, "keeper").await?);
    let owned = json!({"metadata": {
        "annotations": {names::ANNOTATION_DELETED_WITH: cluster["uid"]}, "ownerReferences": [cluster, keeper],
    }});
    let owned = with(share, &owned);
    let unrecorded = account.made(Kind::Claim, account.claim(), owned.clone()).await?;
    let recorded = account.made(Kind::Claim, account.claim(), with(owned, record)).await?;
    let without = |owners: Value| {
        json!({"metadata": {
            "ownerReferences": owners, "annotations": {names::ANNOTATION_DELETED_WITH: null},
        }})
    };
    let one = || without(json!([keeper]));
    account.is_refused(Kind::Claim, Attempt::Patch(&unrecorded, one()), "not this guest's").await?;
    let all = Attempt::Patch(&recorded, without(json!(null)));
    account.is_refused(Kind::Claim, all, "not this guest's").await?;
    account.is_permitted(Kind::Claim, Attempt::Patch(&recorded, one())).await
}

#[tokio::test]
async fn a_claim_uses_only_classes_of_nestor_and_only_those_of_the_guests_list() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let name = s.management_class(&[]).await?;
        let of_class =
            |class: &str| Attempt::Create(with(account.claim(), &spec(json!({"storageClassName": class}))));
        account.is_permitted(Kind::Claim, of_class(&name)).await?;
        let foreign = foreign_class(&s).await?;
        account.is_refused_by("classes", Kind::Claim, of_class(&foreign), "other.example").await?;

        account.guest.apply_policies(&s, &json!({"classes": ["nestor", "gold"]})).await?;
        let text = "may not use StorageClass \"nestor-retain\"";
        account.is_refused(Kind::Claim, of_class("nestor-retain"), text).await?;
        account.is_permitted(Kind::Claim, of_class("nestor")).await?;
        for (class, is_permitted) in [("gold", true), ("standard", false)] {
            let class = spec(json!({"volumeAttributesClassName": class}));
            let attempt = Attempt::Create(with(account.claim(), &class));
            match is_permitted {
                true => account.is_permitted(Kind::Claim, attempt).await?,
                false => account.is_refused(Kind::Claim, attempt, "guests[].classes").await?,
            }
        }
        let snapshot = with(account.snapshot(), &spec(json!({"volumeSnapshotClassName": "other"})));
        account
            .is_refused(Kind::Snapshot, Attempt::Create(snapshot), "VolumeSnapshotClass \"other\"")
            .await?;
        account.is_permitted(Kind::Snapshot, Attempt::Create(account.snapshot())).await
    })
    .await
}

/// Gives a class of the management cluster another provisioner.
async fn foreign_class(s: &Scenario) -> Result<String> {
    let name = s.management_class(&[]).await?;
    let classes: Api<StorageClass> = Api::all(s.management.clone());
    classes.delete(&name, &DeleteParams::default()).await?;
    let class = json!({"metadata": {"name": name}, "provisioner": "other.example"});
    classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    Ok(name)
}

#[tokio::test]
async fn the_chart_has_policies_for_each_guest_unless_they_are_disabled() -> Result<()> {
    let guest = |name: &str| json!({"name": name, "namespace": "tenants", "clusterId": format!("{name}.ID")});
    let guests = json!([guest("one"), guest("two")]);
    let all = admission_policies(&json!({"guests": guests})).await?;
    assert_eq!(all.len(), 20);
    let text = json!(all).to_string();
    for expected in ["system:serviceaccount:tenants:one", "system:serviceaccount:tenants:two", "'two.ID'"] {
        ensure!(text.contains(expected), "{text}");
    }
    ensure!(!text.contains("${"), "{text}");
    assert_eq!(
        admission_policies(&json!({"guests": guests, "admission": {"enabled": false}})).await?.len(),
        0
    );
    let without_id = json!({"guests": [{"name": "one", "namespace": "tenants"}]});
    let error =
        admission_policies(&without_id).await.err().context("a guest without clusterId was accepted")?;
    ensure!(format!("{error:#}").contains("clusterId"), "{error:#}");
    Ok(())
}

#[tokio::test]
async fn snapshots_have_the_guests_label_and_those_of_others_are_not_changed() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let other = labels(json!({names::LABEL_CLUSTER_ID: "another", account.share(): "ro"}));
        let foreign = account.made(Kind::Snapshot, account.snapshot(), other).await?;
        let own = account.made(Kind::Snapshot, account.snapshot(), json!({})).await?;
        let long = "x".repeat(513);
        for (patch, text) in [
            (labels(json!({names::LABEL_CLUSTER_ID: null})), "must have the label nestor.dev/cluster-id="),
            (labels(json!({names::LABEL_CLUSTER_ID: "another"})), "must have the label"),
            (labels(json!({"share.nestor.dev/another": "ro"})), "share.nestor.dev/another"),
            (annotations(json!({"example.com/a": "b"})), "example.com/a"),
            (annotations(json!({names::ANNOTATION_GUEST_SNAPSHOT: long})), "at most 512"),
            (json!({"metadata": {"finalizers": ["example.com/keep"]}}), "finalizers"),
            (owners(json!([stranger()])), "the only ownerReference"),
            (
                spec(json!({"source": {
                    "persistentVolumeClaimName": null, "volumeSnapshotContentName": "of-another",
                }})),
                "the VolumeSnapshotContent",
            ),
        ] {
            let attempt = Attempt::Create(with(account.snapshot(), &patch));
            account.is_refused(Kind::Snapshot, attempt, text).await?;
        }
        let relabelled = labels(json!({names::LABEL_CLUSTER_ID: account.guest.cluster_id}));
        let attempt = Attempt::Patch(&foreign, relabelled);
        account.is_refused(Kind::Snapshot, attempt, "not this guest's").await?;
        account.is_refused(Kind::Snapshot, Attempt::Delete(&foreign), "not this guest's").await?;
        let given_away = labels(json!({names::LABEL_CLUSTER_ID: "another"}));
        let attempt = Attempt::Patch(&own, given_away);
        account.is_refused(Kind::Snapshot, attempt, "nestor.dev/cluster-id").await?;

        account.is_permitted(Kind::Snapshot, Attempt::Create(account.snapshot())).await?;
        let trace = annotations(json!({names::ANNOTATION_DELETION_TRACEPARENT: "00-1-2-01"}));
        account.is_permitted(Kind::Snapshot, Attempt::Patch(&own, trace)).await?;
        account.is_permitted(Kind::Snapshot, Attempt::Delete(&own)).await
    })
    .await
}

fn entry(claim: &str) -> Value {
    json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
}

#[tokio::test]
async fn of_virtual_machines_only_the_entries_of_the_guests_own_are_changed() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let node = s.node_in(&account.namespace, &account.guest.cluster_id).await?;
        let others = s.node_in(&account.namespace, "another").await?;
        let unlabelled = s.node_in(&account.namespace, "").await?;
        // As a VM Operator and the platform team set them.
        let preset = json!({
            "metadata": {"annotations": {"example.com/a": "b"}},
            "spec": {"powerState": "PoweredOn", "volumes": [{"name": "root", "vsphereVolume": {"size": 1}}]},
        });
        let vms = account.api(&account.platform, Kind::Vm);
        vms.patch(&node.name, &PatchParams::default(), &Patch::Merge(&preset)).await?;
        let root = preset["spec"]["volumes"][0].clone();
        for (patch, text) in [
            (spec(json!({"powerState": "PoweredOff"})), "powerState"),
            (spec(json!({"className": "large"})), "only spec.volumes"),
            (spec(json!({"hardware": {"cdrom": [{"name": "other"}]}})), "hardware"),
            (spec(json!({"volumes": [entry("a")]})), "name an existing claim"),
            (labels(json!({names::LABEL_CLUSTER_ID: "another"})), "decides whose disks a VM gets"),
            (labels(json!({"team": "a"})), "cannot change labels"),
            (json!({"metadata": {"finalizers": ["example.com/keep"]}}), "finalizers"),
            (owners(json!([stranger()])), "ownerReferences"),
            (annotations(json!({"example.com/a": null})), "example.com/a"),
            (
                annotations(json!({names::ANNOTATION_PROVEN_OFF: "2026-01-01T00:00:00Z"})),
                "nestor.dev/proven-off",
            ),
            (annotations(json!({names::ANNOTATION_OUT_OF_SERVICE: "x".repeat(513)})), "at most 512"),
        ] {
            account.is_refused(Kind::Vm, Attempt::Patch(&node.name, patch), text).await?;
        }
        let attach = || spec(json!({"volumes": [root.clone(), entry("a")]}));
        for vm in [&others, &unlabelled] {
            let attempt = Attempt::Patch(&vm.name, spec(json!({"volumes": [entry("a")]})));
            account.is_refused(Kind::Vm, attempt, "not this guest's").await?;
        }
        account.is_permitted(Kind::Vm, Attempt::Patch(&node.name, attach())).await?;
        let controller = spec(json!({"hardware": {"scsiControllers": [{"busNumber": 1}]}}));
        account.is_permitted(Kind::Vm, Attempt::Patch(&node.name, with(attach(), &controller))).await?;
        let written = annotations(json!({
            names::ANNOTATION_OUT_OF_SERVICE: "uid", names::ANNOTATION_VOLUMES_CONFIRMED: "7",
            names::trace_annotation("a"): "00-1-2-01",
        }));
        account.is_permitted(Kind::Vm, Attempt::Patch(&node.name, with(attach(), &written))).await?;
        vms.patch(&node.name, &PatchParams::default(), &Patch::Merge(attach())).await?;
        let detach = spec(json!({"volumes": [root]}));
        account.is_permitted(Kind::Vm, Attempt::Patch(&node.name, detach)).await
    })
    .await
}

#[tokio::test]
async fn the_policies_hold_for_an_account_with_too_many_rights() -> Result<()> {
    run(|s| async move {
        let account = Account::create(&s).await?;
        let bindings: Api<RoleBinding> = Api::namespaced(s.management.clone(), &account.namespace.name);
        let everything = json!({
            "metadata": {"name": "everything"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{
                "kind": "ServiceAccount", "name": format!("gc-csi-{}", account.guest.name),
                "namespace": account.namespace.name,
            }],
        });
        bindings.create(&PostParams::default(), &serde_json::from_value(everything)?).await?;
        let node = s.node_in(&account.namespace, &account.guest.cluster_id).await?;
        let vm = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha6", "kind": "VirtualMachine",
            "metadata": {"name": "attempt", "labels": {names::LABEL_CLUSTER_ID: account.guest.cluster_id}},
            "spec": {},
        });
        for attempt in [Attempt::Create(vm), Attempt::Delete(&node.name), Attempt::Status(&node.name)] {
            account.is_refused(Kind::Vm, attempt, "cannot create or delete VirtualMachines").await?;
        }
        let claim = account.made(Kind::Claim, account.claim(), json!({})).await?;
        account.is_refused(Kind::Claim, Attempt::Status(&claim), "subresources of claims").await?;
        // Other accounts are not affected, whatever they write.
        let patch = labels(json!({names::LABEL_CLUSTER_ID: "another", "share.nestor.dev/third": "rw"}));
        let claims = account.api(&account.platform, Kind::Claim);
        claims.patch(&claim, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    })
    .await
}
