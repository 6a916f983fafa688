//! Ownership, enforced by mgmt-csi: a guest that uses its own rights and the Kubernetes API, without gc-csi, gets no
//! access to the data of another guest in the same namespace. No admission policy applies to the account, so that only
//! mgmt-csi refuses.

use anyhow::{Context, Result, ensure};
use crds::{VirtualMachine, names};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams,
};
use kube::{Client, ResourceExt};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::bytes::{noise, read, write};
use tests::management::VM_GUESTS;
use tests::own_namespace::OwnNamespace;
use tests::{PATIENCE, Scenario, eventually, from_claim, from_snapshot, run, run_alone, unique};

/// Size of a volume of 4 MiB.
const ALL: usize = 4 << 20;

/// An account with the first guest's rights in the management cluster, used without gc-csi.
struct Intruder {
    client: Client,
    namespace: String,
}

impl Intruder {
    async fn of(s: &Scenario) -> Result<Self> {
        Ok(Self { client: s.management_without_policies().await?, namespace: s.namespace.clone() })
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn vms(&self) -> Api<VirtualMachine> {
        lab::virtual_machines::api_in(&self.client, &self.namespace)
    }

    fn snapshots(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshot");
        Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::from_gvk(&kind))
    }

    /// Sets the only entry of a VM's `spec.volumes`, or none.
    async fn set_entry(&self, vm: &str, claim: Option<&str>) -> Result<()> {
        let entry = |claim: &str| json!({"name": "entry", "persistentVolumeClaim": {"claimName": claim}});
        let entries: Vec<Value> = claim.map(entry).into_iter().collect();
        let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
        self.vms().patch(vm, &PatchParams::default(), &patch).await?;
        Ok(())
    }
}

/// An attempt that may be refused by admission.
fn attempt<T>(outcome: kube::Result<T>) -> Result<Option<T>> {
    match outcome {
        Ok(done) => Ok(Some(done)),
        Err(kube::Error::Api(status)) if [403, 422].contains(&status.code) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn labels(labels: Value) -> Patch<Value> {
    Patch::Merge(json!({"metadata": {"labels": labels}}))
}

fn share(guest: &str) -> String {
    format!("{}{guest}", names::LABEL_SHARE_PREFIX)
}

/// Tries to attach a claim without gc-csi; returns the message of the refusal, after which nothing is left.
async fn attach_is_refused(
    s: &Scenario,
    intruder: &Intruder,
    node: &LoopNode,
    claim: &str,
) -> Result<String> {
    intruder.set_entry(&node.name, Some(claim)).await?;
    let message = s.attach_refused(&node.name, claim, "NotShared").await?;
    ensure!(s.infra.list_attachments(Some(node.uuid), None).await?.is_empty(), "the disk was plugged");
    intruder.set_entry(&node.name, None).await?;
    eventually("the VolumeAttachment is gone", PATIENCE, || async {
        let left = s.attachment(&node.name, claim).await?;
        Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
    })
    .await?;
    Ok(message)
}

/// A volume of the second guest with known content.
struct Victim {
    claim: String,
    /// Its objects as they were.
    objects: (PersistentVolumeClaim, PersistentVolume),
    file: std::path::PathBuf,
}

impl Victim {
    async fn create(s: &Scenario, guest: &str) -> Result<Self> {
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, guest)], json!({})).await?;
        let file = s.file_of(&s.infra_volume(&claim).await?).await?;
        write(&file, &noise(9, ALL))?;
        Ok(Self { objects: Self::read(s, &claim).await?, claim, file })
    }

    async fn read(s: &Scenario, claim: &str) -> Result<(PersistentVolumeClaim, PersistentVolume)> {
        let claim = s.claims().get(claim).await?;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).context("no volume")?;
        Ok((claim, s.volumes().get(&volume).await?))
    }

    async fn is_untouched(&self, s: &Scenario) -> Result<()> {
        let (claim, volume) = Self::read(s, &self.claim).await?;
        let same_claim = claim.labels() == self.objects.0.labels() && claim.spec == self.objects.0.spec;
        ensure!(same_claim && volume == self.objects.1, "the victim's objects were changed");
        self.is_intact()
    }

    fn is_intact(&self) -> Result<()> {
        ensure!(read(&self.file, ALL)? == noise(9, ALL), "the victim's data was changed");
        Ok(())
    }
}

#[tokio::test]
async fn a_claim_of_another_guest_is_not_attached_whatever_the_guest_labels() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let (intruder, node) = (Intruder::of(&s).await?, s.node().await?);
        let victim = Victim::create(&s, &second.cluster_id).await?;
        let message = attach_is_refused(&s, &intruder, &node, &victim.claim).await?;
        ensure!(message.contains(&victim.claim) && message.contains("nor shared"), "{message}");
        ensure!(!message.contains(&second.cluster_id), "it names the other guest: {message}");
        let attachment = names::volume_attachment(&(&node.name).into(), &(&victim.claim).into());
        s.wait_for_management_event_of("VolumeAttachment", &attachment, &[&node.name, "NotShared"]).await?;
        victim.is_untouched(&s).await?;

        let (params, own) = (PatchParams::default(), s.cluster_id.as_str());
        let forged = labels(json!({names::LABEL_CLUSTER_ID: own, share(own): "rw"}));
        attempt(intruder.claims().patch(&victim.claim, &params, &forged).await)?;
        attach_is_refused(&s, &intruder, &node, &victim.claim).await?;

        let forged = labels(json!({names::LABEL_CLUSTER_ID: second.cluster_id}));
        if attempt(intruder.vms().patch(&node.name, &params, &forged).await)?.is_some() {
            let texts = ["first value", "nestor-vm-guests"];
            s.wait_for_management_event_of("VirtualMachine", &node.name, &texts).await?;
        }
        attach_is_refused(&s, &intruder, &node, &victim.claim).await?;
        victim.is_intact()?;

        // The guest's own claims are attached all the same.
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, own)], json!({})).await?;
        intruder.set_entry(&node.name, Some(&claim)).await?;
        plugged(&s, &node, false).await?;
        s.vms().patch(&node.name, &params, &labels(json!({names::LABEL_CLUSTER_ID: own}))).await?;
        intruder.set_entry(&node.name, None).await?;
        s.no_attachments(&node).await
    })
    .await
}

/// Waits until the node has one disk, read-only or not.
async fn plugged(s: &Scenario, node: &LoopNode, read_only: bool) -> Result<()> {
    eventually(&format!("a disk on {}", node.name), PATIENCE, || async {
        let all = s.infra.list_attachments(Some(node.uuid), None).await?;
        let attached: Vec<_> =
            all.iter().filter(|one| one.state == infra_api::AttachmentState::Attached).collect();
        ensure!(attached.iter().all(|one| one.read_only == read_only), "{attached:?}");
        Ok(if attached.len() == 1 { Ok(()) } else { Err(format!("{all:?}")) })
    })
    .await
}

#[tokio::test]
async fn a_volume_shared_read_only_is_plugged_read_only_whatever_the_entry_and_the_claim_say() -> Result<()> {
    run_alone(|s| async move {
        let second = s.second_guest().await?;
        let (intruder, node) = (Intruder::of(&s).await?, s.node().await?);
        let victim = Victim::create(&s, &second.cluster_id).await?;
        let label = share(&s.cluster_id);
        s.label_volume(&victim.claim, &json!({&label: "ro"})).await?;
        let forged = labels(json!({&label: "rw"}));
        attempt(intruder.claims().patch(&victim.claim, &PatchParams::default(), &forged).await)?;
        intruder.set_entry(&node.name, Some(&victim.claim)).await?;
        plugged(&s, &node, true).await?;
        eventually("the share on the claim is that of the volume again", PATIENCE, || async {
            let mode = s.claims().get(&victim.claim).await?.labels().get(&label).cloned();
            Ok(if mode.as_deref() == Some("ro") { Ok(()) } else { Err(format!("{mode:?}")) })
        })
        .await?;

        // A disk stays as it was plugged, also if it is shared otherwise since and mgmt-csi restarts.
        s.label_volume(&victim.claim, &json!({&label: "rw"})).await?;
        s.kill_component("mgmt-csi").await?;
        s.start_component("mgmt-csi").await?;
        let other = s.management_claim(&[(names::LABEL_CLUSTER_ID, &s.cluster_id)], json!({})).await?;
        let another_node = s.node().await?;
        s.driver.publish(&other, &another_node.name).await?;
        s.driver.unpublish(&other, &another_node.name).await?;
        plugged(&s, &node, true).await?;
        let attachment = s.attachment(&node.name, &victim.claim).await?.and_then(|one| one.status);
        ensure!(attachment.as_ref().is_some_and(|status| status.attached), "{attachment:?}");

        intruder.set_entry(&node.name, None).await?;
        s.no_attachments(&node).await?;
        intruder.set_entry(&node.name, Some(&victim.claim)).await?;
        plugged(&s, &node, false).await?;
        intruder.set_entry(&node.name, None).await?;
        s.no_attachments(&node).await?;
        victim.is_intact()
    })
    .await
}

#[tokio::test]
async fn a_volume_of_another_guest_is_neither_cloned_nor_snapshotted_nor_restored() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let intruder = Intruder::of(&s).await?;
        let victim = Victim::create(&s, &second.cluster_id).await?;
        let snapshot_of_victim =
            s.management_snapshot(&[(names::LABEL_CLUSTER_ID, &second.cluster_id)], &victim.claim).await?;
        // A snapshot without a label, which the guest itself may have made.
        let unlabelled = s.management_snapshot(&[], &victim.claim).await?;

        let forged = labels(json!({names::LABEL_CLUSTER_ID: s.cluster_id, share(&s.cluster_id): "rw"}));
        for name in [&snapshot_of_victim, &unlabelled] {
            attempt(intruder.snapshots().patch(name, &PatchParams::default(), &forged).await)?;
        }
        for source in
            [from_claim(&victim.claim), from_snapshot(&snapshot_of_victim), from_snapshot(&unlabelled)]
        {
            copy_is_refused(&s, &intruder, &source, &second.cluster_id).await?;
        }
        snapshot_is_refused(&s, &intruder, &victim.claim, &second.cluster_id).await?;
        victim.is_intact()?;

        // A share lets the guest read, so also copy.
        s.label_volume(&victim.claim, &json!({share(&s.cluster_id): "ro"})).await?;
        let copy = s
            .management_claim(&[(names::LABEL_CLUSTER_ID, &s.cluster_id)], from_claim(&victim.claim))
            .await?;
        ensure!(read(&s.file_of(&s.infra_volume(&copy).await?).await?, ALL)? == noise(9, ALL));
        // A snapshot is shared by its content.
        let content =
            s.snapshots().get(&unlabelled).await?.data["status"]["boundVolumeSnapshotContentName"].clone();
        let content = content.as_str().context("no content")?;
        let shared = labels(json!({share(&s.cluster_id): "ro"}));
        s.contents().patch(content, &PatchParams::default(), &shared).await?;
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let copy = s.management_claim(&own, from_snapshot(&unlabelled)).await?;
        ensure!(read(&s.file_of(&s.infra_volume(&copy).await?).await?, ALL)? == noise(9, ALL));
        Ok(())
    })
    .await
}

/// Tries to copy a source into a claim of the guest.
async fn copy_is_refused(s: &Scenario, intruder: &Intruder, source: &Value, other: &str) -> Result<()> {
    let mut claim = json!({
        "metadata": {"name": unique(&s.name), "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        },
    });
    claim["spec"]["dataSource"] = source["dataSource"].clone();
    let claim = intruder.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await;
    let Some(claim) = attempt(claim)? else { return Ok(()) };
    let name = claim.name_any();
    let texts = ["PermissionDenied", "nor shared"];
    let (_, message) = s.wait_for_management_event_of("PersistentVolumeClaim", &name, &texts).await?;
    ensure!(!message.contains(other), "it names the other guest: {message}");
    let volume = infra_api::VolumeId::new(format!("pvc-{}", claim.uid().context("no UID")?))?;
    ensure!(s.infra.get_volume(&volume).await?.is_none(), "volume {volume} was created");
    intruder.claims().delete(&name, &DeleteParams::default()).await?;
    Ok(())
}

/// Tries to take a snapshot for the guest.
async fn snapshot_is_refused(s: &Scenario, intruder: &Intruder, claim: &str, other: &str) -> Result<()> {
    let name = unique(&s.name);
    let snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
        "spec": {"volumeSnapshotClassName": "nestor", "source": {"persistentVolumeClaimName": claim}},
    });
    let made = intruder.snapshots().create(&PostParams::default(), &serde_json::from_value(snapshot)?).await;
    if attempt(made)?.is_none() {
        return Ok(());
    }
    let message = eventually(&format!("snapshot {name} fails"), PATIENCE, || async {
        let status = s.snapshots().get(&name).await?.data["status"].clone();
        let message = status["error"]["message"].as_str().unwrap_or_default().to_owned();
        Ok(if message.contains("nor shared") { Ok(message) } else { Err(status.to_string()) })
    })
    .await?;
    ensure!(!message.contains(other), "it names the other guest: {message}");
    intruder.snapshots().delete(&name, &DeleteParams::default()).await?;
    Ok(())
}

#[tokio::test]
async fn a_vm_without_a_label_is_refused_and_its_first_label_counts() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let node = s.node_in(&namespace, "").await?;
        let unlabelled = labels(json!({names::LABEL_CLUSTER_ID: null}));
        namespace.vms().patch(&node.name, &PatchParams::default(), &unlabelled).await?;
        let (guest, other) = (unique("guest"), unique("guest"));
        let (own, foreign) = (claim_in(&namespace, &guest).await?, claim_in(&namespace, &other).await?);
        request(&namespace, &node, &[&own]).await?;
        let message = reason_in(&namespace, "GuestUnknown").await?;
        ensure!(message.contains(&node.name) && message.contains(names::LABEL_CLUSTER_ID), "{message}");
        let label = |guest: &str| labels(json!({names::LABEL_CLUSTER_ID: guest}));
        namespace.vms().patch(&node.name, &PatchParams::default(), &label(&guest)).await?;
        plugged(&s, &node, false).await?;
        namespace.vms().patch(&node.name, &PatchParams::default(), &label(&other)).await?;
        request(&namespace, &node, &[&foreign]).await?;
        reason_in(&namespace, "NotShared").await?;
        request(&namespace, &node, &[]).await?;
        s.no_attachments(&node).await
    })
    .await
}

#[tokio::test]
async fn a_vm_that_was_attached_before_its_guest_was_known_keeps_its_disk_but_gets_no_other() -> Result<()> {
    run_alone(|s| async move {
        let namespace = s.own_namespace().await?;
        let guest = unique("guest");
        let node = s.node_in(&namespace, &guest).await?;
        let (first, second) = (claim_in(&namespace, &guest).await?, claim_in(&namespace, &guest).await?);
        request(&namespace, &node, &[&first]).await?;
        plugged(&s, &node, false).await?;
        eventually("the disk is reported", PATIENCE, || async {
            let attached = attached_in(&namespace).await?;
            Ok(if attached == [first.as_str()] { Ok(()) } else { Err(format!("{attached:?}")) })
        })
        .await?;

        // As after an upgrade from a version without ownership: neither a label nor a record.
        s.kill_component("mgmt-csi").await?;
        let (params, uid) = (PatchParams::default(), namespace.vms().get(&node.name).await?.uid());
        let label = labels(json!({names::LABEL_CLUSTER_ID: null}));
        namespace.vms().patch(&node.name, &params, &label).await?;
        let entry = Patch::Merge(json!({"data": {uid.context("no UID")?: null}}));
        s.vm_guests().patch(VM_GUESTS, &params, &entry).await?;
        s.start_component("mgmt-csi").await?;

        request(&namespace, &node, &[&first, &second]).await?;
        reason_in(&namespace, "GuestUnknown").await?;
        plugged(&s, &node, false).await?;
        let attached = attached_in(&namespace).await?;
        ensure!(attached == [first.as_str()], "{attached:?}");
        request(&namespace, &node, &[]).await?;
        s.no_attachments(&node).await
    })
    .await
}

/// Claims whose disks are reported as attached.
async fn attached_in(namespace: &OwnNamespace) -> Result<Vec<String>> {
    let all = namespace.attachments().list(&ListParams::default()).await?.items.into_iter();
    let attached = all.filter(|one| one.status.as_ref().is_some_and(|status| status.attached));
    Ok(attached.map(|one| one.spec.volume_name.as_str().to_owned()).collect())
}

/// Creates a claim of a guest.
async fn claim_in(namespace: &OwnNamespace, guest: &str) -> Result<String> {
    let claim = json!({
        "metadata": {"name": unique("claim"), "labels": {names::LABEL_CLUSTER_ID: guest}},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        },
    });
    let made = namespace.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    Ok(made.name_any())
}

/// Sets the entries of a VM's `spec.volumes`.
async fn request(namespace: &OwnNamespace, node: &LoopNode, claims: &[&str]) -> Result<()> {
    let entry = |claim: &&str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
    let patch = json!({"spec": {"volumes": claims.iter().map(entry).collect::<Vec<_>>()}});
    namespace.vms().patch(&node.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// Waits until a VolumeAttachment in the namespace has this error; returns its message.
async fn reason_in(namespace: &OwnNamespace, reason: &str) -> Result<String> {
    eventually(&format!("an attach that fails with {reason}"), PATIENCE, || async {
        let all = namespace.attachments().list(&Default::default()).await?;
        let errors: Vec<_> = all.into_iter().filter_map(|one| one.status?.error).collect();
        let found = errors.iter().find(|error| error.reason == reason).map(|error| error.message.clone());
        Ok(found.ok_or_else(|| format!("{errors:?}")))
    })
    .await
}

#[tokio::test]
async fn a_volume_without_a_record_gets_the_labels_of_its_claim_once() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let handle = s.infra_volume(&s.management_claim(&[], json!({})).await?).await?.id;
        let (volume, guest) = (unique("static"), unique("guest"));
        let object = json!({
            "metadata": {"name": volume},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "4Mi"}, "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": handle},
                "claimRef": {"namespace": namespace.name, "name": "data"},
            },
        });
        s.volumes().create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let claim = json!({
            "metadata": {"name": "data", "labels": {names::LABEL_CLUSTER_ID: guest, share("reader"): "ro"}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                "resources": {"requests": {"storage": "4Mi"}},
            },
        });
        namespace.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        eventually("the volume is recorded", PATIENCE, || async {
            let labels = s.volumes().get(&volume).await?.labels().clone();
            let is_recorded =
                labels.get(names::LABEL_CLUSTER_ID) == Some(&guest) && labels.contains_key(&share("reader"));
            Ok(if is_recorded { Ok(()) } else { Err(format!("{labels:?}")) })
        })
        .await?;
        let forged = labels(json!({names::LABEL_CLUSTER_ID: "thief", share("reader"): "rw"}));
        namespace.claims().patch("data", &PatchParams::default(), &forged).await?;
        eventually("the claim has the labels of the volume again", PATIENCE, || async {
            let labels = namespace.claims().get("data").await?.labels().clone();
            let is_restored = labels.get(names::LABEL_CLUSTER_ID) == Some(&guest)
                && labels.get(&share("reader")).map(String::as_str) == Some("ro");
            Ok(if is_restored { Ok(()) } else { Err(format!("{labels:?}")) })
        })
        .await?;
        ensure!(s.volumes().get(&volume).await?.labels().get(names::LABEL_CLUSTER_ID) == Some(&guest));
        namespace.claims().delete("data", &DeleteParams::default()).await?;
        s.volumes().delete(&volume, &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}
