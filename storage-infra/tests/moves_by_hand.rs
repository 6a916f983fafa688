//! Moves while other hands are at work: the copy of an attached disk is finished or ended with virsh, while storage-infra runs and
//! while it is down, and the VM is paused, powered off or out of space meanwhile. The next reader has every write, and a file that
//! a VM may have written to stays. Runs as root.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::moves::{At, SIZE, check_moved, move_attached, to};
use crate::support::libvirtd::Libvirtd;
use crate::support::*;
use infra_api::{Labels, MovePhase, ProblemCode, SuspensionSpec};
use uuid::Uuid;

impl At {
    fn virsh(&self, arguments: &[&str]) -> String {
        self.libvirt.virsh(arguments)
    }

    fn domain(&self) -> String {
        self.node.to_string()
    }

    /// The target name of the disk, which virsh takes.
    fn target(&self, disk: Uuid) -> String {
        let xml = self.virsh(&["dumpxml", &self.domain()]);
        let found = xml.split("<disk ").find(|one| one.contains(&disk.to_string())).unwrap();
        found.split("<target dev='").nth(1).unwrap().split('\'').next().unwrap().to_owned()
    }

    /// What the XML says about the copy of the disk.
    fn is_ready(&self, disk: Uuid) -> bool {
        let xml = self.virsh(&["dumpxml", &self.domain()]);
        let found = xml.split("<disk ").find(|one| one.contains(&disk.to_string())).unwrap();
        found
            .split("<mirror ")
            .nth(1)
            .is_some_and(|mirror| mirror.split('>').next().unwrap().contains("ready='yes'"))
    }

    async fn copied(&self, disk: Uuid) {
        until("all data is copied", async || self.is_ready(disk)).await;
    }

    /// Finishes the copy as an administrator does.
    fn pivot(&self, disk: Uuid) {
        let target = self.target(disk);
        self.virsh(&["blockjob", &self.domain(), &target, "--pivot"]);
    }

    /// Starts the move of an attached volume, and suspends it so that the copy is ready and nothing else happens.
    async fn copied_and_waiting(&self, disk: Uuid) {
        self.attach("a", "v").await;
        self.write(disk, 1, 0);
        self.virsh(&["suspend", &self.domain()]);
        self.start("v", &to("far", None)).await.unwrap();
        self.copied(disk).await;
        self.waits("paused").await;
    }

    async fn message(&self) -> String {
        self.volume("v").await.moving.and_then(|moving| moving.message).unwrap_or_default()
    }

    async fn waits(&self, why: &str) {
        until(&format!("the move waits: {why}"), async || self.message().await.contains(why)).await;
    }

    /// Stops the server, does something, and starts it again.
    async fn while_down(self, what: impl FnOnce(&Libvirtd, &Site)) -> Self {
        let Self { server, site, libvirt, node } = self;
        server.kill();
        what(&libvirt, &site);
        Self { server: site.start(), site, libvirt, node }
    }

    fn cli(&self, arguments: &[&str]) -> Output {
        let pki = self.site.path("pki");
        let mut command = Command::new(BINARY);
        command.args(arguments).env("NESTOR_INFRA_URL", format!("https://{}", self.server.api));
        for (name, file) in [("CA", "ca.crt"), ("CERT", "operator.crt"), ("KEY", "operator.key")] {
            command.env(format!("NESTOR_INFRA_{name}"), pki.join(file));
        }
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// All files of a pool whose first block has this byte.
    fn files_with(&self, pool: &str, byte: u8) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.site.path(pool)).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_file() && first_block(path).iter().all(|one| *one == byte)).collect()
    }
}

fn first_block(path: &Path) -> Vec<u8> {
    let mut found = vec![0; 4096];
    match fs::File::open(path).unwrap().read_exact_at(&mut found, 0) {
        Ok(()) => found,
        Err(_) => vec![255; 1],
    }
}

#[tokio::test]
async fn a_copy_finished_by_hand_is_taken_and_the_next_pod_reads_every_write() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    at.pivot(disk);
    at.virsh(&["resume", &at.domain()]);
    at.write(disk, 5, 0);
    // At once, before the move looks again.
    until("the disk is detached", async || at.server.client.detach(&attachment("a"), SOON).await.is_ok())
        .await;
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    assert_eq!(first_block(&at.file("far", "v")), [5; 4096]);
    at.attach("b", "v").await;
    assert!(at.reads(disk, 5, 0));
}

#[tokio::test]
async fn a_copy_finished_by_hand_while_the_server_is_down_is_taken_from_the_running_vm() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    let node = at.domain();
    let target = at.target(disk);
    let at = at
        .while_down(|libvirt, _| {
            libvirt.virsh(&["blockjob", &node, &target, "--pivot"]);
            libvirt.virsh(&["resume", &node]);
        })
        .await;
    at.write(disk, 5, 0);
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    assert!(at.reads(disk, 5, 0));
}

/// The VM wrote to the new file, and is off or without the disk before the server has seen that.
async fn finished_unseen(end: &[&str]) -> (At, Uuid) {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    let node = at.domain();
    let target = at.target(disk);
    let (device, _) = at.device(disk);
    let at = at
        .while_down(|libvirt, _| {
            libvirt.virsh(&["blockjob", &node, &target, "--pivot"]);
            libvirt.virsh(&["resume", &node]);
            let write = format!("qemu-io -d {device} \"write -P 5 0 4k\"");
            libvirt.virsh(&["qemu-monitor-command", &node, "--hmp", &write]);
            let words: Vec<&str> =
                end.iter().map(|word| if *word == "NODE" { &node } else { *word }).collect();
            libvirt.virsh(&words);
            if end[0] == "destroy" {
                libvirt.virsh(&["start", &node]);
            }
        })
        .await;
    at.waits("differ").await;
    (at, disk)
}

/// Both files are there, with what they had, and the volume is attached nowhere.
async fn check_held(at: &At, disk: Uuid) {
    let message = at.message().await;
    for pool in ["pool", "far"] {
        assert!(message.contains(text(&at.file(pool, "v"))), "{message}");
    }
    assert!(message.contains("--choose"), "{message}");
    assert_eq!(first_block(&at.file("pool", "v")), [1; 4096]);
    assert_eq!(first_block(&at.file("far", "v")), [5; 4096]);
    assert!(!at.libvirt.has(at.node, disk));
    let client = &at.server.client;
    assert_eq!(
        code(client.attach(&attachment("a"), &writer(&volume("v"), at.node), SOON).await),
        ProblemCode::Unavailable
    );
    assert_eq!(code(client.detach(&attachment("a"), SOON).await), ProblemCode::Unavailable);
    // A cancellation chooses nothing.
    client.cancel_move(&volume("v")).await.unwrap();
    at.waits("differ").await;
    assert_eq!(at.pools_with("v"), ["pool", "far"]);
}

#[tokio::test]
async fn where_the_vm_may_have_run_on_the_new_file_the_operator_chooses_it() {
    let (at, disk) = finished_unseen(&["destroy", "NODE"]).await;
    check_held(&at, disk).await;
    let (_, ops) = at.server.ops("/metrics").await;
    assert!(ops.contains("nestor_storage_infra_moves_undecided 1"), "{ops}");
    let refused = at.cli(&["volume", "move", "v", "--choose", "nowhere"]);
    assert!(!refused.status.success(), "{refused:?}");
    let chosen = at.cli(&["volume", "move", "v", "--choose", "far"]);
    assert!(chosen.status.success(), "{chosen:?}");
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    // The VM gets the disk again, with the write; the other file is kept under another name.
    until("the VM has the disk", async || at.libvirt.has(at.node, disk)).await;
    assert_eq!(at.device(disk).1, text(&at.file("far", "v")));
    assert!(at.reads(disk, 5, 0));
    assert_eq!(at.files_with("pool", 1).len(), 1, "the other file is kept");
    let (_, ops) = at.server.ops("/metrics").await;
    assert!(ops.contains("nestor_storage_infra_moves_undecided 0"), "{ops}");
}

#[tokio::test]
async fn where_the_vm_may_have_run_on_the_new_file_the_operator_chooses_the_old_one() {
    let (at, disk) = finished_unseen(&["detach-device-alias", "NODE", "scsi0-0-0-0"]).await;
    check_held(&at, disk).await;
    let chosen = at.cli(&["volume", "move", "v", "--choose", "pool"]);
    assert!(chosen.status.success(), "{chosen:?}");
    let kept = at.end("v").await;
    assert_eq!((kept.pool.as_str(), at.pools_with("v")), ("pool", vec!["pool"]));
    until("the VM has the disk", async || at.libvirt.has(at.node, disk)).await;
    assert!(at.reads(disk, 1, 0));
    assert_eq!(at.files_with("far", 5).len(), 1, "the other file is kept");
}

#[tokio::test]
async fn equal_files_need_no_choice() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    let node = at.domain();
    let at = at
        .while_down(|libvirt, _| {
            libvirt.virsh(&["destroy", &node]);
            libvirt.virsh(&["start", &node]);
        })
        .await;
    // The old file is used, and the move completes with the VM that has the disk again.
    check_moved_with(&at, disk, 1).await;
}

async fn check_moved_with(at: &At, disk: Uuid, byte: u8) {
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    until("the VM has the disk", async || at.libvirt.has(at.node, disk)).await;
    assert!(at.reads(disk, byte, 0));
}

#[tokio::test]
async fn a_copy_that_is_aborted_by_hand_begins_again() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    let target = at.target(disk);
    at.virsh(&["blockjob", &at.domain(), &target, "--abort"]);
    at.virsh(&["resume", &at.domain()]);
    at.write(disk, 6, 0);
    check_moved_with(&at, disk, 6).await;
}

#[tokio::test]
async fn a_cancelled_move_whose_copy_was_finished_by_hand_is_completed() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.copied_and_waiting(disk).await;
    at.pivot(disk);
    at.server.client.cancel_move(&volume("v")).await.unwrap();
    at.virsh(&["resume", &at.domain()]);
    at.write(disk, 5, 0);
    check_moved_with(&at, disk, 5).await;
}

#[tokio::test]
async fn a_vm_that_was_paused_for_a_switch_runs_after_a_second_crash_during_the_recovery() {
    for (first, second) in [
        ("hypervisor.pivot.before", "hypervisor.unpause.before"),
        ("hypervisor.pivot.before", "hypervisor.unpause.after"),
        ("hypervisor.pause.before", "hypervisor.unpause.before"),
        ("hypervisor.pivot.after", "hypervisor.unpause.before"),
    ] {
        println!("{first}, then {second}");
        let at = At::new().await;
        let disk = at.create("v").await.disk_uuid;
        at.attach("a", "v").await;
        at.site.arm(first, 1);
        let _ = move_attached(&at, "v", disk).await;
        let At { mut server, site, libvirt, node } = at;
        server.wait_for_crash().await;
        site.arm(second, 1);
        server = site.start();
        server.wait_for_crash().await;
        let at = At { server: site.start(), site, libvirt, node };
        check_moved(&at, "v", disk).await;
    }
}

#[tokio::test]
async fn a_disk_that_leaves_a_vm_paused_for_a_switch_does_not_leave_it_paused() {
    let at = At::new().await;
    let disk = at.create("v").await.disk_uuid;
    at.attach("a", "v").await;
    at.site.arm("hypervisor.pivot.before", 1);
    let _ = move_attached(&at, "v", disk).await;
    let At { mut server, site, libvirt, node } = at;
    server.wait_for_crash().await;
    let alias = "scsi0-0-0-0";
    let domain = node.to_string();
    let xml = libvirt.virsh(&["dumpxml", &domain]);
    let found = xml.split("<disk ").find(|one| one.contains(&disk.to_string())).unwrap();
    let target = found.split("<target dev='").nth(1).unwrap().split('\'').next().unwrap().to_owned();
    libvirt.virsh(&["blockjob", &domain, &target, "--abort"]);
    libvirt.virsh(&["detach-device-alias", &domain, alias, "--live"]);
    let at = At { server: site.start(), site, libvirt, node };
    until("the VM runs", async || at.state() == "running").await;
    check_moved(&at, "v", disk).await;
}

#[tokio::test]
async fn a_move_whose_attachments_are_forgotten_is_finished_and_cancelled() {
    for cancelled in [false, true] {
        let at = At::new().await;
        at.create("v").await;
        at.attach("a", "v").await;
        at.site.write(&volume("v"), &vec![7; 6 * MIB as usize], MIB);
        at.start("v", &to("far", Some(MIB))).await.unwrap();
        at.is_in("v", MovePhase::Mirroring).await;
        let client = &at.server.client;
        let why = SuspensionSpec { reason: "a long time".into(), pause_nodes: true };
        client.suspend_volume(&volume("v"), &why).await.unwrap();
        until("the disk is detached", async || client.detach(&attachment("a"), SOON).await.is_ok()).await;
        at.waits("suspended").await;
        assert_eq!(at.pools_with("v"), ["pool", "far"]);
        let at = at
            .while_down(|_, site| {
                assert_eq!(site.catalog().execute("DELETE FROM ended_attachments", []).unwrap(), 1);
            })
            .await;
        let client = &at.server.client;
        if cancelled {
            client.cancel_move(&volume("v")).await.unwrap();
        }
        client.resume_volume(&volume("v")).await.unwrap();
        let ended = at.end("v").await;
        let expected = if cancelled { "pool" } else { "far" };
        assert_eq!((ended.pool.as_str(), at.pools_with("v")), (expected, vec![expected]));
    }
}

/// A boot sector that writes itself to every sector from the second MiB to the end of 8 MiB, by the BIOS. The address of the
/// sector is in what it writes, at [`ADDRESS`].
fn writes_all_sectors() -> [u8; 512] {
    let code = [
        0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, // segments and stack
        0xbe, 0x26, 0x7c, 0xb8, 0x00, 0x43, 0xcd, 0x13, // extended write
        0x72, 0xf6, // again after an error
        0x66, 0xff, 0x06, 0x2e, 0x7c, // the next sector
        0x66, 0x81, 0x3e, 0x2e, 0x7c, 0x00, 0x40, 0x00, 0x00, 0x72, 0xe6, // until the end
        0xf4, 0xeb, 0xfd, // halt
        0x10, 0x00, 0x01, 0x00, 0x00, 0x7c, 0x00, 0x00, 0x00, 0x08, 0x00, 0x00, // packet: address 2048
    ];
    let mut sector = [0; 512];
    sector[..code.len()].copy_from_slice(&code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

const ADDRESS: usize = 0x2e;

/// Number of sectors, from the second MiB on, that a file has as the boot sector writes them.
fn written_sectors(path: &Path) -> usize {
    let bytes = fs::read(path).unwrap();
    let sectors = bytes.chunks(512).enumerate().skip(2048);
    sectors
        .take_while(|(address, bytes)| bytes[ADDRESS..ADDRESS + 4] == (*address as u32).to_le_bytes())
        .count()
}

#[tokio::test]
async fn a_vm_that_is_paused_by_a_full_pool_is_moved_out_of_it_and_repeats_its_write() {
    let mut site = Site::new();
    site.mount_of_size("pool", &["mkfs.xfs", "-q", "-m", "reflink=1"], 400 * MIB);
    site.mount("far", &["mkfs.xfs", "-q", "-m", "reflink=1"]);
    let mut libvirt = Libvirtd::start();
    site.libvirt = Some(libvirt.uri());
    let node = libvirt.domain();
    let server = site.ready(&[node]).await;
    let at = At { server, site, libvirt, node };
    at.add_pool("far", Labels::new()).await;
    let disk = at.create("v").await.disk_uuid;
    at.site.write(&volume("v"), &writes_all_sectors(), 0);
    at.attach("a", "v").await;
    let full = at.site.path("pool/full");
    for block in ["1M", "4k"] {
        let mut fill = Command::new("dd");
        fill.args(["if=/dev/zero", &format!("bs={block}"), "oflag=append", "conv=notrunc,fsync"]);
        fill.arg(format!("of={}", full.display())).stderr(Stdio::null()).status().unwrap();
    }
    at.virsh(&["reset", &at.domain()]);
    let reason = || at.virsh(&["domstate", &at.domain(), "--reason"]);
    until("the VM is paused for lack of space", async || reason().contains("I/O error")).await;
    at.start("v", &to("far", None)).await.unwrap();
    let moved = at.end("v").await;
    assert_eq!((moved.pool.as_str(), at.pools_with("v")), ("far", vec!["far"]));
    until("the VM runs", async || at.state() == "running").await;
    let all = (SIZE / 512 - 2048) as usize;
    until("the VM has written everything", async || written_sectors(&at.file("far", "v")) == all).await;
    assert_eq!(at.device(disk).1, text(&at.file("far", "v")));
}
