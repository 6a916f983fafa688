//! Moves of volumes between pools: detached, and attached to real QEMU domains without a boot disk that write meanwhile. After a
//! crash at every step there is one file, it has all data, the catalog names it, and the domain uses it. Runs as root.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::support::libvirtd::Libvirtd;
use crate::support::*;
use infra_api::{
    AttachmentSpec, ClientError, Drain, DrainSpec, Labels, MovePhase, MoveSpec, PoolName, PoolSpec,
    ProblemCode, Rejection, Volume, VolumeSize, VolumeSpec, ZONE_LABEL,
};
use uuid::Uuid;

pub(super) const SIZE: u64 = 8 * MIB;

pub(super) fn pool_named(name: &str) -> PoolName {
    PoolName::new(name).unwrap()
}

pub(super) fn to(pool: &str, rate: Option<u64>) -> MoveSpec {
    MoveSpec { pool: pool_named(pool), bytes_per_second: rate }
}

fn here() -> VolumeSpec {
    let mut spec = size(SIZE);
    spec.placement.pool = Some(pool());
    spec
}

/// A server with the pools `pool` and `far`, on two filesystems, and one domain.
pub(super) struct At {
    // Dropped in this order.
    pub(super) server: Server,
    pub(super) site: Site,
    pub(super) libvirt: Libvirtd,
    pub(super) node: Uuid,
}

impl At {
    pub(super) async fn new() -> Self {
        // The daemon sees only what is mounted before it starts.
        let mut site = Site::reflink();
        site.mount("far", &["mkfs.xfs", "-q", "-m", "reflink=1"]);
        let mut libvirt = Libvirtd::start();
        site.libvirt = Some(libvirt.uri());
        let node = libvirt.domain();
        let server = site.ready(&[node]).await;
        let at = Self { server, site, libvirt, node };
        at.add_pool("far", Labels::new()).await;
        at
    }

    pub(super) async fn add_pool(&self, name: &str, labels: Labels) {
        let path = self.site.path(name);
        fs::create_dir_all(&path).unwrap();
        let spec = PoolSpec { path: text(&path).to_owned(), labels, ..self.site.pool_spec() };
        self.server.client.put_pool(&pool_named(name), &spec).await.unwrap();
    }

    pub(super) async fn create(&self, id: &str) -> Volume {
        self.server.client.put_volume(&volume(id), &here(), SOON).await.unwrap()
    }

    pub(super) async fn attach(&self, id: &str, of: &str) {
        let spec = writer(&volume(of), self.node);
        self.server.client.attach(&attachment(id), &spec, SOON).await.unwrap();
    }

    pub(super) async fn volume(&self, id: &str) -> Volume {
        self.server.client.get_volume(&volume(id)).await.unwrap().unwrap()
    }

    pub(super) async fn start(&self, id: &str, spec: &MoveSpec) -> Result<Volume, ClientError> {
        self.server.client.move_volume(&volume(id), spec).await
    }

    pub(super) async fn end(&self, id: &str) -> Volume {
        until("the move is complete", async || self.volume(id).await.moving.is_none()).await;
        self.volume(id).await
    }

    pub(super) async fn is_in(&self, id: &str, phase: MovePhase) {
        let is = async || self.volume(id).await.moving.is_some_and(|moving| moving.phase == phase);
        until(&format!("the move is {phase}"), is).await;
    }

    /// Names of the pools that have a file of this volume.
    pub(super) fn pools_with(&self, id: &str) -> Vec<&'static str> {
        let has = |pool: &&str| {
            ["raw", "vpart"].iter().any(|end| self.site.path(pool).join(format!("{id}.{end}")).exists())
        };
        ["pool", "far"].into_iter().filter(has).collect()
    }

    pub(super) fn file(&self, pool: &str, id: &str) -> std::path::PathBuf {
        self.site.path(pool).join(format!("{id}.raw"))
    }

    pub(super) fn state(&self) -> String {
        self.libvirt.virsh(&["domstate", &self.node.to_string()])
    }

    /// The domain's device of the disk of a volume, and its file.
    pub(super) fn device(&self, disk: Uuid) -> (String, String) {
        let xml = self.libvirt.virsh(&["dumpxml", &self.node.to_string()]);
        let disks = xml.split("<disk ").find(|one| one.contains(&disk.to_string())).unwrap();
        let attribute = |name: &str| {
            let after = disks.split(name).nth(1).unwrap();
            after.split('\'').nth(1).unwrap().to_owned()
        };
        (attribute("<alias name="), attribute("<source file="))
    }

    /// Writes a block of this byte on the disk as the domain does.
    pub(super) fn write(&self, disk: Uuid, byte: u8, block: u64) {
        let (device, _) = self.device(disk);
        let command = format!("qemu-io -d {device} \"write -P {byte} {} 4k\"", block * 4096);
        let done = self.libvirt.virsh(&["qemu-monitor-command", &self.node.to_string(), "--hmp", &command]);
        // QEMU prints the result elsewhere, and errors here.
        assert_eq!(done, "");
    }

    /// Whether the file that the domain has open has a block of this byte.
    pub(super) fn reads(&self, disk: Uuid, byte: u8, block: u64) -> bool {
        let (_, file) = self.device(disk);
        let mut found = [0; 4096];
        fs::File::open(file).unwrap().read_exact_at(&mut found, block * 4096).unwrap();
        found.iter().all(|one| *one == byte)
    }

    pub(super) async fn drain(&self) -> Drain {
        self.server.client.drain_pool(&pool(), &DrainSpec::default()).await.unwrap()
    }

    pub(super) async fn restart_after_crash(self) -> Self {
        let Self { mut server, site, libvirt, node } = self;
        server.wait_for_crash().await;
        Self { server: site.start(), site, libvirt, node }
    }
}

#[tokio::test]
async fn a_detached_volume_moves_with_its_data_and_frees_its_space() {
    let at = At::new().await;
    at.create("v").await;
    at.site.write(&volume("v"), b"kept", 3 * MIB);
    let client = &at.server.client;
    client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    at.start("v", &to("far", None)).await.unwrap();
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    let bytes = fs::read(at.file("far", "v")).unwrap();
    assert_eq!((&bytes[3 * MIB as usize..][..4], bytes.len() as u64), (&b"kept"[..], SIZE));
    assert!(fs::metadata(at.file("far", "v")).unwrap().blocks() * 512 < MIB, "holes stay holes");
    let pools = client.list_pools().await.unwrap();
    let reserved: HashMap<&str, u64> =
        pools.iter().map(|pool| (pool.name.as_str(), pool.reserved_bytes)).collect();
    assert_eq!(reserved["far"], SIZE);
    assert!(reserved["pool"] < SIZE, "only the snapshot is left there: {}", reserved["pool"]);
    // The snapshot stays usable, and the volume can be used.
    client.put_volume(&volume("restored"), &restored(&snapshot("s"), SIZE), SOON).await.unwrap();
    at.attach("a", "v").await;
    at.write(moved.disk_uuid, 8, 5);
    assert!(at.reads(moved.disk_uuid, 8, 5) && at.reads(moved.disk_uuid, 0, 0));
    // Repeated, the request changes nothing.
    assert_eq!(at.start("v", &to("far", None)).await.unwrap().moving, None);
}

#[tokio::test]
async fn a_volume_moves_while_its_vm_writes_and_every_write_is_kept() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.attach("a", "v").await;
    (0..64).for_each(|block| at.write(disk, 1, block));
    at.write(disk, 9, SIZE / 4096 - 1);
    at.start("v", &to("far", Some(MIB))).await.unwrap();
    let mut block = 0;
    while at.volume("v").await.moving.is_some() {
        at.write(disk, 2, block % 64);
        block += 1;
    }
    let moved = at.volume("v").await;
    assert_eq!((moved.pool.as_str(), moved.moving), ("far", None));
    assert!(block > 0);
    assert_eq!(at.device(disk).1, text(&at.file("far", "v")));
    assert_eq!((at.state().as_str(), at.pools_with("v")), ("running", vec!["far"]));
    let last = block.min(64);
    assert!((0..last).all(|block| at.reads(disk, 2, block)));
    assert!((last..64).all(|block| at.reads(disk, 1, block)) && at.reads(disk, 9, SIZE / 4096 - 1));
    at.write(disk, 3, 7);
    // It is expanded, detached and attached as before.
    let more = VolumeSize { capacity_bytes: 2 * SIZE, limit_bytes: None };
    at.server.client.expand_volume(&volume("v"), &more).await.unwrap();
    at.server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert!(fs::read(at.file("far", "v")).unwrap()[7 * 4096..8 * 4096].iter().all(|byte| *byte == 3));
    at.attach("b", "v").await;
    assert!(at.reads(disk, 3, 7));
}

#[tokio::test]
async fn operations_during_a_copy_are_refused_or_end_it_and_the_old_file_stays_the_truth() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.attach("a", "v").await;
    at.site.write(&volume("v"), &vec![7; 6 * MIB as usize], MIB);
    at.start("v", &to("far", Some(MIB))).await.unwrap();
    at.is_in("v", MovePhase::Mirroring).await;
    let client = &at.server.client;
    let more = VolumeSize { capacity_bytes: 2 * SIZE, limit_bytes: None };
    for refused in [
        code(client.expand_volume(&volume("v"), &more).await),
        code(client.release(&volume("v"), &infra_api::Release::default()).await),
    ] {
        assert!([ProblemCode::Unavailable, ProblemCode::InUse].contains(&refused), "{refused}");
    }
    assert_eq!(code(at.start("v", &to("pool", None)).await), ProblemCode::InUse);
    let removal = client.delete_pool(&pool_named("far")).await.unwrap_err();
    assert!(removal.to_string().contains("being moved"), "{removal}");
    client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    // A detach ends the copy; the move goes on with the detached volume.
    at.write(disk, 5, 0);
    client.detach(&attachment("a"), SOON).await.unwrap();
    at.is_in("v", MovePhase::Copying).await;
    assert_eq!(at.volume("v").await.pool, pool());
    // An attach is not delayed by that copy.
    at.attach("b", "v").await;
    assert_eq!(at.device(disk).1, text(&at.file("pool", "v")));
    assert!(at.reads(disk, 5, 0));
    client.cancel_move(&volume("v")).await.unwrap();
    let kept = at.end("v").await;
    assert_eq!((kept.pool, at.pools_with("v")), (pool(), vec!["pool"]));
    // Deletion ends a move, too.
    client.detach(&attachment("b"), SOON).await.unwrap();
    at.start("v", &to("far", Some(MIB))).await.unwrap();
    at.is_in("v", MovePhase::Copying).await;
    assert_eq!(code(client.delete_volume(&volume("v")).await), ProblemCode::Unavailable);
    until("the volume is deleted", async || client.delete_volume(&volume("v")).await.is_ok()).await;
    assert!(at.pools_with("v").is_empty());
}

#[tokio::test]
async fn a_vm_that_stops_during_the_copy_keeps_the_old_file() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.attach("a", "v").await;
    at.site.write(&volume("v"), &vec![7; 6 * MIB as usize], MIB);
    at.start("v", &to("far", Some(MIB))).await.unwrap();
    at.is_in("v", MovePhase::Mirroring).await;
    at.write(disk, 5, 0);
    at.libvirt.virsh(&["destroy", &at.node.to_string()]);
    until("the move waits", async || {
        at.volume("v").await.moving.is_some_and(|moving| moving.message.is_some())
    })
    .await;
    assert_eq!(at.volume("v").await.pool, pool());
    at.libvirt.virsh(&["start", &at.node.to_string()]);
    // The disk is attached again from the old file, and the move completes.
    until("the VM has the disk", async || at.libvirt.has(at.node, disk)).await;
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    assert!(at.reads(disk, 5, 0) && at.reads(disk, 7, 256));
}

#[tokio::test]
async fn what_cannot_be_moved_is_refused_with_the_reason() {
    let at = At::new().await;
    at.create("v").await;
    let client = &at.server.client;
    assert_eq!(code(at.start("w", &to("far", None)).await), ProblemCode::NotFound);
    assert_eq!(code(at.start("v", &to("none", None)).await), ProblemCode::NotFound);
    assert_eq!(code(at.start("v", &to("far", Some(1))).await), ProblemCode::Invalid);
    at.add_pool("zoned", Labels::from([(ZONE_LABEL.to_owned(), "z".to_owned())])).await;
    let refused = at.start("v", &to("zoned", None)).await.unwrap_err();
    assert!(refused.to_string().contains("every zone"), "{refused}");
    let mut huge = here();
    huge.capacity_bytes = 7 << 30;
    huge.placement.pool = Some(pool_named("far"));
    client.put_volume(&volume("huge"), &huge, SOON).await.unwrap();
    huge.placement.pool = Some(pool());
    client.put_volume(&volume("other"), &huge, SOON).await.unwrap();
    let full = at.start("other", &to("far", None)).await.unwrap_err();
    assert_eq!(full.code(), Some(ProblemCode::OutOfSpace), "{full}");
    assert!(full.to_string().contains("bytes free"), "{full}");
    let reading = AttachmentSpec { read_only: true, ..writer(&volume("v"), at.node) };
    client.attach(&attachment("r"), &reading, SOON).await.unwrap();
    assert_eq!(code(at.start("v", &to("far", None)).await), ProblemCode::InUse);
    client.detach(&attachment("r"), SOON).await.unwrap();
    let why = infra_api::SuspensionSpec { reason: "errors".into(), pause_nodes: false };
    client.suspend_volume(&volume("v"), &why).await.unwrap();
    assert_eq!(code(at.start("v", &to("far", None)).await), ProblemCode::Suspended);
    assert_eq!(at.pools_with("v"), ["pool"]);
}

#[tokio::test]
async fn a_drain_moves_what_it_can_says_what_it_cannot_and_can_be_repeated() {
    let at = At::new().await;
    let client = &at.server.client;
    for id in ["one", "two"] {
        client.put_volume(&volume(id), &size(SIZE), SOON).await.unwrap();
    }
    at.create("named").await;
    for id in ["one", "two"] {
        if at.volume(id).await.pool.as_str() == "far" {
            at.start(id, &to("pool", None)).await.unwrap();
            at.end(id).await;
        }
    }
    until("the drain moves nothing any more", async || !at.drain().await.is_moving()).await;
    let left = at.drain().await.volumes;
    assert_eq!((left.len(), left[0].volume.as_str()), (1, "named"));
    assert!(left[0].message.as_ref().unwrap().contains("not the requested pool"), "{left:?}");
    for id in ["one", "two"] {
        assert_eq!((at.volume(id).await.pool.as_str(), at.pools_with(id)), ("far", vec!["far"]));
    }
    let refused = client.put_volume(&volume("new"), &here(), SOON).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert!(problem.rejections.iter().any(|one| one.reason == Rejection::Cordoned), "{refused}");
    client.cancel_drain(&pool()).await.unwrap();
    // Moved by name, it leaves.
    at.start("named", &to("far", None)).await.unwrap();
    at.end("named").await;
    assert_eq!(at.drain().await.volumes, []);
    client.delete_pool(&pool()).await.unwrap();
}

/// Moves an attached volume, with a write before and one during the copy.
pub(super) async fn move_attached(at: &At, id: &str, disk: Uuid) -> Result<(), ClientError> {
    at.write(disk, 4, 1);
    at.start(id, &to("far", None)).await?;
    until("the move is complete, or the server crashed", async || {
        match at.server.client.get_volume(&volume(id)).await {
            Ok(found) => found.is_some_and(|volume| volume.moving.is_none()),
            Err(_) => true,
        }
    })
    .await;
    Ok(())
}

/// Checks that the volume is in its new pool and nowhere else, and that the domain uses that file.
pub(super) async fn check_moved(at: &At, id: &str, disk: Uuid) {
    let moved = at.end(id).await;
    assert_eq!((moved.pool.as_str(), at.pools_with(id)), ("far", vec!["far"]));
    assert_eq!(at.device(disk).1, text(&at.file("far", id)));
    assert_eq!(at.state(), "running");
    assert!(at.reads(disk, 4, 1));
    at.write(disk, 6, 2);
    let bytes = fs::read(at.file("far", id)).unwrap();
    assert!(bytes[4096..8192].iter().all(|byte| *byte == 4));
    assert!(bytes[8192..12288].iter().all(|byte| *byte == 6));
    let record = read_record(&at.file("far", id)).unwrap();
    assert!(record.get("unfinishedMove").is_none(), "{record}");
}

async fn clear(at: &At, id: &str) {
    let client = &at.server.client;
    client.detach(&attachment(id), SOON).await.unwrap();
    client.delete_volume(&volume(id)).await.unwrap();
    assert!(at.pools_with(id).is_empty());
}

#[tokio::test]
async fn an_attached_volume_has_one_file_after_a_crash_at_every_step_of_its_move() {
    let mut at = At::new().await;
    let disk = at.create("v0").await.disk_uuid;
    at.attach("v0", "v0").await;
    at.site.record_fail_points();
    move_attached(&at, "v0", disk).await.unwrap();
    let steps: Vec<String> = at.site.passed_fail_points();
    check_moved(&at, "v0", disk).await;
    clear(&at, "v0").await;
    assert!(steps.iter().any(|step| step == "hypervisor.pivot.after"), "{steps:?}");
    let mut times: HashMap<&str, usize> = HashMap::new();
    for (number, step) in steps.iter().enumerate() {
        let time = times.entry(step).or_default();
        *time += 1;
        let id = format!("v{}", number + 1);
        let disk = at.create(&id).await.disk_uuid;
        at.attach(&id, &id).await;
        at.site.arm(step, *time);
        println!("at {step}, pass {time}");
        let _ = move_attached(&at, &id, disk).await;
        at = at.restart_after_crash().await;
        // The crash may have been before the intent.
        until("the move is requested", async || at.start(&id, &to("far", None)).await.is_ok()).await;
        check_moved(&at, &id, disk).await;
        clear(&at, &id).await;
    }
    println!("{} crashes", steps.len());
}

#[tokio::test]
async fn a_vm_that_ends_while_it_is_paused_for_the_switch_loses_nothing() {
    for step in ["hypervisor.pivot.before", "hypervisor.pivot.after"] {
        let mut at = At::new().await;
        let disk = at.create("v").await.disk_uuid;
        at.attach("a", "v").await;
        at.site.arm(step, 1);
        let _ = move_attached(&at, "v", disk).await;
        at.server.wait_for_crash().await;
        assert_eq!(at.state(), "paused", "{step}");
        at.libvirt.virsh(&["destroy", &at.node.to_string()]);
        let At { server, site, libvirt, node } = at;
        drop(server);
        let at = At { server: site.start(), site, libvirt, node };
        at.libvirt.virsh(&["start", &node.to_string()]);
        until("the VM has the disk", async || at.libvirt.has(node, disk)).await;
        check_moved(&at, "v", disk).await;
    }
}
