//! Fairness between guests: load by one guest does not delay others, and causes no needless objects or events. The
//! tests check counts and order; `cargo lab bench fairness` measures times.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crds::{VolumeAttachment, names};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use lab::LoopNode;
use lab::audit::{Entry, Mark};
use serde_json::{Value, json};
use tests::driver::new_volume;
use tests::own_namespace::OwnNamespace;
use tests::program::{management_cluster, shim_replica};
use tests::{MIB, PATIENCE, Scenario, eventually, run, run_alone, unique};

const SHIM: &str = "vm-operator-shim";
const MGMT: &str = "mgmt-csi";

/// Number of missing claims in a VM's spec.
const MISSING: usize = 128;
/// Number of attachments of a dead VM.
const DEAD_ATTACHMENTS: usize = 1000;
/// Number of disks that are attached and removed: enough to count as flapping.
const NOISY_DISKS: usize = 40;

fn entry(claim: &str) -> Value {
    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
}

fn missing_claims(count: usize) -> Vec<String> {
    let first = unique("absent");
    (0..count).map(|number| format!("{first}-{number}")).collect()
}

/// Replaces a VM's `spec.volumes`.
async fn set_volumes(client: &Client, namespace: &str, vm: &str, claims: &[String]) -> kube::Result<()> {
    let entries: Vec<Value> = claims.iter().map(|claim| entry(claim)).collect();
    let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
    let vms = lab::virtual_machines::api_in(client, namespace);
    vms.patch(vm, &PatchParams::default(), &patch).await.map(drop)
}

/// Waits until a VM's status has `count` disks that `pick` accepts, and no others.
async fn wait_for_disks(
    client: &Client,
    namespace: &str,
    vm: &str,
    count: usize,
    pick: impl Fn(&crds::VirtualMachineVolumeStatus) -> bool,
) -> Result<()> {
    let vms = lab::virtual_machines::api_in(client, namespace);
    eventually(&format!("VM {vm} has {count} disks"), PATIENCE, || async {
        let all = vms.get(vm).await?.status.unwrap_or_default().volumes;
        let accepted = all.iter().filter(|disk| pick(disk)).count();
        let matches = accepted == count && all.len() == count;
        Ok(if matches { Ok(()) } else { Err(format!("{accepted} of {}: {:?}", all.len(), all.first())) })
    })
    .await
}

fn is_missing(disk: &crds::VirtualMachineVolumeStatus) -> bool {
    let claim = disk.name.as_str();
    let error = disk.error.as_deref().unwrap_or_default();
    !disk.attached && error.starts_with("ClaimNotFound") && error.contains(claim)
}

/// The writes of one of our components to a resource since `mark`.
fn writes_by(s: &Scenario, mark: Mark, by: &str, resource: &str) -> Result<Vec<Entry>> {
    let mut all = s.lab.audit()?.since(mark)?;
    all.retain(|one| one.user_agent.starts_with(by) && one.is_write() && one.resource == resource);
    Ok(all)
}

/// The events about an object.
async fn events_of(client: &Client, namespace: &str, object: &str) -> Result<Vec<Event>> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let about = ListParams::default().fields(&format!("involvedObject.name={object}"));
    Ok(events.list(&about).await?.items)
}

#[tokio::test]
async fn missing_claims_cause_no_attachments_and_one_event() -> Result<()> {
    run_alone(|s| async move {
        let (noisy, quiet) = (s.node().await?, s.node().await?);
        let mark = s.lab.audit()?.mark()?;
        for _ in 0..3 {
            // Different claims each time, so that nothing is deduplicated.
            set_volumes(&s.management, &s.namespace, &noisy.name, &missing_claims(MISSING)).await?;
            wait_for_disks(&s.management, &s.namespace, &noisy.name, MISSING, is_missing).await?;
            set_volumes(&s.management, &s.namespace, &noisy.name, &[]).await?;
            wait_for_disks(&s.management, &s.namespace, &noisy.name, 0, |_| true).await?;
        }
        // One of the claims is created later.
        let late = s.csi_name();
        let claim = s.claim_name(&late);
        let requested = [missing_claims(1), vec![claim.clone()]].concat();
        set_volumes(&s.management, &s.namespace, &noisy.name, &requested).await?;
        wait_for_disks(&s.management, &s.namespace, &noisy.name, 2, is_missing).await?;
        s.driver.create(new_volume(&late, MIB, "nestor")).await?;
        eventually("the late claim is attached", PATIENCE, || async {
            let disk = s.disk(&noisy.name, &claim).await?;
            Ok(if disk.as_ref().is_some_and(|disk| disk.attached) {
                Ok(())
            } else {
                Err(format!("{disk:?}"))
            })
        })
        .await?;
        set_volumes(&s.management, &s.namespace, &noisy.name, &[]).await?;
        wait_for_disks(&s.management, &s.namespace, &noisy.name, 0, |_| true).await?;

        let handle = s.volume().await?;
        s.driver.publish(&handle, &quiet.name).await?;
        s.driver.unpublish(&handle, &quiet.name).await?;

        let made = writes_by(&s, mark, SHIM, "volumeattachments")?;
        let made: Vec<&str> = made.iter().filter(|one| one.verb == "create").map(|one| &*one.name).collect();
        assert_eq!(made.len(), 2, "one for the late claim, one for the other VM: {made:?}");
        let event = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(&s.management, &s.namespace, &noisy.name).await?;
            Ok(found
                .into_iter()
                .find(|event| event.reason.as_deref() == Some("ClaimNotFound"))
                .ok_or_else(|| "no event".to_owned()))
        })
        .await?;
        let note = event.message.unwrap_or_default();
        ensure!(note.starts_with("128 claims not found: absent-") && note.ends_with('…'), "{note}");
        let by_shim = writes_by(&s, mark, SHIM, "events")?.len();
        let by_mgmt = writes_by(&s, mark, MGMT, "events")?.len();
        assert_eq!((by_shim, by_mgmt), (1, 0), "one event per VM and cause");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_vm_spec_cannot_have_more_volumes_than_the_limit() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let many = missing_claims(crds::MAX_VOLUMES + 1);
        let refused = set_volumes(&s.management, &s.namespace, &node.name, &many).await.err();
        let refused = refused.context("a VM has more entries than the limit")?.to_string();
        ensure!(refused.contains("spec.volumes") && refused.contains("256"), "{refused}");
        set_volumes(&s.management, &s.namespace, &node.name, &many[1..]).await?;
        wait_for_disks(&s.management, &s.namespace, &node.name, crds::MAX_VOLUMES, is_missing).await?;
        set_volumes(&s.management, &s.namespace, &node.name, &[]).await?;
        wait_for_disks(&s.management, &s.namespace, &node.name, 0, |_| true).await
    })
    .await
}

/// Creates a VM in its own namespace, with bound claims there.
async fn vm_in_own_namespace(s: &Scenario, claims: usize) -> Result<(OwnNamespace, LoopNode, Vec<String>)> {
    let namespace = s.own_namespace().await?;
    let guest = unique("guest");
    let node = s.node_in(&namespace, &guest).await?;
    let made: Vec<String> = stream::iter(0..claims)
        .map(|_| async {
            let claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": {"name": unique("claim"), "labels": {names::LABEL_CLUSTER_ID: guest}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            }))?;
            anyhow::Ok(namespace.claims().create(&PostParams::default(), &claim).await?.name_any())
        })
        .buffer_unordered(8)
        .try_collect()
        .await?;
    eventually("the claims are bound", PATIENCE, || async {
        let all = namespace.claims().list(&ListParams::default()).await?;
        let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref()?.phase.clone();
        let bound = all.iter().filter(|claim| phase(claim).as_deref() == Some("Bound")).count();
        Ok(if bound == claims { Ok(()) } else { Err(format!("{bound} of {claims}")) })
    })
    .await?;
    Ok((namespace, node, made))
}

/// Waits until a VM's status has a disk that `pick` accepts, and returns its name.
async fn wait_for_disk(
    vms: &Api<crds::VirtualMachine>,
    vm: &str,
    pick: impl Fn(&crds::VirtualMachineVolumeStatus) -> bool,
) -> Result<String> {
    eventually(&format!("a disk of VM {vm}"), PATIENCE, || async {
        let all = vms.get(vm).await?.status.unwrap_or_default().volumes;
        Ok(all
            .iter()
            .find(|disk| pick(disk))
            .map(|disk| disk.name.clone())
            .ok_or(format!("{:?}", all.first())))
    })
    .await
}

fn is_attached(disk: &crds::VirtualMachineVolumeStatus) -> bool {
    disk.attached
}

fn is_delayed(disk: &crds::VirtualMachineVolumeStatus) -> bool {
    let error = disk.error.as_deref().unwrap_or_default();
    !disk.attached
        && error.starts_with("AttachDelayed")
        && error.contains("attached in its turn, at about 20")
}

#[tokio::test]
async fn a_vm_that_flaps_waits_with_a_message_and_delays_no_other_guest() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let (namespace, noisy, claims) = vm_in_own_namespace(&s, NOISY_DISKS).await?;
        s.stop_component(SHIM).await?;
        let flags = ["--attach-burst=40", "--attach-rate=2"];
        let shim = shim_replica(&s, &management_cluster(&s)?.kubeconfig_of(SHIM), &flags).await?;
        let (client, vms) = (&s.management, namespace.vms());
        set_volumes(client, &namespace.name, &noisy.name, &claims).await?;
        wait_for_disks(client, &namespace.name, &noisy.name, NOISY_DISKS, is_attached).await?;
        set_volumes(client, &namespace.name, &noisy.name, &[]).await?;
        wait_for_disks(client, &namespace.name, &noisy.name, 0, |_| true).await?;
        // All disks were removed within a minute: now there is one attach per second, and each disk that waits says why.
        set_volumes(client, &namespace.name, &noisy.name, &claims).await?;
        wait_for_disk(&vms, &noisy.name, is_delayed).await?;
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        let first = wait_for_disk(&vms, &noisy.name, is_attached).await?;
        let disks = async || anyhow::Ok(vms.get(&noisy.name).await?.status.unwrap_or_default().volumes);
        ensure!(disks().await?.iter().any(is_delayed), "the other guest waited until all were attached");
        // A detach does not wait.
        let others: Vec<String> =
            claims.iter().filter(|claim| names::volume_entry(claim) != first).cloned().collect();
        set_volumes(client, &namespace.name, &noisy.name, &others).await?;
        eventually("the disk is detached", PATIENCE, || async {
            let left = disks().await?.into_iter().find(|disk| disk.name.starts_with(&first));
            Ok(left.map_or(Ok(()), |left| Err(format!("{left:?}"))))
        })
        .await?;
        ensure!(disks().await?.iter().any(is_delayed), "the detach waited until all others were attached");
        // The others are attached in the end.
        wait_for_disks(client, &namespace.name, &noisy.name, NOISY_DISKS - 1, is_attached).await?;
        let event = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(client, &namespace.name, &noisy.name).await?;
            Ok(found.into_iter().next().ok_or_else(|| "no event".to_owned()))
        })
        .await?;
        let note = event.message.unwrap_or_default();
        assert_eq!(event.reason.as_deref(), Some("AttachDelayed"));
        ensure!(
            note.contains("removed 33 or more disks within a minute") && note.contains(" wait, "),
            "{note}"
        );
        set_volumes(client, &namespace.name, &noisy.name, &[]).await?;
        wait_for_disks(client, &namespace.name, &noisy.name, 0, |_| true).await?;
        let status = shim.stop().await?;
        ensure!(status.success(), "the shim exited with {status}");
        s.start_component(SHIM).await
    })
    .await
}

/// Creates VolumeAttachments of a VM without entries in its spec.
async fn create_attachments_without_entries(s: &Arc<Scenario>, vm: &LoopNode, count: usize) -> Result<()> {
    let owner = s.vms().get(&vm.name).await?;
    let owner = json!({
        "apiVersion": format!("{}/{}", crds::VIRTUAL_MACHINE_GROUP, crds::VIRTUAL_MACHINE_VERSIONS[0]),
        "kind": "VirtualMachine", "name": vm.name, "uid": owner.uid(),
    });
    let made = stream::iter(missing_claims(count)).map(|claim| {
        let object = json!({
            "metadata": {
                "name": names::volume_attachment(&(&vm.name).into(), &(&claim).into()), "ownerReferences": [owner],
                "finalizers": [names::FINALIZER_DETACH],
            },
            "spec": {"nodeUUID": vm.uuid, "volumeName": claim},
        });
        async move {
            let object: VolumeAttachment = serde_json::from_value(object)?;
            s.attachments().create(&PostParams::default(), &object).await?;
            anyhow::Ok(())
        }
    });
    made.buffer_unordered(16).try_collect().await
}

#[tokio::test]
async fn a_thousand_attachments_of_a_dead_vm_do_not_delay_others() -> Result<()> {
    run_alone(|s| async move {
        let (dead, node, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        create_attachments_without_entries(&s, &dead, DEAD_ATTACHMENTS).await?;
        for _ in 0..3 {
            s.driver.publish(&handle, &node.name).await?;
            s.driver.unpublish(&handle, &node.name).await?;
        }
        let left = async || {
            let first = s.attachments().list(&ListParams::default().limit(1)).await?;
            let more = first.metadata.remaining_item_count.unwrap_or_default();
            anyhow::Ok(first.items.len() as i64 + more)
        };
        ensure!(left().await? > 0, "the attach waited until all were deleted");
        eventually("all VolumeAttachments of the dead VM are deleted", 5 * PATIENCE, || async {
            let left = left().await?;
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left} left")) })
        })
        .await?;
        // One event per cause on the VM, and one on the attachment that failed first.
        let all: Api<Event> = Api::namespaced(s.management.clone(), &s.namespace);
        let mut about = all.list(&ListParams::default()).await?.items;
        about.retain(|event| {
            event.involved_object.name.as_deref().is_some_and(|name| name.starts_with(&dead.name))
        });
        let about: Vec<_> = about.iter().map(|event| (&event.reason, &event.message)).collect();
        ensure!(about.len() <= 4, "{} events: {about:#?}", about.len());
        Ok(())
    })
    .await
}
