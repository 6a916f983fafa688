//! `pool discover` and `pool init` with loop devices: a blank disk becomes a pool, and a disk with anything on it is refused
//! and not written to. Runs as root.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::support::*;
use infra_api::{PoolName, ZONE_LABEL};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes of an LVM label that its checksum covers.
const LVM_LABEL: usize = 512 - 20;

/// A loop device of this test.
struct Disk {
    device: String,
    image: PathBuf,
}

impl Drop for Disk {
    fn drop(&mut self) {
        // What a failed test left behind; the device goes away with its last user.
        let _ =
            Command::new("umount").args(["--lazy", "--quiet", &self.device]).stderr(Stdio::null()).status();
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}

fn succeeds(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Attaches an image as a loop device.
fn attach(image: &Path, more: &[&str]) -> Disk {
    let device = succeeds("losetup", &[&["--find", "--show"], more, &[text(image)]].concat());
    Disk { device: device.trim().to_owned(), image: image.to_owned() }
}

fn image(site: &Site, name: &str, bytes: u64) -> PathBuf {
    let path = site.path(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn blank(site: &Site, name: &str) -> Disk {
    attach(&image(site, name, GIB), &[])
}

/// A blank disk with these bytes at an offset.
fn with_bytes(site: &Site, name: &str, bytes: &[u8], at: u64) -> Disk {
    let path = image(site, name, GIB);
    File::options().write(true).open(&path).unwrap().write_all_at(bytes, at).unwrap();
    attach(&path, &[])
}

fn formatted(site: &Site, name: &str, make: &[&str]) -> Disk {
    let path = image(site, name, GIB);
    succeeds(make[0], &[&make[1..], &[text(&path)]].concat());
    attach(&path, &[])
}

fn lvm_checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0xf597_a6cf, |sum, byte| {
        (0..8).fold(
            sum ^ u32::from(*byte),
            |sum, _| if sum & 1 == 1 { (sum >> 1) ^ 0xedb8_8320 } else { sum >> 1 },
        )
    })
}

/// The label of an LVM physical volume, which is in its second sector.
fn lvm_label() -> Vec<u8> {
    let mut covered = vec![0; LVM_LABEL];
    covered[..4].copy_from_slice(&32_u32.to_le_bytes());
    covered[4..12].copy_from_slice(b"LVM2 001");
    covered[12..44].copy_from_slice(&[b'a'; 32]);
    let mut label = b"LABELONE".to_vec();
    label.extend(1_u64.to_le_bytes());
    label.extend(lvm_checksum(&covered).to_le_bytes());
    label.extend(covered);
    label
}

/// A master boot record with one partition.
fn partition_table() -> Vec<u8> {
    let mut sector = vec![0; 512];
    sector[446 + 4] = 0x83;
    sector[446 + 8..446 + 12].copy_from_slice(&2048_u32.to_le_bytes());
    sector[446 + 12..446 + 16].copy_from_slice(&2048_u32.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// What `pool discover` prints about a disk.
fn discovered(disk: &Disk) -> serde_json::Value {
    let shown = succeeds(BINARY, &["pool", "discover", &disk.device, "--output", "json"]);
    serde_json::from_str::<serde_json::Value>(&shown).unwrap()[0].take()
}

fn id(disk: &Disk) -> String {
    discovered(disk)["id"].as_str().unwrap().to_owned()
}

/// The arguments of `pool init` for a site's server.
fn init(site: &Site, server: &Server, devices: &[&str], more: &[&str]) -> Vec<String> {
    let (mounts, fstab, pki) = (site.path("mounts"), site.path("fstab"), site.path("pki"));
    let file = |name: &str| pki.join(name).display().to_string();
    let url = format!("https://{}", server.api);
    let words = ["pool", "init", "--mount-dir", text(&mounts), "--fstab", text(&fstab), "--infra-url", &url];
    let mut all: Vec<String> =
        words.iter().chain(devices).chain(more).map(|word| (*word).to_owned()).collect();
    for (flag, name) in [("ca", "ca.crt"), ("cert", "operator.crt"), ("key", "operator.key")] {
        all.extend([format!("--infra-{flag}"), file(name)]);
    }
    all
}

fn run_init(site: &Site, server: &Server, devices: &[&str], more: &[&str]) -> Output {
    Command::new(BINARY).args(init(site, server, devices, more)).stdin(Stdio::null()).output().unwrap()
}

fn error(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Fails unless the disk is refused for this reason by both commands, and stays as it is.
fn is_refused(site: &Site, server: &Server, disk: &Disk, reason: &str) {
    let copy = site.path("copy");
    succeeds("cp", &["--sparse=always", text(&disk.image), text(&copy)]);
    let shown = discovered(disk);
    assert_eq!(shown["usable"], false, "{reason}: {shown}");
    assert!(shown["reasons"].to_string().contains(reason), "{reason}: {shown}");
    let device = format!("{}={}", disk.device, id(disk));
    let refusal = error(&run_init(site, server, &[&device], &["--name", "new", "--yes"]));
    assert!(refusal.contains(reason) && refusal.contains("nothing was changed"), "{reason}: {refusal}");
    succeeds("cmp", &[text(&disk.image), text(&copy)]);
    fs::remove_file(copy).unwrap();
}

async fn nothing_was_made(site: &Site, server: &Server) {
    assert_eq!(server.client.list_pools().await.unwrap().len(), 0);
    assert!(!site.path("fstab").exists() && !site.path("mounts").exists());
}

#[tokio::test]
async fn a_disk_with_anything_on_it_is_refused_and_not_written_to() {
    let site = Site::new();
    let server = site.start();
    let refused = |disk: &Disk, reason: &str| is_refused(&site, &server, disk, reason);
    refused(&formatted(&site, "ext4", &["mkfs.ext4", "-q", "-F"]), "has a signature: ext4");
    refused(&formatted(&site, "swap", &["mkswap", "--quiet"]), "has a signature: swap");
    refused(&with_bytes(&site, "table", &partition_table(), 0), "has a signature: dos partition table");
    refused(&with_bytes(&site, "lvm", &lvm_label(), 512), "has a signature: LVM2_member");
    refused(&with_bytes(&site, "raw", b"rows of a database", 4096), "has data without a known signature");
    refused(&with_bytes(&site, "tail", b"x", GIB - 1), "has data without a known signature");
    refused(&attach(&image(&site, "small", GIB - MIB), &[]), "too small");
    refused(&attach(&image(&site, "read-only", GIB), &["--read-only"]), "read-only");

    let mounted = formatted(&site, "mounted", &["mkfs.xfs", "-q"]);
    fs::create_dir(site.path("here")).unwrap();
    succeeds("mount", &[&mounted.device, text(&site.path("here"))]);
    refused(&mounted, &format!("mounted at {}", site.path("here").display()));
    let backing = blank(&site, "backing");
    let nested = attach(Path::new(&backing.device), &[]);
    refused(&backing, &format!("backing file of {}", nested.device.trim_start_matches("/dev/")));
    nothing_was_made(&site, &server).await;
}

#[test]
fn swap_space_in_use_is_no_blank_disk() {
    let site = Site::new();
    let disk = formatted(&site, "swap", &["mkswap", "--quiet"]);
    succeeds("swapon", &[&disk.device]);
    let shown = discovered(&disk);
    succeeds("swapoff", &[&disk.device]);
    let reasons = shown["reasons"].to_string();
    assert!(reasons.contains("used as swap space") && reasons.contains("open exclusively"), "{shown}");
}

#[tokio::test]
async fn a_volume_that_is_attached_to_this_host_is_no_blank_disk() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let mut spec = infra_api::VolumeSpec::of_size(GIB);
    spec.placement.pool = Some(pool());
    server.client.put_volume(&volume("v"), &spec, SOON).await.unwrap();
    let disk = attach(&site.file(&volume("v")), &[]);
    let shown = discovered(&disk);
    assert!(shown["reasons"].to_string().contains("v.raw of a pool"), "{shown}");
    let refusal = error(&run_init(&site, &server, &[&disk.device], &["--name", "new"]));
    assert!(refusal.contains("v.raw of a pool"), "{refusal}");
}

#[tokio::test]
async fn another_disk_than_the_expected_one_and_a_missing_confirmation_are_refused() {
    let site = Site::new();
    let server = site.start();
    let (one, two) = (blank(&site, "one"), blank(&site, "two"));
    assert_eq!(discovered(&one)["usable"], true);
    assert_ne!(id(&one), id(&two));
    let refusal = |device: &str, more: &[&str]| {
        error(&run_init(&site, &server, &[device], &[&["--name", "new"], more].concat()))
    };
    let exchanged = format!("{}={}", one.device, id(&two));
    assert!(refusal(&exchanged, &["--yes"]).contains("another disk"));
    assert!(refusal(&one.device, &["--yes"]).contains("--yes needs the ID"));
    assert!(refusal(&one.device, &[]).contains("not a terminal"));
    // Attached again, it is another disk for the host.
    let before = id(&one);
    succeeds("losetup", &["--detach", &one.device]);
    succeeds("losetup", &[&one.device, text(&one.image)]);
    assert!(refusal(&format!("{}={before}", one.device), &["--yes"]).contains("another disk"));
    assert!(refusal(text(&site.path("one")), &[]).contains("not a block device"));
    nothing_was_made(&site, &server).await;
}

#[tokio::test]
async fn blank_disks_become_pools_with_volumes() {
    let site = Site::new();
    let (one, two) = (blank(&site, "one"), blank(&site, "two"));
    let server = site.start();
    let devices = [format!("{}={}", one.device, id(&one)), format!("{}={}", two.device, id(&two))];
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let more = ["--name", "fast", "--zone", "z1", "--label", "tier=fast", "--yes"];
    let made = run_init(&site, &server, &devices, &more);
    assert!(made.status.success(), "{made:?}");
    let fstab = fs::read_to_string(site.path("fstab")).unwrap();
    for (name, disk) in [("fast-1", &one), ("fast-2", &two)] {
        let found = server.client.get_pool(&PoolName::new(name).unwrap()).await.unwrap().unwrap();
        assert!(found.healthy && found.reflink, "{found:?}");
        assert_eq!((found.labels[ZONE_LABEL].as_str(), found.labels["tier"].as_str()), ("z1", "fast"));
        let target = site.path("mounts").join(name);
        assert_eq!(Path::new(&found.path), target.join("pool"));
        let uuid = succeeds("blkid", &["--probe", "--output", "value", "--match-tag", "UUID", &disk.device]);
        assert!(fstab.contains(&format!("UUID={} {} xfs ", uuid.trim(), target.display())), "{fstab}");
        let mut spec = infra_api::VolumeSpec::of_size(MIB);
        spec.placement.pool = Some(found.name.clone());
        server.client.put_volume(&volume(name), &spec, SOON).await.unwrap();
        assert!(target.join("pool").join(format!("{name}.raw")).exists());
        assert!(discovered(disk)["reasons"].to_string().contains("mounted at"));
    }
    // Neither can be made a pool again.
    let again = format!("{}={}", one.device, id(&one));
    assert!(error(&run_init(&site, &server, &[&again], &["--name", "again", "--yes"])).contains("xfs"));
    drop(server);
}

#[tokio::test]
async fn the_typed_word_confirms() {
    let site = Site::new();
    let disk = blank(&site, "one");
    let server = site.start();
    let words =
        [vec![BINARY.to_owned()], init(&site, &server, &[&disk.device], &["--name", "typed"])].concat();
    let answered = |answer: &str| {
        // `script` gives the program a terminal.
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", &words.join(" "), "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let (made, shown) = answered("yes\n");
    assert!(!made && shown.contains("not confirmed; nothing was changed"), "{shown}");
    nothing_was_made(&site, &server).await;
    let (made, shown) = answered("format\n");
    assert!(made && shown.contains(&disk.device), "{shown}");
    assert!(server.client.get_pool(&PoolName::new("typed").unwrap()).await.unwrap().unwrap().healthy);
}
