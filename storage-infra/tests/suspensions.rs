//! Suspended volumes and pools: nobody uses them, and the virtual machines that have their disks stop. Runs with the real
//! server, a real libvirtd and real QEMU domains without a boot disk. Runs as root.

use crate::support::libvirtd::Libvirtd;
use crate::support::*;
use infra_api::{
    AttachmentState, ClientError, ConditionCause, ProblemCode, Rejection, SuspensionSpec, Volume, VolumeSize,
};
use uuid::Uuid;

fn suspension(pause_nodes: bool) -> SuspensionSpec {
    SuspensionSpec { reason: "disk sdb reports errors".into(), pause_nodes }
}

/// A server with two domains; volume `v` is attached to the first by attachment `a`.
struct Attached {
    // Dropped in this order.
    server: Server,
    site: Site,
    libvirt: Libvirtd,
    nodes: [Uuid; 2],
    disk: Uuid,
}

impl Attached {
    async fn new() -> Self {
        // The daemon sees only what is mounted before it starts.
        let mut site = Site::reflink();
        let mut libvirt = Libvirtd::start();
        site.libvirt = Some(libvirt.uri());
        let nodes = [libvirt.domain(), libvirt.domain()];
        let server = site.ready(&nodes).await;
        let disk = server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap().disk_uuid;
        let at = Self { server, site, libvirt, nodes, disk };
        at.attach("a", "v", 0).await.unwrap();
        at
    }

    async fn attach(&self, id: &str, of: &str, node: usize) -> Result<infra_api::Attachment, ClientError> {
        let spec = writer(&volume(of), self.nodes[node]);
        self.server.client.attach(&attachment(id), &spec, SOON).await
    }

    async fn volume(&self) -> Volume {
        self.server.client.get_volume(&volume("v")).await.unwrap().unwrap()
    }

    async fn suspend(&self, pause_nodes: bool) -> Result<Volume, ClientError> {
        self.server.client.suspend_volume(&volume("v"), &suspension(pause_nodes)).await
    }

    async fn resume(&self) {
        self.server.client.resume_volume(&volume("v")).await.unwrap();
    }

    fn state(&self, node: usize) -> String {
        self.libvirt.virsh(&["domstate", &self.nodes[node].to_string(), "--reason"])
    }

    async fn is(&self, state: &str) {
        until(&format!("the domain is {state}"), async || self.state(0).starts_with(state)).await;
    }

    /// Replaces the server by another one with the same catalog.
    fn restart(self) -> Self {
        let Self { server, site, libvirt, nodes, disk } = self;
        server.kill();
        Self { server: site.start(), site, libvirt, nodes, disk }
    }
}

#[tokio::test]
async fn a_suspended_volume_is_not_used_and_its_vm_stops_until_it_is_resumed() {
    let at = Attached::new().await;
    let refused = at.suspend(false).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::InUse));
    assert!(refused.to_string().contains("--pause-nodes"), "{refused}");
    assert_eq!(at.volume().await.suspension, None);

    let suspended = at.suspend(true).await.unwrap();
    assert_eq!(suspended.suspension.unwrap().reason, "disk sdb reports errors");
    assert_eq!(suspended.condition.cause, Some(ConditionCause::Suspended));
    assert_eq!(at.state(0), "paused (user)");
    assert!(at.state(1).starts_with("running"), "it has no disk of the volume");

    // Somebody resumes it: it stops again.
    at.libvirt.virsh(&["resume", &at.nodes[0].to_string()]);
    at.is("paused").await;

    let client = &at.server.client;
    for refused in [
        code(at.attach("b", "v", 1).await),
        code(client.delete_volume(&volume("v")).await),
        code(client.release(&volume("v"), &infra_api::Release::default()).await),
        code(
            client
                .expand_volume(&volume("v"), &VolumeSize { capacity_bytes: 2 * MIB, limit_bytes: None })
                .await,
        ),
    ] {
        assert!([ProblemCode::Suspended, ProblemCode::InUse].contains(&refused), "{refused}");
    }
    // What only reads it is allowed.
    client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    client.put_volume(&volume("clone"), &cloned(&volume("v"), MIB), SOON).await.unwrap();

    at.resume().await;
    assert_eq!(at.state(0), "running (unpaused)");
    let resumed = at.volume().await;
    assert_eq!((resumed.suspension, resumed.condition.healthy), (None, true));
    at.resume().await;
}

#[tokio::test]
async fn a_detached_volume_is_not_attached_while_it_is_suspended() {
    let at = Attached::new().await;
    at.server.client.detach(&attachment("a"), SOON).await.unwrap();
    at.suspend(false).await.unwrap();
    let refused = at.attach("b", "v", 0).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::Suspended));
    assert!(refused.to_string().contains("disk sdb reports errors"), "{refused}");
    assert!(refused.to_string().contains("storage-infra volume resume v"), "{refused}");
    assert!(!at.libvirt.has(at.nodes[0], at.disk));
    assert_eq!(code(at.server.client.delete_volume(&volume("v")).await), ProblemCode::Suspended);
    at.resume().await;
    let attached = at.attach("c", "v", 0).await.unwrap();
    assert_eq!(attached.state, AttachmentState::Attached);
}

#[tokio::test]
async fn a_disk_that_a_vm_lost_by_a_reboot_stays_away_while_the_volume_is_suspended() {
    let at = Attached::new().await;
    at.suspend(true).await.unwrap();
    let name = at.nodes[0].to_string();
    at.libvirt.virsh(&["destroy", &name]);
    at.libvirt.virsh(&["start", &name]);
    // The repeated request is refused, and the VM runs without the disk.
    let refused = at.attach("a", "v", 0).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::Unavailable));
    assert!(refused.to_string().contains("is suspended"), "{refused}");
    assert!(!at.libvirt.has(at.nodes[0], at.disk));
    assert!(at.state(0).starts_with("running"), "{}", at.state(0));
    at.resume().await;
    at.attach("a", "v", 0).await.unwrap();
    assert!(at.libvirt.has(at.nodes[0], at.disk));
}

#[tokio::test]
async fn only_vms_that_the_server_paused_are_resumed_and_a_detached_disk_releases_its_vm() {
    let at = Attached::new().await;
    let name = at.nodes[0].to_string();
    at.libvirt.virsh(&["suspend", &name]);
    at.suspend(true).await.unwrap();
    at.resume().await;
    assert!(at.state(0).starts_with("paused"), "somebody else paused it: {}", at.state(0));
    at.libvirt.virsh(&["resume", &name]);

    at.suspend(true).await.unwrap();
    at.server.client.detach(&attachment("a"), SOON).await.unwrap();
    // The node is forgotten only after its VM was resumed.
    until("the node is removed", async || at.server.client.delete_node(at.nodes[0]).await.is_ok()).await;
    assert!(at.state(0).starts_with("running"), "{}", at.state(0));
}

#[tokio::test]
async fn a_suspension_outlives_the_server_and_is_carried_out_by_the_next() {
    let at = Attached::new().await;
    at.suspend(true).await.unwrap();
    let at = at.restart();
    assert!(at.volume().await.suspension.is_some());
    at.libvirt.virsh(&["resume", &at.nodes[0].to_string()]);
    at.is("paused").await;
    at.resume().await;
    assert!(at.state(0).starts_with("running"));
}

#[tokio::test]
async fn a_suspended_pool_takes_no_volumes_and_suspends_those_it_has() {
    let at = Attached::new().await;
    let client = &at.server.client;
    assert_eq!(code(client.suspend_pool(&pool(), &suspension(false)).await), ProblemCode::InUse);
    let suspended = client.suspend_pool(&pool(), &suspension(true)).await.unwrap();
    assert_eq!(suspended.suspension.unwrap().reason, "disk sdb reports errors");
    assert!(at.state(0).starts_with("paused"));
    let found = at.volume().await;
    assert_eq!((found.suspension, found.condition.cause), (None, Some(ConditionCause::Suspended)));
    let refused = client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().rejections[0].reason, Rejection::Suspended);
    assert_eq!(code(at.attach("b", "v", 1).await), ProblemCode::Suspended);

    // The volume is suspended for two reasons; the VM runs when the last one ends.
    at.suspend(true).await.unwrap();
    client.resume_pool(&pool()).await.unwrap();
    assert!(at.state(0).starts_with("paused"));
    at.resume().await;
    assert!(at.state(0).starts_with("running"));
    client.put_volume(&volume("w"), &size(MIB), SOON).await.unwrap();
}

#[tokio::test]
async fn a_suspension_needs_a_reason_and_an_object_and_says_what_cannot_be_paused() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let (client, id) = (&server.client, volume("v"));
    assert_eq!(code(client.suspend_volume(&id, &suspension(false)).await), ProblemCode::NotFound);
    client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let none = SuspensionSpec { reason: String::new(), pause_nodes: false };
    assert_eq!(code(client.suspend_volume(&id, &none).await), ProblemCode::Invalid);
    client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    // A loop device is of this host.
    let refused = client.suspend_volume(&id, &suspension(true)).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::Unavailable));
    assert!(refused.to_string().contains("cannot be paused"), "{refused}");
    client.detach(&attachment("a"), SOON).await.unwrap();
    client.suspend_volume(&id, &suspension(true)).await.unwrap();
}

#[tokio::test]
async fn a_crash_around_a_pause_or_a_resume_leaves_no_vm_running_or_paused_against_the_suspension() {
    let mut at = Attached::new().await;
    for point in ["hypervisor.pause.before", "hypervisor.pause.after"] {
        at.site.arm(point, 1);
        at.suspend(true).await.unwrap_err();
        at.server.wait_for_crash().await;
        at = at.restart();
        at.is("paused").await;
        at.resume().await;
        assert!(at.state(0).starts_with("running"), "{point}");
    }
    for point in ["hypervisor.unpause.before", "hypervisor.unpause.after"] {
        at.suspend(true).await.unwrap();
        at.site.arm(point, 1);
        at.server.client.resume_volume(&volume("v")).await.unwrap_err();
        at.server.wait_for_crash().await;
        at = at.restart();
        at.is("running").await;
        assert_eq!(at.volume().await.suspension, None, "{point}");
    }
}
