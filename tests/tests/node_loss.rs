//! Machines that are off, hang, crash, are deleted, or cannot be reached: no volume is ever written from two of them, none
//! stays behind, and what was acknowledged is there on the machine that comes next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use infra_api::NodeState;
use kube::api::{DeleteParams, ListParams};
use lab::vm::virsh;
use rustix::process::Signal;
use tests::driver;
use tests::hypervisor::{Bare, Halted};
use tests::pods::{self, Machines, Volume, filesystem};
use tests::records::Records;
use tests::{PATIENCE, Scenario, eventually, run};
use tonic::Code;

/// A call that finds a disk stuck is given so long to find out.
const SHORT: Duration = Duration::from_secs(3);

// ---- machines that this host plays ----

#[tokio::test]
async fn a_machine_that_is_off_has_no_disks_and_gets_only_those_that_are_ordered() -> Result<()> {
    run(|s| async move {
        let (here, there, moved) = (s.node().await?, s.node().await?, s.volume().await?);
        let kept = s.volume().await?;
        s.driver.publish(&moved, &here.name).await?;
        let off = Halted::off(&here)?;

        // Nobody says that it is lost: its disks are asked for, and leave at once.
        let refused = s.driver.publish(&moved, &there.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&here.name), "{refused}");
        s.driver.unpublish(&moved, &here.name).await?;
        s.driver.publish(&moved, &there.name).await?;

        let refused = s.driver.publish(&kept, &here.name).await.unwrap_err();
        assert!(refused.message().contains("is off"), "{refused}");
        drop(off);
        eventually("an attach to the machine that is on again", PATIENCE, || async {
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
async fn a_hung_machine_keeps_its_disk_until_people_say_that_it_is_lost() -> Result<()> {
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

        let hung = Halted::paused(&here)?;
        is_stuck(&s, &handle, &here.name).await?;
        // It is told on the claim why, and who else wants the volume hears it too.
        s.told("data", &[&here.name, "is paused"]).await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        for word in [here.name.as_str(), "is paused"] {
            assert!(refused.message().contains(word), "{refused}");
        }
        let node = s.infra.get_node(here.uuid).await?.context("no such node")?;
        ensure!(node.state == NodeState::Running, "nobody said that it is lost, and it is {}", node.state);

        let said = Instant::now();
        s.taint_out_of_service(&here.name, true).await?;
        eventually("a detach by force", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &here.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        let node = s.infra.get_node(here.uuid).await?.context("no such node")?;
        ensure!(node.state == NodeState::Off, "its disk was taken by force, and it is {}", node.state);
        let confirmed = Instant::now();
        let disk = s.driver.publish(&handle, &there.name).await?;
        println!(
            "hung, said to be lost: switched off after {:.1} s, attached elsewhere {:.1} s later",
            (confirmed - said).as_secs_f64(),
            confirmed.elapsed().as_secs_f64()
        );
        written.verify(&disk_on(&there.by_id_dir, &disk))?;

        // It is on again: nothing is plugged into it, and nothing more is said of it.
        drop(hung);
        s.taint_out_of_service(&here.name, false).await?;
        s.nothing_is_attached(&here).await?;
        s.driver.unpublish(&handle, &there.name).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_machine_that_is_deleted_while_it_hangs_keeps_others_out_until_it_is_off() -> Result<()> {
    run(|s| async move {
        let (here, there, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &here.name).await?;
        let hung = Halted::paused(&here)?;
        s.machines().delete(&here.name, &DeleteParams::default()).await?;
        eventually("the machine's object is gone", PATIENCE, || async {
            Ok(s.machines().get_opt(&here.name).await?.map_or(Ok(()), |_| Err("still there".to_owned())))
        })
        .await?;
        // To the guest it is gone, and so are its disks; the infra knows better.
        eventually("a detach from a machine that is gone", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &here.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        assert!(refused.message().contains(&here.name), "{refused}");
        let attached = s.infra.list_attachments(None, None).await?;
        let holders: Vec<_> = attached.iter().filter(|one| one.node == here.uuid).collect();
        ensure!(holders.len() == 1, "{holders:?}");
        let off = Instant::now();
        hung.switch_off()?;
        eventually("an attach once the machine is off", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &there.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        println!(
            "deleted while it hung, then off: attached elsewhere after {:.1} s",
            off.elapsed().as_secs_f64()
        );
        Ok(())
    })
    .await
}

/// Detaches a disk that does not leave, and fails unless the driver says so in time, and what people can do.
async fn is_stuck(s: &Scenario, claim: &str, node: &str) -> Result<()> {
    let detach = || s.driver.unpublish_within(claim, node, SHORT);
    driver::late("a detach", &["out-of-service"], detach).await.map(drop)
}

fn disk_on(by_id: &std::path::Path, disk: &str) -> std::path::PathBuf {
    by_id.join(format!("wwn-0x{}", &disk.replace('-', "")[..16]))
}

// ---- domains with nothing to boot ----

/// Runs a test with two domains that have nothing to boot, and removes them, however it ends.
async fn with_bare_domains<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Arc<[Bare; 2]>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    run(|s| async move {
        let machines = Arc::new([Bare::start(&s).await?, Bare::start(&s).await?]);
        let outcome = tokio::spawn(body(s.clone(), machines.clone())).await;
        let mut removed = Ok(());
        for machine in machines.iter() {
            removed = removed.and(machine.remove(&s).await);
        }
        outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))).and(removed)
    })
    .await
}

/// Moves a volume from one domain to the other, and says how long that took.
async fn moves(s: &Scenario, handle: &str, [from, to]: [&Bare; 2], how: &str) -> Result<String> {
    let start = Instant::now();
    eventually(&format!("{how}: a detach"), PATIENCE, || async {
        Ok(s.driver.unpublish(handle, &from.node.name).await.map_err(|status| status.to_string()))
    })
    .await?;
    let free = start.elapsed();
    let disk = s.driver.publish(handle, &to.node.name).await?;
    ensure!(
        !from.has(s, &disk).await? && to.has(s, &disk).await?,
        "{how}: the disk is not where it should be"
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
async fn a_paused_or_crashed_domain_gives_its_disk_up_and_a_saved_one_keeps_it() -> Result<()> {
    with_bare_domains(|s, machines| async move {
        let [one, two] = &*machines;
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &one.node.name).await?;
        // It does not run, and the disk leaves all the same: then it is not there when it goes on, either.
        one.virsh(&s, "suspend").await?;
        moves(&s, &handle, [one, two], "paused").await?;
        one.virsh(&s, "resume").await?;
        ensure!(!one.has(&s, &disk).await?, "the disk came back with its machine");

        two.signal(&s, Signal::KILL)?;
        moves(&s, &handle, [two, one], "crashed").await?;
        two.virsh(&s, "start").await?;
        ensure!(!two.has(&s, &disk).await?, "the disk came back with its machine");

        // It is off, and will go on with the disk that it had.
        one.virsh(&s, "managedsave").await?;
        is_stuck(&s, &handle, &one.node.name).await?;
        let refused = s.driver.publish(&handle, &two.node.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
        virsh(s.lab.run(), ["managedsave-remove", &one.node.name]).await?;
        moves(&s, &handle, [one, two], "no longer saved").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_hung_domain_is_destroyed_for_its_disk_only_when_people_say_that_it_is_lost() -> Result<()> {
    with_bare_domains(|s, machines| async move {
        let [one, two] = &*machines;
        s.lab.join_guest(&one.node).await?;
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &one.node.name).await?;
        one.signal(&s, Signal::STOP)?;
        is_stuck(&s, &handle, &one.node.name).await?;
        let refused = s.driver.publish(&handle, &two.node.name).await.unwrap_err();
        ensure!(refused.message().contains(&one.node.name), "{refused}");
        // Asked for long enough to be told why, and still there.
        let all = ListParams::default();
        eventually("the order says why", PATIENCE, || async {
            let orders = s.attachments().list(&all).await?;
            let told = orders.iter().filter_map(|order| order.status.as_ref()?.error.as_ref());
            let told: Vec<&str> = told.map(|error| error.message.as_str()).collect();
            Ok(if told.iter().any(|text| text.contains("hung")) { Ok(()) } else { Err(format!("{told:?}")) })
        })
        .await?;
        ensure!(one.has(&s, &disk).await?, "the disk was taken from a machine that nobody said is lost");

        s.taint_out_of_service(&one.node.name, true).await?;
        moves(&s, &handle, [one, two], "hung, said to be lost").await?;
        ensure!(one.virsh(&s, "domstate").await?.trim() == "shut off", "it kept its disk and still runs");
        one.virsh(&s, "start").await?;
        s.taint_out_of_service(&one.node.name, false).await?;
        ensure!(!one.has(&s, &disk).await?, "the disk came back with its machine");
        Ok(())
    })
    .await
}

// ---- virtual machines ----

/// Runs a test that loses a virtual machine. Machines run again, and are nodes again, when it ends, however it ends.
async fn losing<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Machines>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let _alone = tests::alone().await;
    pods::run(|machines| async move {
        let outcome =
            tokio::spawn(body(machines.clone())).await.unwrap_or_else(|panic| Err(anyhow!("{panic}")));
        let mut restored = Ok(());
        for node in [&machines.here, &machines.there] {
            restored =
                restored.and(restore(&machines, node).await.with_context(|| format!("restoring {node}")));
        }
        match (outcome, restored) {
            (Err(error), Err(dirty)) => Err(error.context(format!("(and afterwards: {dirty:#})"))),
            (outcome, restored) => outcome.and(restored),
        }
    })
    .await
}

async fn restore(machines: &Machines, node: &str) -> Result<()> {
    let s = machines.scenario();
    let machine = s.lab.vm(node)?;
    machine.go_on()?;
    if machine.is_running() {
        machine.set_network(true).await?;
    } else {
        machine.power_on().await?;
    }
    machine.wait_for_node(&s.guest).await?;
    machines.set_out_of_service(node, false).await
}

/// A pod that counts on one machine.
struct Counting {
    volume: Volume,
    /// Where it is.
    lost: String,
    /// Where it can go.
    other: String,
}

async fn counting(machines: &Machines) -> Result<Counting> {
    let volume = machines.claim("data", &filesystem("ext4")).await?;
    machines.keep_counting("web", &volume).await?;
    let lost = machines.counts_on("web", None).await?;
    let other = if lost == machines.here { machines.there.clone() } else { machines.here.clone() };
    Ok(Counting { volume, lost, other })
}

impl Counting {
    /// Says that the machine is lost, waits until the pod counts on the other one, and says how long that took. Fails
    /// when both machines have the disk at any moment that is looked at.
    async fn moves(&self, machines: &Machines, how: &str) -> Result<()> {
        let s = machines.scenario();
        let said = Instant::now();
        machines.set_out_of_service(&self.lost, true).await?;
        let free = async {
            eventually(&format!("{} lets go of the disk", self.lost), PATIENCE, || async {
                // The other first: the disk may only have come there after it left here.
                let there = s.lab.libvirt_disks(&self.other).await?.contains(&self.volume.disk);
                let here = self.has_disk(s).await?;
                ensure!(!(here && there), "both machines have the disk");
                Ok(if here { Err("it has it".to_owned()) } else { Ok(()) })
            })
            .await?;
            anyhow::Ok(said.elapsed())
        };
        let (free, node) = tokio::try_join!(free, machines.counts_on("web", Some(&self.lost)))?;
        ensure!(node == self.other, "the pod is on {node}");
        let after = said.elapsed() - free;
        println!(
            "{how}: the disk is free {:.1} s after the taint, and the pod is ready on the other machine {:.1} s after that",
            free.as_secs_f64(),
            after.as_secs_f64()
        );
        Ok(())
    }

    async fn has_disk(&self, s: &Scenario) -> Result<bool> {
        Ok(s.lab.vm(&self.lost)?.is_running()
            && s.lab.libvirt_disks(&self.lost).await?.contains(&self.volume.disk))
    }

    /// Fails unless all that was acknowledged where the pod was, was found where it came next.
    async fn nothing_is_lost(&self, machines: &Machines) -> Result<()> {
        let acknowledged = machines.acknowledged_on(&self.lost, &self.volume).await?;
        machines.remove_sets().await?;
        // On the machine that was lost, which thereby shows that it takes the volume again.
        let found = machines.found(&self.lost, &self.volume).await?;
        println!("{acknowledged} records were acknowledged there, {found} were found here");
        ensure!(acknowledged >= 5 && found >= acknowledged, "{acknowledged} acknowledged, and {found} found");
        Ok(())
    }
}

#[tokio::test]
async fn a_pod_moves_from_a_machine_without_network_which_loses_its_disk_while_it_runs() -> Result<()> {
    losing(|machines| async move {
        let (s, pod) = (machines.scenario(), counting(&machines).await?);
        let machine = s.lab.vm(&pod.lost)?;
        machine.set_network(false).await?;
        machines.node_ready(&pod.lost, false).await?;
        // It still writes, and nobody has said that it is lost.
        ensure!(pod.has_disk(s).await?, "the disk was taken from a machine that nobody said is lost");
        let refused = s.driver.publish(&pod.volume.handle, &pod.other).await.unwrap_err();
        ensure!(
            refused.code() == Code::FailedPrecondition && refused.message().contains(&pod.lost),
            "{refused}"
        );

        pod.moves(&machines, "without network").await?;
        ensure!(machine.is_running(), "a machine that lets go of its disk was switched off");
        machine.set_network(true).await?;
        machines.node_ready(&pod.lost, true).await?;
        machines.set_out_of_service(&pod.lost, false).await?;
        pod.nothing_is_lost(&machines).await
    })
    .await
}

#[tokio::test]
async fn a_pod_moves_from_a_hung_machine_only_after_that_is_switched_off() -> Result<()> {
    losing(|machines| async move {
        let (s, pod) = (machines.scenario(), counting(&machines).await?);
        let direct = s.volume().await?;
        s.driver.publish(&direct, &pod.lost).await?;
        let machine = s.lab.vm(&pod.lost)?;
        machine.hang()?;
        is_stuck(s, &direct, &pod.lost).await?;
        let refused = s.driver.publish(&direct, &pod.other).await.unwrap_err();
        ensure!(
            refused.code() == Code::FailedPrecondition && refused.message().contains(&pod.lost),
            "{refused}"
        );
        machines.node_ready(&pod.lost, false).await?;
        ensure!(pod.has_disk(s).await?, "the disk was taken from a machine that nobody said is lost");

        pod.moves(&machines, "hung").await?;
        ensure!(!machine.is_running(), "it kept its disk and still runs");
        eventually("the other disk left, too", PATIENCE, || async {
            Ok(s.driver.unpublish(&direct, &pod.lost).await.map_err(|status| status.to_string()))
        })
        .await?;
        restore(&machines, &pod.lost).await?;
        pod.nothing_is_lost(&machines).await
    })
    .await
}
