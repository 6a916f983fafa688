//! Two hypervisor hosts, each with a local pool, and a pool that both reach: where volumes are placed and plugged, volumes and
//! VMs that move between the hosts, and a host that does not answer. Needs `cargo lab up --hosts 2`.

use anyhow::{Context, Result, ensure};
use crds::names::{LABEL_ZONE, PARAMETER_MANAGEMENT_CLASS};
use infra_api::{Attachment, AttachmentState, Pool};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::Api;
use lab::host::REACH;
use lab::{Host, Vm};
use serde_json::{Value, json};
use tests::pods::{self, ClaimOptions, PodScenario, Script, Volume, filesystem};
use tests::{PATIENCE, Scenario, eventually};

/// Fails unless the records on the volume are complete and in order; sets `n` to their number.
const CHECK: &str = "touch /data/records; n=$(wc -l < /data/records); seq 1 $n | cmp - /data/records";
const APPEND: &str = "n=$((n + 1)); echo $n >> /data/records; sync";

/// The VMs, one on each host.
fn vms(s: &Scenario) -> Result<[Vm; 2]> {
    let on = |host: Host| {
        let all = s.lab.vms().into_iter().map(|name| s.lab.vm(&name)).collect::<Result<Vec<_>>>()?;
        let found = all.into_iter().find(|vm| vm.host().is_ok_and(|its| its == host));
        found.with_context(|| format!("no VM on {}: `cargo lab up --hosts 2`", host.name()))
    };
    Ok([on(Host::ALL[0])?, on(Host::ALL[1])?])
}

async fn management_class(s: &Scenario, reach: &str) -> Result<String> {
    s.management_class(&[(&format!("pool.{REACH}"), reach)]).await
}

/// A bound claim in the shared pool.
async fn shared_volume(pods: &PodScenario, name: &str) -> Result<Volume> {
    let class = Some(management_class(pods.scenario(), "shared").await?);
    pods.claim(name, &ClaimOptions { class, ..filesystem("ext4") }).await
}

/// A volume of a class of local pools, which was created for a pod on this VM. The pod has written the name of the claim.
async fn local_volume(pods: &PodScenario, name: &str, vm: &Vm) -> Result<Volume> {
    let s = pods.scenario();
    let management_class = management_class(s, "local").await?;
    let parameters = [(PARAMETER_MANAGEMENT_CLASS, management_class.as_str())];
    let class = s.guest_class_with(&parameters, json!({"volumeBindingMode": "WaitForFirstConsumer"})).await?;
    s.claim_with(name, &class, "64Mi", json!({})).await?;
    let script = format!("echo {name} > /data/origin; sync");
    let pod = pods.start(Script::new("first", &vm.name, &script).mount_claim(name, "/data")).await?;
    let volume = pods.bound_volume(name).await?;
    pods.finish(&pod).await?;
    pods.remove(&pod).await?;
    Ok(volume)
}

async fn pool_of(s: &Scenario, volume: &Volume) -> Result<Pool> {
    let pool = s.infra_volume(&volume.handle).await?.pool;
    s.infra.get_pool(&pool).await?.with_context(|| format!("no pool {pool}"))
}

/// Whether the filesystem of a pool is mounted for the libvirt and the VMs of a host.
fn is_mounted(s: &Scenario, pool: &Pool, host: Host) -> Result<bool> {
    let pid = s.lab.pid(&host.libvirtd()).with_context(|| format!("{} does not run", host.libvirtd()))?;
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(4) == Some(pool.path.as_str())))
}

/// The zones to which the PersistentVolume restricts its pods.
async fn zones(s: &Scenario, volume: &Volume) -> Result<Vec<String>> {
    let pv = serde_json::to_value(s.guest_volumes().get(&volume.pv).await?)?;
    let terms = pv["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"].as_array().cloned();
    let of_term = |term: &Value| {
        let one = &term["matchExpressions"][0];
        ensure!(one["key"] == LABEL_ZONE && one["operator"] == "In", "{term}");
        Ok(serde_json::from_value::<Vec<String>>(one["values"].clone())?)
    };
    let mut found = terms.unwrap_or_default().iter().map(of_term).collect::<Result<Vec<_>>>()?.concat();
    found.sort();
    Ok(found)
}

/// What the storage infra has attached to a VM.
async fn attachments_of(s: &Scenario, vm: &Vm) -> Result<Vec<Attachment>> {
    Ok(s.infra.list_attachments(Some(vm.uuid), None).await?)
}

/// The VMs that have a volume, according to the storage infra.
async fn vms_with(s: &Scenario, volume: &Volume) -> Result<Vec<uuid::Uuid>> {
    let id = s.infra_volume(&volume.handle).await?.id;
    Ok(s.infra.list_attachments(None, Some(&id)).await?.iter().map(|one| one.node).collect())
}

async fn is_attached_to_none(s: &Scenario, volume: &Volume) -> Result<()> {
    eventually(&format!("{} is detached", volume.handle), PATIENCE, || async {
        let left = vms_with(s, volume).await?;
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
    })
    .await
}

/// Waits until the storage infra has a VM on this host, and both tiers its zone.
async fn is_known_on(s: &Scenario, vm: &Vm, host: Host) -> Result<()> {
    eventually(&format!("{} is known to be on {}", vm.name, host.name()), PATIENCE, || async {
        let node = s.infra.get_node(vm.uuid).await?.context("the storage infra does not know the VM")?;
        let zone = s.vms().get(&vm.name).await?.status.and_then(|status| status.zone);
        let is_there = node.hypervisor == host.name() && zone.as_deref() == Some(host.zone());
        Ok(if is_there { Ok(()) } else { Err(format!("on {}, zone {zone:?}", node.hypervisor)) })
    })
    .await
}

// ---- local pools ----

#[tokio::test]
async fn a_claim_is_placed_in_the_local_pool_of_the_host_of_its_pods_vm() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        for vm in vms(s)? {
            let host = vm.host()?;
            is_known_on(s, &vm, host).await?;
            let node = Api::<Node>::all(s.guest.clone()).get(&vm.name).await?;
            ensure!(node.labels().get(LABEL_ZONE).map(String::as_str) == Some(host.zone()));
            let volume = local_volume(&pods, &format!("on-{}", host.name()), &vm).await?;
            let pool = pool_of(s, &volume).await?;
            ensure!(pool.reached_by == [host.name()], "{volume:?} is in {pool:?}");
            ensure!(zones(s, &volume).await? == [host.zone()]);
            for other in Host::ALL {
                ensure!(
                    is_mounted(s, &pool, other)? == (other == host),
                    "{} for {}",
                    pool.path,
                    other.name()
                );
            }
            let again = Script::new("again", &vm.name, "cat /data/origin").mount(&volume, "/data");
            ensure!(pods.run(again).await? == volume.claim);
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_of_a_local_pool_is_never_plugged_on_the_other_host() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let [here, there] = vms(s)?;
        let volume = local_volume(&pods, "data", &here).await?;
        pods.detached(&volume).await?;

        // The scheduler.
        pods.start(Script::new("astray", &there.name, "true").mount(&volume, "/data")).await?;
        s.not_scheduled("astray", &["didn't match PersistentVolume's node affinity"]).await?;
        pods.remove("astray").await?;

        // The guest's attach-detach controller, without the scheduler.
        let attachment = s.k8s_attach(&volume.pv, &there.name).await?;
        let expected = ["VolumeNotReachable", "run the pod in another zone or VM"];
        s.k8s_attachments().refused(&attachment, &expected).await?;
        s.wait_for_event("data", &expected).await?;
        is_refused_everywhere(s, &there, &volume).await?;
        s.k8s_detach(&attachment).await?;

        // An entry of the VM, without the guest.
        let entry = json!({"name": volume.handle, "persistentVolumeClaim": {"claimName": volume.handle}});
        s.add_entry(&there.name, entry).await?;
        is_refused_everywhere(s, &there, &volume).await?;
        s.remove_entries(&there.name, |entry| entry["name"] == *volume.handle).await?;
        pods.detached(&volume).await?;
        let again = Script::new("again", &here.name, "cat /data/origin").mount(&volume, "/data");
        ensure!(pods.run(again).await? == "data");
        Ok(())
    })
    .await
}

/// The VolumeAttachment and the VirtualMachine say why; the disk is nowhere.
async fn is_refused_everywhere(s: &Scenario, vm: &Vm, volume: &Volume) -> Result<()> {
    let why = s.attach_refused(&vm.name, &volume.handle, "VolumeNotReachable").await?;
    println!("VolumeAttachment: {why}");
    eventually("the VirtualMachine shows the reason", PATIENCE, || async {
        let shown = s.disk(&vm.name, &volume.handle).await?;
        let text = shown.as_ref().and_then(|disk| disk.error.clone()).unwrap_or_default();
        let is_shown = text.contains("VolumeNotReachable") && shown.is_some_and(|disk| !disk.attached);
        Ok(if is_shown { Ok(()) } else { Err(text) })
    })
    .await?;
    let plugged = s.lab.libvirt_disks(&vm.name).await?;
    ensure!(vms_with(s, volume).await?.is_empty() && !plugged.contains(&volume.disk), "{plugged:?}");
    Ok(())
}

// ---- the shared pool ----

#[tokio::test]
async fn a_volume_of_the_shared_pool_moves_between_vms_of_both_hosts_with_its_records() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let volume = shared_volume(&pods, "data").await?;
        ensure!(pool_of(s, &volume).await?.reached_by == Host::ALL.map(Host::name));
        ensure!(zones(s, &volume).await? == Host::ALL.map(Host::zone));
        let [here, there] = vms(s)?;
        for (turn, vm) in [&here, &there, &here].into_iter().enumerate() {
            let script = format!("{CHECK}; echo $n; for _ in 1 2 3 4 5; do {APPEND}; done");
            let found = pods.run(Script::new("turn", &vm.name, &script).mount(&volume, "/data")).await?;
            ensure!(found == (turn * 5).to_string(), "{} found {found} records", vm.name);
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn while_a_host_does_not_answer_the_other_goes_on_and_nothing_counts_as_detached() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let [here, there] = vms(s)?;
        let (held, other) = (shared_volume(&pods, "held").await?, shared_volume(&pods, "other").await?);
        let script = format!("{CHECK}; while :; do {APPEND}; sleep 1; done");
        pods.start(Script::new("holder", &there.name, &script).mount(&held, "/data")).await?;
        pods.running("holder").await?;
        let before = attachments_of(s, &there).await?;
        let silent = s.pause_component(&there.host()?.libvirtd())?;
        answers(s, &there, false).await?;

        // Attaches and detaches on the other host.
        let script = format!("{CHECK}; {APPEND}; echo $n");
        let written = pods.run(Script::new("beside", &here.name, &script).mount(&other, "/data")).await?;
        ensure!(written == "1", "{written}");
        is_attached_to_none(s, &other).await?;
        // The disk stays where it is, first with its pod, then without.
        pods.running("holder").await?;
        ensure!(attachments_of(s, &there).await? == before, "attached before: {before:?}");
        pods.remove("holder").await?;
        let script = format!("{CHECK}; echo $n");
        let heir = pods.start(Script::new("heir", &here.name, &script).mount(&held, "/data")).await?;
        let why = s.detach_failed(&there.name, &held.handle).await?;
        println!("the detach waits: {why}");
        ensure!(vms_with(s, &held).await? == [there.uuid]);
        ensure!(s.is_proven_off(&there.name, false).await?.is_ok());
        ensure!(!s.infra.get_node(there.uuid).await?.context("no node")?.proven_off);

        drop(silent);
        answers(s, &there, true).await?;
        let found: u64 = pods.finish(&heir).await?.parse().context("no number of records")?;
        ensure!(found > 0, "the records are lost");
        println!("{found} records came along");
        Ok(())
    })
    .await
}

/// Waits until the storage infra sees that the host of a VM responds, or not.
async fn answers(s: &Scenario, vm: &Vm, expected: bool) -> Result<()> {
    let silent = vm.host()?.name();
    eventually(&format!("{silent} responds: {expected}"), PATIENCE, || async {
        let hosts = s.infra.list_hosts().await?;
        let is_so = hosts.iter().all(|host| host.reachable == (expected || host.name != silent));
        Ok(if is_so { Ok(()) } else { Err(format!("{hosts:?}")) })
    })
    .await
}

// ---- live migration ----

#[tokio::test]
async fn a_vm_migrates_to_the_other_host_and_back_while_its_pod_writes() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let volume = shared_volume(&pods, "data").await?;
        pods.run_record_writer("writer", &volume, 1).await?;
        let node = pods.ready_on("writer", None).await?;
        let vm = s.lab.vm(&node)?;
        let home = vm.host()?;
        let away = Host::ALL.into_iter().find(|host| *host != home).context("no other host")?;
        let (attached, pod) = (attachments_of(s, &vm).await?, writer(s).await?);
        ensure!(attached.len() == 1 && attached[0].state == AttachmentState::Attached, "{attached:?}");
        for to in [away, home] {
            let before = pods.durable_records(&node, &volume).await?;
            vm.migrate(to).await?;
            is_known_on(s, &vm, to).await?;
            goes_on(&pods, &node, &volume, before).await?;
            ensure!(attachments_of(s, &vm).await? == attached, "attached before: {attached:?}");
            ensure!(s.lab.libvirt_disks(&node).await?.contains(&volume.disk));
            ensure!(writer(s).await? == pod, "the pod was replaced or restarted: it was {pod:?}");
        }
        pods.remove_sets().await?;
        pods.detached(&volume).await?;
        let [here, there] = vms(s)?;
        let other = if here.name == node { there } else { here };
        println!("{} records are complete", pods.complete_records(&other.name, &volume).await?);
        Ok(())
    })
    .await
}

/// UID of the writer's pod, and how often it restarted.
async fn writer(s: &Scenario) -> Result<(Option<String>, Vec<i32>)> {
    let pod: Pod = s.guest_pods().get("writer-0").await?;
    let status = pod.status.as_ref().and_then(|status| status.container_statuses.clone());
    Ok((pod.uid(), status.unwrap_or_default().iter().map(|one| one.restart_count).collect()))
}

/// Waits until more than `before` records are durable.
async fn goes_on(pods: &PodScenario, node: &str, volume: &Volume, before: u64) -> Result<()> {
    eventually("the pod writes", PATIENCE, || async {
        let now = pods.durable_records(node, volume).await?;
        println!("{before} records before the migration, {now} after it");
        Ok(if now > before { Ok(()) } else { Err(format!("{before}, then {now} records")) })
    })
    .await
}
