//! What administrators and backup tools do to disks behind the server's back, on real QEMU domains without a boot disk: it is
//! found, told and never loses a write, and it heals once it is undone. Runs as root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::libvirtd::Libvirtd;
use crate::support::*;
use infra_api::{
    ClientError, ConditionCause, Labels, MoveSpec, PoolName, PoolSpec, ProblemCode, Volume, VolumeSize,
};
use uuid::Uuid;

const SIZE: u64 = 4 * MIB;
/// How long a detach is waited for that is refused.
const BRIEFLY: Duration = Duration::from_secs(2);

/// A server with one pool and a second one beside it, and two domains.
struct At {
    // Dropped in this order.
    server: Server,
    site: Site,
    libvirt: Libvirtd,
    node: Uuid,
    other: Uuid,
}

impl At {
    async fn new() -> Self {
        let site = Site::reflink();
        Self::on(site).await
    }

    async fn on(mut site: Site) -> Self {
        let mut libvirt = Libvirtd::start();
        site.libvirt = Some(libvirt.uri());
        let [node, other] = [libvirt.domain(), libvirt.domain()];
        let server = site.ready(&[node, other]).await;
        Self { server, site, libvirt, node, other }
    }

    /// A volume that is attached to the first domain.
    async fn attached(&self, id: &str) -> Volume {
        let mut spec = size(SIZE);
        spec.placement.pool = Some(pool());
        let made = self.server.client.put_volume(&volume(id), &spec, SOON).await.unwrap();
        self.attach(id, id, self.node).await.unwrap();
        made
    }

    async fn attach(&self, id: &str, of: &str, node: Uuid) -> Result<(), ClientError> {
        self.server.client.attach(&attachment(id), &writer(&volume(of), node), SOON).await.map(drop)
    }

    async fn detach(&self, id: &str) -> Result<(), ClientError> {
        self.server.client.detach(&attachment(id), BRIEFLY).await
    }

    async fn volume(&self, id: &str) -> Volume {
        self.server.client.get_volume(&volume(id)).await.unwrap().unwrap()
    }

    /// Waits until a volume is abnormal because of its disk, and returns the message.
    async fn altered(&self, id: &str) -> String {
        let is = async || self.volume(id).await.condition.cause == Some(ConditionCause::Altered);
        until("the altered disk is found", is).await;
        self.volume(id).await.condition.message.unwrap()
    }

    async fn healed(&self, id: &str) {
        until("the volume is normal again", async || self.volume(id).await.condition.healthy).await;
    }

    fn virsh(&self, arguments: &[&str]) -> String {
        self.libvirt.virsh(arguments)
    }

    /// The `<disk>` of a volume in the live state of the first domain.
    fn disk(&self, volume: &Volume) -> String {
        let xml = self.virsh(&["dumpxml", &self.name()]);
        let disk = xml.split("<disk ").find(|disk| disk.contains(&volume.disk_uuid.to_string())).unwrap();
        format!("<disk {}</disk>", disk.split("</disk>").next().unwrap())
    }

    fn target(&self, volume: &Volume) -> String {
        self.disk(volume).split("<target dev='").nth(1).unwrap().split('\'').next().unwrap().to_owned()
    }

    fn name(&self) -> String {
        self.node.to_string()
    }

    /// Takes an external snapshot, as backup tools do, and returns the layer's file.
    fn overlay(&self, volume: &Volume) -> PathBuf {
        let layer = self.site.path("overlay.qcow2");
        let spec = format!("{},snapshot=external,file={}", self.target(volume), layer.display());
        self.virsh(&[
            "snapshot-create-as",
            &self.name(),
            "backup",
            "--disk-only",
            "--no-metadata",
            "--diskspec",
            &spec,
        ]);
        layer
    }

    /// Copies the disk of a volume, as a tool does.
    fn blockcopy(&self, volume: &Volume, to: &Path, more: &[&str]) {
        let (name, target) = (self.name(), self.target(volume));
        let copy = ["blockcopy", &name, &target, "--dest", text(to), "--format", "raw", "--transient-job"];
        self.virsh(&[&copy, more].concat());
    }

    fn write(&self, volume: &Volume, pattern: u8, at: u64) {
        self.libvirt.write(self.node, volume.disk_uuid, pattern, at);
    }

    /// Everything that would copy, lose or change data that may not be the volume's is refused, and nothing is changed.
    async fn refuses_everything(&self, id: &str) {
        let (client, name) = (&self.server.client, volume(id));
        let refused = |what: &str, code: ProblemCode| assert_eq!(code, ProblemCode::InUse, "{what}");
        refused("snapshot", code(client.put_snapshot(&snapshot("s"), &of(&name), SOON).await));
        refused("clone", code(client.put_volume(&volume("clone"), &cloned(&name, SIZE), SOON).await));
        let bigger = VolumeSize { capacity_bytes: 2 * SIZE, limit_bytes: None };
        refused("expand", code(client.expand_volume(&name, &bigger).await));
        refused("move", code(client.move_volume(&name, &to_far()).await));
        refused("attach elsewhere", code(self.attach("elsewhere", id, self.other).await));
        let release = infra_api::Release { path: Some(text(&self.site.path("pool/out.img")).to_owned()) };
        refused("release", code(client.release(&name, &release).await));
        refused("delete", code(client.delete_volume(&name).await));
        assert!(client.export(&infra_api::VolumeSource::Volume(name), None).await.is_err());
    }

    async fn add_far(&self) {
        let path = self.site.path("far");
        fs::create_dir_all(&path).unwrap();
        let spec = PoolSpec { path: text(&path).to_owned(), labels: Labels::new(), ..self.site.pool_spec() };
        self.server.client.put_pool(&PoolName::new("far").unwrap(), &spec).await.unwrap();
    }
}

fn to_far() -> MoveSpec {
    MoveSpec { pool: PoolName::new("far").unwrap(), bytes_per_second: None }
}

fn detail(error: Result<(), ClientError>) -> String {
    error.unwrap_err().problem().unwrap().detail.clone()
}

#[tokio::test]
async fn an_external_snapshot_holds_the_volume_until_its_layer_is_committed() {
    let at = At::new().await;
    at.add_far().await;
    let made = at.attached("v").await;
    at.write(&made, 0x11, 0);
    let layer = at.overlay(&made);
    at.write(&made, 0x22, 4096);
    at.refuses_everything("v").await;
    let message = at.altered("v").await;
    assert!(message.contains("blockcommit") && message.contains(text(&layer)), "{message}");
    // The disk stays in the VM: its writes are in the layer.
    at.detach("v").await.unwrap_err();
    assert!(at.libvirt.has(at.node, made.disk_uuid));
    assert_eq!(at.site.read(&volume("v"), 1, 4096), [0], "the write is not in the volume's file");
    at.virsh(&["blockcommit", &at.name(), &at.target(&made), "--active", "--pivot", "--wait"]);
    at.healed("v").await;
    until("the disk is detached", async || at.detach("v").await.is_ok()).await;
    assert_eq!(
        (at.site.read(&volume("v"), 1, 0), at.site.read(&volume("v"), 1, 4096)),
        (vec![0x11], vec![0x22])
    );
    at.attach("next", "v", at.other).await.unwrap();
}

#[tokio::test]
async fn a_layer_is_remembered_when_the_vm_stops_and_an_operator_accepts_the_data() {
    let at = At::new().await;
    at.add_far().await;
    let made = at.attached("v").await;
    let layer = at.overlay(&made);
    at.write(&made, 0x22, 4096);
    at.altered("v").await;
    at.virsh(&["destroy", &at.name()]);
    until("the VM is off, and its attachment ends", async || at.detach("v").await.is_ok()).await;
    at.refuses_everything("v").await;
    // The server that was restarted knows it, too, and does not give the file to the VM that starts again.
    let At { server, site, libvirt, node, other } = at;
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    let at = At { server, site, libvirt, node, other };
    at.virsh(&["start", &at.name()]);
    let refused = detail(at.attach("again", "v", at.node).await);
    assert!(refused.contains("layer"), "{refused}");
    // What an operator does: bring the writes back, and say so.
    let commit = Command::new("qemu-img").args(["commit", "-q"]).arg(&layer).status().unwrap();
    assert!(commit.success());
    at.server.client.accept_volume(&volume("v")).await.unwrap();
    assert!(at.volume("v").await.condition.healthy);
    at.attach("again-2", "v", at.node).await.unwrap();
    assert_eq!(at.site.read(&volume("v"), 1, 4096), [0x22]);
}

#[tokio::test]
async fn a_layer_that_lost_its_vm_while_the_server_was_down_is_found_beside_the_file() {
    let at = At::new().await;
    let made = at.attached("v").await;
    let target = at.target(&made);
    let At { server, site, libvirt, node, other } = at;
    assert_eq!(server.stop(), Some(0));
    let name = node.to_string();
    // Where virsh makes it if nobody says otherwise.
    libvirt.virsh(&[
        "snapshot-create-as",
        &name,
        "backup",
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &target,
    ]);
    let layer = site.path("pool/v.backup");
    assert!(layer.exists());
    libvirt.write(node, made.disk_uuid, 0x22, 4096);
    libvirt.virsh(&["destroy", &name]);
    let server = site.start();
    let at = At { server, site, libvirt, node, other };
    at.virsh(&["start", &name]);
    let shows = async || {
        let all = at.server.client.list_attachments(None, None).await.unwrap();
        all[0]
            .message
            .as_ref()
            .is_some_and(|message| message.contains("v.backup is a layer over the file of volume v"))
    };
    until("the attachment says why it has no disk", shows).await;
    assert!(!at.libvirt.has(node, made.disk_uuid));
    let copied = at.server.client.put_volume(&volume("clone"), &cloned(&volume("v"), SIZE), SOON).await;
    assert_eq!(code(copied), ProblemCode::InUse);
    at.server.client.detach(&attachment("v"), SOON).await.unwrap();
    assert_eq!(code(at.attach("elsewhere", "v", other).await), ProblemCode::InUse);

    let commit = Command::new("qemu-img").args(["commit", "-q", text(&layer)]).status().unwrap();
    assert!(commit.success());
    fs::remove_file(&layer).unwrap();
    at.attach("again", "v", other).await.unwrap();
    assert_eq!(at.site.read(&volume("v"), 1, 4096), [0x22]);
}

#[tokio::test]
async fn a_vm_that_starts_again_gets_no_disk_while_a_loop_device_has_its_file() {
    let at = At::new().await;
    let made = at.attached("v").await;
    at.virsh(&["destroy", &at.name()]);
    let device = LoopDevice::on(&at.site.path("pool/v.raw"));
    at.virsh(&["start", &at.name()]);
    let shows = async || {
        let all = at.server.client.list_attachments(None, None).await.unwrap();
        all[0].message.as_ref().is_some_and(|message| message.contains(&device.0))
    };
    until("the attachment names the loop device", shows).await;
    assert!(!at.libvirt.has(at.node, made.disk_uuid));
    drop(device);
    until("the VM has its disk again", async || at.libvirt.has(at.node, made.disk_uuid)).await;
}

/// A loop device until it is dropped.
struct LoopDevice(String);

impl LoopDevice {
    fn on(file: &Path) -> Self {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[tokio::test]
async fn a_layer_on_a_block_device_is_seen_too() {
    let at = At::new().await;
    let made = at.attached("v").await;
    let file = at.site.path("layer.img");
    fs::File::create(&file).unwrap().set_len(4 * SIZE).unwrap();
    let device = LoopDevice::on(&file);
    let spec = format!("{},snapshot=external,stype=block,file={}", at.target(&made), device.0);
    at.virsh(&[
        "snapshot-create-as",
        &at.name(),
        "backup",
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &spec,
    ]);
    at.write(&made, 0x22, 4096);
    let message = at.altered("v").await;
    assert!(message.contains(&device.0), "{message}");
    at.detach("v").await.unwrap_err();
    at.virsh(&["blockcommit", &at.name(), &at.target(&made), "--active", "--pivot", "--wait"]);
    at.healed("v").await;
    until("the disk is detached", async || at.detach("v").await.is_ok()).await;
    assert_eq!(at.site.read(&volume("v"), 1, 4096), [0x22]);
}

#[tokio::test]
async fn a_vm_that_was_restarted_does_not_get_the_file_below_a_layer() {
    let at = At::new().await;
    let made = at.attached("v").await;
    at.overlay(&made);
    at.altered("v").await;
    at.virsh(&["destroy", &at.name()]);
    at.virsh(&["start", &at.name()]);
    let shows = async || {
        let all = at.server.client.list_attachments(None, None).await.unwrap();
        all[0].message.as_ref().is_some_and(|message| message.contains("layer"))
    };
    until("the attachment says why it has no disk", shows).await;
    assert!(!at.libvirt.has(at.node, made.disk_uuid));
}

#[tokio::test]
async fn a_push_backup_leaves_no_layer_and_the_volume_stays_normal() {
    let at = At::new().await;
    let made = at.attached("v").await;
    at.write(&made, 0x11, 0);
    let copy = at.site.path("backup.raw");
    let xml = format!(
        "<domainbackup mode='push'><disks><disk name='{}' type='file'><target file='{}'/><driver type='raw'/></disk>\
         </disks></domainbackup>",
        at.target(&made),
        copy.display()
    );
    let file = at.libvirt.path("backup.xml");
    fs::write(&file, xml).unwrap();
    at.virsh(&["backup-begin", &at.name(), text(&file)]);
    until("the backup is complete", async || at.virsh(&["domjobinfo", &at.name()]).contains("None")).await;
    assert_eq!(fs::read(&copy).unwrap()[0], 0x11);
    at.server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    assert!(at.volume("v").await.condition.healthy);
    at.server.client.detach(&attachment("v"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_copy_by_somebody_else_is_told_and_ended_by_its_owner() {
    let at = At::new().await;
    at.add_far().await;
    let made = at.attached("v").await;
    let copy = at.site.path("copy.raw");
    at.blockcopy(&made, &copy, &["--bandwidth", "1"]);
    let message = at.altered("v").await;
    assert!(message.contains(text(&copy)), "{message}");
    assert_eq!(
        code(at.server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await),
        ProblemCode::InUse
    );
    at.virsh(&["blockjob", &at.name(), &at.target(&made), "--abort"]);
    at.healed("v").await;
    at.server.client.detach(&attachment("v"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_disk_that_was_exchanged_for_another_file_is_not_detached() {
    let at = At::new().await;
    at.add_far().await;
    let made = at.attached("v").await;
    let copy = at.site.path("copy.raw");
    at.blockcopy(&made, &copy, &["--wait", "--pivot"]);
    at.write(&made, 0x33, 0);
    at.refuses_everything("v").await;
    let message = at.altered("v").await;
    assert!(message.contains("instead of"), "{message}");
    at.detach("v").await.unwrap_err();
    assert!(at.libvirt.has(at.node, made.disk_uuid));
    // Back again: the copy has everything.
    let file = at.site.file(&volume("v"));
    at.blockcopy(&made, &file, &["--reuse-external", "--wait", "--pivot"]);
    at.healed("v").await;
    until("the disk is detached", async || at.detach("v").await.is_ok()).await;
    assert_eq!(at.site.read(&volume("v"), 1, 0), [0x33]);
}

#[tokio::test]
async fn disks_that_somebody_attached_by_hand_are_told_and_stay() {
    let at = At::new().await;
    let made = at.attached("v").await;
    let xml = at.disk(&made);
    let attach = |xml: &str| {
        let file = at.libvirt.path("hand.xml");
        fs::write(&file, xml).unwrap();
        at.virsh(&["attach-device", &at.name(), text(&file), "--live"]);
    };
    at.server.client.detach(&attachment("v"), SOON).await.unwrap();
    // With another serial, it is still the volume's data.
    let other = Uuid::new_v4();
    let alias = xml.find("<alias").unwrap();
    let end = alias + xml[alias..].find("/>").unwrap() + 2;
    let foreign =
        format!("{}{}", &xml[..alias], &xml[end..]).replace(&made.disk_uuid.to_string(), &other.to_string());
    attach(&foreign);
    let refused = detail(at.attach("v2", "v", at.node).await);
    assert!(refused.contains("qemu-system"), "{refused}");
    let unexpected = async || at.volume("v").await.condition.cause == Some(ConditionCause::UnexpectedDisk);
    until("the disk is told", unexpected).await;
    assert_eq!(code(at.server.client.delete_volume(&volume("v")).await), ProblemCode::InUse);
    assert!(at.libvirt.has(at.node, other));
}

#[tokio::test]
async fn a_saved_definition_does_not_bring_a_disk_back() {
    let at = At::new().await;
    let made = at.attached("v").await;
    let file = at.libvirt.path("saved.xml");
    let define = |xml: &str| {
        fs::write(&file, xml).unwrap();
        at.virsh(&["define", text(&file)]);
    };
    let has = |serial: Uuid| at.virsh(&["dumpxml", &at.name(), "--inactive"]).contains(&serial.to_string());
    let live = at.virsh(&["dumpxml", &at.name()]);
    define(&live);
    assert!(has(made.disk_uuid), "a dumped definition keeps disks");
    wait_for("the disk is removed from the definition", || !has(made.disk_uuid));
    assert!(at.libvirt.has(at.node, made.disk_uuid), "the VM keeps its disk");
    // One that somebody added as their own is told, and left.
    let other = Uuid::new_v4();
    define(&live.replace(&made.disk_uuid.to_string(), &other.to_string()));
    let message = at.altered("v").await;
    assert!(message.contains("persistent definition") && has(other), "{message}");
}

/// A process that has a file open until it is dropped.
struct Opener(Child);

impl Opener {
    fn of(file: &Path) -> Self {
        let file = fs::File::options().read(true).write(true).open(file).unwrap();
        Self(Command::new("sleep").arg("600").stdin(Stdio::from(file)).spawn().unwrap())
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn who_has_the_file_open_is_asked_before_it_is_attached() {
    let at = At::new().await;
    let id = volume("v");
    at.server.client.put_volume(&id, &size(SIZE), SOON).await.unwrap();
    let file = at.site.file(&id);
    let device = LoopDevice::on(&file);
    let refused = detail(at.attach("a1", "v", at.node).await);
    assert!(refused.contains(&device.0), "{refused}");
    drop(device);
    let process = Opener::of(&file);
    let refused = detail(at.attach("a2", "v", at.node).await);
    assert!(refused.contains(&process.0.id().to_string()) && refused.contains("sleep"), "{refused}");
    drop(process);
    let mut image = Command::new("qemu-io");
    let mut image = image
        .args(["--format", "raw"])
        .arg(&file)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let named = async || match at.attach("a3", "v", at.node).await {
        Err(error) => error.problem().unwrap().detail.contains("qemu-io"),
        Ok(()) => at.server.client.detach(&attachment("a3"), SOON).await.is_err(),
    };
    until("the program is named", named).await;
    image.kill().unwrap();
    image.wait().unwrap();
    at.attach("a4", "v", at.node).await.unwrap();
}

#[tokio::test]
async fn a_file_that_was_exchanged_or_truncated_is_told_and_not_attached() {
    let at = At::new().await;
    let id = volume("v");
    at.server.client.put_volume(&id, &size(SIZE), SOON).await.unwrap();
    let (file, aside) = (at.site.file(&id), at.site.path("pool/aside.img"));
    let damaged = async |text: &str| {
        until(&format!("the volume is damaged: {text}"), async || {
            let condition = at.volume("v").await.condition;
            condition.cause == Some(ConditionCause::File) && condition.message.unwrap().contains(text)
        })
        .await;
    };
    // Each change of the directory is noticed at the next check.
    fs::rename(&file, &aside).unwrap();
    damaged("missing").await;
    assert!(at.attach("a1", "v", at.node).await.is_err());
    // Restored without its extended attributes.
    fs::copy(&aside, &file).unwrap();
    damaged("has no record").await;
    let refused = detail(at.attach("a2", "v", at.node).await);
    assert!(refused.contains("accept"), "{refused}");
    at.server.client.accept_volume(&id).await.unwrap();
    at.healed("v").await;
    at.attach("a3", "v", at.node).await.unwrap();
    at.server.client.detach(&attachment("a3"), SOON).await.unwrap();
    fs::File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
    let refused = detail(at.attach("a4", "v", at.node).await);
    assert!(refused.contains("truncated"), "{refused}");
}

#[tokio::test]
async fn a_pool_that_was_restored_from_an_earlier_state_is_not_used() {
    let at = At::new().await;
    let id = volume("v");
    at.server.client.put_volume(&id, &size(SIZE), SOON).await.unwrap();
    let marker = at.site.path("pool/.nestor-pool");
    let name = "user.nestor.generation";
    let generation = || {
        let mut bytes = [0; 32];
        let length = rustix::fs::lgetxattr(&marker, name, &mut bytes).ok()?;
        std::str::from_utf8(&bytes[..length]).ok()?.parse::<u64>().ok()
    };
    wait_for("the marker has a generation", || generation().is_some());
    let first = generation();
    let At { server, site, libvirt, node, other } = at;
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    wait_for("the marker has a higher generation", || generation() > first);
    assert_eq!(server.stop(), Some(0));
    // What rsync -X or an LVM snapshot brings back.
    rustix::fs::setxattr(&marker, name, b"1", rustix::fs::XattrFlags::empty()).unwrap();
    let server = site.start();
    let at = At { server, site, libvirt, node, other };
    let unhealthy = async || at.volume("v").await.condition.cause == Some(ConditionCause::Pool);
    until("the pool is not healthy", unhealthy).await;
    assert!(at.volume("v").await.condition.message.unwrap().contains("earlier state"));
    assert!(at.attach("a", "v", at.node).await.is_err());
    assert!(at.server.client.put_volume(&volume("w"), &size(SIZE), SOON).await.is_err());
}
