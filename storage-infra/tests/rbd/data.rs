//! Exports, imports and copies of volumes that are images.

use std::process::{Command, Output};

use futures::StreamExt;
use infra_api::{
    Adoption, Client, EngineKind, Placement, PoolName, PoolSpec, VolumeSource, VolumeSpec, VolumeState,
};

use super::adopt::adoption;
use super::{ONE_AT_A_TIME, images};
use crate::support::ceph::Ceph;
use crate::support::*;

pub(super) fn named(pool: &str) -> PoolName {
    PoolName::new(pool).unwrap()
}

/// The same volume in this pool.
pub(super) fn in_pool(pool: &str, spec: VolumeSpec) -> VolumeSpec {
    let placement = Placement { pool: Some(named(pool)), ..Placement::default() };
    VolumeSpec { placement, ..spec }
}

/// Registers the site's directory as the pool `files`.
pub(super) async fn add_files(site: &Site, server: &Server) {
    let spec = PoolSpec { engine: EngineKind::File, ..site.pool_spec() };
    server.client.put_pool(&named("files"), &spec).await.unwrap();
}

/// A server with the pools `pool` in Ceph and `files`.
async fn both() -> (Ceph, Site, Server) {
    let ceph = Ceph::start();
    ceph.user("own", None);
    let site = Site::new();
    let server = site.start();
    server.client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
    add_files(&site, &server).await;
    (ceph, site, server)
}

/// Runs a client command of the program.
fn cli(site: &Site, server: &Server, arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments).env("NESTOR_INFRA_URL", format!("https://{}", server.api));
    for (name, file) in [("CA", "ca.crt"), ("CERT", "operator.crt"), ("KEY", "operator.key")] {
        command.env(format!("NESTOR_INFRA_{name}"), site.path("pki").join(file));
    }
    command.output().unwrap()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

/// The stream of a volume or snapshot.
pub(super) async fn exported(client: &Client, source: VolumeSource) -> Vec<u8> {
    let stream = client.export(&source, None).await.unwrap();
    stream.map(Result::unwrap).concat().await
}

/// Creates an image that is a volume of 64 MiB with 3 MiB of data.
async fn filled(ceph: &Ceph, client: &Client, id: &str) -> Vec<u8> {
    client.put_volume(&volume(id), &in_pool("pool", size(64 * MIB)), SOON).await.unwrap();
    for (pattern, at) in [(7, 8 * MIB), (8, 9 * MIB), (9, 63 * MIB)] {
        ceph.write(&format!("vms/{id}"), pattern, at);
    }
    ceph.export(&format!("vms/{id}"))
}

/// Bytes that an image has allocated.
fn used(ceph: &Ceph, image: &str) -> u64 {
    let usage: serde_json::Value =
        serde_json::from_str(&ceph.rbd(&["du", "--format", "json", image])).unwrap();
    usage["images"].as_array().unwrap().iter().map(|one| one["used_size"].as_u64().unwrap()).sum()
}

#[tokio::test]
async fn an_image_is_exported_without_its_holes_and_imported_as_an_image_or_a_file() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site, server) = both().await;
    let content = filled(&ceph, &server.client, "v").await;
    let file = site.path("v.export");
    succeeded(&cli(&site, &server, &["volume", "export", "v", "--to", text(&file)]));
    let stream = std::fs::read(&file).unwrap();
    assert!((stream.len() as u64) < 4 * MIB, "{}", stream.len());
    succeeded(&cli(&site, &server, &["volume", "import", "w", "--from", text(&file), "--pool", "pool"]));
    assert!(ceph.export("vms/w") == content);
    assert!(used(&ceph, "vms/w") <= 12 * MIB, "{}", used(&ceph, "vms/w"));
    succeeded(&cli(&site, &server, &["volume", "import", "x", "--from", text(&file), "--pool", "files"]));
    assert!(std::fs::read(site.file(&volume("x"))).unwrap() == content);
    // A file becomes an image too.
    let from_file = exported(&server.client, VolumeSource::Volume(volume("x"))).await;
    assert!((from_file.len() as u64) < 4 * MIB);

    // A snapshot, while the volume is written to; and a clone, whose data is its parent's.
    let (s, z) = (snapshot("s"), volume("z"));
    server.client.put_snapshot(&s, &of(&volume("v")), SOON).await.unwrap();
    server.client.put_volume(&z, &in_pool("pool", cloned(&volume("v"), 64 * MIB)), SOON).await.unwrap();
    let foreign = ceph.open_image("vms/v");
    let refused = server.client.export(&VolumeSource::Volume(volume("v")), None).await.map(drop);
    assert!(refused.unwrap_err().to_string().contains("the Ceph client"));
    drop(foreign);
    ceph.write("vms/v", 5, 8 * MIB);
    let snapshot_file = site.path("s.export");
    succeeded(&cli(&site, &server, &["snapshot", "export", "s", "--to", text(&snapshot_file)]));
    succeeded(&cli(
        &site,
        &server,
        &["volume", "import", "y", "--from", text(&snapshot_file), "--pool", "pool"],
    ));
    assert!(ceph.export("vms/y") == content);
    assert_eq!(exported(&server.client, VolumeSource::Volume(z)).await.len(), stream.len());
}

#[tokio::test]
async fn an_import_of_an_image_is_resumed_after_its_last_valid_extent() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site, server) = both().await;
    let content = filled(&ceph, &server.client, "v").await;
    let file = site.path("v.export");
    succeeded(&cli(&site, &server, &["volume", "export", "v", "--to", text(&file)]));
    let stream = std::fs::read(&file).unwrap();
    server.client.put_import(&volume("w"), &in_pool("pool", size(64 * MIB))).await.unwrap();
    let half = futures::stream::iter([Ok(stream[..stream.len() / 2].to_vec())]);
    server.client.send_import(&volume("w"), false, half).await.unwrap_err();
    let state = server.client.get_volume(&volume("w")).await.unwrap().unwrap().state;
    assert_eq!(state, VolumeState::Creating);
    let received = server.client.get_import(&volume("w")).await.unwrap().unwrap().received_bytes;
    assert!(received > 8 * MIB && received < 64 * MIB, "{received}");
    // What is behind the last valid extent is removed.
    ceph.write("vms/_incomplete-volume.w", 1, 32 * MIB);
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    let resumed = ["volume", "import", "w", "--pool", "pool", "--from", text(&file), "--resume"];
    succeeded(&cli(&site, &server, &resumed));
    assert!(ceph.export("vms/w") == content);
    assert_eq!(images(&ceph, ""), ["_nestor-pool", "v", "w"]);
}

#[tokio::test]
async fn a_volume_is_copied_between_files_and_images() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (ceph, site, server) = both().await;
    let client = &server.client;
    let content = filled(&ceph, client, "v").await;
    let (s, w, x) = (snapshot("s"), volume("w"), volume("x"));
    client.put_snapshot(&s, &of(&volume("v")), SOON).await.unwrap();
    client.put_volume(&w, &in_pool("files", restored(&s, 64 * MIB)), SOON).await.unwrap();
    assert!(std::fs::read(site.file(&w)).unwrap() == content);
    client.put_volume(&x, &in_pool("pool", cloned(&w, 72 * MIB)), SOON).await.unwrap();
    let copy = ceph.export("vms/x");
    assert!(copy[..content.len()] == content && copy.len() as u64 == 72 * MIB);
    assert!(used(&ceph, "vms/x") <= 12 * MIB);
    // A raw file is adopted by a copy.
    let path = site.path("pool/disk.img");
    std::fs::write(&path, &content).unwrap();
    let adopted = Adoption { path: text(&path).to_owned(), pool: Some(pool()), ..adoption("none") };
    client.adopt(&volume("y"), &adopted, SOON).await.unwrap();
    assert!(ceph.export("vms/y") == content && path.exists());
}
