//! Volumes on this host for pods of the management cluster: the hypervisor kind `host` of the real server, with real loop
//! devices. Runs as root.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::*;
use host_links::{DeviceRecord, HostLinks};
use infra_api::{AttachmentState, Labels, NodeSpec, NodeState, ProblemCode, VolumeSize};
use uuid::Uuid;

/// Directory of the links of a site.
const LINKS: &str = "host";
/// Longer than the server waits for a disk that is in use.
const BRIEFLY: Duration = Duration::from_secs(7);
/// Name of the hypervisor.
const HYPERVISOR: &str = "this-host";

/// A site whose server attaches volumes to this host too.
fn site() -> Site {
    let mut site = Site::new();
    let target = format!("{HYPERVISOR}=host:{}", site.path(LINKS).display());
    site.flags.extend(["--hypervisor".to_owned(), target]);
    site
}

/// A server with a VM and with this host as nodes.
async fn ready(site: &Site, vm: Uuid) -> (Server, Uuid) {
    let server = site.ready(&[vm]).await;
    let host = HostLinks::at(site.path(LINKS)).node().unwrap().expect("the server chose a UUID");
    let spec =
        NodeSpec { name: "worker-1".into(), hypervisor: String::new(), zone: None, labels: Labels::new() };
    let node = server.client.put_node(host, &spec).await.unwrap();
    assert_eq!((node.hypervisor.as_str(), node.state), (HYPERVISOR, NodeState::Running));
    (server, host)
}

fn link(site: &Site, host: Uuid, disk: Uuid) -> PathBuf {
    let wwn = &disk.simple().to_string()[..16];
    HostLinks::at(site.path(LINKS)).disks_of(host).join(format!("wwn-0x{wwn}"))
}

fn succeeds(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Whether the record beside a link is of the device that it points to.
fn is_current(link: &Path) -> bool {
    let Ok(device) = fs::read_link(link) else { return false };
    let now = DeviceRecord::of(&Path::new("/sys/block").join(device.file_name().unwrap())).unwrap();
    DeviceRecord::read(link).unwrap() == Some(now)
}

#[tokio::test]
async fn a_host_has_a_disk_with_a_record_of_its_device_until_it_is_detached() {
    let site = site();
    let (server, host) = ready(&site, Uuid::new_v4()).await;
    let id = volume("data");
    let made = server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    let name = attachment("host-1");
    let attached = server.client.attach(&name, &writer(&id, host), SOON).await.unwrap();
    assert_eq!((attached.state, attached.disk_uuid), (AttachmentState::Attached, made.disk_uuid));
    assert!(attached.blank_attestation.is_some() && attached.format_token.is_some());
    assert_eq!(server.client.attach(&name, &writer(&id, host), SOON).await.unwrap(), attached);
    let link = link(&site, host, made.disk_uuid);
    assert!(is_current(&link));
    fs::File::options().write(true).open(&link).unwrap().write_all_at(b"hello", 0).unwrap();
    let bigger = VolumeSize { capacity_bytes: 6 * MIB, limit_bytes: None };
    server.client.expand_volume(&id, &bigger).await.unwrap();
    let device = fs::read_link(&link).unwrap();
    let sectors = Path::new("/sys/block").join(device.file_name().unwrap()).join("size");
    assert_eq!(fs::read_to_string(sectors).unwrap().trim(), (6 * MIB / 512).to_string());

    assert_eq!(code(server.client.delete_volume(&id).await), ProblemCode::InUse);
    server.client.detach(&name, SOON).await.unwrap();
    assert!(fs::symlink_metadata(&link).is_err() && site.devices().is_empty());
    assert_eq!(DeviceRecord::read(&link).unwrap(), None);
    assert_eq!(site.read(&id, 5, 0), b"hello");
    server.client.delete_volume(&id).await.unwrap();
    server.client.delete_node(host).await.unwrap();
}

#[tokio::test]
async fn one_writer_at_most_among_vms_and_hosts() {
    let site = site();
    let vm = Uuid::new_v4();
    let (server, host) = ready(&site, vm).await;
    let id = volume("data");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    for (first, second) in [(vm, host), (host, vm)] {
        let (has, wants) = (attachment(&format!("a-{first}")), attachment(&format!("b-{second}")));
        server.client.attach(&has, &writer(&id, first), SOON).await.unwrap();
        let refused = server.client.attach(&wants, &writer(&id, second), SOON).await.unwrap_err();
        let problem = refused.problem().unwrap();
        assert_eq!((problem.code, problem.nodes[0].uuid), (ProblemCode::InUse, first));
        assert_eq!(
            code(server.client.attach(&attachment("r"), &reader(&id, second), SOON).await),
            ProblemCode::InUse
        );
        assert_eq!(site.devices().len(), 1);
        server.client.detach(&has, SOON).await.unwrap();
    }
    let [one, two] = [attachment("reader-1"), attachment("reader-2")];
    server.client.attach(&one, &reader(&id, vm), SOON).await.unwrap();
    server.client.attach(&two, &reader(&id, host), SOON).await.unwrap();
    assert_eq!(
        code(server.client.attach(&attachment("w"), &writer(&id, host), SOON).await),
        ProblemCode::InUse
    );
}

#[tokio::test]
async fn a_disk_in_use_stays_attached_and_no_other_node_gets_it() {
    let site = site();
    let vm = Uuid::new_v4();
    let (server, host) = ready(&site, vm).await;
    let id = volume("data");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("host-1");
    server.client.attach(&name, &writer(&id, host), SOON).await.unwrap();
    let in_use = fs::File::open(link(&site, host, made.disk_uuid)).unwrap();
    server.client.detach(&name, BRIEFLY).await.unwrap_err();
    assert_eq!(
        code(server.client.attach(&attachment("vm"), &writer(&id, vm), SOON).await),
        ProblemCode::InUse
    );
    assert_eq!(site.devices().len(), 1);
    drop(in_use);
    until("the disk is detached", async || server.client.detach(&name, SOON).await.is_ok()).await;
    server.client.attach(&attachment("vm-2"), &writer(&id, vm), SOON).await.unwrap();
}

#[tokio::test]
async fn after_a_reboot_links_are_stale_until_the_server_attaches_the_disks_again() {
    let site = site();
    let (server, host) = ready(&site, Uuid::new_v4()).await;
    let ids = [volume("one"), volume("two")];
    let mut links = Vec::new();
    for id in &ids {
        let made = server.client.put_volume(id, &size(MIB), SOON).await.unwrap();
        server.client.attach(&attachment(id.as_str()), &writer(id, host), SOON).await.unwrap();
        links.push(link(&site, host, made.disk_uuid));
    }
    server.stop();
    // What a reboot leaves: links, records of an earlier boot, and device numbers that stand for other files by now.
    let devices: Vec<PathBuf> = links.iter().map(|link| fs::read_link(link).unwrap()).collect();
    for device in &devices {
        succeeds("losetup", &["--detach", text(device)]);
    }
    wait_for("the devices are gone", || site.devices().is_empty());
    for (number, device) in devices.iter().enumerate() {
        let other = site.path(&format!("other-{number}"));
        fs::File::create(&other).unwrap().set_len(MIB).unwrap();
        succeeds("losetup", &[text(device), text(&other)]);
    }
    assert!(links.iter().all(|link| !is_current(link)));
    let server = site.start();
    wait_for("the disks are attached again", || links.iter().all(|link| is_current(link)));
    for (link, text) in links.iter().zip([b"one", b"two"]) {
        fs::File::options().write(true).open(link).unwrap().write_all_at(text, 0).unwrap();
    }
    for (id, text) in ids.iter().zip([b"one", b"two"]) {
        server.client.detach(&attachment(id.as_str()), SOON).await.unwrap();
        assert_eq!(site.read(id, 3, 0), text);
    }
    for device in &devices {
        succeeds("losetup", &["--detach", text(device)]);
    }
    assert!(site.devices().is_empty(), "nothing of the volumes is left attached");
}

#[tokio::test]
async fn nothing_is_attached_to_or_assumed_of_another_host() {
    let site = site();
    let (server, _) = ready(&site, Uuid::new_v4()).await;
    let other = Uuid::new_v4();
    let unnamed = NodeSpec { name: "b".into(), hypervisor: String::new(), zone: None, labels: Labels::new() };
    assert_eq!(code(server.client.put_node(other, &unnamed).await), ProblemCode::NotFound);
    let spec = NodeSpec { hypervisor: HYPERVISOR.into(), ..unnamed };
    let node = server.client.put_node(other, &spec).await.unwrap();
    assert_eq!(node.state, NodeState::Unknown);
    assert!(node.message.unwrap().contains("another host"));
    let id = volume("data");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("there");
    assert_eq!(code(server.client.attach(&name, &writer(&id, other), SOON).await), ProblemCode::Unavailable);
    server.client.detach(&name, BRIEFLY).await.unwrap_err();
    assert_eq!(
        code(server.client.attach(&attachment("x"), &writer(&id, other), SOON).await),
        ProblemCode::InUse
    );
    assert!(site.devices().is_empty());
}

#[tokio::test]
async fn a_host_keeps_its_uuid_over_restarts() {
    let site = site();
    let (server, host) = ready(&site, Uuid::new_v4()).await;
    server.stop();
    let server = site.start();
    assert_eq!(HostLinks::at(site.path(LINKS)).node().unwrap(), Some(host));
    assert_eq!(server.client.get_node(host).await.unwrap().unwrap().state, NodeState::Running);
}

#[tokio::test]
async fn a_loop_device_of_somebody_else_is_neither_used_nor_detached() {
    let site = site();
    let (server, host) = ready(&site, Uuid::new_v4()).await;
    let id = volume("data");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let strange = succeeds("losetup", &["--find", "--show", text(&site.file(&id))]);
    let refused = server.client.attach(&attachment("a"), &writer(&id, host), SOON).await.unwrap_err();
    assert!(refused.problem().unwrap().detail.contains(&strange), "{refused}");
    succeeds("losetup", &["--detach", &strange]);
    server.client.attach(&attachment("b"), &writer(&id, host), SOON).await.unwrap();
    let strange = succeeds("losetup", &["--find", "--show", text(&site.file(&id))]);
    server.client.detach(&attachment("b"), SOON).await.unwrap();
    assert_eq!(site.devices(), [PathBuf::from(&strange)], "only the server's own device is detached");
    succeeds("losetup", &["--detach", &strange]);
}

#[tokio::test]
async fn a_disk_whose_file_is_missing_is_found_by_its_record_and_detached() {
    let site = site();
    let (server, host) = ready(&site, Uuid::new_v4()).await;
    let id = volume("data");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("a");
    server.client.attach(&name, &writer(&id, host), SOON).await.unwrap();
    let link = link(&site, host, made.disk_uuid);
    let device = fs::read_link(&link).unwrap();
    let (file, aside) = (site.file(&id), site.path("aside"));
    fs::rename(&file, &aside).unwrap();
    // While a process has the device open, the disk is attached, whatever is in the pool.
    let in_use = fs::File::open(&device).unwrap();
    server.client.detach(&name, BRIEFLY).await.unwrap_err();
    let backing = Path::new("/sys/block").join(device.file_name().unwrap()).join("loop/backing_file");
    assert!(backing.exists());
    drop(in_use);
    until("the disk is detached", async || server.client.detach(&name, SOON).await.is_ok()).await;
    assert!(!backing.exists() && fs::symlink_metadata(&link).is_err());
    fs::rename(&aside, &file).unwrap();
    server.client.attach(&attachment("b"), &writer(&id, host), SOON).await.unwrap();
}
