//! Deletion of guests: their claims and snapshots, for every deletion order of a guest's objects. Garbage collection is
//! done by Kubernetes; no Cluster API controller runs, so Cluster objects are deleted at once.

use anyhow::{Context, Result};
use crds::names;
use infra_api::VolumeId;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::json;
use tests::bytes::{device, noise, read, write};
use tests::guest::static_volume;
use tests::own_namespace::OwnNamespace;
use tests::program::Controller;
use tests::tenants::{Tenant, new_claim};
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// Creates a claim without gc-csi, with these labels.
async fn claim_without_gc_csi(namespace: &OwnNamespace, labels: &[(&str, &str)]) -> Result<String> {
    let name = unique("by-hand");
    let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
    let claim = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        },
    }))?;
    namespace.claims().create(&PostParams::default(), &claim).await?;
    Ok(name)
}

/// A guest with a VM and a volume that are deleted with its Cluster object.
struct GuestWithVolume {
    namespace: OwnNamespace,
    guest: Tenant,
    vm: LoopNode,
    gc_csi: Controller,
    volume: String,
    /// The volume's ID in the storage infra.
    infra_volume: VolumeId,
}

impl GuestWithVolume {
    async fn begin(s: &Scenario) -> Result<Self> {
        let namespace = s.own_namespace().await?;
        let guest = s.tenant(&namespace).await?;
        let cluster = namespace.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
        let vm = s.node_in(&namespace, &guest.cluster_id).await?;
        let gc_csi = guest.start_deleting(s).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        namespace.owned(&volume, &cluster, true).await?;
        let infra_volume = namespace.volume_of(&volume).await?;
        Ok(Self { namespace, guest, vm, gc_csi, volume, infra_volume })
    }
}

/// Waits until gc-csi counts this number of objects that its guest's deletion will not delete.
async fn wait_for_outliving_metric(controller: &Controller, expected: u64) -> Result<()> {
    let line = format!("nestor_gc_csi_objects_outliving_guest {expected}\n");
    eventually(&format!("{expected} objects outlive the guest"), PATIENCE, || async {
        let (_, metrics) = controller.process.get("/metrics").await?;
        let observed = metrics.lines().find(|line| line.starts_with("nestor_gc_csi_objects_outliving"));
        Ok(if metrics.contains(&line) { Ok(()) } else { Err(format!("{observed:?}")) })
    })
    .await
}

async fn delete_vm(namespace: &OwnNamespace, vm: &LoopNode) -> Result<()> {
    namespace.vms().delete(&vm.name, &DeleteParams::default()).await?;
    eventually(&format!("VM {} deleted", vm.name), PATIENCE, || async {
        let left = namespace.vms().get_opt(&vm.name).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
    })
    .await
}

/// Waits until a VM has no attachments in the management cluster and the storage infra.
async fn detached(s: &Scenario, namespace: &OwnNamespace, vm: &LoopNode) -> Result<()> {
    eventually(&format!("no disks attached to {}", vm.name), PATIENCE, || async {
        let attachments = namespace.attachments().list(&ListParams::default()).await?.items;
        let uuid = vm.uuid.to_string();
        let attachments: Vec<_> = attachments.iter().filter(|one| one.spec.node_uuid == uuid).collect();
        let disks = s.infra.list_attachments(Some(vm.uuid), None).await?;
        let is_free = attachments.is_empty() && disks.is_empty();
        Ok(if is_free { Ok(()) } else { Err(format!("{attachments:?}, {disks:?}")) })
    })
    .await
}

#[tokio::test]
async fn with_retain_all_objects_stay_and_can_be_listed_by_cluster_id() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = s.tenant(&namespace).await?;
        namespace.cluster(&guest.name, &[]).await?;
        // Retain is the default.
        let gc_csi = guest.start(&s, &[&format!("--cluster-object={}", guest.name)]).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
        namespace.delete_cluster(&guest.name, &DeleteParams::background()).await?;
        gc_csi.stop().await?;

        let own = ListParams::default().labels(&format!("{}={}", names::LABEL_CLUSTER_ID, guest.cluster_id));
        let claims = namespace.claims().list(&own).await?.items;
        assert_eq!(
            claims.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
            std::slice::from_ref(&volume)
        );
        assert!(claims[0].owner_references().is_empty() && claims[0].metadata.deletion_timestamp.is_none());
        let snapshots = namespace.snapshots().list(&own).await?.items;
        assert_eq!(snapshots.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), [snapshot]);
        assert!(snapshots[0].owner_references().is_empty());

        // A guest with the same cluster ID can use the volume again; another guest can after the label of the
        // PersistentVolume is set, which mgmt-csi copies to the claim.
        let again = guest.start(&s, &[]).await?;
        let vm = s.node_in(&namespace, &guest.cluster_id).await?;
        again.driver.publish(&volume, &vm.name).await?;
        again.driver.unpublish(&volume, &vm.name).await?;
        again.stop().await?;
        let new_owner = s.tenant(&namespace).await?;
        let label =
            Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: new_owner.cluster_id}}}));
        let claim = namespace.claims().get(&volume).await?;
        let management_volume = claim.spec.and_then(|spec| spec.volume_name).context("no volume")?;
        s.volumes().patch(&management_volume, &PatchParams::default(), &label).await?;
        let vm = s.node_in(&namespace, &new_owner.cluster_id).await?;
        let cluster = namespace.cluster(&new_owner.name, &[]).await?.uid().context("no UID")?;
        let other_gc_csi = new_owner.start_deleting(&s).await?;
        eventually("the new owner attaches the volume", PATIENCE, || async {
            Ok(other_gc_csi.driver.publish(&volume, &vm.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        other_gc_csi.driver.unpublish(&volume, &vm.name).await?;
        // The volume was not created by that guest, so it is kept when that guest is deleted too.
        wait_for_outliving_metric(&other_gc_csi, 1).await?;
        namespace.owned(&volume, &cluster, false).await
    })
    .await
}

#[tokio::test]
async fn with_delete_only_the_guests_own_objects_are_deleted_with_its_cluster() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let other_guest = s.tenant(&namespace).await?;
        let other_cluster = namespace.cluster(&other_guest.name, &[]).await?.uid().context("no UID")?;
        let other_gc_csi = other_guest.start_deleting(&s).await?;
        let kept = new_claim(&other_gc_csi.driver).await?;
        namespace.owned(&kept, &other_cluster, true).await?;
        for (propagation, is_alive) in
            [(DeleteParams::background(), true), (DeleteParams::foreground(), false)]
        {
            let guest = s.tenant(&namespace).await?;
            let cluster = namespace.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
            let label = (names::LABEL_CLUSTER_ID, guest.cluster_id.as_str());
            let (labelled, unlabelled) = (
                claim_without_gc_csi(&namespace, &[label]).await?,
                claim_without_gc_csi(&namespace, &[]).await?,
            );
            let gc_csi = guest.start_deleting(&s).await?;
            // gc-csi is ready before it has found its Cluster object; once it owns something, it has.
            let first = new_claim(&gc_csi.driver).await?;
            namespace.owned(&first, &cluster, true).await?;
            let volume = new_claim(&gc_csi.driver).await?;
            let infra_volume = namespace.volume_of(&volume).await?;
            let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
            // The ownerReference is set in the create request, so that there is no gap without it.
            let made = namespace.claims().get(&volume).await?;
            let owners = made.owner_references();
            assert!(owners.len() == 1 && owners[0].uid == cluster, "{owners:?}");
            assert_eq!(
                (owners[0].kind.as_str(), owners[0].api_version.as_str()),
                ("Cluster", "cluster.x-k8s.io/v1beta2")
            );
            assert_eq!((owners[0].block_owner_deletion, owners[0].controller), (Some(false), None));
            assert_eq!(namespace.snapshots().get(&snapshot).await?.owner_references().len(), 1);
            // Claims labelled by the platform team stay.
            wait_for_outliving_metric(&gc_csi, 1).await?;

            let gc_csi = if is_alive { Some(gc_csi) } else { gc_csi.stop().await.map(|()| None)? };
            namespace.delete_cluster(&guest.name, &propagation).await?;
            namespace.claims_gone(&[&first, &volume]).await?;
            eventually("the snapshot is deleted", PATIENCE, || async {
                let left = namespace.snapshots().get_opt(&snapshot).await?;
                Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
            })
            .await?;
            s.infra_forgets(&[infra_volume]).await?;
            for name in [&labelled, &unlabelled, &kept] {
                assert!(namespace.claims().get(name).await?.metadata.deletion_timestamp.is_none(), "{name}");
            }
            if let Some(gc_csi) = gc_csi {
                // Without its Cluster object, the guest still creates volumes, which stay.
                new_claim(&gc_csi.driver).await?;
                wait_for_outliving_metric(&gc_csi, 2).await?;
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn owner_references_follow_the_policy_and_those_of_others_stay() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = s.tenant(&namespace).await?;
        let other = namespace.cluster(&unique("other"), &[]).await?;
        // Without a Cluster object, no ownerReference is set, and this is reported.
        let gc_csi = guest.start_deleting(&s).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
        wait_for_outliving_metric(&gc_csi, 2).await?;
        gc_csi.process.has_logged("has no Cluster object").await?;
        let owner = json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "name": other.name_any(), "uid": other.uid(),
        });
        let by_hand = Patch::Merge(json!({"metadata": {"ownerReferences": [owner]}}));
        namespace.claims().patch(&volume, &PatchParams::default(), &by_hand).await?;

        let cluster = namespace.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
        namespace.owned(&volume, &cluster, true).await?;
        wait_for_outliving_metric(&gc_csi, 0).await?;
        assert_eq!(namespace.snapshots().get(&snapshot).await?.owner_references().len(), 1);
        // The ownerReference is removed by another client.
        namespace.claims().patch(&volume, &PatchParams::default(), &by_hand).await?;
        namespace.owned(&volume, &cluster, true).await?;
        gc_csi.stop().await?;

        // The policy changes to Retain.
        let gc_csi = guest.start(&s, &[]).await?;
        namespace.owned(&volume, &cluster, false).await?;
        eventually("the snapshot has no ownerReference", PATIENCE, || async {
            let found = namespace.snapshots().get(&snapshot).await?;
            Ok(if found.owner_references().is_empty() { Ok(()) } else { Err(format!("{:?}", found.metadata)) })
        })
        .await?;
        let claim = namespace.claims().get(&volume).await?;
        assert_eq!(claim.owner_references().len(), 1, "the platform team's ownerReference stays");
        assert!(!claim.annotations().contains_key(names::ANNOTATION_DELETED_WITH));
        gc_csi.stop().await?;

        // The policy changes back to Delete, with the Cluster object found by its label.
        let label = (names::LABEL_CLUSTER_ID, guest.cluster_id.as_str());
        let labelled = namespace.cluster(&unique("labelled"), &[label]).await?.uid().context("no UID")?;
        let gc_csi = Controller::start_in(
            &s,
            &namespace.name,
            &s.lab.state().management.as_ref().context("no management cluster")?.kubeconfig,
            &guest.cluster_id,
            &["--on-guest-deletion=Delete"],
        )
        .await?;
        namespace.owned(&volume, &labelled, true).await?;
        gc_csi.stop().await
    })
    .await
}

#[tokio::test]
async fn an_attached_volume_is_kept_until_its_vm_is_deleted() -> Result<()> {
    run(|s| async move {
        let GuestWithVolume { namespace, guest, vm, gc_csi, volume, infra_volume } =
            GuestWithVolume::begin(&s).await?;
        let disk = device(&vm, &gc_csi.driver.publish(&volume, &vm.name).await?);
        write(&disk, &noise(1, 4096))?;
        gc_csi.stop().await?;

        // The Cluster object is deleted first: its claims are being deleted, the disk stays attached and its volume is kept.
        namespace.delete_cluster(&guest.name, &DeleteParams::background()).await?;
        namespace.waits_for_detach(&volume).await?;
        assert_eq!(read(&disk, 4096)?, noise(1, 4096));
        write(&disk, &noise(2, 4096))?;
        assert!(s.infra.get_volume(&infra_volume).await?.is_some());

        // After the VM is deleted, claim and volume are deleted, without a detach by the guest.
        delete_vm(&namespace, &vm).await?;
        detached(&s, &namespace, &vm).await?;
        namespace.claims_gone(&[&volume]).await?;
        s.infra_forgets(&[infra_volume]).await
    })
    .await
}

#[tokio::test]
async fn deletion_completes_if_vms_or_the_namespace_are_deleted_before_the_cluster() -> Result<()> {
    run(|s| async move {
        let mut volumes = Vec::new();
        for namespace_first in [false, true] {
            let GuestWithVolume { namespace, guest, vm, gc_csi, volume, infra_volume } =
                GuestWithVolume::begin(&s).await?;
            volumes.push(infra_volume);
            gc_csi.driver.publish(&volume, &vm.name).await?;
            gc_csi.stop().await?;
            if namespace_first {
                namespace.remove().await?;
            } else {
                delete_vm(&namespace, &vm).await?;
                detached(&s, &namespace, &vm).await?;
                assert!(namespace.claims().get(&volume).await?.metadata.deletion_timestamp.is_none());
                namespace.delete_cluster(&guest.name, &DeleteParams::background()).await?;
                namespace.claims_gone(&[&volume]).await?;
            }
            detached(&s, &namespace, &vm).await?;
        }
        s.infra_forgets(&volumes).await
    })
    .await
}

#[tokio::test]
async fn a_claim_used_by_another_guest_is_kept_when_its_own_guest_is_deleted() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let (owner, consumer) = (s.tenant(&namespace).await?, s.tenant(&namespace).await?);
        let cluster = namespace.cluster(&owner.name, &[]).await?.uid().context("no UID")?;
        let vm = s.node_in(&namespace, &consumer.cluster_id).await?;
        let (own_gc_csi, other_gc_csi) = (owner.start_deleting(&s).await?, consumer.start(&s, &[]).await?);
        let mut volumes = Vec::new();
        for _ in 0..2 {
            let volume = new_claim(&own_gc_csi.driver).await?;
            let share = format!("{}{}", names::LABEL_SHARE_PREFIX, consumer.cluster_id);
            let label = Patch::Merge(json!({"metadata": {"labels": {share: "rw"}}}));
            // mgmt-csi copies the label to the claim.
            let claim = namespace.claims().get(&volume).await?;
            let management_volume = claim.spec.and_then(|spec| spec.volume_name).context("no volume")?;
            s.volumes().patch(&management_volume, &PatchParams::default(), &label).await?;
            namespace.owned(&volume, &cluster, true).await?;
            volumes.push(volume);
        }
        let (early, late) = (&volumes[0], &volumes[1]);
        let guest_volume = |handle: &str| static_volume(&unique(&s.name), &s.name, handle, &json!({}));

        // While the owner's gc-csi runs, it removes the ownerReference while the claim is used, and restores it afterwards.
        let used = s.guest_volumes().create(&PostParams::default(), &guest_volume(early)?).await?.name_any();
        namespace.owned(early, &cluster, false).await?;
        wait_for_outliving_metric(&own_gc_csi, 1).await?;
        s.guest_volumes().delete(&used, &DeleteParams::default()).await?;
        namespace.owned(early, &cluster, true).await?;

        // While it does not run, the consumer's gc-csi removes the ownerReference before it answers the attach.
        own_gc_csi.stop().await?;
        s.guest_volumes().create(&PostParams::default(), &guest_volume(late)?).await?;
        // Repeated like csi-attacher does: the claim is being changed by others.
        eventually(&format!("{late} attached to {}", vm.name), PATIENCE, || async {
            Ok(other_gc_csi.driver.publish(late, &vm.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        assert!(namespace.claims().get(late).await?.owner_references().is_empty());
        namespace.delete_cluster(&owner.name, &DeleteParams::background()).await?;
        namespace.claims_gone(&[early]).await?;
        assert!(namespace.claims().get(late).await?.metadata.deletion_timestamp.is_none());
        other_gc_csi.driver.unpublish(late, &vm.name).await?;
        Ok(())
    })
    .await
}
