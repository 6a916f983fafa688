//! Raw block volumes that several VMs of KubeVirt write to at once, and how all others stay with one VM.

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_ATTACHED_TO, ANNOTATION_NEVER_ATTACHED, LABEL_CLUSTER_ID};
use csi::proto::volume_capability::access_mode::Mode;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tests::driver::{Driver, block, mount};
use tests::pods::{self, ClaimOptions, GONE, PodScenario, Script, Volume};
use tests::{PATIENCE, eventually};
use tonic::Code;

use super::policies::{Account, Machine, Two, claim_with, disk, record, template, volume};
use super::{Clusters, GUEST};

/// Shell functions: `say TEXT BLOCK` and `hear TEXT BLOCK`, past the page caches of the VMs.
const TALK: &str = "say() { printf '%s' \"$1\" | dd of=/dev/volume bs=4096 seek=$2 conv=sync,notrunc oflag=direct 2>/dev/null; }
    hear() {
        until [ \"$(dd if=/dev/volume bs=4096 skip=$2 count=1 iflag=direct 2>/dev/null | head -c ${#1})\" = \"$1\" ]; do sleep 1; done
    }\n";

fn talk(script: &str) -> String {
    format!("{TALK}{script}")
}

/// A claim with these access modes and volumeMode Block, of a class whose volumes may have any.
async fn bound(pods: &PodScenario, name: &str, modes: &[&str]) -> Result<Volume> {
    let more = json!({"accessModes": modes, "resources": {"requests": {"storage": "4Mi"}}});
    let class = Some("nestor-shareable".to_owned());
    pods.claim(name, &ClaimOptions { class, more, ..pods::block() }).await
}

/// The disk of a volume in the template of a VM.
async fn disk_in(clusters: &Clusters, vm: &str, volume: &Volume) -> Result<Option<Value>> {
    let machine = clusters.kubevirt("VirtualMachine").get(vm).await?;
    let disks = machine.data["spec"]["template"]["spec"]["domain"]["devices"]["disks"].as_array().cloned();
    Ok(disks.context("no disks")?.into_iter().find(|disk| disk["name"] == volume.handle.as_str()))
}

/// Waits until a VM neither has the volume nor is asked to.
async fn left(clusters: &Clusters, vm: &str, volume: &Volume) -> Result<()> {
    eventually(&format!("{vm} has no disk {}", volume.handle), GONE, || async {
        let (entry, status) =
            (disk_in(clusters, vm, volume).await?, clusters.status(vm, &volume.handle).await?);
        Ok(if entry.is_none() && status.is_none() { Ok(()) } else { Err(format!("{entry:?}, {status:?}")) })
    })
    .await
}

async fn management_claim(clusters: &Clusters, volume: &Volume) -> Result<PersistentVolumeClaim> {
    Ok(clusters.claims().get(&volume.handle).await?)
}

#[tokio::test]
async fn pods_on_two_vms_read_what_the_other_writes_and_one_leaves_the_other_undisturbed() -> Result<()> {
    pods::run(|pods| async move {
        let clusters = Clusters::open().await?;
        let volume = bound(&pods, "raw", &["ReadWriteMany"]).await?;
        let claim = management_claim(&clusters, &volume).await?;
        ensure!(
            !claim.annotations().contains_key(ANNOTATION_NEVER_ATTACHED),
            "it may be formatted: {claim:?}"
        );
        let spec = claim.spec.context("no spec")?;
        ensure!(spec.access_modes == Some(vec!["ReadWriteMany".to_owned()]), "{spec:?}");
        ensure!(spec.volume_mode.as_deref() == Some("Block"), "{spec:?}");

        let stays =
            talk("say 'from one' 0; hear 'from two' 1; hear 'from three' 2; say 'still here' 3; echo kept");
        let stays = Script::new("stays", &pods.first_node, &stays).device(&volume, "/dev/volume");
        pods.start(stays).await?;
        let leaves = talk("hear 'from one' 0; say 'from two' 1; echo heard");
        let leaves = Script::new("leaves", &pods.second_node, &leaves).device(&volume, "/dev/volume");
        pods.start(leaves).await?;
        let output = pods.finish("leaves").await?;
        ensure!(output == "heard", "{output}");
        for vm in [&pods.first_node, &pods.second_node] {
            let disk = disk_in(&clusters, vm, &volume).await?.unwrap_or_default();
            ensure!(disk["shareable"] == true, "{vm}: {disk}");
        }
        let claim = management_claim(&clusters, &volume).await?;
        ensure!(!claim.annotations().contains_key(ANNOTATION_ATTACHED_TO), "a record: {claim:?}");

        pods.remove("leaves").await?;
        left(&clusters, &pods.second_node, &volume).await?;
        let status = clusters.status(&pods.first_node, &volume.handle).await?.unwrap_or_default();
        ensure!(status["phase"] == "Ready", "the detach elsewhere disturbed it: {status}");
        pods.running("stays").await?;

        let comes = talk("say 'from three' 2; hear 'still here' 3; echo answered");
        let comes = Script::new("comes", &pods.second_node, &comes).device(&volume, "/dev/volume");
        let output = pods.run(comes).await?;
        ensure!(output == "answered", "{output}");
        let output = pods.finish("stays").await?;
        ensure!(output == "kept", "{output}");
        pods.remove("stays").await?;
        pods.detached(&volume).await
    })
    .await
}

/// A call that a VM has the volume for refuses another, and names that VM.
async fn is_refused(driver: &Driver, volume: &Volume, mode: Mode, [holder, other]: [&str; 2]) -> Result<()> {
    let refused = driver.refusal(&volume.handle, other, &block(mode)).await?;
    ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
    ensure!(refused.message().contains(&format!("VirtualMachine {holder}")), "{refused}");
    Ok(())
}

#[tokio::test]
async fn a_volume_that_one_vm_uses_alone_is_refused_to_others_whatever_the_claim_permits() -> Result<()> {
    pods::run_alone(|pods| async move {
        let clusters = Clusters::open().await?;
        let driver = Driver::connect(&clusters.lab.controller_socket(GUEST)?).await?;
        let (first, second) = (pods.first_node.as_str(), pods.second_node.as_str());
        let once = bound(&pods, "once", &["ReadWriteOnce"]).await?;
        let many = bound(&pods, "many", &["ReadWriteMany"]).await?;

        // The claim of a volume decides, and not the call.
        let shared = block(Mode::MultiNodeMultiWriter);
        let refused = driver.refusal(&once.handle, first, &shared).await?;
        ensure!(refused.message().contains("ReadWriteOnce only"), "{refused}");
        let files = driver.refusal(&many.handle, first, &mount(Mode::MultiNodeMultiWriter)).await?;
        ensure!(files.code() == Code::InvalidArgument && files.message().contains("filesystem"), "{files}");

        for volume in [&once, &many] {
            driver.publish_as(&volume.handle, first, block(Mode::SingleNodeWriter)).await?;
            let claim = management_claim(&clusters, volume).await?;
            let record = claim.annotations().get(ANNOTATION_ATTACHED_TO).context("no record")?;
            ensure!(record.contains(&format!("\"vm\":\"{first}\"")), "{record}");
            let disk = disk_in(&clusters, first, volume).await?.unwrap_or_default();
            ensure!(disk["shareable"].is_null(), "{disk}");
            is_refused(&driver, volume, Mode::SingleNodeWriter, [first, second]).await?;
        }
        is_refused(&driver, &many, Mode::MultiNodeMultiWriter, [first, second]).await?;
        for volume in [&once, &many] {
            driver.unpublish(&volume.handle, first).await?;
            pods.detached(volume).await?;
        }

        driver.publish_as(&many.handle, first, shared.clone()).await?;
        is_refused(&driver, &many, Mode::SingleNodeWriter, [first, second]).await?;
        driver.publish_as(&many.handle, second, shared).await?;
        is_refused(&driver, &many, Mode::SingleNodeWriter, [second, first]).await?;
        for vm in [first, second] {
            driver.unpublish(&many.handle, vm).await?;
        }
        pods.detached(&many).await
    })
    .await
}

// ---- admission policies ----

/// A patch that adds a claim with a shareable disk.
fn share(machine: &Machine, claim: &str) -> Value {
    let mut shareable = disk(claim);
    shareable["shareable"] = json!(true);
    machine.with(&[volume(claim)], &[shareable])
}

/// A claim of a guest.
async fn claim_of(clusters: &Clusters, guest: &Account, modes: &[&str], mode: &str) -> Result<String> {
    let labels = json!({LABEL_CLUSTER_ID: guest.cluster_id});
    claim_with(clusters, labels, json!({}), json!({"accessModes": modes, "volumeMode": mode})).await
}

/// Several VMs may have a claim only if the claim itself permits it.
pub(super) async fn only_shareable_claims_are_shared(clusters: &Clusters, two: &Two) -> Result<()> {
    let guest = &two.guest;
    let free = claim_of(clusters, guest, &["ReadWriteOnce"], "Block").await?;
    let other = Machine::create(clusters, &guest.cluster_id, &free).await?;
    others_stay_with_one_vm(clusters, two, &other).await?;
    sharing_and_a_record_exclude_each_other(clusters, two, &other).await?;
    clusters.kubevirt("VirtualMachine").delete(&other.name, &DeleteParams::default()).await?;
    Ok(())
}

async fn others_stay_with_one_vm(clusters: &Clusters, two: &Two, other: &Machine) -> Result<()> {
    let Two { guest, own, .. } = two;
    let (vm, policy) = ("VirtualMachine", "kubevirt-claims");
    for (modes, mode) in
        [(["ReadWriteOnce"], "Block"), (["ReadWriteOncePod"], "Block"), (["ReadWriteMany"], "Filesystem")]
    {
        let claim = claim_of(clusters, guest, &modes, mode).await?;
        for machine in [own, other] {
            let attach = machine.attach(&claim);
            guest.is_refused(policy, vm, &machine.name, &attach, "names no VirtualMachine").await?;
        }
        record(clusters, &claim, own.record()).await?;
        guest.is_permitted(vm, &own.name, &own.attach(&claim)).await?;
        guest.is_refused(policy, vm, &other.name, &other.attach(&claim), "names another").await?;
        guest.is_refused(policy, vm, &other.name, &share(other, &claim), "cannot be shareable").await?;
        guest.is_refused(policy, vm, &own.name, &share(own, &claim), "cannot be shareable").await?;
        // Its guest does not change what a claim permits.
        let many = json!({"spec": {"accessModes": ["ReadWriteMany"], "volumeMode": "Block"}});
        let changed = guest.patch("PersistentVolumeClaim", &claim, &many).await;
        ensure!(
            matches!(&changed, Err(kube::Error::Api(status)) if [403, 422].contains(&status.code)),
            "{changed:?}"
        );
    }
    // The disk of a claim that the VM has already.
    let mut plugged = other.disks.clone();
    let last = plugged.last_mut().context("no disk")?;
    last["shareable"] = json!(true);
    let patch = template(&other.volumes, &plugged);
    guest.is_refused(policy, vm, &other.name, &patch, "cannot be shareable").await
}

async fn sharing_and_a_record_exclude_each_other(
    clusters: &Clusters,
    two: &Two,
    other: &Machine,
) -> Result<()> {
    let Two { guest, neighbour, own, others, .. } = two;
    let (vm, kind) = ("VirtualMachine", "PersistentVolumeClaim");
    let shared = claim_of(clusters, guest, &["ReadWriteMany"], "Block").await?;
    neighbour
        .is_refused("kubevirt-claims", vm, &others.name, &share(others, &shared), "not this guest's")
        .await?;
    let machines = clusters.kubevirt(vm);
    let attach = Patch::Merge(share(own, &shared));
    guest.is_permitted(vm, &own.name, &share(own, &shared)).await?;
    guest.is_permitted(kind, &shared, &recorded(other)).await?;
    machines.patch(&own.name, &PatchParams::default(), &attach).await?;
    guest.is_permitted(vm, &other.name, &share(other, &shared)).await?;
    guest.is_refused("kubevirt-records", kind, &shared, &recorded(other), "shares this claim").await?;
    guest.is_permitted(kind, &shared, &recorded(own)).await?;

    record(clusters, &shared, own.record()).await?;
    guest.is_refused("kubevirt-claims", vm, &other.name, &share(other, &shared), "names another").await?;
    record(clusters, &shared, None).await?;
    let detach = Patch::Merge(template(&own.volumes, &own.disks));
    machines.patch(&own.name, &PatchParams::default(), &detach).await?;
    eventually("another VM may have the claim alone", PATIENCE, || async {
        Ok(guest.patch(kind, &shared, &recorded(other)).await.map_err(|error| error.to_string()))
    })
    .await
}

fn recorded(machine: &Machine) -> Value {
    super::policies::recorded(machine.record())
}
