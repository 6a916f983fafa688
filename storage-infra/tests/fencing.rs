//! Forced detach of disks of stalled or powered-off VMs, with real loop devices and simulated power states. Runs as
//! root.

use std::time::Duration;

use crate::support::*;
use infra_api::{NodeState, ProblemCode};
use uuid::Uuid;

/// More than the time until a VM that keeps its disk is powered off.
const FENCED: Duration = Duration::from_secs(60);

/// A server with these nodes; volume `v` is attached to the first by attachment `a`.
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
async fn a_vm_that_keeps_its_disk_is_powered_off_only_by_a_forced_detach() {
    let site = Site::new();
    let nodes = [Uuid::new_v4(), Uuid::new_v4()];
    let server = with_writer(&site, &nodes).await;
    site.set_power(nodes[0], "paused");
    // The reason is reported after the first wait.
    until("the response has the reason of the wait", async || {
        let message =
            still_running(async || server.client.detach(&attachment("a"), Duration::from_secs(8)).await)
                .await;
        message.contains("is paused")
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
async fn a_vm_that_releases_its_disk_is_not_powered_off_by_a_forced_detach() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = with_writer(&site, &[node]).await;
    server.client.fence(&attachment("a"), FENCED).await.unwrap();
    assert_eq!((state(&server, node).await, fences(&server).await), (NodeState::Running, false));
    assert!(site.devices().is_empty());
}

#[tokio::test]
async fn a_pending_detach_completes_when_the_vm_is_off() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = with_writer(&site, &[node]).await;
    site.set_power(node, "paused");
    still_running(async || server.client.detach(&attachment("a"), Duration::from_secs(1)).await).await;
    site.set_power(node, "off");
    until("nothing is attached", async || {
        server.client.list_attachments(None, None).await.unwrap().is_empty()
    })
    .await;
    assert!(site.devices().is_empty());
    let refused = server.client.attach(&attachment("b"), &writer(&volume("v"), node), SOON).await;
    assert_eq!(code(refused), ProblemCode::NodeNotRunning);
    // A refused attach leaves no row.
    assert_eq!(server.client.list_attachments(None, None).await.unwrap(), []);
}
