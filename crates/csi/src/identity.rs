//! CSI Identity service: name, capabilities and readiness of a driver.

use kube_kit::health::Health;
use tonic::{Request, Response, Status};

use crate::proto;
use crate::proto::plugin_capability::service::Type as Service;
use crate::proto::plugin_capability::volume_expansion::Type as Expansion;

/// The Identity service.
#[derive(Debug, Clone)]
pub struct Identity {
    name: String,
    services: Vec<Service>,
    expansion: Option<Expansion>,
    alive: Health,
    ready: Health,
}

impl Identity {
    /// Creates the service. `alive` and `ready` are the checks behind `/healthz` and `/readyz`, which `Probe` also reports.
    pub fn new(name: impl Into<String>, alive: Health, ready: Health) -> Self {
        Self { name: name.into(), services: Vec::new(), expansion: None, alive, ready }
    }

    /// Announces a service.
    #[must_use]
    pub fn with_service(mut self, service: Service) -> Self {
        self.services.push(service);
        self
    }

    /// Announces volume expansion.
    #[must_use]
    pub fn with_expansion(mut self, expansion: Expansion) -> Self {
        self.expansion = Some(expansion);
        self
    }
}

#[tonic::async_trait]
impl proto::identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<proto::GetPluginInfoRequest>,
    ) -> Result<Response<proto::GetPluginInfoResponse>, Status> {
        Ok(Response::new(proto::GetPluginInfoResponse {
            name: self.name.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<proto::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<proto::GetPluginCapabilitiesResponse>, Status> {
        use proto::plugin_capability::{Service as ServiceCapability, Type, VolumeExpansion};
        let services = self.services.iter().map(|s| Type::Service(ServiceCapability { r#type: *s as i32 }));
        let expansion =
            self.expansion.iter().map(|e| Type::VolumeExpansion(VolumeExpansion { r#type: *e as i32 }));
        let capabilities = services
            .chain(expansion)
            .map(|r#type| proto::PluginCapability { r#type: Some(r#type) })
            .collect();
        Ok(Response::new(proto::GetPluginCapabilitiesResponse { capabilities }))
    }

    /// A driver that is not healthy answers FAILED_PRECONDITION (CSI specification, "Probe"). A driver that is not ready is
    /// still healthy: sidecars wait for it.
    async fn probe(&self, _: Request<proto::ProbeRequest>) -> Result<Response<proto::ProbeResponse>, Status> {
        if !self.alive.failing().is_empty() {
            return Err(Status::failed_precondition(reasons(&self.alive)));
        }
        let ready = self.ready.failing().is_empty();
        if !ready {
            tracing::debug!(failing = reasons(&self.ready), "not ready");
        }
        Ok(Response::new(proto::ProbeResponse { ready: Some(ready) }))
    }
}

/// Names and reasons of the failing checks.
fn reasons(health: &Health) -> String {
    let failing = health.failing().into_iter().map(|(name, reason)| format!("{name}: {reason}"));
    failing.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use proto::identity_server::Identity as _;

    use super::*;

    #[tokio::test]
    async fn a_probe_distinguishes_unhealthy_from_not_ready() {
        let (alive, ready) = (Health::default(), Health::default());
        let identity = Identity::new("driver", alive.clone(), ready.clone());
        let probe = || async {
            let answer = identity.probe(Request::new(proto::ProbeRequest {})).await;
            answer.map(|answer| answer.into_inner().ready)
        };
        let (socket, cluster) = (alive.check("socket", "gone"), ready.check("cluster", "away"));
        let refused = probe().await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (tonic::Code::FailedPrecondition, "socket: gone"));
        socket.pass();
        assert_eq!(probe().await.unwrap(), Some(false));
        cluster.pass();
        assert_eq!(probe().await.unwrap(), Some(true));
    }
}
