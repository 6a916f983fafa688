//! The names under which the driver serves kubelet: its own, and one that volumes of an older driver
//! still carry. Both are one Node service, with one set of locks, behind sockets of their own.

use std::path::{Path, PathBuf};

use csi::metrics::CallMetrics;
use csi::registration::{Registration, RegistrationServer};
use csi::server::{self, Endpoint};
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

/// One name of the driver, and where it is served.
#[derive(Debug, Clone)]
pub(crate) struct Face {
    /// The name.
    pub(crate) driver: String,
    /// Where CSI is served.
    pub(crate) endpoint: Endpoint,
    /// Where kubelet learns of it, unless somebody else tells it.
    pub(crate) registration: Option<Endpoint>,
    /// Path of the CSI socket as kubelet sees it.
    pub(crate) as_kubelet_sees: PathBuf,
}

impl Face {
    /// `registration` and `kubelet_endpoint` are as the flags gave them.
    pub(crate) fn new(
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
                // kubelet's gRPC makes an HTTP authority of this path, with `/` as `%2F`; Rust's `http` takes
                // `%` only before an `@`.
                let file = format!("plugins_registry/nestor@{driver}-reg.sock");
                Some(kubelet_dir.join(file).display().to_string())
            }
        };
        let registration = registration
            .map(|path| path.parse())
            .transpose()
            .map_err(|error: String| anyhow::anyhow!("registration socket of {driver}: {error}"))?;
        let as_kubelet_sees = kubelet_endpoint.unwrap_or_else(|| endpoint.path().to_owned());
        Ok(Self { driver: driver.to_owned(), endpoint, registration, as_kubelet_sees })
    }

    /// Serves `routes` under this name until `stop`. kubelet is told once callers can connect; what it
    /// makes of the driver shows in `ready`.
    pub(crate) async fn serve(
        &self,
        routes: Routes,
        ready: &Health,
        calls: CallMetrics,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        // Bound before kubelet is told: it calls at once.
        let socket = server::bind(&self.endpoint).await?;
        let serve_csi = socket.serve(routes, calls.clone(), stop.clone());
        let serve_registration = async {
            let Some(endpoint) = &self.registration else { return Ok(()) };
            let name = format!("kubelet knows {}", self.driver);
            let accepted = ready.check(name, "kubelet has not registered the driver yet");
            let sees = self.as_kubelet_sees.display().to_string();
            let registration = Registration::new(self.driver.as_str(), sees, accepted);
            let routes = Routes::new(RegistrationServer::new(registration));
            server::serve(endpoint, routes, calls, stop.clone()).await
        };
        tokio::try_join!(serve_csi, serve_registration)?;
        Ok(())
    }
}
