//! Proof of detachment: a VM's disk is free only when it is proven that the VM cannot write to it. Runs with the real
//! server, a real libvirtd and real QEMU domains without a boot disk. Runs as root.

use std::time::Duration;

use crate::support::libvirtd::{HOST, Libvirtd, processes};
use crate::support::*;
use infra_api::{NodeState, ProblemCode};
use uuid::Uuid;

const SHORT: Duration = Duration::from_secs(2);

/// A server with two domains; volume `v` is attached to the first by attachment `a`.
struct Plugged {
    // Dropped in this order.
    server: Server,
    site: Site,
    libvirt: Libvirtd,
    nodes: [Uuid; 2],
    disk: Uuid,
}

impl Plugged {
    async fn new() -> Self {
        let mut libvirt = Libvirtd::start();
        let mut site = Site::new();
        site.libvirt = Some(libvirt.uri());
        let nodes = [libvirt.domain(), libvirt.domain()];
        let server = site.ready(&nodes).await;
        let id = volume("v");
        let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
        server.client.attach(&attachment("a"), &writer(&id, nodes[0]), SOON).await.unwrap();
        Self { server, site, libvirt, nodes, disk }
    }

    fn name(&self, node: usize) -> String {
        self.nodes[node].to_string()
    }

    async fn state(&self) -> NodeState {
        self.server.client.get_node(self.nodes[0]).await.unwrap().unwrap().state
    }

    /// Whether the server reports the VM of volume `v` as proven off, alone and in the list.
    async fn is_proven_off(&self) -> bool {
        let alone = self.server.client.get_node(self.nodes[0]).await.unwrap().unwrap();
        let all = self.server.client.list_nodes().await.unwrap();
        let listed = all.into_iter().find(|node| node.uuid == self.nodes[0]).unwrap();
        assert_eq!(alone.proven_off, listed.proven_off);
        alone.proven_off
    }

    /// Requests a detach, which must not succeed and must report this reason.
    async fn is_kept(&self, why: &str) {
        assert!(!self.is_proven_off().await, "a VM that keeps its disk is not proven off");
        until("the detach reports the reason", async || {
            still_running(async || self.server.client.detach(&attachment("a"), SHORT).await)
                .await
                .contains(why)
        })
        .await;
        let elsewhere = writer(&volume("v"), self.nodes[1]);
        let refused = self.server.client.attach(&attachment("b"), &elsewhere, SOON).await;
        assert_eq!(code(refused), ProblemCode::InUse);
    }

    /// Waits until the disk is detached without another request.
    async fn is_detached(&self) {
        until("the disk is detached", async || {
            self.server.client.list_attachments(None, None).await.unwrap().is_empty()
        })
        .await;
    }
}

#[tokio::test]
async fn a_vm_saved_to_a_file_keeps_its_disk_until_it_runs_again() {
    let mut all = Plugged::new().await;
    let (name, file) = (all.name(0), all.libvirt.path("memory"));
    all.libvirt.virsh(&["save", &name, text(&file)]);
    all.is_kept("saved").await;
    // libvirt itself has forgotten the saved state.
    all.libvirt.restart(HOST);
    assert!(all.libvirt.virsh(&["domstate", "--reason", &name]).contains("unknown"));
    all.is_kept("saved").await;
    assert_eq!(all.state().await, NodeState::Saved);
    // A restarted server remembers it.
    let Plugged { server, site, libvirt, nodes, disk } = all;
    server.kill();
    let all = Plugged { server: site.start(), site, libvirt, nodes, disk };
    all.is_kept("saved").await;

    all.libvirt.virsh(&["restore", text(&file)]);
    all.is_detached().await;
    assert!(!all.libvirt.has(all.nodes[0], all.disk));
    assert_eq!(all.state().await, NodeState::Running);
    all.libvirt.virsh(&["destroy", &name]);
    until("the VM is off", async || all.state().await == NodeState::Off).await;
}

#[tokio::test]
async fn the_disk_of_a_saved_vm_is_free_when_the_saved_state_is_discarded() {
    let all = Plugged::new().await;
    let name = all.name(0);
    all.libvirt.virsh(&["managedsave", &name]);
    all.is_kept("managedsave-remove").await;
    // Here libvirt can be queried, so the operator's declaration is refused.
    assert_eq!(code(all.server.client.discard_saved_state(all.nodes[0]).await), ProblemCode::InUse);
    all.libvirt.virsh(&["managedsave-remove", &name]);
    all.is_detached().await;
    assert_eq!(all.state().await, NodeState::Off);

    all.libvirt.virsh(&["start", &name]);
    until("the VM runs", async || all.state().await == NodeState::Running).await;
    let id = volume("v");
    all.server.client.attach(&attachment("c"), &writer(&id, all.nodes[0]), SOON).await.unwrap();
    all.libvirt.virsh(&["save", &name, text(&all.libvirt.path("memory"))]);
    until("the saved state is recorded", async || all.state().await == NodeState::Saved).await;
    // A refused attach leaves nothing behind.
    let other = volume("w");
    all.server.client.put_volume(&other, &size(MIB), SOON).await.unwrap();
    let refused = all.server.client.attach(&attachment("d"), &writer(&other, all.nodes[0]), SOON).await;
    assert_eq!(code(refused), ProblemCode::NodeNotRunning);
    all.server.client.delete_volume(&other).await.unwrap();

    still_running(async || all.server.client.detach(&attachment("c"), SHORT).await).await;
    all.server.client.discard_saved_state(all.nodes[0]).await.unwrap();
    all.is_detached().await;
}

#[tokio::test]
async fn a_vm_does_not_count_as_off_when_another_host_answers() {
    let mut all = Plugged::new().await;
    until("the host is recorded", async || {
        let query = "SELECT count(*) FROM hypervisor_hosts";
        all.site.catalog().query_row(query, [], |row| row.get::<_, u32>(0)).unwrap() == 1
    })
    .await;
    all.libvirt.virsh(&["destroy", &all.name(0)]);
    all.libvirt.restart(Uuid::new_v4());
    all.is_kept("forget-host").await;
    assert_eq!(all.state().await, NodeState::Unknown);
    assert_eq!(code(all.server.client.forget_host("there").await), ProblemCode::NotFound);
    all.server.client.forget_host("here").await.unwrap();
    all.is_detached().await;
    assert_eq!(all.state().await, NodeState::Off);
}

#[tokio::test]
async fn a_vm_that_libvirt_lost_keeps_its_disk_while_its_qemu_runs() {
    let mut all = Plugged::new().await;
    let name = all.name(0);
    all.libvirt.restart_without_status();
    assert_eq!(all.libvirt.virsh(&["domstate", &name]), "shut off");
    let lost = processes(all.nodes[0]);
    assert_eq!(lost.len(), 1);
    all.is_kept("lock").await;
    // Another QEMU process of the same VM without the disk does not free it.
    all.libvirt.virsh(&["start", &name]);
    all.is_kept("lock").await;
    assert!(std::process::Command::new("kill").args(["-KILL", &lost[0]]).status().unwrap().success());
    all.is_detached().await;
}

#[tokio::test]
async fn a_vm_that_is_off_is_proven_off_until_it_runs_again() {
    let all = Plugged::new().await;
    let name = all.name(0);
    assert!(!all.is_proven_off().await, "it runs");
    all.libvirt.virsh(&["destroy", &name]);
    until("it is proven off", async || all.is_proven_off().await).await;
    // Its volume is detached, and the proof stays.
    all.server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert!(all.is_proven_off().await);
    // The other VM has never had a volume: nothing would show its QEMU if libvirt lost it.
    all.libvirt.virsh(&["destroy", &all.name(1)]);
    let other = async || all.server.client.get_node(all.nodes[1]).await.unwrap().unwrap();
    until("the other VM is off", async || other().await.state == NodeState::Off).await;
    assert!(!other().await.proven_off);

    all.libvirt.virsh(&["start", &name]);
    assert!(!all.is_proven_off().await, "it runs again");
    // It went off without a volume.
    all.libvirt.virsh(&["destroy", &name]);
    until("it is off", async || all.state().await == NodeState::Off).await;
    assert!(!all.is_proven_off().await);
}

#[tokio::test]
async fn a_vm_that_does_not_exist_any_more_is_proven_off() {
    let all = Plugged::new().await;
    let name = all.name(0);
    all.libvirt.virsh(&["destroy", &name]);
    all.libvirt.virsh(&["undefine", &name]);
    until("it is gone", async || all.state().await == NodeState::Gone).await;
    until("it is proven off", async || all.is_proven_off().await).await;
}

#[tokio::test]
async fn an_unexpected_disk_is_reported_and_detached_if_it_is_ours() {
    let all = Plugged::new().await;
    let (client, id) = (&all.server.client, volume("v"));
    // An operator declares the saved state discarded and restores it nevertheless.
    let (name, file) = (all.name(0), all.libvirt.path("memory"));
    all.libvirt.virsh(&["save", &name, text(&file)]);
    all.is_kept("saved").await;
    client.discard_saved_state(all.nodes[0]).await.unwrap();
    all.is_detached().await;
    // It has the disk again, until the server finds it: the metric shows that it did.
    all.libvirt.virsh(&["restore", text(&file)]);
    until("the disk is detached", async || !all.libvirt.has(all.nodes[0], all.disk)).await;
    let metric = async |text: &str| all.server.ops("/metrics").await.1.contains(text);
    until("the detach is counted", async || {
        metric("nestor_storage_infra_unexpected_disks_detached_total 1").await
    })
    .await;
    let condition = async || client.get_volume(&id).await.unwrap().unwrap().condition;
    until("the unexpected disk is reported", async || {
        condition().await.message.is_some_and(|text| text.contains("without an attachment"))
    })
    .await;
    until("the volume is normal", async || condition().await.healthy).await;

    // This disk was attached by someone else.
    all.libvirt.plug(all.nodes[0], &all.site.file(&id), Uuid::new_v4());
    until("the unexpected disk is reported", async || !condition().await.healthy).await;
    let message = condition().await.message.unwrap();
    assert!(message.contains("manually") && message.contains(&all.name(0)), "{message}");
    assert!(metric("nestor_storage_infra_unexpected_disks{hypervisor=\"here\"} 1").await);
    let refused = client.attach(&attachment("c"), &writer(&id, all.nodes[1]), SOON).await;
    assert_eq!(code(refused), ProblemCode::InUse);
    assert_eq!(code(client.delete_volume(&id).await), ProblemCode::InUse);
    all.libvirt.virsh(&["detach-disk", &name, "sdz", "--live"]);
    until("the volume is normal", async || condition().await.healthy).await;
    client.attach(&attachment("d"), &writer(&id, all.nodes[1]), SOON).await.unwrap();
}
