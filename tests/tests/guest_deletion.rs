//! What becomes of a guest's claims and snapshots when the guest is deleted, in any order of its objects. Garbage
//! collection is Kubernetes' own; nobody acts on Cluster objects here, so they are gone when they are deleted.

use anyhow::{Context, Result};
use crds::names;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::Event;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::json;
use tests::bytes::{device, noise, read, write};
use tests::guest::static_volume;
use tests::place::{Place, Tenant, new_claim};
use tests::program::Controller;
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// A claim that somebody other than gc-csi makes in a place, with these labels.
async fn claim_by_hand(place: &Place, labels: &[(&str, &str)]) -> Result<String> {
    let name = unique("by-hand");
    let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
    let claim = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        },
    }))?;
    place.claims().create(&PostParams::default(), &claim).await?;
    Ok(name)
}

/// A guest whose volumes go with its Cluster object, with a machine and a volume.
struct Doomed {
    place: Place,
    guest: Tenant,
    machine: LoopNode,
    gc_csi: Controller,
    volume: String,
    /// The same volume, by its id in the infra.
    of_infra: VolumeId,
}

impl Doomed {
    async fn begin(s: &Scenario) -> Result<Self> {
        let place = s.place().await?;
        let guest = s.tenant(&place).await?;
        let cluster = place.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
        let machine = s.machine_at(&place).await?;
        let gc_csi = guest.start_deleting(s).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        place.owned(&volume, &cluster, true).await?;
        let of_infra = place.volume_of(&volume).await?;
        Ok(Self { place, guest, machine, gc_csi, volume, of_infra })
    }
}

/// Waits until a gc-csi counts so many objects that outlive its guest though it should delete them.
async fn outliving(controller: &Controller, wanted: u64) -> Result<()> {
    let line = format!("nestor_gc_csi_objects_outliving_guest {wanted}\n");
    eventually(&format!("{wanted} objects outlive the guest"), PATIENCE, || async {
        let (_, metrics) = controller.process.get("/metrics").await?;
        let said = metrics.lines().find(|line| line.starts_with("nestor_gc_csi_objects_outliving"));
        Ok(if metrics.contains(&line) { Ok(()) } else { Err(format!("{said:?}")) })
    })
    .await
}

async fn delete_machine(place: &Place, machine: &LoopNode) -> Result<()> {
    place.machines().delete(&machine.name, &DeleteParams::default()).await?;
    eventually(&format!("machine {} gone", machine.name), PATIENCE, || async {
        let left = place.machines().get_opt(&machine.name).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
    })
    .await
}

/// Waits until nothing orders a disk into a machine any more, and the infra has none in it.
async fn unplugged(s: &Scenario, place: &Place, machine: &LoopNode) -> Result<()> {
    eventually(&format!("nothing plugged into {}", machine.name), PATIENCE, || async {
        let orders = place.attachments().list(&ListParams::default()).await?.items;
        let uuid = machine.uuid.to_string();
        let orders: Vec<_> = orders.iter().filter(|one| one.spec.node_uuid == uuid).collect();
        let disks = s.infra.list_attachments(Some(machine.uuid), None).await?;
        let is_free = orders.is_empty() && disks.is_empty();
        Ok(if is_free { Ok(()) } else { Err(format!("{orders:?}, {disks:?}")) })
    })
    .await
}

#[tokio::test]
async fn with_retain_everything_stays_and_can_be_listed_by_the_guests_id() -> Result<()> {
    run(|s| async move {
        let place = s.place().await?;
        let guest = s.tenant(&place).await?;
        place.cluster(&guest.name, &[]).await?;
        // Retain is the default.
        let gc_csi = guest.start(&s, &[&format!("--cluster-object={}", guest.name)]).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
        place.delete_cluster(&guest.name, &DeleteParams::background()).await?;
        gc_csi.stop().await?;

        let own = ListParams::default().labels(&format!("{}={}", names::LABEL_CLUSTER_ID, guest.cluster_id));
        let claims = place.claims().list(&own).await?.items;
        assert_eq!(
            claims.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
            std::slice::from_ref(&volume)
        );
        assert!(claims[0].owner_references().is_empty() && claims[0].metadata.deletion_timestamp.is_none());
        let snapshots = place.snapshots().list(&own).await?.items;
        assert_eq!(snapshots.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), [snapshot]);
        assert!(snapshots[0].owner_references().is_empty());

        // A new guest of the same identity has it again; one of another identity, once the label says so.
        let again = guest.start(&s, &[]).await?;
        let machine = s.machine_at(&place).await?;
        again.driver.publish(&volume, &machine.name).await?;
        again.driver.unpublish(&volume, &machine.name).await?;
        again.stop().await?;
        let heir = s.tenant(&place).await?;
        let label = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: heir.cluster_id}}}));
        place.claims().patch(&volume, &PatchParams::default(), &label).await?;
        let cluster = place.cluster(&heir.name, &[]).await?.uid().context("no UID")?;
        let theirs = heir.start_deleting(&s).await?;
        theirs.driver.publish(&volume, &machine.name).await?;
        theirs.driver.unpublish(&volume, &machine.name).await?;
        // It was given to that guest, not made by it: it is kept when that one is deleted, too.
        outliving(&theirs, 1).await?;
        place.owned(&volume, &cluster, false).await
    })
    .await
}

#[tokio::test]
async fn with_delete_what_the_guest_made_goes_with_its_cluster_and_nothing_else() -> Result<()> {
    run(|s| async move {
        let place = s.place().await?;
        let neighbour = s.tenant(&place).await?;
        let beside = place.cluster(&neighbour.name, &[]).await?.uid().context("no UID")?;
        let theirs = neighbour.start_deleting(&s).await?;
        let kept = new_claim(&theirs.driver).await?;
        place.owned(&kept, &beside, true).await?;
        for (how, is_alive) in [(DeleteParams::background(), true), (DeleteParams::foreground(), false)] {
            let guest = s.tenant(&place).await?;
            let cluster = place.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
            let label = (names::LABEL_CLUSTER_ID, guest.cluster_id.as_str());
            let (labelled, unlabelled) =
                (claim_by_hand(&place, &[label]).await?, claim_by_hand(&place, &[]).await?);
            let gc_csi = guest.start_deleting(&s).await?;
            // It is ready before it has seen its Cluster object; once something is owned, it has.
            let first = new_claim(&gc_csi.driver).await?;
            place.owned(&first, &cluster, true).await?;
            let volume = new_claim(&gc_csi.driver).await?;
            let of_infra = place.volume_of(&volume).await?;
            let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
            // With the write that made it: no moment is left in which the guest's end would leave it behind.
            let made = place.claims().get(&volume).await?;
            let owners = made.owner_references();
            assert!(owners.len() == 1 && owners[0].uid == cluster, "{owners:?}");
            assert_eq!(
                (owners[0].kind.as_str(), owners[0].api_version.as_str()),
                ("Cluster", "cluster.x-k8s.io/v1beta2")
            );
            assert_eq!((owners[0].block_owner_deletion, owners[0].controller), (Some(false), None));
            assert_eq!(place.snapshots().get(&snapshot).await?.owner_references().len(), 1);
            // What the platform team labelled stays.
            outliving(&gc_csi, 1).await?;

            let gc_csi = if is_alive { Some(gc_csi) } else { gc_csi.stop().await.map(|()| None)? };
            place.delete_cluster(&guest.name, &how).await?;
            place.claims_gone(&[&first, &volume]).await?;
            eventually("the snapshot gone", PATIENCE, || async {
                let left = place.snapshots().get_opt(&snapshot).await?;
                Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
            })
            .await?;
            s.infra_forgets(&[of_infra]).await?;
            for name in [&labelled, &unlabelled, &kept] {
                assert!(place.claims().get(name).await?.metadata.deletion_timestamp.is_none(), "{name}");
            }
            if let Some(gc_csi) = gc_csi {
                // A guest without a Cluster object makes volumes all the same, which stay.
                new_claim(&gc_csi.driver).await?;
                outliving(&gc_csi, 2).await?;
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn owners_follow_the_policy_and_the_cluster_object_and_those_of_others_stay() -> Result<()> {
    run(|s| async move {
        let place = s.place().await?;
        let guest = s.tenant(&place).await?;
        let other = place.cluster(&unique("other"), &[]).await?;
        // No Cluster object yet: nothing is owned, and it is said.
        let gc_csi = guest.start_deleting(&s).await?;
        let volume = new_claim(&gc_csi.driver).await?;
        let snapshot = gc_csi.driver.snapshot(&unique("snapshot"), &volume, "nestor").await?.snapshot_id;
        outliving(&gc_csi, 2).await?;
        gc_csi.process.has_logged("has no Cluster object").await?;
        let owner = json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "name": other.name_any(), "uid": other.uid(),
        });
        let by_hand = Patch::Merge(json!({"metadata": {"ownerReferences": [owner]}}));
        place.claims().patch(&volume, &PatchParams::default(), &by_hand).await?;

        let cluster = place.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
        place.owned(&volume, &cluster, true).await?;
        outliving(&gc_csi, 0).await?;
        assert_eq!(place.snapshots().get(&snapshot).await?.owner_references().len(), 1);
        // Somebody takes it off.
        place.claims().patch(&volume, &PatchParams::default(), &by_hand).await?;
        place.owned(&volume, &cluster, true).await?;
        gc_csi.stop().await?;

        // The policy is Retain now.
        let gc_csi = guest.start(&s, &[]).await?;
        place.owned(&volume, &cluster, false).await?;
        eventually("the snapshot without an owner", PATIENCE, || async {
            let found = place.snapshots().get(&snapshot).await?;
            Ok(if found.owner_references().is_empty() { Ok(()) } else { Err(format!("{:?}", found.metadata)) })
        })
        .await?;
        let claim = place.claims().get(&volume).await?;
        assert_eq!(claim.owner_references().len(), 1, "the platform team's own reference stays");
        assert!(!claim.annotations().contains_key(names::ANNOTATION_DELETED_WITH));
        gc_csi.stop().await?;

        // And Delete again, with the Cluster object found by its label.
        let label = (names::LABEL_CLUSTER_ID, guest.cluster_id.as_str());
        let labelled = place.cluster(&unique("labelled"), &[label]).await?.uid().context("no UID")?;
        let gc_csi = Controller::start_in(
            &s,
            &place.namespace,
            &s.lab.state().management.as_ref().context("no management cluster")?.kubeconfig,
            &guest.cluster_id,
            &["--on-guest-deletion=Delete"],
        )
        .await?;
        place.owned(&volume, &labelled, true).await?;
        gc_csi.stop().await
    })
    .await
}

#[tokio::test]
async fn a_volume_that_a_machine_has_is_not_taken_from_it_before_the_machine_goes() -> Result<()> {
    run(|s| async move {
        let Doomed { place, guest, machine, gc_csi, volume, of_infra } = Doomed::begin(&s).await?;
        let disk = device(&machine, &gc_csi.driver.publish(&volume, &machine.name).await?);
        write(&disk, &noise(1, 4096))?;
        gc_csi.stop().await?;

        // The Cluster object goes first: its claims go, the disk stays, and so does the volume that is in it.
        place.delete_cluster(&guest.name, &DeleteParams::background()).await?;
        place.claims_gone(&[&volume]).await?;
        eventually("a refusal to delete a volume that is plugged", PATIENCE, || async {
            // csi-provisioner gives the infra's volume and the PersistentVolume one name.
            let about = format!("involvedObject.kind=PersistentVolume,involvedObject.name={of_infra}");
            let events: Api<Event> = Api::all(s.management.clone());
            let list = events.list(&ListParams::default().fields(&about)).await?;
            let said: Vec<_> = list.into_iter().filter_map(|event| event.message).collect();
            let is_refused = said.iter().any(|text| text.contains("attached"));
            Ok(if is_refused { Ok(()) } else { Err(format!("{said:?}")) })
        })
        .await?;
        assert_eq!(read(&disk, 4096)?, noise(1, 4096));
        write(&disk, &noise(2, 4096))?;
        assert!(s.infra.get_volume(&of_infra).await?.is_some());

        // Then the machine: now all goes, though nobody detaches.
        delete_machine(&place, &machine).await?;
        unplugged(&s, &place, &machine).await?;
        s.infra_forgets(&[of_infra]).await
    })
    .await
}

#[tokio::test]
async fn nothing_is_stuck_when_machines_go_before_the_cluster_or_the_namespace_before_both() -> Result<()> {
    run(|s| async move {
        let mut volumes = Vec::new();
        for namespace_first in [false, true] {
            let Doomed { place, guest, machine, gc_csi, volume, of_infra } = Doomed::begin(&s).await?;
            volumes.push(of_infra);
            gc_csi.driver.publish(&volume, &machine.name).await?;
            gc_csi.stop().await?;
            if namespace_first {
                place.remove().await?;
            } else {
                delete_machine(&place, &machine).await?;
                unplugged(&s, &place, &machine).await?;
                assert!(place.claims().get(&volume).await?.metadata.deletion_timestamp.is_none());
                place.delete_cluster(&guest.name, &DeleteParams::background()).await?;
                place.claims_gone(&[&volume]).await?;
            }
            unplugged(&s, &place, &machine).await?;
        }
        s.infra_forgets(&volumes).await
    })
    .await
}

#[tokio::test]
async fn a_claim_that_another_guest_uses_outlives_its_own_guest() -> Result<()> {
    run(|s| async move {
        let place = s.place().await?;
        let (owner, consumer) = (s.tenant(&place).await?, s.tenant(&place).await?);
        let cluster = place.cluster(&owner.name, &[]).await?.uid().context("no UID")?;
        let machine = s.machine_at(&place).await?;
        let (ours, theirs) = (owner.start_deleting(&s).await?, consumer.start(&s, &[]).await?);
        let mut volumes = Vec::new();
        for _ in 0..2 {
            let volume = new_claim(&ours.driver).await?;
            let share = format!("{}{}", names::LABEL_SHARE_PREFIX, consumer.cluster_id);
            let label = Patch::Merge(json!({"metadata": {"labels": {share: "rw"}}}));
            place.claims().patch(&volume, &PatchParams::default(), &label).await?;
            place.owned(&volume, &cluster, true).await?;
            volumes.push(volume);
        }
        let (early, late) = (&volumes[0], &volumes[1]);
        let guest_volume = |handle: &str| static_volume(&unique(&s.name), &s.name, handle, &json!({}));

        // While the owner's gc-csi runs: nobody's while it is used, the guest's own again afterwards.
        let used = s.guest_volumes().create(&PostParams::default(), &guest_volume(early)?).await?.name_any();
        place.owned(early, &cluster, false).await?;
        outliving(&ours, 1).await?;
        s.guest_volumes().delete(&used, &DeleteParams::default()).await?;
        place.owned(early, &cluster, true).await?;

        // While it does not run, the consumer's own is enough: before its attach is answered, nobody owns the claim.
        ours.stop().await?;
        s.guest_volumes().create(&PostParams::default(), &guest_volume(late)?).await?;
        // Repeated as csi-attacher does: the claim is just being changed by others.
        eventually(&format!("{late} attached to {}", machine.name), PATIENCE, || async {
            Ok(theirs.driver.publish(late, &machine.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        assert!(place.claims().get(late).await?.owner_references().is_empty());
        place.delete_cluster(&owner.name, &DeleteParams::background()).await?;
        place.claims_gone(&[early]).await?;
        assert!(place.claims().get(late).await?.metadata.deletion_timestamp.is_none());
        theirs.driver.unpublish(late, &machine.name).await?;
        Ok(())
    })
    .await
}
