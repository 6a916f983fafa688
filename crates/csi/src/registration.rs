//! Plugin registration with kubelet, for nodes without a node-driver-registrar sidecar.

use kube_kit::health::Check;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Messages of kubelet's plugin registration.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    tonic::include_proto!("pluginregistration");
}

pub use proto::registration_server::RegistrationServer;

/// Registration service: reports the driver's socket to kubelet and records kubelet's answer.
#[derive(Debug, Clone)]
pub struct Registration {
    driver: String,
    endpoint: String,
    accepted: Check,
    refused: CancellationToken,
}

impl Registration {
    /// Creates the service. `endpoint` is the host path of the driver's socket; `accepted` passes when kubelet has registered the
    /// driver. `refused` is cancelled when kubelet has refused it: kubelet asks again only when the socket is new.
    pub fn new(
        driver: impl Into<String>,
        endpoint: String,
        accepted: Check,
        refused: CancellationToken,
    ) -> Self {
        Self { driver: driver.into(), endpoint, accepted, refused }
    }
}

#[tonic::async_trait]
impl proto::registration_server::Registration for Registration {
    async fn get_info(&self, _: Request<proto::InfoRequest>) -> Result<Response<proto::PluginInfo>, Status> {
        Ok(Response::new(proto::PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<proto::RegistrationStatus>,
    ) -> Result<Response<proto::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(driver = self.driver, "kubelet registered the driver");
            self.accepted.pass();
        } else {
            tracing::error!(
                driver = self.driver,
                error = status.error,
                "kubelet refused the registration of the driver"
            );
            self.accepted.fail(format!("kubelet refused the registration: {}", status.error));
            self.refused.cancel();
        }
        Ok(Response::new(proto::RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use kube_kit::health::Health;

    use super::proto::registration_server::Registration as _;
    use super::*;

    #[tokio::test]
    async fn a_refused_registration_ends_and_an_accepted_one_is_ready() {
        for accepts in [true, false] {
            let (health, refused) = (Health::default(), CancellationToken::new());
            let check = health.check("registration", "not yet");
            let registration = Registration::new("driver", "/csi.sock".to_owned(), check, refused.clone());
            let status =
                proto::RegistrationStatus { plugin_registered: accepts, error: "no Node".to_owned() };
            registration.notify_registration_status(Request::new(status)).await.unwrap();
            assert_eq!(refused.is_cancelled(), !accepts);
            assert_eq!(health.failing().is_empty(), accepts);
        }
    }
}
