//! Clearance: no file of a volume is removed or recreated while it is or may be in use, even if the catalog is
//! outdated. Runs with the real server, real filesystems, a real libvirtd and real QEMU domains without a boot disk.
//! Runs as root.

use std::fs;
use std::process::{Child, Command, Stdio};

use crate::support::libvirtd::{HOST, Libvirtd};
use crate::support::*;
use infra_api::ProblemCode;
use uuid::Uuid;

/// A site with two domains of its own libvirtd.
struct Place {
    site: Site,
    libvirt: Libvirtd,
    nodes: [Uuid; 2],
}

impl Place {
    fn new() -> Self {
        let mut libvirt = Libvirtd::start();
        let mut site = Site::new();
        site.libvirt = Some(libvirt.uri());
        let nodes = [libvirt.domain(), libvirt.domain()];
        Self { site, libvirt, nodes }
    }
}

/// Stops a server gracefully and copies its catalog.
fn stop_and_back_up(server: Server, site: &Site) -> Vec<u8> {
    assert_eq!(server.stop(), Some(0));
    backup(site)
}

/// A process that holds a file open as QEMU holds an image.
struct Qemu(Child);

impl Qemu {
    async fn open(site: &Site, id: &infra_api::VolumeId) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["--format", "raw"]).arg(site.file(id)).stdin(Stdio::piped()).stdout(Stdio::null());
        let qemu = Self(command.spawn().unwrap());
        until("qemu-io holds its lock", async || {
            storage_infra::engine::image_lock::holder(&site.file(id)).unwrap().is_some()
        })
        .await;
        qemu
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn an_older_catalog_does_not_remove_a_file_in_use_by_qemu() {
    let Place { site, libvirt, nodes } = Place::new();
    let server = site.ready(&nodes).await;
    let id = volume("v");
    let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
    let older = stop_and_back_up(server, &site);
    let server = site.start();
    server.client.attach(&attachment("a"), &writer(&id, nodes[0]), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let record = read_record(&site.file(&id));
    restore(&site, &older);

    let server = site.start();
    let refused = server.client.delete_volume(&id).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::InUse), "{refused}");
    let message = refused.to_string();
    assert!(
        message.contains(&nodes[0].to_string()) && message.contains("storage-infra recover"),
        "{message}"
    );
    assert!(site.file(&id).exists() && libvirt.has(nodes[0], disk));
    assert_eq!(read_record(&site.file(&id)), record);
    // The volume cannot be attached elsewhere, and is not detached from the VM that has it.
    let elsewhere = server.client.attach(&attachment("b"), &writer(&id, nodes[1]), SOON).await;
    assert_eq!(code(elsewhere), ProblemCode::InUse);
    until("the disk is reported", async || {
        !server.client.get_volume(&id).await.unwrap().unwrap().condition.healthy
    })
    .await;
    assert!(libvirt.has(nodes[0], disk) && !libvirt.has(nodes[1], disk));
    assert_eq!(server.stop(), Some(0));

    let (status, said) = site.recover(&["--dry-run=false"]);
    assert_eq!(status, 0, "{said}");
    let server = site.start();
    assert_eq!(code(server.client.delete_volume(&id).await), ProblemCode::InUse);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.delete_volume(&id).await.unwrap();
    assert!(!site.file(&id).exists());
}

#[tokio::test]
async fn an_older_catalog_does_not_reattach_a_disk_that_was_detached_since() {
    let Place { site, libvirt, nodes } = Place::new();
    let server = site.ready(&nodes).await;
    let id = volume("v");
    let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("a"), &writer(&id, nodes[0]), SOON).await.unwrap();
    let older = stop_and_back_up(server, &site);
    let server = site.start();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let holders = || read_record(&site.file(&id)).unwrap()["holders"].as_array().unwrap().len();
    until("the detach is recorded", async || holders() == 0).await;
    assert_eq!(server.stop(), Some(0));
    restore(&site, &older);

    let server = site.start();
    until("the conflict is reported", async || {
        let known = server.client.get_attachment(&attachment("a")).await.unwrap().unwrap();
        assert!(!libvirt.has(nodes[0], disk));
        known.message.is_some_and(|message| message.contains("older than the pool"))
    })
    .await;
    assert!(!libvirt.has(nodes[0], disk));
    assert_eq!(holders(), 0);
}

#[tokio::test]
async fn a_stale_row_in_state_creating_does_not_touch_the_file_or_its_record() {
    let Place { site, libvirt, nodes } = Place::new();
    let server = site.ready(&nodes).await;
    let id = volume("v");
    let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("a"), &writer(&id, nodes[0]), SOON).await.unwrap();
    site.write(&id, b"kept", 0);
    assert_eq!(server.stop(), Some(0));
    let record = read_record(&site.file(&id)).unwrap();
    assert_eq!(record["holders"].as_array().unwrap().len(), 1);
    // The row as it was while the volume was being created.
    site.catalog()
        .execute_batch("DELETE FROM attachments; UPDATE volumes SET state = 'creating', capacity = 524288")
        .unwrap();

    let server = site.start();
    let elsewhere = server.client.attach(&attachment("b"), &writer(&id, nodes[1]), SOON).await;
    assert!(elsewhere.is_err());
    assert_eq!(read_record(&site.file(&id)).unwrap(), record);
    assert_eq!(code(server.client.delete_volume(&id).await), ProblemCode::InUse);
    assert_eq!(fs::metadata(site.file(&id)).unwrap().len(), MIB);
    assert_eq!(site.read(&id, 4, 0), b"kept");
    assert!(libvirt.has(nodes[0], disk) && !libvirt.has(nodes[1], disk));
}

#[tokio::test]
async fn a_pool_registered_later_does_not_count_as_newer_than_the_catalog() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    fs::create_dir(site.path("later")).unwrap();
    let name = infra_api::PoolName::new("later").unwrap();
    let spec = infra_api::PoolSpec { path: text(&site.path("later")).to_owned(), ..site.pool_spec() };
    server.client.put_pool(&name, &spec).await.unwrap();
    let mut wanted = size(MIB);
    wanted.placement.pool = Some(name.clone());
    server.client.put_volume(&volume("w"), &wanted, SOON).await.unwrap();
    server.client.delete_volume(&volume("w")).await.unwrap();
    assert!(!site.path("later/w.raw").exists());
    // Nor for the next server.
    server.client.put_volume(&volume("w"), &wanted, SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    server.client.delete_volume(&volume("w")).await.unwrap();
    server.client.delete_pool(&name).await.unwrap();
}

#[tokio::test]
async fn a_file_opened_by_a_process_is_kept_and_the_error_names_the_process() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let qemu = Qemu::open(&site, &id).await;
    let refused = server.client.delete_volume(&id).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::InUse), "{refused}");
    let process = format!("process {} (qemu-io)", qemu.0.id());
    assert!(refused.to_string().contains(&process), "{refused}");
    assert!(site.file(&id).exists());
    drop(qemu);
    server.client.delete_volume(&id).await.unwrap();
    assert!(!site.file(&id).exists());
}

#[tokio::test]
async fn a_file_is_kept_while_a_hypervisor_cannot_report_its_disks() {
    let Place { site, mut libvirt, nodes } = Place::new();
    let server = site.ready(&nodes).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    libvirt.stop();
    let refused = server.client.delete_volume(&id).await.unwrap_err();
    assert_eq!(refused.code(), Some(ProblemCode::Unavailable), "{refused}");
    assert!(refused.to_string().contains("hypervisor here"), "{refused}");
    assert!(site.file(&id).exists());
    libvirt.restart(HOST);
    // The deletion was started and is not forgotten.
    until("the volume is gone", async || server.client.get_volume(&id).await.unwrap().is_none()).await;
    assert!(!site.file(&id).exists());
}

#[tokio::test]
async fn every_removal_is_in_the_audit_log_with_its_actor() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("s"), &of(&id), SOON).await.unwrap();
    server.client.delete_snapshot(&snapshot("s")).await.unwrap();
    server.client.delete_volume(&id).await.unwrap();
    server.client.delete_pool(&pool()).await.unwrap();
    let file = text(&site.file(&id)).to_owned();
    let audited = |act: &str, what: &str| {
        let found = server
            .logged(|event| event["target"] == "audit" && event["act"] == act && event["object"] == what);
        assert_eq!(found.len(), 1, "{act} {what}: {:?}", server.logged(|event| event["target"] == "audit"));
        let who = found[0]["who"].as_str().unwrap().to_owned();
        assert!(who.contains("CN=operator"), "{who}");
        found[0].clone()
    };
    assert_eq!(audited("remove", "volume v")["path"], file);
    audited("remove", "snapshot s");
    audited("forget", "volume v");
    audited("forget", "snapshot s");
    audited("release", "pool pool");
    audited("forget", "pool pool");
}

#[tokio::test]
async fn a_missing_file_is_reported_once_and_its_disk_is_reattached_when_it_returns() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let disk = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let (link, aside) = (site.link(node, disk), site.path("aside.raw"));
    let device = fs::read_link(&link).unwrap();
    assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
    fs::remove_file(&link).unwrap();
    fs::rename(site.file(&id), &aside).unwrap();

    let server = site.start();
    let attempts = || {
        server
            .logged(|event| event["message"] == "could not complete the attachment's operation; will retry")
            .len()
    };
    until("a retry has failed", async || attempts() > 0).await;
    // Each repair tick reattaches the disk of another volume that was detached from the node.
    let other = volume("w");
    let disk_of_other = server.client.put_volume(&other, &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("b"), &writer(&other, node), SOON).await.unwrap();
    let link_of_other = site.link(node, disk_of_other);
    for _ in 0..2 {
        let device = fs::read_link(&link_of_other).unwrap();
        assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
        fs::remove_file(&link_of_other).unwrap();
        until("the other disk is attached again", async || link_of_other.exists()).await;
    }
    let warned = server.logged(|event| event["level"] == "WARN" && event["attachment"] == "a");
    assert_eq!(warned.len(), 1, "{warned:?}");
    fs::rename(&aside, site.file(&id)).unwrap();
    until("the disk is attached again", async || link.exists()).await;
}
