//! Servers that lose their lease in the middle of something: cut off from the database, behind a VM that hangs, before a file gets
//! its name. Runs as root.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::libvirtd::{Libvirtd, processes};
use crate::support::relay::Relay;
use crate::support::*;
use infra_api::{Labels, NodeSpec, ProblemCode};
use test_postgres::Cluster;
use uuid::Uuid;

fn send(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
}

fn stop(server: &Server) {
    send("-STOP", &server.pid().to_string());
}

fn go_on(server: &Server) {
    send("-CONT", &server.pid().to_string());
}

async fn is_active(server: &Server) -> bool {
    server.ops("/readyz").await.0 == 200
}

async fn becomes_active(server: &Server) {
    until("the server is active", async || is_active(server).await).await;
}

/// Registers the pool and a node.
async fn register(site: &Site, server: &Server, node: Uuid) {
    server.client.put_pool(&pool(), &site.pool_spec()).await.unwrap();
    let spec = NodeSpec { name: "n".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
    server.client.put_node(node, &spec).await.unwrap();
}

/// A server that reaches its database through a relay, and one that reaches it directly.
struct Two {
    // Dropped in this order.
    first: Server,
    second: Server,
    relay: Relay,
    site: Site,
    _cluster: Cluster,
}

impl Two {
    async fn start(mut site: Site) -> Self {
        let cluster = Cluster::start();
        let direct = cluster.database();
        let relay = Relay::to(cluster.socket());
        site.flags.extend(["--catalog".to_owned(), relay.url(&direct, cluster.socket())]);
        let first = site.start();
        becomes_active(&first).await;
        *site.flags.last_mut().unwrap() = direct;
        let second = site.start_with_data("other");
        Self { first, second, relay, site, _cluster: cluster }
    }
}

#[tokio::test]
async fn a_server_that_is_cut_off_ends_and_frees_its_pools_while_a_call_hangs() {
    let mut site = Site::new();
    let mut libvirt = Libvirtd::start();
    let node = libvirt.domain();
    site.libvirt = Some(libvirt.uri());
    let mut two = Two::start(site).await;
    register(&two.site, &two.first, node).await;
    for name in ["v", "w"] {
        two.first.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap();
    }
    // A call to the hypervisor hangs meanwhile, and with it a thread of the server.
    let qemu = processes(node).remove(0);
    send("-STOP", &qemu);
    two.site.record_fail_points();
    let client = two.first.client.clone();
    let hanging =
        tokio::spawn(async move { client.attach(&attachment("v"), &writer(&volume("v"), node), SOON).await });
    until("the attach is under way", async || {
        fs::read_to_string(two.site.path("points/passed")).unwrap().contains("hypervisor.plug.before")
    })
    .await;
    two.relay.cut();
    let begin = Instant::now();
    two.first.wait_for_crash().await;
    println!("the server ended {:?} after it was cut off", begin.elapsed());
    becomes_active(&two.second).await;
    send("-CONT", &qemu);
    until("the second server uses the pool", async || {
        two.second.client.attach(&attachment("w"), &writer(&volume("w"), node), SOON).await.is_ok()
    })
    .await;
    println!("the second server used the pool after {:?}", begin.elapsed());
    hanging.await.unwrap().unwrap_err();
}

#[tokio::test]
async fn an_attach_that_waited_behind_a_hung_vm_is_not_sent_when_the_lease_is_over() {
    let cluster = Cluster::start();
    let mut site = Site::new();
    let mut libvirt = Libvirtd::start();
    let node = libvirt.domain();
    site.libvirt = Some(libvirt.uri());
    site.flags = vec!["--catalog".to_owned(), cluster.database()];
    let mut server = site.start();
    becomes_active(&server).await;
    register(&site, &server, node).await;
    let mut disks = Vec::new();
    for name in ["v", "w"] {
        disks.push(server.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap().disk_uuid);
    }
    let qemu = processes(node).remove(0);
    send("-STOP", &qemu);
    site.record_fail_points();
    let mut waiting = Vec::new();
    for (number, name) in ["v", "w"].into_iter().enumerate() {
        let client = server.client.clone();
        waiting.push(tokio::spawn(async move {
            client.attach(&attachment(name), &writer(&volume(name), node), SOON).await
        }));
        until("the attach is under way", async || {
            let passed = fs::read_to_string(site.path("points/passed")).unwrap();
            passed.matches("hypervisor.plug.before").count() == number + 1
        })
        .await;
    }
    cluster.crash();
    // Longer than the lease, which nothing shows.
    tokio::time::sleep(Duration::from_millis(2300)).await;
    send("-CONT", &qemu);
    until("the server ends, or attaches the second disk", async || {
        server.has_crashed() || libvirt.has(node, disks[1])
    })
    .await;
    assert!(!libvirt.has(node, disks[1]), "it was attached without the lease");
    server.wait_for_crash().await;
    for attach in waiting {
        attach.await.unwrap().unwrap_err();
    }
}

#[tokio::test]
async fn a_file_keeps_its_name_when_the_server_that_was_to_rename_it_was_replaced() {
    let mut site = Site::reflink();
    let kept = site.path("pool/kept.img");
    site.flags = vec!["--file-dir".to_owned(), text(&site.path("pool")).to_owned()];
    let two = Two::start(site).await;
    let Two { mut first, second, site, _cluster: cluster, .. } = two;
    let node = Uuid::new_v4();
    register(&site, &first, node).await;
    first.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    site.write(&volume("v"), b"old", 0);
    let released = site.path("pool/released.img");
    fs::create_dir_all(site.path("points")).unwrap();
    fs::write(site.path("points/freeze"), "engine.file.release.before").unwrap();
    let (client, to) = (first.client.clone(), infra_api::Release { path: Some(text(&released).to_owned()) });
    let frozen = tokio::spawn(async move { client.release(&volume("v"), &to).await });
    until("the first server stops", async || !site.path("points/freeze").exists()).await;
    // As when a filesystem's server forgets the locks of a client that is gone: the marker's lock is free.
    let (marker, copy) = (site.path("pool/.nestor-pool"), site.path("pool/.copy"));
    fs::copy(&marker, &copy).unwrap();
    write_record(&copy, read_record(&marker).as_ref());
    fs::rename(&copy, &marker).unwrap();
    becomes_active(&second).await;
    let to = infra_api::Release { path: Some(text(&released).to_owned()) };
    until("the second server releases the volume", async || {
        let _ = second.client.release(&volume("v"), &to).await;
        second.client.get_volume(&volume("v")).await.is_ok_and(|found| found.is_none())
    })
    .await;
    // Somebody takes the file away, and makes a volume of the same name.
    fs::rename(&released, &kept).unwrap();
    until("the volume is there again", async || {
        second.client.put_volume(&volume("v"), &size(MIB), SOON).await.is_ok()
    })
    .await;
    site.write(&volume("v"), b"new", 0);
    // The first server cannot learn that it was replaced.
    stop(&second);
    cluster.crash();
    go_on(&first);
    let answer = frozen.await.unwrap();
    assert!(!released.exists(), "the replaced server took the new volume's file away: {answer:?}");
    assert_eq!(site.read(&volume("v"), 3, 0), b"new");
    assert!(read_record(&site.file(&volume("v"))).is_some());
    assert_eq!(code(answer), ProblemCode::Unavailable);
    first.wait_for_crash().await;
    cluster.start_again();
    go_on(&second);
    becomes_active(&second).await;
}
