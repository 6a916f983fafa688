//! Pools in a real Ceph cluster, with a real libvirtd and real QEMU domains without a boot disk. Runs as root, with
//! Ceph's programs installed: `cargo lab test --only ceph`.

mod adopt;
mod crash;
mod data;
mod ha;
mod moves;

use std::time::Duration;

use crate::support::ceph::Ceph;
use crate::support::libvirtd::{Libvirtd, processes};
use crate::support::*;
use infra_api::{CephPool, EngineKind, Labels, NodeSpec, PoolName, ProblemCode, Qos, VolumeId, VolumeSize};
use uuid::Uuid;

/// More than the time until a VM that keeps its disk is powered off.
const FENCED: Duration = Duration::from_secs(60);
/// Clusters take memory: one at a time.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

fn bytes(capacity_bytes: u64) -> VolumeSize {
    VolumeSize { capacity_bytes, limit_bytes: None }
}

/// Names of the images in `vms/NAMESPACE`.
fn images(ceph: &Ceph, namespace: &str) -> Vec<String> {
    serde_json::from_str(&ceph.rbd(&["ls", "--format", "json", "--pool", "vms", "--namespace", namespace]))
        .unwrap()
}

fn trash(ceph: &Ceph, namespace: &str) -> usize {
    let list = ["trash", "ls", "--all", "--format", "json", "--pool", "vms", "--namespace", namespace];
    serde_json::from_str::<Vec<serde_json::Value>>(&ceph.rbd(&list)).unwrap().len()
}

#[tokio::test]
async fn volumes_and_snapshots_are_images_that_a_user_of_one_namespace_can_manage() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let ceph = Ceph::start();
    ceph.rbd(&["namespace", "create", "vms/a"]);
    ceph.user("own", Some("a"));
    let mut site = Site::new();
    site.flags = vec!["--file-dir".to_owned(), text(&site.path("pool")).to_owned()];
    let server = site.start();
    let client = &server.client;
    let spec = ceph.pool_spec("own", Some("a"));
    let created = client.put_pool(&pool(), &spec).await.unwrap();
    assert!(created.healthy && created.reflink && created.capacity_bytes > 1 << 30, "{created:?}");
    let kept = |class: Option<&str>| {
        Some(CephPool { replicas: 3, min_replicas: 2, device_class: class.map(str::to_owned) })
    };
    assert_eq!(created.ceph, kept(None));
    assert_eq!((created.engine, created.path.as_str()), (EngineKind::Rbd, spec.path.as_str()));
    ceph.limit_to_class("ssd");
    // The cluster computes anew what is free.
    until("the device class and its free space are shown", async || {
        let shown = client.get_pool(&pool()).await.unwrap().unwrap();
        shown.ceph == kept(Some("ssd")) && shown.free_bytes > 0
    })
    .await;
    // The user cannot reach the rest of the Ceph pool.
    let other = client.put_pool(&PoolName::new("other").unwrap(), &ceph.pool_spec("own", None)).await;
    assert_eq!(code(other), ProblemCode::Invalid);
    let (v, s, w, x) = (volume("v"), snapshot("s"), volume("w"), volume("x"));
    let first = client.put_volume(&v, &size(8 * MIB), SOON).await.unwrap();
    let again = client.put_volume(&v, &size(8 * MIB), SOON).await.unwrap();
    assert_eq!(first.disk_uuid, again.disk_uuid);
    client.expand_volume(&v, &bytes(16 * MIB)).await.unwrap();
    assert!(client.expand_volume(&v, &bytes(8 * MIB)).await.is_err(), "a volume never shrinks");
    client.put_snapshot(&s, &of(&v), SOON).await.unwrap();
    client.put_volume(&w, &restored(&s, 32 * MIB), SOON).await.unwrap();
    client.put_volume(&x, &cloned(&v, 16 * MIB), SOON).await.unwrap();
    let mut names = images(&ceph, "a");
    names.sort();
    assert_eq!(names, ["_nestor-pool", "_snapshot.s", "v", "w", "x"]);
    assert!(ceph.rbd(&["info", "vms/a/w"]).contains("32 MiB"));
    let record = ceph.rbd(&["image-meta", "list", "vms/a/v"]);
    assert!(record.contains("formatToken\":\""), "the record is complete: {record}");

    // What the engine cannot do is refused.
    let too_large = client.put_volume(&volume("large"), &size(64 << 40), SOON).await;
    assert_eq!(code(too_large), ProblemCode::OutOfSpace);
    let image = site.path("pool/image.qcow2");
    let create = ["create", "-q", "-f", "qcow2", text(&image), "1M"];
    assert!(std::process::Command::new("qemu-img").args(create).status().unwrap().success());
    let adoption = serde_json::from_value(serde_json::json!({"path": text(&image)})).unwrap();
    let adopted = client.adopt(&volume("adopted"), &adoption, SOON).await.unwrap_err();
    assert!(adopted.to_string().contains("engine rbd"), "{adopted}");
    // The hypervisor `loop` takes only files.
    let node = Uuid::new_v4();
    let spec = NodeSpec { name: "n".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
    client.put_node(node, &spec).await.unwrap();
    let attached = client.attach(&attachment("a"), &writer(&x, node), SOON).await.unwrap_err();
    assert!(attached.to_string().contains("is not a file"), "{attached}");
    until("the refused attach leaves nothing", async || {
        client.list_attachments(None, None).await.unwrap().is_empty()
    })
    .await;

    // A volume that has clones is gone for its users at once; Ceph keeps its data until the last clone is gone.
    client.delete_volume(&v).await.unwrap();
    assert_eq!(trash(&ceph, "a"), 1);
    client.delete_snapshot(&s).await.unwrap();
    client.delete_volume(&x).await.unwrap();
    client.delete_volume(&w).await.unwrap();
    assert_eq!((images(&ceph, "a"), trash(&ceph, "a")), (vec!["_nestor-pool".to_owned()], 0));
    client.delete_pool(&pool()).await.unwrap();
    assert_eq!(images(&ceph, "a"), [""; 0]);
}

#[tokio::test]
async fn a_lost_catalog_is_rebuilt_from_the_images() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let ceph = Ceph::start();
    ceph.user("own", None);
    let site = Site::new();
    let server = site.start();
    let client = &server.client;
    client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
    let mut spec = size(8 * MIB);
    spec.labels = [("claim".to_owned(), "data".to_owned())].into();
    client.put_volume(&volume("v"), &spec, SOON).await.unwrap();
    client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    client.put_volume(&volume("w"), &restored(&snapshot("s"), 8 * MIB), SOON).await.unwrap();
    let before = client.list_volumes(None, None).await.unwrap().items;
    let snapshots = client.list_snapshots(None, None, None).await.unwrap().items;
    assert_eq!(server.stop(), Some(0));
    for file in ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"] {
        let _ = std::fs::remove_file(site.path("data").join(file));
    }
    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("2 volumes, 1 snapshots"), "{said}");
    let server = site.start();
    assert_eq!(server.client.list_volumes(None, None).await.unwrap().items, before);
    assert_eq!(server.client.list_snapshots(None, None, None).await.unwrap().items, snapshots);
    server.client.delete_volume(&volume("w")).await.unwrap();
}

/// A server with a pool in Ceph and two domains.
struct Plugged {
    // Dropped in this order.
    server: Server,
    site: Site,
    libvirt: Libvirtd,
    ceph: Ceph,
    nodes: [Uuid; 2],
}

impl Plugged {
    async fn new() -> Self {
        let ceph = Ceph::start();
        ceph.user("own", None);
        let mut libvirt = Libvirtd::start();
        let mut site = Site::new();
        site.libvirt = Some(libvirt.uri());
        let nodes = [libvirt.domain(), libvirt.domain()];
        let server = site.start();
        server.client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
        for (index, node) in nodes.iter().enumerate() {
            let (name, hypervisor) = (format!("node-{index}"), "here".to_owned());
            let spec = NodeSpec { name, hypervisor, zone: None, labels: Labels::new() };
            server.client.put_node(*node, &spec).await.unwrap();
        }
        Self { server, site, libvirt, ceph, nodes }
    }

    /// Writes 1 MiB to the only disk of a VM, in its QEMU, and checks that the image has it.
    fn write(&self, node: usize, volume: &VolumeId, pattern: u8, at: u64) {
        let domain = self.nodes[node].to_string();
        for command in [format!("write -P {pattern} {at} 1M"), "flush".to_owned()] {
            let line = format!("qemu-io -d scsi0-0-0-0 \"{command}\"");
            let said = self.libvirt.virsh(&["qemu-monitor-command", &domain, "--hmp", &line]);
            assert_eq!(said, "");
        }
        self.has(volume, pattern, at);
    }

    /// Begins to write 1 MiB, which may wait for the cluster.
    fn start_write(&self, node: usize, pattern: u8, at: u64) -> std::process::Child {
        let domain = self.nodes[node].to_string();
        let line = format!("qemu-io -d scsi0-0-0-0 \"write -P {pattern} {at} 1M\"");
        self.libvirt.virsh_child(&["qemu-monitor-command", &domain, "--hmp", &line])
    }

    fn finish_write(&self, mut begun: std::process::Child, volume: &VolumeId, pattern: u8, at: u64) {
        assert!(begun.wait().unwrap().success());
        self.has(volume, pattern, at);
    }

    /// Checks that an image has a pattern.
    fn has(&self, volume: &VolumeId, pattern: u8, at: u64) {
        let content = self.ceph.export(&format!("vms/{volume}"));
        let at = usize::try_from(at).unwrap();
        assert!(
            content[at..at + MIB as usize].iter().all(|byte| *byte == pattern),
            "{volume}: {pattern} at {at}"
        );
    }
}

#[tokio::test]
async fn a_vm_uses_an_image_and_no_write_is_lost_when_parts_of_the_cluster_die() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut here = Plugged::new().await;
    let client = here.server.client.clone();
    let (v, s, w, y) = (volume("v"), snapshot("s"), volume("w"), volume("y"));
    let other = client.put_volume(&y, &size(16 * MIB), SOON).await.unwrap().disk_uuid;
    let spec =
        infra_api::VolumeSpec { qos: Qos { iops: Some(5000), bytes_per_second: None }, ..size(16 * MIB) };
    let disk = client.put_volume(&v, &spec, SOON).await.unwrap().disk_uuid;
    let attached = client.attach(&attachment("a"), &writer(&v, here.nodes[0]), SOON).await.unwrap();
    assert!(attached.blank_attestation.is_some());
    assert!(here.libvirt.has(here.nodes[0], disk));
    let xml = here.libvirt.virsh(&["dumpxml", &here.nodes[0].to_string()]);
    assert!(xml.contains("vms/v") && xml.contains("5000") && !xml.contains("key ="), "{xml}");
    here.write(0, &v, 1, 0);
    // One writer.
    let second = client.attach(&attachment("b"), &writer(&v, here.nodes[1]), SOON).await;
    assert_eq!(code(second), ProblemCode::InUse);
    assert_eq!(code(client.delete_volume(&v).await), ProblemCode::InUse);
    // The VM sees the new size at once.
    client.expand_volume(&v, &bytes(32 * MIB)).await.unwrap();
    here.write(0, &v, 2, 31 * MIB);
    let limits = Qos { iops: Some(4000), bytes_per_second: None };
    client.put_qos(&v, &limits).await.unwrap();
    // An OSD dies during writes, and the monitor restarts.
    here.ceph.kill_osd(1);
    here.write(0, &v, 3, 4 * MIB);
    here.ceph.kill_monitor();
    let pending = here.start_write(0, 4, 8 * MIB);
    // Without monitors nothing is attached: that would freeze the VM.
    let elsewhere = writer(&y, here.nodes[1]);
    let refused = client.attach(&attachment("c"), &elsewhere, Duration::from_secs(10)).await;
    assert!(refused.is_err(), "{refused:?}");
    assert!(!here.libvirt.has(here.nodes[1], other));
    here.ceph.start_monitor();
    here.finish_write(pending, &v, 4, 8 * MIB);
    here.ceph.start_osd(1);
    here.ceph.wait_for("three OSDs", |ceph| ceph.admin(&["osd", "stat"]).contains("3 up"));
    until("the pool is healthy again", async || client.get_pool(&pool()).await.unwrap().unwrap().healthy)
        .await;
    client.attach(&attachment("c"), &elsewhere, SOON).await.unwrap();
    assert!(here.libvirt.has(here.nodes[1], other));
    client.detach(&attachment("c"), SOON).await.unwrap();
    client.delete_volume(&y).await.unwrap();
    // A snapshot of the disk in use, restored for the other VM.
    client.put_snapshot(&s, &of(&v), SOON).await.unwrap();
    here.write(0, &v, 9, 0);
    client.put_volume(&w, &restored(&s, 32 * MIB), SOON).await.unwrap();
    client.attach(&attachment("w"), &writer(&w, here.nodes[1]), SOON).await.unwrap();
    for (pattern, at) in [(1, 0), (2, 31 * MIB), (3, 4 * MIB), (4, 8 * MIB)] {
        here.has(&w, pattern, at);
    }
    client.detach(&attachment("w"), SOON).await.unwrap();
    client.detach(&attachment("a"), SOON).await.unwrap();
    client.attach(&attachment("d"), &writer(&v, here.nodes[1]), SOON).await.unwrap();
    here.write(1, &v, 5, MIB);
    here.has(&v, 9, 0);
    here.has(&v, 2, 31 * MIB);
    client.detach(&attachment("d"), SOON).await.unwrap();
    client.delete_volume(&w).await.unwrap();
    client.delete_snapshot(&s).await.unwrap();
    client.delete_volume(&v).await.unwrap();
    assert_eq!(images(&here.ceph, ""), ["_nestor-pool"]);
}

#[tokio::test]
async fn a_volume_of_a_killed_vm_is_free_only_without_watcher_and_at_once_after_a_fence() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let here = Plugged::new().await;
    let client = here.server.client.clone();
    let (v, w) = (volume("v"), volume("w"));
    for (id, name) in [(&v, "a"), (&w, "b")] {
        client.put_volume(id, &size(16 * MIB), SOON).await.unwrap();
        client.attach(&attachment(name), &writer(id, here.nodes[0]), SOON).await.unwrap();
    }
    here.write(0, &v, 7, 0);
    for pid in processes(here.nodes[0]) {
        assert!(std::process::Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    }
    // Ceph reports the dead client until its watch expires, and until then nothing proves that it is dead.
    let waits = still_running(async || client.detach(&attachment("b"), Duration::from_secs(8)).await).await;
    assert!(waits.contains("the Ceph client"), "{waits}");
    client.fence(&attachment("a"), FENCED).await.unwrap();
    assert!(here.ceph.admin(&["osd", "blocklist", "ls"]).contains("[::1]"));
    client.attach(&attachment("c"), &writer(&v, here.nodes[1]), SOON).await.unwrap();
    here.has(&v, 7, 0);
    here.write(1, &v, 8, 0);
    until("the other volume is free", async || client.list_attachments(None, None).await.unwrap().len() == 1)
        .await;
    client.detach(&attachment("c"), SOON).await.unwrap();

    // A client that is no attachment keeps the image: two writers would destroy it.
    let foreign = here.ceph.open_image("vms/v");
    let refused = client.attach(&attachment("d"), &writer(&v, here.nodes[1]), SOON).await.unwrap_err();
    assert!(
        refused.code() == Some(ProblemCode::InUse) && refused.to_string().contains("Ceph client"),
        "{refused}"
    );
    assert_eq!(code(client.delete_volume(&v).await), ProblemCode::InUse);
    drop(foreign);
    client.attach(&attachment("e"), &writer(&v, here.nodes[1]), SOON).await.unwrap();
    here.has(&v, 8, 0);
}

#[tokio::test]
async fn a_guest_can_have_a_ceph_pool_and_user_of_its_own_but_no_disk_in_a_namespace() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let here = Plugged::new().await;
    let client = here.server.client.clone();
    here.ceph.create_pool("guest");
    here.ceph.user_of("guest", "guest", None);
    // The guest's user sees nothing of other pools.
    assert!(here.ceph.as_user("guest", &["ls", "--pool", "guest"]).success());
    assert!(!here.ceph.as_user("guest", &["ls", "--pool", "vms"]).success());
    let (own, own_pool) = (volume("own"), PoolName::new("guest").unwrap());
    client.put_pool(&own_pool, &here.ceph.pool_spec_of("guest", "guest", None)).await.unwrap();
    let in_pool = |pool: &PoolName| {
        let placement = infra_api::Placement { pool: Some(pool.clone()), ..infra_api::Placement::default() };
        infra_api::VolumeSpec { placement, ..size(16 * MIB) }
    };
    let disk = client.put_volume(&own, &in_pool(&own_pool), SOON).await.unwrap().disk_uuid;
    client.attach(&attachment("own"), &writer(&own, here.nodes[0]), SOON).await.unwrap();
    assert!(here.libvirt.has(here.nodes[0], disk));
    client.detach(&attachment("own"), SOON).await.unwrap();

    here.ceph.rbd(&["namespace", "create", "vms/a"]);
    here.ceph.user("inside", Some("a"));
    let (inside, namespace) = (volume("inside"), PoolName::new("namespace").unwrap());
    client.put_pool(&namespace, &here.ceph.pool_spec("inside", Some("a"))).await.unwrap();
    let disk = client.put_volume(&inside, &in_pool(&namespace), SOON).await.unwrap().disk_uuid;
    let refused = client.attach(&attachment("in"), &writer(&inside, here.nodes[0]), SOON).await.unwrap_err();
    assert!(refused.to_string().contains("in the RADOS namespace a"), "{refused}");
    assert!(!here.libvirt.has(here.nodes[0], disk));
    until("nothing is left of the attach", async || {
        client.list_attachments(None, None).await.unwrap().is_empty()
    })
    .await;
    client.delete_volume(&inside).await.unwrap();
    client.delete_volume(&own).await.unwrap();
}
