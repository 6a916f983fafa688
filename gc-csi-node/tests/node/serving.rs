//! Registration, health, capabilities, node info and driver endpoints.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use csi::proto::identity_client::IdentityClient;
use csi::proto::node_client::NodeClient;
use csi::proto::node_service_capability::{Type, rpc::Type as Can};
use csi::proto::plugin_capability::service::Type as Service;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{
    GetPluginCapabilitiesRequest, GetPluginInfoRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest,
};
use csi::registration::proto::registration_client::RegistrationClient;
use csi::registration::proto::{InfoRequest, RegistrationStatus};

use tonic::{Code, Request};

use crate::test_node::{TestNode, block};

#[tokio::test]
async fn the_driver_is_ready_when_kubelet_has_registered_it() {
    let mut node = TestNode::start().await;
    let channel = csi::client::connect(&node.registration_socket()).await.unwrap();
    let mut kubelet = RegistrationClient::new(channel);
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "guest.csi.nestor.dev"));
    assert_eq!(info.endpoint, node.socket().display().to_string());
    assert_eq!(node.get("/readyz").0, 503);
    let made = || std::fs::metadata(node.registration_socket()).and_then(|socket| socket.modified()).ok();
    let refused_at = made();
    let notice = RegistrationStatus { plugin_registered: false, error: "a reason".to_owned() };
    kubelet.notify_registration_status(notice).await.unwrap();
    assert_eq!(node.get("/readyz").0, 503);
    // kubelet asks again only at a new socket.
    let renewed = async {
        while made().is_none() || made() == refused_at {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), renewed).await.unwrap();
    let channel = csi::client::connect(&node.registration_socket()).await.unwrap();
    let notice = RegistrationStatus { plugin_registered: true, error: String::new() };
    RegistrationClient::new(channel).notify_registration_status(notice).await.unwrap();
    assert_eq!(node.get("/readyz").0, 200);

    // /healthz does not depend on kubelet; it succeeds after the first self-check.
    let alive = async {
        while node.get("/healthz").0 != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), alive).await.unwrap();
    assert!(node.get("/metrics").1.contains("csi_call_duration"));

    for socket in [node.socket(), node.registration_socket()] {
        assert_eq!(std::fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(node.stop_driver().await, Some(0));
    assert!(!node.socket().exists() && !node.registration_socket().exists());
}

#[tokio::test]
async fn the_node_reports_its_name_and_capabilities() {
    let node = TestNode::start().await;
    assert_eq!(services(&node).await, [Service::ControllerService]);
    let mut client = node.client();
    let info = client.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.accessible_topology), ("vm-1", None));
    let answer = client.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap().into_inner();
    let can: Vec<_> = answer
        .capabilities
        .into_iter()
        .filter_map(|capability| match capability.r#type? {
            Type::Rpc(rpc) => Can::try_from(rpc.r#type).ok(),
        })
        .collect();
    let all = [
        Can::StageUnstageVolume,
        Can::GetVolumeStats,
        Can::ExpandVolume,
        Can::VolumeCondition,
        Can::SingleNodeMultiWriter,
    ];
    assert_eq!(can, all);
}

/// Services that the driver announces.
async fn services(node: &TestNode) -> Vec<Service> {
    use csi::proto::plugin_capability::Type;
    let channel = csi::client::connect(&node.socket()).await.unwrap();
    let answer =
        IdentityClient::new(channel).get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await.unwrap();
    let capabilities = answer.into_inner().capabilities.into_iter();
    let service = |r#type| match r#type {
        Type::Service(service) => Service::try_from(service.r#type).ok(),
        Type::VolumeExpansion(_) => None,
    };
    capabilities.filter_map(|capability| service(capability.r#type?)).collect()
}

#[tokio::test]
async fn zone_and_volume_limit_are_set_by_flags() {
    let mut node = TestNode::new();
    node.start_driver_with(None, &["--zone=z1", "--max-volumes=7"]).await;
    let info = node.client().node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.max_volumes_per_node, 7);
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!(segments, [("topology.kubernetes.io/zone".to_owned(), "z1".to_owned())].into());
    assert_eq!(services(&node).await, [Service::ControllerService, Service::VolumeAccessibilityConstraints]);
}

#[tokio::test]
async fn a_node_with_an_unknown_zone_is_not_reported_as_a_node_without_topology() {
    let mut node = TestNode::new();
    // No server listens at this address.
    let kubeconfig = node.path("kubeconfig");
    let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
        clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}";
    std::fs::write(&kubeconfig, text).unwrap();
    let flag = format!("--guest-kubeconfig={}", kubeconfig.display());
    node.start_driver_with(None, &["--topology", &flag]).await;
    let mut request = Request::new(NodeGetInfoRequest {});
    request.set_timeout(Duration::from_secs(1));
    let refused = node.client().node_get_info(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("vm-1") && refused.message().contains("127.0.0.1:1"), "{refused}");
}

#[tokio::test]
async fn a_legacy_driver_name_is_served_by_the_same_driver() {
    let mut node = TestNode::new();
    let socket = node.path("kubelet/plugins/old.sock");
    let endpoint = format!("--legacy-endpoint=unix://{}", socket.display());
    node.start_driver_with(None, &["--legacy-driver-name=old.example.com", &endpoint]).await;
    let registration = node.path("kubelet/plugins_registry/nestor@old.example.com-reg.sock");
    for (registration, socket, driver) in [
        (registration, socket.clone(), "old.example.com"),
        (node.registration_socket(), node.socket(), "guest.csi.nestor.dev"),
    ] {
        let mut kubelet = RegistrationClient::new(node.connect(&registration).await);
        let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.name.as_str(), info.endpoint), (driver, socket.display().to_string()));
        let mut identity = IdentityClient::new(node.connect(&socket).await);
        let info = identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.name, driver);
        let notice = RegistrationStatus { plugin_registered: true, error: String::new() };
        assert_eq!(node.get("/readyz").0, 503, "ready before {driver} is registered");
        kubelet.notify_registration_status(notice).await.unwrap();
    }
    assert_eq!(node.get("/readyz").0, 200);

    // A volume has one lock for all driver names: of two calls for a disk that never appears, the later one is refused
    // while the earlier one waits.
    let missing = node.image(8);
    let stage = || {
        let mut request = Request::new(node.stage_request(&missing, block(Mode::SingleNodeWriter)));
        request.set_timeout(Duration::from_secs(60));
        request
    };
    let mut own = node.client();
    let mut old = NodeClient::new(node.connect(&socket).await);
    let first = tokio::select! {
        answer = own.node_stage_volume(stage()) => answer,
        answer = old.node_stage_volume(stage()) => answer,
    };
    assert_eq!(first.unwrap_err().code(), Code::Aborted);
    assert_eq!(node.stop_driver().await, Some(0));
    assert!(!socket.exists());
}
