//! What the driver serves around its volumes.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use csi::proto::node_service_capability::{Type, rpc::Type as Can};
use csi::proto::{NodeGetCapabilitiesRequest, NodeGetInfoRequest};
use csi::registration::proto::registration_client::RegistrationClient;
use csi::registration::proto::{InfoRequest, RegistrationStatus};

use crate::machine::Machine;

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
    tokio::time::timeout(Duration::from_secs(5), alive).await.unwrap();
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
    let mut node = machine.node().await;
    let info = node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("vm-1", 200));
    let answer = node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap().into_inner();
    let can: Vec<_> = answer
        .capabilities
        .into_iter()
        .filter_map(|capability| match capability.r#type? {
            Type::Rpc(rpc) => Can::try_from(rpc.r#type).ok(),
        })
        .collect();
    assert_eq!(
        can,
        [Can::StageUnstageVolume, Can::GetVolumeStats, Can::VolumeCondition, Can::SingleNodeMultiWriter]
    );
}
