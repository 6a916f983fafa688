//! A virtual machine's disk is free only when it is proven that the virtual machine cannot write to it: over the real
//! server, a real libvirtd and real QEMUs, whose machines have nothing to boot. Runs as root.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

use std::time::Duration;

use infra_api::{NodeState, ProblemCode};
use support::libvirtd::{HOST, Libvirtd, processes};
use support::*;
use uuid::Uuid;

const SHORT: Duration = Duration::from_secs(2);

/// A server over two domains, the first of which has the disk of volume `v`, by attachment `a`.
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

    /// Detaches the disk, which must not succeed, and gives why.
    async fn kept(&self) -> String {
        let told = under_way(async || self.server.client.detach(&attachment("a"), SHORT).await).await;
        let elsewhere = writer(&volume("v"), self.nodes[1]);
        let refused = self.server.client.attach(&attachment("b"), &elsewhere, SOON).await;
        assert_eq!(code(refused), ProblemCode::InUse);
        told
    }

    /// Waits until the disk is detached without being asked again.
    async fn is_detached(&self) {
        until("the disk is detached", async || {
            self.server.client.list_attachments(None, None).await.unwrap().is_empty()
        })
        .await;
    }
}

#[tokio::test]
async fn a_vm_that_is_saved_to_a_file_keeps_its_disk_until_it_runs_again() {
    let mut all = Plugged::new().await;
    let (name, file) = (all.name(0), all.libvirt.path("memory"));
    all.libvirt.virsh(&["save", &name, text(&file)]);
    assert!(all.kept().await.contains("saved"));
    // libvirt itself does not know it any more.
    all.libvirt.restart(HOST);
    assert!(all.libvirt.virsh(&["domstate", "--reason", &name]).contains("unknown"));
    assert!(all.kept().await.contains("saved"));
    //S1
    // Nor does a server that is started anew forget it.
    let Plugged { server, site, libvirt, nodes, disk } = all;
    server.kill();
    let all = Plugged { server: site.start(), site, libvirt, nodes, disk };
    assert!(all.kept().await.contains("saved"));

    all.libvirt.virsh(&["restore", text(&file)]);
    all.is_detached().await;
    assert!(!all.libvirt.has(all.nodes[0], all.disk));
    assert_eq!(all.state().await, NodeState::Running);
    all.libvirt.virsh(&["destroy", &name]);
    until("the VM is off", async || all.state().await == NodeState::Off).await;
}

#[tokio::test]
async fn a_vm_that_libvirt_lost_keeps_its_disk_for_as_long_as_its_qemu_runs() {
    let mut all = Plugged::new().await;
    let name = all.name(0);
    all.libvirt.restart_without_status();
    assert_eq!(all.libvirt.virsh(&["domstate", &name]), "shut off");
    let lost = processes(all.nodes[0]);
    assert_eq!(lost.len(), 1);
    assert!(all.kept().await.contains("lock"));
    // Another QEMU of the same VM does not make it free, either: that one does not have the disk.
    all.libvirt.virsh(&["start", &name]);
    assert!(all.kept().await.contains("lock"));
    assert!(std::process::Command::new("kill").args(["-KILL", &lost[0]]).status().unwrap().success());
    all.is_detached().await;
}
