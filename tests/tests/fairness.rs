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
use tests::{MIB, PATIENCE, Scenario, alone, eventually, run, unique};

const SHIM: &str = "vm-operator-shim";
const MGMT: &str = "mgmt-csi";

/// Number of missing claims in a VM's spec.
const ABSENT: usize = 128;
/// Number of attachments of a dead VM.
const DEAD: usize = 1000;
/// Number of disks that are attached and detached repeatedly: enough to use up the burst.
const FLAPPING: usize = 40;

fn entry(claim: &str) -> Value {
    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
}

fn absent(count: usize) -> Vec<String> {
    let first = unique("absent");
    (0..count).map(|number| format!("{first}-{number}")).collect()
}

/// Replaces a VM's `spec.volumes`.
async fn set(client: &Client, namespace: &str, vm: &str, claims: &[String]) -> kube::Result<()> {
    let entries: Vec<Value> = claims.iter().map(|claim| entry(claim)).collect();
    let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
    let machines = lab::virtual_machines::api_in(client, namespace);
    machines.patch(vm, &PatchParams::default(), &patch).await.map(drop)
}

/// Waits until a VM's status has `count` disks that `pick` accepts, and no others.
async fn told(
    client: &Client,
    namespace: &str,
    vm: &str,
    count: usize,
    pick: impl Fn(&crds::VirtualMachineVolumeStatus) -> bool,
) -> Result<()> {
    let machines = lab::virtual_machines::api_in(client, namespace);
    eventually(&format!("VM {vm} has {count} disks"), PATIENCE, || async {
        let all = machines.get(vm).await?.status.unwrap_or_default().volumes;
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
fn written(s: &Scenario, mark: Mark, by: &str, resource: &str) -> Result<Vec<Entry>> {
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
    let _alone = alone().await;
    run(|s| async move {
        let (loud, quiet) = (s.node().await?, s.node().await?);
        let mark = s.lab.audit()?.mark()?;
        for _ in 0..3 {
            // Different claims each time, so that nothing is deduplicated.
            set(&s.management, &s.namespace, &loud.name, &absent(ABSENT)).await?;
            told(&s.management, &s.namespace, &loud.name, ABSENT, is_missing).await?;
            set(&s.management, &s.namespace, &loud.name, &[]).await?;
            told(&s.management, &s.namespace, &loud.name, 0, |_| true).await?;
        }
        // One of the claims is created later.
        let late = s.csi_name();
        let claim = s.claim_name(&late);
        let wanted = [absent(1), vec![claim.clone()]].concat();
        set(&s.management, &s.namespace, &loud.name, &wanted).await?;
        told(&s.management, &s.namespace, &loud.name, 2, is_missing).await?;
        s.driver.create(new_volume(&late, MIB, "nestor")).await?;
        eventually("the late claim is attached", PATIENCE, || async {
            let disk = s.disk(&loud.name, &claim).await?;
            Ok(if disk.as_ref().is_some_and(|disk| disk.attached) {
                Ok(())
            } else {
                Err(format!("{disk:?}"))
            })
        })
        .await?;
        set(&s.management, &s.namespace, &loud.name, &[]).await?;
        told(&s.management, &s.namespace, &loud.name, 0, |_| true).await?;

        let handle = s.volume().await?;
        s.driver.publish(&handle, &quiet.name).await?;
        s.driver.unpublish(&handle, &quiet.name).await?;

        let made = written(&s, mark, SHIM, "volumeattachments")?;
        let made: Vec<&str> = made.iter().filter(|one| one.verb == "create").map(|one| &*one.name).collect();
        assert_eq!(made.len(), 2, "one for the late claim, one for the other VM: {made:?}");
        let event = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(&s.management, &s.namespace, &loud.name).await?;
            Ok(found
                .into_iter()
                .find(|event| event.reason.as_deref() == Some("ClaimNotFound"))
                .ok_or_else(|| "no event".to_owned()))
        })
        .await?;
        let note = event.message.unwrap_or_default();
        ensure!(note.starts_with("128 claims not found: absent-") && note.ends_with('…'), "{note}");
        let by_shim = written(&s, mark, SHIM, "events")?.len();
        let by_mgmt = written(&s, mark, MGMT, "events")?.len();
        assert_eq!((by_shim, by_mgmt), (1, 0), "one event per VM and cause");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_vm_spec_cannot_have_more_volumes_than_the_limit() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let many = absent(crds::MAX_VOLUMES + 1);
        let refused = set(&s.management, &s.namespace, &node.name, &many).await.err();
        let refused = refused.context("a VM has more entries than the limit")?.to_string();
        ensure!(refused.contains("spec.volumes") && refused.contains("256"), "{refused}");
        set(&s.management, &s.namespace, &node.name, &many[1..]).await?;
        told(&s.management, &s.namespace, &node.name, crds::MAX_VOLUMES, is_missing).await?;
        set(&s.management, &s.namespace, &node.name, &[]).await?;
        told(&s.management, &s.namespace, &node.name, 0, |_| true).await
    })
    .await
}

/// Creates a VM in its own namespace, with bound claims there.
async fn elsewhere(s: &Scenario, claims: usize) -> Result<(OwnNamespace, LoopNode, Vec<String>)> {
    let namespace = s.own_namespace().await?;
    let node = s.node_in(&namespace).await?;
    let made: Vec<String> = stream::iter(0..claims)
        .map(|_| async {
            let claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": {"name": unique("claim")},
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

#[tokio::test]
async fn an_attach_completes_while_another_guest_floods_the_shim() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let (namespace, loud, claims) = elsewhere(&s, FLAPPING).await?;
        s.stop_component(SHIM).await?;
        let flags = ["--attach-burst=40", "--attach-rate=1"];
        let shim = shim_replica(&s, &management_cluster(&s)?.kubeconfig_of(SHIM), &flags).await?;
        let client = &s.management;
        let is_attached = |disk: &crds::VirtualMachineVolumeStatus| disk.attached;
        set(client, &namespace.name, &loud.name, &claims).await?;
        told(client, &namespace.name, &loud.name, FLAPPING, is_attached).await?;
        set(client, &namespace.name, &loud.name, &[]).await?;
        told(client, &namespace.name, &loud.name, 0, |_| true).await?;
        // The burst is used up: the second round of attaches is rate-limited.
        set(client, &namespace.name, &loud.name, &claims).await?;
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        let status = namespace.vms().get(&loud.name).await?.status.unwrap_or_default();
        let attached = status.volumes.iter().filter(|disk| disk.attached).count();
        ensure!(attached < FLAPPING, "the other guest waited until all {attached} were attached");
        // All of them are attached in the end.
        told(client, &namespace.name, &loud.name, FLAPPING, is_attached).await?;
        let events = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(client, &namespace.name, &loud.name).await?;
            Ok(if found.is_empty() { Err("no event".to_owned()) } else { Ok(found) })
        })
        .await?;
        let reasons: Vec<_> = events.iter().filter_map(|event| event.reason.as_deref()).collect();
        assert_eq!(reasons, ["AttachDelayed"]);
        set(client, &namespace.name, &loud.name, &[]).await?;
        told(client, &namespace.name, &loud.name, 0, |_| true).await?;
        let status = shim.stop().await?;
        ensure!(status.success(), "the shim exited with {status}");
        s.start_component(SHIM).await
    })
    .await
}

/// Creates VolumeAttachments of a VM without entries in its spec.
async fn leave_attachments(s: &Arc<Scenario>, vm: &LoopNode, count: usize) -> Result<()> {
    let owner = s.machines().get(&vm.name).await?;
    let owner = json!({
        "apiVersion": format!("{}/{}", crds::VIRTUAL_MACHINE_GROUP, crds::VIRTUAL_MACHINE_VERSIONS[0]),
        "kind": "VirtualMachine", "name": vm.name, "uid": owner.uid(),
    });
    let made = stream::iter(absent(count)).map(|claim| {
        let object = json!({
            "metadata": {
                "name": names::volume_attachment(&vm.name, &claim), "ownerReferences": [owner],
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
    let _alone = alone().await;
    run(|s| async move {
        let (dead, node, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        leave_attachments(&s, &dead, DEAD).await?;
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
