//! The management cluster's etcd is put back to what it was some time before, while guests run. What the guests did
//! since is not in it any more, though their disks are as they are.

use anyhow::{Context, Result};
use crds::names;
use infra_api::{Volume, VolumeId};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use lab::LoopNode;
use lab::cluster::Revisions;
use serde_json::json;
use tests::bytes::device;
use tests::records::{Records, Writer};
use tests::{PATIENCE, Scenario, alone, eventually, guest, run};

/// A guest's volume.
struct Used {
    claim: &'static str,
    /// The guest's PersistentVolume.
    volume: String,
    /// The management claim.
    handle: String,
    /// The infra's volume.
    infra: Volume,
}

impl Used {
    async fn new(s: &Scenario, claim: &'static str) -> Result<Self> {
        let handle = s.bound_claim(claim).await?;
        let volume = s.bound(claim).await?.1.name_any();
        Ok(Self { claim, volume, infra: s.infra_volume(&handle).await?, handle })
    }

    /// The machines that have it, by UUID, as the infra says.
    async fn machines(&self, s: &Scenario) -> Result<Vec<String>> {
        let list = s.infra.list_attachments(None, Some(&self.infra.id)).await?;
        Ok(list.iter().map(|one| one.node.to_string()).collect())
    }

    /// Attaches it as the guest would, and writes records to it; gives the order.
    async fn write(&self, s: &Scenario, node: &LoopNode) -> Result<(String, Writer)> {
        let order = s.order_attach(&self.volume, &node.name).await?;
        let disk = device(node, &s.attached(&order).await?);
        Ok((order, Records::begin(&disk, 1 << 20)?.keep_appending()))
    }

    /// Waits until a machine has it by an order of the management cluster's, and is shown to.
    async fn is_ordered(&self, s: &Scenario, node: &LoopNode) -> Result<()> {
        eventually(&format!("{} ordered into {}", self.claim, node.name), PATIENCE, || async {
            let order = s.attachment(&node.name, &self.handle).await?;
            let attached =
                order.as_ref().and_then(|order| order.status.as_ref()).is_some_and(|status| status.attached);
            let shown = s.disk(&node.name, &self.handle).await?.is_some_and(|disk| disk.attached);
            Ok(if attached && shown { Ok(()) } else { Err(format!("{order:?}")) })
        })
        .await
    }
}

/// Waits until a writer has got on, which it does not when its disk is gone.
async fn gets_on(what: &str, writer: &Writer) -> Result<()> {
    let before = writer.log().acknowledged();
    eventually(&format!("the writer of {what} gets on"), PATIENCE, || async {
        let now = writer.log().acknowledged();
        Ok(if now > before + 20 { Ok(()) } else { Err(format!("{before}, {now}")) })
    })
    .await
}

/// Makes the management objects of a volume anew that the infra still has, from what the infra says of it.
async fn make_objects_anew(s: &Scenario, volume: &Volume) -> Result<()> {
    let (name, namespace) = (&volume.labels["pvc"], &volume.labels["namespace"]);
    let object: PersistentVolume = serde_json::from_value(json!({
        "metadata": {
            "name": volume.id,
            "annotations": {"pv.kubernetes.io/provisioned-by": names::MANAGEMENT_DRIVER},
        },
        "spec": {
            "capacity": {"storage": volume.capacity_bytes.to_string()},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": "nestor",
            "claimRef": {"namespace": namespace, "name": name},
            "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": volume.id},
        },
    }))?;
    s.volumes().create(&PostParams::default(), &object).await?;
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor", "volumeName": volume.id,
            "resources": {"requests": {"storage": volume.capacity_bytes.to_string()}},
        },
    }))?;
    s.claims().create(&PostParams::default(), &claim).await?;
    Ok(())
}

#[tokio::test]
async fn no_disk_is_pulled_plugged_twice_or_emptied_because_objects_are_as_they_were_before() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (here, there) = (s.node().await?, s.node().await?);
        for node in [&here, &there] {
            s.lab.join_guest(node).await?;
        }
        let stays = Used::new(&s, "stays").await?;
        let deleted = Used::new(&s, "deleted").await?;
        let detached = Used::new(&s, "detached").await?;
        let moved = Used::new(&s, "moved").await?;
        let (stays_order, stays_writer) = stays.write(&s, &here).await?;
        let (detached_order, detached_writer) = detached.write(&s, &here).await?;
        let (moved_order, moved_writer) = moved.write(&s, &here).await?;
        let backup = s.lab.back_up_management().await?;

        // What the backup knows nothing of.
        let new = Used::new(&s, "new").await?;
        let (new_order, new_writer) = new.write(&s, &here).await?;
        s.guest_claims().delete(deleted.claim, &DeleteParams::default()).await?;
        eventually("the deleted volume gone", PATIENCE, || async {
            let left = s.infra.get_volume(&deleted.infra.id).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{}", left.state))))
        })
        .await?;
        let kept = detached_writer.stop()?.close();
        s.order_detach(&detached_order).await?;
        let moved_records = moved_writer.stop()?.close();
        s.order_detach(&moved_order).await?;
        let moved_order = s.order_attach(&moved.volume, &there.name).await?;
        let moved_disk = device(&there, &s.attached(&moved_order).await?);
        let moved_writer = moved_records.resume(&moved_disk)?.keep_appending();

        s.lab.restore_management(&backup, Revisions::GoOn).await?;

        // What was there before and after goes on as if nothing had been.
        stays.is_ordered(&s, &here).await?;
        // The disk that moved is ordered where it is, not where it was.
        moved.is_ordered(&s, &there).await?;
        assert_eq!(moved.machines(&s).await?, [there.uuid.to_string()]);
        // The claim of the one that is new is missing, which its guest is told; its disk stays.
        s.told(new.claim, &[&new.handle]).await?;
        assert_eq!(new.machines(&s).await?, [here.uuid.to_string()]);
        let second = s.order_attach(&new.volume, &there.name).await?;
        s.orders().refused(&second, &[&new.handle]).await?;
        s.order_detach(&second).await?;
        // The claim of the one that was deleted is back, and has nothing: that is said, and no empty one is made.
        eventually("the claim without its volume is called ill", PATIENCE, || async {
            let claim = s.claims().get(&deleted.handle).await?;
            let conditions = claim.status.and_then(|status| status.conditions).unwrap_or_default();
            let ill =
                conditions.iter().find(|one| one.type_ == names::CONDITION_HEALTHY && one.status == "False");
            Ok(ill.map(drop).ok_or_else(|| format!("{conditions:?}")))
        })
        .await?;
        assert!(s.infra.get_volume(&deleted.infra.id).await?.is_none());
        for (what, writer) in [("stays", &stays_writer), ("moved", &moved_writer), ("new", &new_writer)] {
            gets_on(what, writer).await?;
        }

        // Once its objects are there again, the new one is ordered as before, and never left its machine.
        make_objects_anew(&s, &s.infra.get_volume(&new.infra.id).await?.context("the volume is gone")?)
            .await?;
        new.is_ordered(&s, &here).await?;
        gets_on("new", &new_writer).await?;

        let stays_log = stays_writer.stop()?.close();
        stays_log.verify(&device(&here, &stays.infra.disk_uuid.to_string()))?;
        let moved_log = moved_writer.stop()?.close();
        moved_log.verify(&moved_disk)?;
        let new_log = new_writer.stop()?.close();
        for order in [&stays_order, &moved_order, &new_order] {
            s.order_detach(order).await?;
        }
        // The entries that came back with the copy, which no order of the guest stands for, are taken out after
        // gc-csi's --repair-grace; here at once.
        for used in [&detached, &moved] {
            eventually(&format!("{} let go by {}", used.claim, here.name), PATIENCE, || async {
                let left = s.driver.unpublish(&used.handle, &here.name).await;
                Ok(left.map_err(|status| status.to_string()))
            })
            .await?;
        }
        // All can be had again, with all that was written.
        for (used, log) in [(&new, &new_log), (&detached, &kept), (&stays, &stays_log), (&moved, &moved_log)]
        {
            let order = s.order_attach(&used.volume, &there.name).await?;
            log.verify(&device(&there, &s.attached(&order).await?))?;
            s.order_detach(&order).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_that_waited_when_the_copy_was_made_gets_its_own_volume_again() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        s.stop_part("mgmt-csi").await?;
        s.claim("data", "nestor", "4Mi").await?;
        let waiting = eventually("a management claim that waits", PATIENCE, || async {
            let claims = s.claims().list(&Default::default()).await?;
            let own = claims
                .into_iter()
                .find(|claim| claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&s.name));
            Ok(own.ok_or_else(|| "none".to_owned()))
        })
        .await?;
        let backup = s.lab.back_up_management().await?;
        s.start_part("mgmt-csi").await?;
        let handle = guest::handle(&s.bound("data").await?.1)?;
        assert_eq!(handle, waiting.name_any());
        let used = Used {
            claim: "data",
            volume: s.bound("data").await?.1.name_any(),
            infra: s.infra_volume(&handle).await?,
            handle,
        };
        let (order, writer) = used.write(&s, &node).await?;

        // Where revisions come again, everything that watches must begin anew.
        s.lab.restore_management(&backup, Revisions::ComeAgain).await?;
        s.lab.restart_watchers_of_management().await?;
        used.is_ordered(&s, &node).await?;
        assert_eq!(
            s.infra_volume(&used.handle).await?.id,
            VolumeId::new(format!("pvc-{}", waiting.uid().context("no UID")?))?
        );
        gets_on("data", &writer).await?;
        let log = writer.stop()?.close();
        log.verify(&device(&node, &used.infra.disk_uuid.to_string()))?;
        s.order_detach(&order).await?;
        let order = s.order_attach(&used.volume, &node.name).await?;
        log.verify(&device(&node, &s.attached(&order).await?))?;
        s.order_detach(&order).await
    })
    .await
}
