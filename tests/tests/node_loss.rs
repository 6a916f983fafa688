//! Loss of VMs that are off, paused, crashed, deleted or unreachable: no volume is written by two VMs, none stays
//! attached, and all acknowledged writes are found on the next VM.

mod automatic;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use infra_api::NodeState;
use kube::api::{DeleteParams, ListParams};
use lab::vm::virsh;
use rustix::process::Signal;
use tests::driver;
use tests::hypervisor::{BareDomain, HaltedNode};
use tests::pods::{self, PodScenario, Volume, filesystem};
use tests::records::Records;
use tests::{PATIENCE, Scenario, eventually, run};
use tonic::Code;

/// Timeout of a call that cannot detach a disk.
const SHORT: Duration = Duration::from_secs(3);

// ---- loop nodes ----

#[tokio::test]
async fn a_vm_that_is_off_has_no_disks_and_gets_only_those_with_an_attachment() -> Result<()> {
    run(|s| async move {
        let (here, there, moved) = (s.node().await?, s.node().await?, s.volume().await?);
        let kept = s.volume().await?;
        s.driver.publish(&moved, &here.name).await?;
        let off = HaltedNode::off(&here)?;

        // Without any out-of-service taint, its disks can be detached at once.
        let refused = s.driver.publish(&moved, &there.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&here.name), "{refused}");
        s.driver.unpublish(&moved, &here.name).await?;
        s.driver.publish(&moved, &there.name).await?;

        let refused = s.driver.publish(&kept, &here.name).await.unwrap_err();
        assert!(refused.message().contains("is not running"), "{refused}");
        drop(off);
        eventually("an attach to the VM that runs again", PATIENCE, || async {
            Ok(s.driver.publish(&kept, &here.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        let on_it = s.infra.list_attachments(Some(here.uuid), None).await?;
        ensure!(on_it.len() == 1, "{on_it:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_paused_vm_keeps_its_disk_until_its_node_is_out_of_service() -> Result<()> {
    run(|s| async move {
        let (here, there) = (s.node().await?, s.node().await?);
        s.lab.join_guest(&here).await?;
        let handle = s.bound_claim("data").await?;
        let disk = s.driver.publish(&handle, &here.name).await?;
        let mut records = Records::begin(&disk_on(&here.by_id_dir, &disk), tests::MIB as u64)?;
        for _ in 0..100 {
            records.append()?;
        }
        let written = records.close();

        let hung = HaltedNode::paused(&here)?;
        is_stuck(&s, &handle, &here.name).await?;
        // The reason is reported on the claim, and to other attaches of the volume.
        s.wait_for_event("data", &[&here.name, "does not release it"]).await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for word in [here.name.as_str(), "does not release it"] {
            assert!(refused.message().contains(word), "{refused}");
        }
        let node = s.infra.get_node(here.uuid).await?.context("no such node")?;
        ensure!(node.state == NodeState::Running, "without the taint its state is {}", node.state);

        let tainted_at = Instant::now();
        s.set_out_of_service_taint(&here.name, true).await?;
        eventually("a forced detach", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &here.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        let node = s.infra.get_node(here.uuid).await?.context("no such node")?;
        ensure!(node.state == NodeState::Off, "after the forced detach its state is {}", node.state);
        let confirmed = Instant::now();
        let disk = s.driver.publish(&handle, &there.name).await?;
        println!(
            "paused, out of service: powered off after {:.1} s, attached elsewhere {:.1} s later",
            (confirmed - tainted_at).as_secs_f64(),
            confirmed.elapsed().as_secs_f64()
        );
        written.verify(&disk_on(&there.by_id_dir, &disk))?;

        // The VM runs again without the disk.
        drop(hung);
        s.set_out_of_service_taint(&here.name, false).await?;
        s.no_attachments(&here).await?;
        s.driver.unpublish(&handle, &there.name).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_vm_deleted_while_it_is_paused_blocks_other_attaches_until_it_is_off() -> Result<()> {
    run(|s| async move {
        let (here, there, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &here.name).await?;
        let hung = HaltedNode::paused(&here)?;
        s.vms().delete(&here.name, &DeleteParams::default()).await?;
        eventually("the VM's object is deleted", PATIENCE, || async {
            Ok(s.vms().get_opt(&here.name).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await?;
        // For the guest the VM and its disks are gone; the storage infra still has them.
        eventually("a detach from a deleted VM", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &here.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        // Its name went with its object.
        assert!(refused.message().contains("attached to another VM"), "{refused}");
        let attached = s.infra.list_attachments(None, None).await?;
        let holders: Vec<_> = attached.iter().filter(|one| one.node == here.uuid).collect();
        ensure!(holders.len() == 1, "{holders:?}");
        let off = Instant::now();
        hung.power_off()?;
        eventually("an attach after the VM is off", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &there.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        println!(
            "deleted while paused, then off: attached elsewhere after {:.1} s",
            off.elapsed().as_secs_f64()
        );
        Ok(())
    })
    .await
}

/// Checks that a detach times out with an error that names the out-of-service taint.
async fn is_stuck(s: &Scenario, claim: &str, node: &str) -> Result<()> {
    let detach = || s.driver.unpublish_within(claim, node, SHORT);
    driver::times_out("a detach", &["out-of-service"], detach).await.map(drop)
}

fn disk_on(by_id: &std::path::Path, disk: &str) -> std::path::PathBuf {
    by_id.join(format!("wwn-0x{}", &disk.replace('-', "")[..16]))
}

// ---- domains without a boot disk ----

/// Runs a test with two domains without a boot disk, and removes them afterwards.
async fn with_bare_domains<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Arc<[BareDomain; 2]>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    run(|s| on_bare_domains(s, body)).await
}

async fn on_bare_domains<Body, Running>(s: Arc<Scenario>, body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Arc<[BareDomain; 2]>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let domains = Arc::new([BareDomain::start(&s).await?, BareDomain::start(&s).await?]);
    let outcome = tokio::spawn(body(s.clone(), domains.clone())).await;
    let mut removed = Ok(());
    for domain in domains.iter() {
        removed = removed.and(domain.remove(&s).await);
    }
    outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))).and(removed)
}

/// Moves a volume from one domain to the other, and prints how long that took.
async fn moves_to(s: &Scenario, handle: &str, [from, to]: [&BareDomain; 2], how: &str) -> Result<String> {
    let start = Instant::now();
    eventually(&format!("{how}: a detach"), PATIENCE, || async {
        Ok(s.driver.unpublish(handle, &from.node.name).await.map_err(|status| status.to_string()))
    })
    .await?;
    let free = start.elapsed();
    let disk = s.driver.publish(handle, &to.node.name).await?;
    ensure!(
        !from.has(s, &disk).await? && to.has(s, &disk).await?,
        "{how}: the disk is not attached to the expected VM"
    );
    let after = start.elapsed() - free;
    println!(
        "{how}: free after {:.1} s, attached elsewhere {:.1} s later",
        free.as_secs_f64(),
        after.as_secs_f64()
    );
    Ok(disk)
}

#[tokio::test]
async fn a_disk_can_be_detached_from_a_paused_or_crashed_domain_but_not_from_a_saved_one() -> Result<()> {
    with_bare_domains(|s, domains| async move {
        let [one, two] = &*domains;
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &one.node.name).await?;
        // The disk can be detached while the domain is paused, and is still detached after it resumes.
        one.virsh(&s, "suspend").await?;
        moves_to(&s, &handle, [one, two], "paused").await?;
        one.virsh(&s, "resume").await?;
        ensure!(!one.has(&s, &disk).await?, "the disk was attached again");

        two.signal(&s, Signal::KILL)?;
        moves_to(&s, &handle, [two, one], "crashed").await?;
        two.virsh(&s, "start").await?;
        ensure!(!two.has(&s, &disk).await?, "the disk was attached again");

        // The domain is off, but would resume with its disk.
        one.virsh(&s, "managedsave").await?;
        is_stuck(&s, &handle, &one.node.name).await?;
        let refused = s.driver.publish(&handle, &two.node.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
        virsh(s.lab.run(), ["managedsave-remove", &one.node.name]).await?;
        moves_to(&s, &handle, [one, two], "no longer saved").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_hung_domain_is_destroyed_only_when_its_node_is_out_of_service() -> Result<()> {
    with_bare_domains(|s, domains| async move {
        let [one, two] = &*domains;
        s.lab.join_guest(&one.node).await?;
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &one.node.name).await?;
        one.signal(&s, Signal::STOP)?;
        is_stuck(&s, &handle, &one.node.name).await?;
        let refused = s.driver.publish(&handle, &two.node.name).await.unwrap_err();
        ensure!(refused.message().contains(&one.node.name), "{refused}");
        // After the hang is reported, the disk is still attached.
        let all = ListParams::default();
        eventually("the VolumeAttachment reports the hang", PATIENCE, || async {
            let attachments = s.attachments().list(&all).await?;
            let errors = attachments.iter().filter_map(|one| one.status.as_ref()?.error.as_ref());
            let errors: Vec<&str> = errors.map(|error| error.message.as_str()).collect();
            Ok(if errors.iter().any(|text| text.contains("does not release it")) {
                Ok(())
            } else {
                Err(format!("{errors:?}"))
            })
        })
        .await?;
        ensure!(one.has(&s, &disk).await?, "the disk was detached without the taint");

        s.set_out_of_service_taint(&one.node.name, true).await?;
        moves_to(&s, &handle, [one, two], "hung, out of service").await?;
        ensure!(one.virsh(&s, "domstate").await?.trim() == "shut off", "it kept its disk and still runs");
        one.virsh(&s, "start").await?;
        s.set_out_of_service_taint(&one.node.name, false).await?;
        ensure!(!one.has(&s, &disk).await?, "the disk was attached again");
        Ok(())
    })
    .await
}

// ---- libvirt VMs ----

/// A test that loses a VM needs the other.
static VMS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Runs a test that loses a VM. Afterwards all VMs are started and their nodes are ready again.
async fn with_vms_that_are_restored<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<PodScenario>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let _one_at_a_time = VMS.lock().await;
    pods::run(|pods| async move {
        let outcome = tokio::spawn(body(pods.clone())).await.unwrap_or_else(|panic| Err(anyhow!("{panic}")));
        let mut restored = Ok(());
        for node in [&pods.first_node, &pods.second_node] {
            restored = restored.and(restore(&pods, node).await.with_context(|| format!("restoring {node}")));
        }
        match (outcome, restored) {
            (Err(error), Err(dirty)) => Err(error.context(format!("(the cleanup failed too: {dirty:#})"))),
            (outcome, restored) => outcome.and(restored),
        }
    })
    .await
}

async fn restore(pods: &PodScenario, node: &str) -> Result<()> {
    let s = pods.scenario();
    let vm = s.lab.vm(node)?;
    vm.continue_qemu()?;
    if vm.is_running() {
        vm.set_network(true).await?;
    } else {
        vm.power_on().await?;
    }
    vm.wait_for_node(&s.guest).await?;
    pods.set_out_of_service(node, false).await
}

/// A pod that writes records on one VM.
struct RecordWriterPod {
    volume: Volume,
    /// The VM where it runs first.
    lost: String,
    /// The other VM.
    other: String,
}

async fn start_record_writer(pods: &PodScenario) -> Result<RecordWriterPod> {
    let volume = pods.claim("data", &filesystem("ext4")).await?;
    pods.run_record_writer("web", &volume, 0).await?;
    let lost = pods.ready_on("web", None).await?;
    let other = if lost == pods.first_node { pods.second_node.clone() } else { pods.first_node.clone() };
    Ok(RecordWriterPod { volume, lost, other })
}

impl RecordWriterPod {
    /// Adds the out-of-service taint, waits until the pod runs on the other VM, and prints how long that took. Fails if
    /// both VMs are ever observed with the disk.
    async fn moves_to(&self, pods: &PodScenario, how: &str) -> Result<()> {
        let s = pods.scenario();
        let tainted_at = Instant::now();
        pods.set_out_of_service(&self.lost, true).await?;
        let free = async {
            eventually(&format!("the disk is detached from {}", self.lost), PATIENCE, || async {
                // The other VM is read first: the disk may be attached there right after it was detached here.
                let there = s.lab.libvirt_disks(&self.other).await?.contains(&self.volume.disk);
                let here = self.has_disk(s).await?;
                ensure!(!(here && there), "both VMs have the disk");
                Ok(if here { Err("it is attached".to_owned()) } else { Ok(()) })
            })
            .await?;
            anyhow::Ok(tainted_at.elapsed())
        };
        let (free, node) = tokio::try_join!(free, pods.ready_on("web", Some(&self.lost)))?;
        ensure!(node == self.other, "the pod is on {node}");
        let after = tainted_at.elapsed() - free;
        println!(
            "{how}: the disk is detached {:.1} s after the taint, and the pod is ready on the other VM {:.1} s later",
            free.as_secs_f64(),
            after.as_secs_f64()
        );
        Ok(())
    }

    async fn has_disk(&self, s: &Scenario) -> Result<bool> {
        Ok(s.lab.vm(&self.lost)?.is_running()
            && s.lab.libvirt_disks(&self.lost).await?.contains(&self.volume.disk))
    }

    /// Fails unless all records that were acknowledged on the first VM were found on the second.
    async fn no_record_is_lost(&self, pods: &PodScenario) -> Result<()> {
        let acknowledged = pods.acknowledged_records(&self.lost, &self.volume).await?;
        pods.remove_sets().await?;
        // Read on the VM that was lost, to check that the volume can be attached there again.
        let found = pods.recovered_records(&self.lost, &self.volume).await?;
        println!("{acknowledged} records were acknowledged there, {found} were found here");
        ensure!(acknowledged >= 5 && found >= acknowledged, "{acknowledged} acknowledged, but {found} found");
        Ok(())
    }
}

#[tokio::test]
async fn a_pod_moves_from_a_vm_without_network_which_loses_its_disk_while_it_runs() -> Result<()> {
    with_vms_that_are_restored(|pods| async move {
        let (s, pod) = (pods.scenario(), start_record_writer(&pods).await?);
        let vm = s.lab.vm(&pod.lost)?;
        vm.set_network(false).await?;
        pods.node_ready(&pod.lost, false).await?;
        // The VM still writes, and its node has no taint.
        ensure!(pod.has_disk(s).await?, "the disk was detached without the taint");
        let refused = s.driver.publish(&pod.volume.handle, &pod.other).await.unwrap_err();
        ensure!(
            refused.code() == Code::FailedPrecondition && refused.message().contains(&pod.lost),
            "{refused}"
        );

        pod.moves_to(&pods, "without network").await?;
        ensure!(vm.is_running(), "a VM that released its disk was powered off");
        vm.set_network(true).await?;
        pods.node_ready(&pod.lost, true).await?;
        pods.set_out_of_service(&pod.lost, false).await?;
        pod.no_record_is_lost(&pods).await
    })
    .await
}

#[tokio::test]
async fn a_pod_moves_from_a_hung_vm_only_after_that_is_powered_off() -> Result<()> {
    with_vms_that_are_restored(|pods| async move {
        let (s, pod) = (pods.scenario(), start_record_writer(&pods).await?);
        let direct = s.volume().await?;
        s.driver.publish(&direct, &pod.lost).await?;
        let vm = s.lab.vm(&pod.lost)?;
        vm.stop_qemu()?;
        is_stuck(s, &direct, &pod.lost).await?;
        let refused = s.driver.publish(&direct, &pod.other).await.unwrap_err();
        ensure!(
            refused.code() == Code::FailedPrecondition && refused.message().contains(&pod.lost),
            "{refused}"
        );
        pods.node_ready(&pod.lost, false).await?;
        ensure!(pod.has_disk(s).await?, "the disk was detached without the taint");

        pod.moves_to(&pods, "hung").await?;
        ensure!(!vm.is_running(), "it kept its disk and still runs");
        eventually("the other disk is detached too", PATIENCE, || async {
            Ok(s.driver.unpublish(&direct, &pod.lost).await.map_err(|status| status.to_string()))
        })
        .await?;
        restore(&pods, &pod.lost).await?;
        pod.no_record_is_lost(&pods).await
    })
    .await
}
