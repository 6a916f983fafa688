//! A node plugin: its Node service on all endpoints, with self-checks.

use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::proto::plugin_capability::service::Type as PluginService;
use csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::driver_endpoints::DriverEndpoint;
use super::health::SelfCheck;
use super::service::Node;

/// What a node plugin serves.
#[derive(Debug)]
pub struct Plugin {
    /// The Node service.
    pub node: Node,
    /// Sockets, one per driver name.
    pub endpoints: Vec<DriverEndpoint>,
    /// Fails if a restart may help.
    pub alive: Health,
    /// Fails until kubelet has registered the driver.
    pub ready: Health,
    /// Metrics of the calls.
    pub calls: CallMetrics,
}

impl Plugin {
    /// Serves until `stop`.
    pub async fn serve(self, stop: CancellationToken) -> anyhow::Result<()> {
        let (reporter, grpc_health) = tonic_health::server::health_reporter();
        let self_check = SelfCheck::new(&self.alive, &self.endpoints);
        let serve_endpoints = futures::future::try_join_all(self.endpoints.iter().map(|endpoint| {
            let routes = Routes::new(IdentityServer::new(self.identity(endpoint)))
                .add_service(NodeServer::new(self.node.clone()))
                .add_service(grpc_health.clone());
            endpoint.serve(routes, &self.ready, self.calls.clone(), stop.clone())
        }));
        let check_self = async {
            self_check.run(self.alive.clone(), self.node.names.clone(), reporter, stop.clone()).await;
            Ok(())
        };
        tokio::try_join!(serve_endpoints, check_self).map(drop)
    }

    /// The Controller service of the driver has another socket (CSI specification, GetPluginCapabilities).
    fn identity(&self, endpoint: &DriverEndpoint) -> Identity {
        let identity = Identity::new(endpoint.driver.as_str(), self.alive.clone(), self.ready.clone())
            .with_service(PluginService::ControllerService)
            .with_expansion(Expansion::Online);
        match self.node.topology.is_reported() {
            true => identity.with_service(PluginService::VolumeAccessibilityConstraints),
            false => identity,
        }
    }
}
