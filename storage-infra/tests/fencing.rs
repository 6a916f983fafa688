//! Disks in machines that stand still or are off, over the real server and real loop devices. Runs as root.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod support;

use std::time::Duration;

use infra_api::{NodeState, ProblemCode};
use support::*;
use uuid::Uuid;

/// More than it takes until a machine that keeps its disk is switched off.
const FENCED: Duration = Duration::from_secs(60);

/// A server over these machines, the first of which has the disk of volume `v`, by attachment `a`.
async fn with_writer(site: &Site, nodes: &[Uuid]) -> Server {
    let server = site.ready(nodes).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, nodes[0]), SOON).await.unwrap();
    server
}

async fn state(server: &Server, node: Uuid) -> NodeState {
    server.client.get_node(node).await.unwrap().unwrap().state
}

async fn fences(server: &Server) -> bool {
    server.ops("/metrics").await.1.contains("nestor_storage_infra_fences_total 1")
}

#[tokio::test]
async fn a_machine_that_keeps_its_disk_is_switched_off_only_when_it_is_said_to_be_lost() {
    let site = Site::new();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = with_writer(&site, &nodes).await;
    site.halt(nodes[0], "paused");
    // What it waits for is known once it has been waited for in vain.
    until("a call is told what its work waits for", async || {
        let told =
            under_way(async || server.client.detach(&attachment("a"), Duration::from_secs(8)).await).await;
        told.contains("is paused")
    })
    .await;
    let refused = server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await;
    assert_eq!(code(refused), ProblemCode::InUse);
    assert_eq!((state(&server, nodes[0]).await, fences(&server).await), (NodeState::Running, false));

    server.client.fence(&attachment("a"), FENCED).await.unwrap();
    assert_eq!((state(&server, nodes[0]).await, fences(&server).await), (NodeState::Off, true));
    assert!(site.devices().is_empty());
    server.client.attach(&attachment("b"), &writer(&volume("v"), nodes[1]), SOON).await.unwrap();
    server.client.fence(&attachment("a"), FENCED).await.unwrap();
    assert_eq!(state(&server, nodes[1]).await, NodeState::Running);
}

#[tokio::test]
async fn a_machine_that_lets_go_of_its_disk_is_left_alone_whatever_is_said_of_it() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = with_writer(&site, &[node]).await;
    server.client.fence(&attachment("a"), FENCED).await.unwrap();
    assert_eq!((state(&server, node).await, fences(&server).await), (NodeState::Running, false));
    assert!(site.devices().is_empty());
}

#[tokio::test]
async fn what_waits_for_a_disk_to_leave_ends_by_itself_when_the_machine_is_off() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = with_writer(&site, &[node]).await;
    site.halt(node, "paused");
    under_way(async || server.client.detach(&attachment("a"), Duration::from_secs(1)).await).await;
    site.halt(node, "off");
    until("nothing is attached", async || {
        server.client.list_attachments(None, None).await.unwrap().is_empty()
    })
    .await;
    assert!(site.devices().is_empty());
    let refused = server.client.attach(&attachment("b"), &writer(&volume("v"), node), SOON).await;
    assert_eq!(code(refused), ProblemCode::NodeNotRunning);
    // A refusal leaves nothing behind.
    assert_eq!(server.client.list_attachments(None, None).await.unwrap(), []);
}
