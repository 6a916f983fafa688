//! Restore of the management cluster's etcd from a backup while guests run: later changes of the guests are lost in
//! etcd, but their disks are as they were.

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
use tests::{PATIENCE, Scenario, eventually, guest, run_alone};

/// A guest's volume.
struct AttachedVolume {
    claim: &'static str,
    /// The guest's PersistentVolume.
    volume: String,
    /// The management claim.
    handle: String,
    /// The storage infra's volume.
    infra: Volume,
}

impl AttachedVolume {
    async fn new(s: &Scenario, claim: &'static str) -> Result<Self> {
        let handle = s.bound_claim(claim).await?;
        let volume = s.bound(claim).await?.1.name_any();
        Ok(Self { claim, volume, infra: s.infra_volume(&handle).await?, handle })
    }

    /// UUIDs of the nodes that have it attached in the storage infra.
    async fn nodes(&self, s: &Scenario) -> Result<Vec<String>> {
        let list = s.infra.list_attachments(None, Some(&self.infra.id)).await?;
        Ok(list.iter().map(|one| one.node.to_string()).collect())
    }

    /// Attaches it and writes records to it; returns the guest attachment.
    async fn write(&self, s: &Scenario, node: &LoopNode) -> Result<(String, Writer)> {
        let attachment = s.k8s_attach(&self.volume, &node.name).await?;
        let disk = device(node, &s.attached(&attachment).await?);
        Ok((attachment, Records::begin(&disk, 1 << 20)?.append_in_background()))
    }

    /// Waits until a VolumeAttachment and the VM's status report it as attached.
    async fn is_attached(&self, s: &Scenario, node: &LoopNode) -> Result<()> {
        eventually(&format!("{} attached to {}", self.claim, node.name), PATIENCE, || async {
            let attachment = s.attachment(&node.name, &self.handle).await?;
            let attached = attachment
                .as_ref()
                .and_then(|attachment| attachment.status.as_ref())
                .is_some_and(|status| status.attached);
            let shown = s.disk(&node.name, &self.handle).await?.is_some_and(|disk| disk.attached);
            Ok(if attached && shown { Ok(()) } else { Err(format!("{attachment:?}")) })
        })
        .await
    }
}

/// Waits until a writer has appended more records, which fails if its disk is gone.
async fn makes_progress(what: &str, writer: &Writer) -> Result<()> {
    let before = writer.log().acknowledged();
    eventually(&format!("the writer of {what} makes progress"), PATIENCE, || async {
        let now = writer.log().acknowledged();
        Ok(if now > before + 20 { Ok(()) } else { Err(format!("{before}, {now}")) })
    })
    .await
}

/// Recreates the management objects of a volume from the storage infra's record.
async fn recreate_objects(s: &Scenario, volume: &Volume) -> Result<()> {
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
async fn no_disk_is_detached_attached_twice_or_emptied_after_a_restore() -> Result<()> {
    run_alone(|s| async move {
        let (first_node, second_node) = (s.node().await?, s.node().await?);
        for node in [&first_node, &second_node] {
            s.lab.join_guest(node).await?;
        }
        let stays = AttachedVolume::new(&s, "stays").await?;
        let deleted = AttachedVolume::new(&s, "deleted").await?;
        let detached = AttachedVolume::new(&s, "detached").await?;
        let moved = AttachedVolume::new(&s, "moved").await?;
        let (stays_attachment, stays_writer) = stays.write(&s, &first_node).await?;
        let (detached_attachment, detached_writer) = detached.write(&s, &first_node).await?;
        let (moved_attachment, moved_writer) = moved.write(&s, &first_node).await?;
        let backup = s.lab.back_up_management().await?;

        // Changes after the backup.
        let new = AttachedVolume::new(&s, "new").await?;
        let (new_attachment, new_writer) = new.write(&s, &first_node).await?;
        s.guest_claims().delete(deleted.claim, &DeleteParams::default()).await?;
        eventually("the deleted volume is deleted", PATIENCE, || async {
            let left = s.infra.get_volume(&deleted.infra.id).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{}", left.state))))
        })
        .await?;
        let kept = detached_writer.stop()?.close();
        s.k8s_detach(&detached_attachment).await?;
        let moved_records = moved_writer.stop()?.close();
        s.k8s_detach(&moved_attachment).await?;
        let moved_attachment = s.k8s_attach(&moved.volume, &second_node.name).await?;
        let moved_disk = device(&second_node, &s.attached(&moved_attachment).await?);
        let moved_writer = moved_records.resume(&moved_disk)?.append_in_background();

        s.lab.restore_management(&backup, Revisions::Bumped).await?;

        // A volume that did not change stays attached.
        stays.is_attached(&s, &first_node).await?;
        // The moved volume gets a VolumeAttachment for its new node, not for the old one.
        moved.is_attached(&s, &second_node).await?;
        assert_eq!(moved.nodes(&s).await?, [second_node.uuid.to_string()]);
        // The new volume's claim is missing, which is reported to the guest; its disk stays attached.
        s.wait_for_event(new.claim, &[&new.handle]).await?;
        assert_eq!(new.nodes(&s).await?, [first_node.uuid.to_string()]);
        let second = s.k8s_attach(&new.volume, &second_node.name).await?;
        s.k8s_attachments().refused(&second, &[&new.handle]).await?;
        s.k8s_detach(&second).await?;
        // The deleted volume's claim is back without its volume, which is reported; no empty volume is created.
        eventually("the claim without its volume is reported as unhealthy", PATIENCE, || async {
            let claim = s.claims().get(&deleted.handle).await?;
            let conditions = claim.status.and_then(|status| status.conditions).unwrap_or_default();
            let unhealthy =
                conditions.iter().find(|one| one.type_ == names::CONDITION_HEALTHY && one.status == "False");
            Ok(unhealthy.map(drop).ok_or_else(|| format!("{conditions:?}")))
        })
        .await?;
        assert!(s.infra.get_volume(&deleted.infra.id).await?.is_none());
        for (what, writer) in [("stays", &stays_writer), ("moved", &moved_writer), ("new", &new_writer)] {
            makes_progress(what, writer).await?;
        }

        // After its objects are recreated, the new volume is attached as before; its disk was never detached.
        recreate_objects(&s, &s.infra.get_volume(&new.infra.id).await?.context("the volume is gone")?)
            .await?;
        new.is_attached(&s, &first_node).await?;
        makes_progress("new", &new_writer).await?;

        let stays_log = stays_writer.stop()?.close();
        stays_log.verify(&device(&first_node, &stays.infra.disk_uuid.to_string()))?;
        let moved_log = moved_writer.stop()?.close();
        moved_log.verify(&moved_disk)?;
        let new_log = new_writer.stop()?.close();
        for attachment in [&stays_attachment, &moved_attachment, &new_attachment] {
            s.k8s_detach(attachment).await?;
        }
        // The restored entries without a guest attachment would be removed after gc-csi's --repair-grace; detach them at
        // once.
        for volume in [&detached, &moved] {
            eventually(&format!("{} detached from {}", volume.claim, first_node.name), PATIENCE, || async {
                let left = s.driver.unpublish(&volume.handle, &first_node.name).await;
                Ok(left.map_err(|status| status.to_string()))
            })
            .await?;
        }
        // All volumes can be attached again, with all records.
        for (volume, log) in
            [(&new, &new_log), (&detached, &kept), (&stays, &stays_log), (&moved, &moved_log)]
        {
            let attachment = s.k8s_attach(&volume.volume, &second_node.name).await?;
            log.verify(&device(&second_node, &s.attached(&attachment).await?))?;
            s.k8s_detach(&attachment).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_that_was_pending_in_the_backup_gets_its_own_volume_again() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        s.stop_component("mgmt-csi").await?;
        s.claim("data", "nestor", "4Mi").await?;
        let waiting = eventually("a pending management claim", PATIENCE, || async {
            let claims = s.claims().list(&Default::default()).await?;
            let own = claims
                .into_iter()
                .find(|claim| claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&s.name));
            Ok(own.ok_or_else(|| "none".to_owned()))
        })
        .await?;
        let backup = s.lab.back_up_management().await?;
        s.start_component("mgmt-csi").await?;
        let handle = guest::handle(&s.bound("data").await?.1)?;
        assert_eq!(handle, waiting.name_any());
        let volume = AttachedVolume {
            claim: "data",
            volume: s.bound("data").await?.1.name_any(),
            infra: s.infra_volume(&handle).await?,
            handle,
        };
        let (attachment, writer) = volume.write(&s, &node).await?;

        // Revisions are reused, so every component that watches must be restarted.
        s.lab.restore_management(&backup, Revisions::Reused).await?;
        s.lab.restart_watchers_of_management().await?;
        volume.is_attached(&s, &node).await?;
        assert_eq!(
            s.infra_volume(&volume.handle).await?.id,
            VolumeId::new(format!("pvc-{}", waiting.uid().context("no UID")?))?
        );
        makes_progress("data", &writer).await?;
        let log = writer.stop()?.close();
        log.verify(&device(&node, &volume.infra.disk_uuid.to_string()))?;
        s.k8s_detach(&attachment).await?;
        let attachment = s.k8s_attach(&volume.volume, &node.name).await?;
        log.verify(&device(&node, &s.attached(&attachment).await?))?;
        s.k8s_detach(&attachment).await
    })
    .await
}
