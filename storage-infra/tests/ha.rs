//! Two servers on one PostgreSQL database: one is active. Runs as root.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::*;
use futures::future::join_all;
use infra_api::{Client, ClientOptions, Labels, NodeSpec, ProblemCode, Role};
use test_postgres::Cluster;
use uuid::Uuid;

/// A site whose servers have their catalog in this database.
fn site(database: &str) -> Site {
    let mut site = Site::new();
    site.flags = ["--catalog", database].map(str::to_owned).to_vec();
    site
}

/// A client of several servers.
fn client(site: &Site, servers: &[&Server]) -> Client {
    let urls: Vec<String> = servers.iter().map(|server| format!("https://{}", server.api)).collect();
    let mut options = ClientOptions::from_pki_dir(urls.join(","), &site.path("pki"), Role::Operator);
    options.timeout = PATIENCE;
    Client::new(&options).unwrap()
}

/// Registers the pool and a node.
async fn register(site: &Site, client: &Client) -> Uuid {
    client.put_pool(&pool(), &site.pool_spec()).await.unwrap();
    let node = Uuid::new_v4();
    let spec = NodeSpec { name: "n".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
    client.put_node(node, &spec).await.unwrap();
    node
}

fn send(signal: &str, server: &Server) {
    let pid = server.pid().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

async fn is_active(server: &Server) -> bool {
    server.ops("/readyz").await.0 == 200
}

#[tokio::test]
async fn attaches_go_on_with_the_passive_server_when_the_active_one_is_killed() {
    let cluster = Cluster::start();
    let site = site(&cluster.database());
    let first = site.start();
    until("the first server is active", async || is_active(&first).await).await;
    let second = site.start_with_data("other");
    let client = client(&site, &[&first, &second]);
    let node = register(&site, &client).await;
    let (status, body) = second.ops("/readyz").await;
    assert!(status == 503 && body.contains("is active"), "{body}");
    assert!(second.ops("/metrics").await.1.contains("nestor_storage_infra_active 0"));
    assert!(first.ops("/metrics").await.1.contains("nestor_storage_infra_active 1"));
    assert_eq!(code(second.client.list_volumes(None, None).await), ProblemCode::NotActive);

    let names: Vec<String> = (0..12).map(|number| format!("v{number}")).collect();
    let disks = join_all(
        names
            .iter()
            .map(async |name| client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap().disk_uuid),
    );
    let disks = disks.await;
    let attach = async |name: &String| {
        let begin = Instant::now();
        client.attach(&attachment(name), &writer(&volume(name), node), SOON).await.unwrap();
        begin.elapsed()
    };
    // It dies in an attach, with others waiting or under way.
    site.arm("hypervisor.plug.before", 4);
    let took = join_all(names.iter().map(attach)).await;
    let longest = took.into_iter().max().unwrap();
    println!("the active server was killed; the longest of {} attaches took {longest:?}", names.len());
    assert!(is_active(&second).await);
    for disk in disks {
        assert!(site.link(node, disk).exists());
    }
    assert_eq!(client.list_attachments(Some(node), None).await.unwrap().len(), names.len());

    // A server that ends gives up its lead.
    let third = site.start_with_data("third");
    assert_eq!(second.stop(), Some(0));
    until("the third server is active", async || is_active(&third).await).await;
    assert_eq!(third.client.list_attachments(Some(node), None).await.unwrap().len(), names.len());
}

#[tokio::test]
async fn a_server_that_was_stopped_in_an_attach_and_replaced_does_nothing_when_it_wakes_up() {
    let cluster = Cluster::start();
    let site = site(&cluster.database());
    let mut first = site.start();
    until("the first server is active", async || is_active(&first).await).await;
    let second = site.start_with_data("other");
    let both = client(&site, &[&first, &second]);
    let node = register(&site, &both).await;
    let disk = both.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap().disk_uuid;
    fs::create_dir_all(site.path("points")).unwrap();
    fs::write(site.path("points/freeze"), "hypervisor.plug.before").unwrap();
    let only_first = first.client.clone();
    let attaching =
        tokio::spawn(
            async move { only_first.attach(&attachment("a"), &writer(&volume("v"), node), SOON).await },
        );
    until("the first server stops", async || !site.path("points/freeze").exists()).await;
    until("the second server is active", async || {
        second.client.list_attachments(None, None).await.is_ok_and(|list| list.len() == 1)
    })
    .await;
    // The pool is locked by the stopped process: the second server does not use it.
    let error = second.client.attach(&attachment("a"), &writer(&volume("v"), node), Duration::ZERO).await;
    let refused = error.map_err(|error| error.to_string());
    assert!(!site.link(node, disk).exists(), "{refused:?}");
    let found = second.client.list_pools().await.unwrap().remove(0);
    let message = found.message.unwrap_or_default();
    assert!(!found.healthy && message.contains("another server"), "{message}");

    // It cannot learn that it was replaced, and the second server cannot be the one that attaches the disk.
    send("-STOP", &second);
    cluster.crash();
    send("-CONT", &first);
    assert_eq!(code(attaching.await.unwrap()), ProblemCode::Unavailable);
    assert!(!site.link(node, disk).exists(), "the replaced server attached the disk");
    cluster.start_again();
    first.wait_for_crash().await;
    send("-CONT", &second);
    until("the second server attaches the disk", async || {
        second.client.attach(&attachment("a"), &writer(&volume("v"), node), SOON).await.is_ok()
    })
    .await;
    assert!(site.link(node, disk).exists());
    assert_eq!(site.devices().len(), 1);
}

#[tokio::test]
async fn a_crash_of_the_database_delays_attaches_and_loses_nothing() {
    let cluster = Arc::new(Cluster::start());
    let site = site(&cluster.database());
    let mut server = site.start();
    until("the server is active", async || is_active(&server).await).await;
    let node = register(&site, &server.client).await;
    for name in ["before", "meanwhile"] {
        server.client.put_volume(&volume(name), &size(MIB), SOON).await.unwrap();
    }
    let attach = async |server: &Server, name: &str| {
        server.client.attach(&attachment(name), &writer(&volume(name), node), SOON).await
    };
    attach(&server, "before").await.unwrap();
    cluster.crash();
    assert_eq!(code(attach(&server, "meanwhile").await), ProblemCode::Unavailable);
    assert!(!is_active(&server).await);
    cluster.start_again();
    until("the server attaches again", async || {
        // Without the database for seconds, it ends, and its supervisor starts it again.
        if server.has_crashed() {
            server = site.start();
        }
        attach(&server, "meanwhile").await.is_ok()
    })
    .await;
    let found = server.client.list_attachments(Some(node), None).await.unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(server.stop(), Some(0));
}

#[tokio::test]
async fn a_catalog_of_sqlite_is_taken_over() {
    let cluster = Cluster::start();
    let mut site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let disk = server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("a"), &writer(&volume("v"), node), SOON).await.unwrap();
    assert_eq!(server.stop(), Some(0));
    let database = cluster.database();
    let data = site.path("data");
    let import = ["catalog", "import", "--data-dir", text(&data), "--catalog", &database];
    let output = run(&import);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("attachments"), "{output:?}");
    let refused = site.refused();
    assert!(refused.contains("is missing"), "{refused}");
    site.flags = vec!["--catalog".to_owned(), database];
    let server = site.start();
    until("the server is active", async || is_active(&server).await).await;
    let found = server.client.get_volume(&volume("v")).await.unwrap().unwrap();
    assert_eq!(found.disk_uuid, disk);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    assert!(!site.link(node, disk).exists());
}
