//! What one guest does has no other guest wait behind it: nothing is made for nothing, little is told of much, and who
//! has much waits behind itself. Counts and order are asserted here; how long things take is measured by
//! `cargo lab bench fairness`.

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
use tests::program::{Running, binary};
use tests::{MIB, PATIENCE, Scenario, alone, eventually, run, unique};

const SHIM: &str = "vm-operator-shim";
const MGMT: &str = "mgmt-csi";

/// How many claims a VM names that are not there.
const ABSENT: usize = 128;
/// How many attachments a dead VM has.
const DEAD: usize = 1000;
/// How many disks are attached and taken back again and again: enough to have no burst left.
const FLAPPING: usize = 40;

fn entry(claim: &str) -> Value {
    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
}

fn absent(count: usize) -> Vec<String> {
    let first = unique("absent");
    (0..count).map(|number| format!("{first}-{number}")).collect()
}

/// Writes all of a VM's `spec.volumes`, as who may write to it can.
async fn set(client: &Client, namespace: &str, vm: &str, claims: &[String]) -> kube::Result<()> {
    let entries: Vec<Value> = claims.iter().map(|claim| entry(claim)).collect();
    let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
    let machines = lab::machines::api_in(client, namespace);
    machines.patch(vm, &PatchParams::default(), &patch).await.map(drop)
}

/// Waits until a VM's status tells of so many disks that `pick` takes, and of no others.
async fn told(
    client: &Client,
    namespace: &str,
    vm: &str,
    count: usize,
    pick: impl Fn(&crds::VirtualMachineVolumeStatus) -> bool,
) -> Result<()> {
    let machines = lab::machines::api_in(client, namespace);
    eventually(&format!("VM {vm} tells of {count} disks"), PATIENCE, || async {
        let all = machines.get(vm).await?.status.unwrap_or_default().volumes;
        let so = all.iter().filter(|disk| pick(disk)).count();
        let is_so = so == count && all.len() == count;
        Ok(if is_so { Ok(()) } else { Err(format!("{so} of {}: {:?}", all.len(), all.first())) })
    })
    .await
}

fn is_missing(disk: &crds::VirtualMachineVolumeStatus) -> bool {
    let claim = disk.name.as_str();
    let error = disk.error.as_deref().unwrap_or_default();
    !disk.attached && error.starts_with("ClaimNotFound") && error.contains(claim)
}

/// What our parts wrote of a kind since then.
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
async fn nothing_is_made_for_claims_that_are_absent_and_one_event_tells_of_them_all() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (loud, quiet) = (s.node().await?, s.node().await?);
        let mark = s.lab.audit()?.mark()?;
        for _ in 0..3 {
            // Other claims each time, so that nothing is the same again.
            set(&s.management, &s.namespace, &loud.name, &absent(ABSENT)).await?;
            told(&s.management, &s.namespace, &loud.name, ABSENT, is_missing).await?;
            set(&s.management, &s.namespace, &loud.name, &[]).await?;
            told(&s.management, &s.namespace, &loud.name, 0, |_| true).await?;
        }
        // One of them is made after all.
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
        assert_eq!(made.len(), 2, "for the late claim, and for the other VM: {made:?}");
        let event = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(&s.management, &s.namespace, &loud.name).await?;
            Ok(found
                .into_iter()
                .find(|event| event.reason.as_deref() == Some("ClaimNotFound"))
                .ok_or_else(|| "none".to_owned()))
        })
        .await?;
        let note = event.message.unwrap_or_default();
        ensure!(note.starts_with("128 claims not found: absent-") && note.ends_with('…'), "{note}");
        let by_shim = written(&s, mark, SHIM, "events")?.len();
        let by_mgmt = written(&s, mark, MGMT, "events")?.len();
        assert_eq!((by_shim, by_mgmt), (1, 0), "one event for one VM and cause");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_vm_cannot_name_more_disks_than_it_can_have() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let many = absent(crds::MAX_VOLUMES + 1);
        let refused = set(&s.management, &s.namespace, &node.name, &many).await.err();
        let refused = refused.context("a VM has more entries than disks")?.to_string();
        ensure!(refused.contains("spec.volumes") && refused.contains("256"), "{refused}");
        set(&s.management, &s.namespace, &node.name, &many[1..]).await?;
        told(&s.management, &s.namespace, &node.name, crds::MAX_VOLUMES, is_missing).await?;
        set(&s.management, &s.namespace, &node.name, &[]).await?;
        told(&s.management, &s.namespace, &node.name, 0, |_| true).await
    })
    .await
}

/// A VM in a namespace of its own, with claims there that are bound.
async fn elsewhere(s: &Scenario, claims: usize) -> Result<(tests::place::Place, LoopNode, Vec<String>)> {
    let place = s.place().await?;
    let node = s.machine_at(&place).await?;
    let made: Vec<String> = stream::iter(0..claims)
        .map(|_| async {
            let claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": {"name": unique("claim")},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            }))?;
            anyhow::Ok(place.claims().create(&PostParams::default(), &claim).await?.name_any())
        })
        .buffer_unordered(8)
        .try_collect()
        .await?;
    eventually("the claims are bound", PATIENCE, || async {
        let all = place.claims().list(&ListParams::default()).await?;
        let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref()?.phase.clone();
        let bound = all.iter().filter(|claim| phase(claim).as_deref() == Some("Bound")).count();
        Ok(if bound == claims { Ok(()) } else { Err(format!("{bound} of {claims}")) })
    })
    .await?;
    Ok((place, node, made))
}

#[tokio::test]
async fn while_one_guest_floods_anothers_attach_is_done_before_the_floods_end() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let (place, loud, claims) = elsewhere(&s, FLAPPING).await?;
        s.stop_part(SHIM).await?;
        let shim = slow_shim(&s).await?;
        let client = &s.management;
        let is_attached = |disk: &crds::VirtualMachineVolumeStatus| disk.attached;
        set(client, &place.namespace, &loud.name, &claims).await?;
        told(client, &place.namespace, &loud.name, FLAPPING, is_attached).await?;
        set(client, &place.namespace, &loud.name, &[]).await?;
        told(client, &place.namespace, &loud.name, 0, |_| true).await?;
        // It undoes what it asked for: what it asks for again comes little by little.
        set(client, &place.namespace, &loud.name, &claims).await?;
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        let status = place.machines().get(&loud.name).await?.status.unwrap_or_default();
        let attached = status.volumes.iter().filter(|disk| disk.attached).count();
        ensure!(attached < FLAPPING, "the other waited until all {attached} were attached");
        // And all of it comes.
        told(client, &place.namespace, &loud.name, FLAPPING, is_attached).await?;
        let events = eventually("an event about the VM", PATIENCE, || async {
            let found = events_of(client, &place.namespace, &loud.name).await?;
            Ok(if found.is_empty() { Err("none".to_owned()) } else { Ok(found) })
        })
        .await?;
        let reasons: Vec<_> = events.iter().filter_map(|event| event.reason.as_deref()).collect();
        assert_eq!(reasons, ["AttachDelayed"]);
        set(client, &place.namespace, &loud.name, &[]).await?;
        told(client, &place.namespace, &loud.name, 0, |_| true).await?;
        let ended = shim.stop().await?;
        ensure!(ended.success(), "the shim ended with {ended}");
        s.start_part(SHIM).await
    })
    .await
}

/// A shim by which a VM that undoes what it asked for has one disk attached per second.
async fn slow_shim(s: &Scenario) -> Result<Running> {
    let management = s.lab.state().management.as_ref().context("the lab has no management cluster")?;
    let kubeconfig = format!("--kubeconfig={}", management.kubeconfig_of(SHIM).display());
    let words = [
        &*kubeconfig,
        "--lease-namespace=nestor-system",
        "--lease-duration=5",
        "--lease-renew-deadline=4",
        "--lease-retry-period=1",
        "--attach-burst=40",
        "--attach-rate=1",
    ];
    let running = Running::start(&binary(&s.lab, SHIM), &words).await?;
    running.ready().await?;
    Ok(running)
}

/// Attachments of a VM that nothing asks for.
async fn leave(s: &Arc<Scenario>, vm: &LoopNode, count: usize) -> Result<()> {
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
async fn a_thousand_attachments_of_a_dead_vm_hold_up_its_own_alone() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (dead, node, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        leave(&s, &dead, DEAD).await?;
        for _ in 0..3 {
            s.driver.publish(&handle, &node.name).await?;
            s.driver.unpublish(&handle, &node.name).await?;
        }
        let left = async || {
            let first = s.attachments().list(&ListParams::default().limit(1)).await?;
            let more = first.metadata.remaining_item_count.unwrap_or_default();
            anyhow::Ok(first.items.len() as i64 + more)
        };
        ensure!(left().await? > 0, "the other waited until all were gone");
        eventually("all of them have gone", 5 * PATIENCE, || async {
            let left = left().await?;
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left} left")) })
        })
        .await?;
        // One event of the VM for each cause, and one of an attachment where that was alone at first.
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
