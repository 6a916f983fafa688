//! What the driver serves around its volumes.

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

use crate::machine::{Machine, block};

#[tokio::test]
async fn kubelet_learns_of_the_driver_and_readiness_follows() {
    let mut machine = Machine::start().await;
    let channel = csi::client::connect(&machine.registration_socket()).await.unwrap();
    let mut kubelet = RegistrationClient::new(channel);
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "guest.csi.nestor.dev"));
    assert_eq!(info.endpoint, machine.socket().display().to_string());
    assert_eq!(machine.get("/readyz").0, 503);
    for (plugin_registered, status) in [(false, 503), (true, 200)] {
        let notice = RegistrationStatus { plugin_registered, error: "a reason".to_owned() };
        kubelet.notify_registration_status(notice).await.unwrap();
        assert_eq!(machine.get("/readyz").0, status);
    }

    // Alive, whatever kubelet says, once it has looked at itself.
    let alive = async {
        while machine.get("/healthz").0 != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), alive).await.unwrap();
    assert!(machine.get("/metrics").1.contains("csi_call_duration"));

    for socket in [machine.socket(), machine.registration_socket()] {
        assert_eq!(std::fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(machine.stop_driver().await, Some(0));
    assert!(!machine.socket().exists() && !machine.registration_socket().exists());
}

#[tokio::test]
async fn the_node_says_who_it_is_and_what_it_can() {
    let machine = Machine::start().await;
    assert_eq!(services(&machine).await, [Service::ControllerService]);
    let mut node = machine.node().await;
    let info = node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.accessible_topology), ("vm-1", None));
    let answer = node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap().into_inner();
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

/// What the driver announces as a whole.
async fn services(machine: &Machine) -> Vec<Service> {
    use csi::proto::plugin_capability::Type;
    let channel = csi::client::connect(&machine.socket()).await.unwrap();
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
async fn the_zone_and_the_limit_of_volumes_can_be_given() {
    let mut machine = Machine::new();
    machine.start_driver_with(None, &["--zone=z1", "--max-volumes=7"]).await;
    let info = machine.node().await.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.max_volumes_per_node, 7);
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!(segments, [("topology.kubernetes.io/zone".to_owned(), "z1".to_owned())].into());
    assert_eq!(
        services(&machine).await,
        [Service::ControllerService, Service::VolumeAccessibilityConstraints]
    );
}

#[tokio::test]
async fn a_node_whose_zone_is_not_known_yet_is_not_told_as_one_without() {
    let mut machine = Machine::new();
    // Nobody listens there.
    let kubeconfig = machine.path("kubeconfig");
    let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
        clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}";
    std::fs::write(&kubeconfig, text).unwrap();
    let flag = format!("--guest-kubeconfig={}", kubeconfig.display());
    machine.start_driver_with(None, &["--topology", &flag]).await;
    let mut request = Request::new(NodeGetInfoRequest {});
    request.set_timeout(Duration::from_secs(1));
    let refused = machine.node().await.node_get_info(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("vm-1") && refused.message().contains("127.0.0.1:1"), "{refused}");
}

#[tokio::test]
async fn an_older_drivers_name_is_served_by_the_same_driver() {
    let mut machine = Machine::new();
    let socket = machine.path("kubelet/plugins/old.sock");
    let endpoint = format!("--legacy-endpoint=unix://{}", socket.display());
    machine.start_driver_with(None, &["--legacy-driver-name=old.example.com", &endpoint]).await;
    let registration = machine.path("kubelet/plugins_registry/nestor@old.example.com-reg.sock");
    for (registration, socket, driver) in [
        (registration, socket.clone(), "old.example.com"),
        (machine.registration_socket(), machine.socket(), "guest.csi.nestor.dev"),
    ] {
        let mut kubelet = RegistrationClient::new(machine.connect(&registration).await);
        let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
        assert_eq!((info.name.as_str(), info.endpoint), (driver, socket.display().to_string()));
        let mut identity = IdentityClient::new(machine.connect(&socket).await);
        let said = identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(said.name, driver);
        let notice = RegistrationStatus { plugin_registered: true, error: String::new() };
        assert_eq!(machine.get("/readyz").0, 503, "ready before {driver} is registered");
        kubelet.notify_registration_status(notice).await.unwrap();
    }
    assert_eq!(machine.get("/readyz").0, 200);

    // A volume has one lock, whatever the name under which it is asked for: of two calls for a disk
    // that never comes, the later is refused while the earlier waits.
    let missing = machine.image(8);
    let stage = || {
        let mut request = Request::new(machine.stage_request(&missing, block(Mode::SingleNodeWriter)));
        request.set_timeout(Duration::from_secs(60));
        request
    };
    let mut own = machine.node().await;
    let mut old = NodeClient::new(machine.connect(&socket).await);
    let first = tokio::select! {
        answer = own.node_stage_volume(stage()) => answer,
        answer = old.node_stage_volume(stage()) => answer,
    };
    assert_eq!(first.unwrap_err().code(), Code::Aborted);
    assert_eq!(machine.stop_driver().await, Some(0));
    assert!(!socket.exists());
}
