//! Driver endpoints: the CSI sockets for the driver's own name and, optionally, a legacy driver name that existing
//! volumes carry. All endpoints share one Node service and one set of volume locks.

use std::path::{Path, PathBuf};
use std::time::Duration;

use csi::metrics::CallMetrics;
use csi::registration::{Registration, RegistrationServer};
use csi::server::{self, Endpoint, ServeError};
use kube_kit::health::{Check, Health};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// Time from a refused registration to the next.
const RETRY: Duration = Duration::from_secs(5);

/// CSI endpoint of one driver name.
#[derive(Debug, Clone)]
pub struct DriverEndpoint {
    /// Driver name.
    pub driver: String,
    /// CSI socket.
    pub csi_socket: Endpoint,
    /// Registration socket for kubelet; None if node-driver-registrar registers the driver.
    pub registration: Option<Endpoint>,
    /// Host path of the CSI socket, for kubelet.
    pub kubelet_endpoint: PathBuf,
}

impl DriverEndpoint {
    /// `registration` and `kubelet_endpoint` are the values of the flags.
    pub fn new(
        driver: &str,
        endpoint: Endpoint,
        registration: Option<&str>,
        kubelet_endpoint: Option<PathBuf>,
        kubelet_dir: &Path,
    ) -> anyhow::Result<Self> {
        let registration = match registration {
            Some("none") => None,
            Some(path) => Some(path.to_owned()),
            None => {
                // kubelet's gRPC client uses this path as an HTTP authority, with `/` as `%2F`; Rust's `http` accepts `%` only
                // before an `@`.
                let file = format!("plugins_registry/nestor@{driver}-reg.sock");
                Some(kubelet_dir.join(file).display().to_string())
            }
        };
        let registration = registration
            .map(|path| path.parse())
            .transpose()
            .map_err(|error: String| anyhow::anyhow!("registration socket of {driver}: {error}"))?;
        let kubelet_endpoint = kubelet_endpoint.unwrap_or_else(|| endpoint.path().to_owned());
        Ok(Self { driver: driver.to_owned(), csi_socket: endpoint, registration, kubelet_endpoint })
    }

    /// Serves `routes` until `stop`. Registers with kubelet after the CSI socket listens; `ready` shows the registration.
    pub(crate) async fn serve(
        &self,
        routes: Routes,
        ready: &Health,
        calls: CallMetrics,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        // Bind before the registration: kubelet calls the driver immediately.
        let socket = server::bind(&self.csi_socket).await?;
        let serve_csi = socket.serve(routes, calls.clone(), stop.clone());
        let serve_registration = async {
            let Some(endpoint) = &self.registration else { return Ok(()) };
            let name = format!("registration of {}", self.driver);
            let accepted = ready.check(name, "kubelet has not registered the driver yet");
            self.register(endpoint, &accepted, &calls, &stop).await
        };
        tokio::try_join!(serve_csi, serve_registration)?;
        Ok(())
    }

    /// Serves the registration socket until `stop`. Makes a new one after kubelet has refused the driver, for example because
    /// its Node did not exist yet: kubelet does not ask again at the same socket.
    async fn register(
        &self,
        endpoint: &Endpoint,
        accepted: &Check,
        calls: &CallMetrics,
        stop: &CancellationToken,
    ) -> Result<(), ServeError> {
        let kubelet_endpoint = self.kubelet_endpoint.display().to_string();
        while !stop.is_cancelled() {
            let end = stop.child_token();
            let registration =
                Registration::new(&*self.driver, kubelet_endpoint.clone(), accepted.clone(), end.clone());
            let routes = Routes::new(RegistrationServer::new(registration));
            server::serve(endpoint, routes, calls.clone(), end).await?;
            let _ = tokio::time::timeout(RETRY, stop.cancelled()).await;
        }
        Ok(())
    }
}
