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
    health: Health,
}

impl Identity {
    /// Creates the service; `Probe` reports `health`.
    pub fn new(name: impl Into<String>, health: Health) -> Self {
        Self { name: name.into(), services: Vec::new(), expansion: None, health }
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

    async fn probe(&self, _: Request<proto::ProbeRequest>) -> Result<Response<proto::ProbeResponse>, Status> {
        Ok(Response::new(proto::ProbeResponse { ready: Some(self.health.failing().is_empty()) }))
    }
}
