//! gRPC server on a unix socket that only its owner can open.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::builder::NonEmptyStringValueParser;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::connections::{Connections, Limits};
use crate::metrics::CallMetrics;

/// How long running calls may continue after the stop. Less than the 30 s that Kubernetes gives a pod, so that the socket is
/// always removed, even if a connection is stuck.
const GRACE: Duration = Duration::from_secs(20);

/// How long to wait for another process that listens on the socket. The socket of a driver that died stays open until a child
/// process that it was starting has called exec.
const LISTENER_WAIT: Duration = Duration::from_secs(5);
/// Poll interval of that wait.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Socket address of a driver: `unix:///path`, or the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(PathBuf);

impl Endpoint {
    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = Path::new(text.strip_prefix("unix://").unwrap_or(text));
        if !path.is_absolute() {
            return Err(format!(
                "{text:?} is not the absolute path of a unix socket, such as unix:///csi/csi.sock"
            ));
        }
        // sun_path has 108 bytes, including the final NUL.
        if path.as_os_str().len() > 107 {
            return Err(format!(
                "{text:?} has {} bytes; the maximum length of a unix socket path is 107",
                path.as_os_str().len()
            ));
        }
        Ok(Self(path.to_owned()))
    }
}

/// Flag of the socket.
#[derive(Debug, Clone, clap::Args)]
pub struct EndpointArgs {
    /// Unix socket on which to serve CSI, for example unix:///csi/csi.sock.
    #[arg(long, value_name = "unix:///PATH")]
    pub endpoint: Endpoint,
}

/// Flags of a second socket, for volumes of an earlier driver.
#[derive(Debug, Clone, clap::Args)]
pub struct LegacyArgs {
    /// Name of an earlier driver whose existing volumes this driver also serves.
    #[arg(long, value_name = "NAME", requires = "legacy_endpoint", value_parser = NonEmptyStringValueParser::new())]
    pub legacy_driver_name: Option<String>,
    /// Unix socket on which to serve CSI under the earlier driver's name, for example unix:///csi/legacy.sock.
    #[arg(long, value_name = "unix:///PATH", requires = "legacy_driver_name")]
    pub legacy_endpoint: Option<Endpoint>,
}

impl LegacyArgs {
    /// Name and socket, if configured.
    pub fn get(&self) -> Option<(&str, &Endpoint)> {
        self.legacy_driver_name.as_deref().zip(self.legacy_endpoint.as_ref())
    }
}

/// Failure to serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket cannot be created.
    #[error("failed to listen on {path}: {source}")]
    Listen {
        /// Path of the socket.
        path: String,
        /// OS error.
        source: io::Error,
    },
    /// Another process listens on the socket.
    #[error("failed to listen on {path}: another process serves there; stop it or choose another --endpoint")]
    Taken {
        /// Path of the socket.
        path: String,
    },
    /// The server failed.
    #[error("the server on {path} failed: {source}")]
    Serve {
        /// Path of the socket.
        path: String,
        /// Transport error.
        source: tonic::transport::Error,
    },
}

/// A listening socket: clients can connect, and are served after a call of [`Self::serve`].
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    path: PathBuf,
}

/// Creates the socket. For callers that must register it with others before they serve it.
pub async fn bind(endpoint: &Endpoint) -> Result<Bound, ServeError> {
    let path = endpoint.path().to_owned();
    Ok(Bound { listener: listen(&path, LISTENER_WAIT).await?, path })
}

impl Bound {
    /// Serves `routes` until `stop`, waits for running calls (at most 20 s), and removes the socket.
    pub async fn serve(
        self,
        routes: Routes,
        metrics: CallMetrics,
        stop: CancellationToken,
    ) -> Result<(), ServeError> {
        self.serve_within(Connections::default(), Limits::default(), routes, metrics, stop).await
    }

    async fn serve_within(
        self,
        connections: Connections,
        limits: Limits,
        routes: Routes,
        metrics: CallMetrics,
        stop: CancellationToken,
    ) -> Result<(), ServeError> {
        let path = self.path;
        let made = identity(&path);
        let opening = connections.clone();
        let incoming = UnixListenerStream::new(self.listener)
            .map(move |stream| stream.map(|stream| opening.open(stream)));
        tracing::info!(endpoint = %path.display(), "serving");
        let served = tonic::transport::Server::builder()
            .layer(metrics)
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        let grace_exceeded = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
        };
        let served = tokio::select! {
            served = served => served,
            never = connections.close_surplus(limits) => match never {},
            () = grace_exceeded => {
                tracing::warn!(endpoint = %path.display(), "calls or connections did not end within {GRACE:?}, aborting them");
                Ok(())
            }
        };
        // Another driver may have replaced the socket.
        if identity(&path).is_some_and(|found| Some(found) == made) {
            let _ = remove(&path);
        }
        served.map_err(|source| ServeError::Serve { path: path.display().to_string(), source })
    }
}

/// Serves `routes` on `endpoint` until `stop`, waits for running calls (at most 20 s), and removes the socket.
pub async fn serve(
    endpoint: &Endpoint,
    routes: Routes,
    metrics: CallMetrics,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    bind(endpoint).await?.serve(routes, metrics, stop).await
}

/// Creates the socket with mode 0600. Replaces a socket of a dead process, and fails for other files. Waits up to `wait`
/// for another process that listens there.
async fn listen(path: &Path, wait: Duration) -> Result<UnixListener, ServeError> {
    let fail = |source| ServeError::Listen { path: path.display().to_string(), source };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(fail)?;
    }
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(fail(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the path exists and is not a socket",
            )));
        }
        let deadline = Instant::now() + wait;
        while UnixStream::connect(path).await.is_ok() {
            if Instant::now() >= deadline {
                return Err(ServeError::Taken { path: path.display().to_string() });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        remove(path).map_err(fail)?;
    }
    let listener = UnixListener::bind(path).map_err(fail)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
    Ok(listener)
}

/// Identifies a file: inode numbers are reused, so the ctime is included.
fn identity(path: &Path) -> Option<(u64, i64, i64)> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.ino(), meta.ctime(), meta.ctime_nsec()))
}

/// Removes a file. Idempotent.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::proto::identity_client::IdentityClient;
    use crate::proto::identity_server::IdentityServer;

    #[test]
    fn an_endpoint_is_an_absolute_path_that_fits_a_socket_address() {
        assert_eq!("unix:///csi/csi.sock".parse::<Endpoint>().unwrap().path(), Path::new("/csi/csi.sock"));
        assert!("tcp://1.2.3.4:5".parse::<Endpoint>().is_err());
        assert!(format!("unix:///{}", "x".repeat(107)).parse::<Endpoint>().is_err());
    }

    #[tokio::test]
    async fn another_file_at_the_path_is_kept_and_a_dead_socket_is_replaced() {
        let dir = std::env::temp_dir().join(format!("nestor-listen-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(listen(&file, Duration::ZERO).await.is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

        let socket = dir.join("socket");
        let first = listen(&socket, Duration::ZERO).await.unwrap();
        assert!(matches!(listen(&socket, Duration::ZERO).await, Err(ServeError::Taken { .. })));
        let (next, ()) = tokio::join!(listen(&socket, LISTENER_WAIT), async { drop(first) });
        assert!(next.is_ok());
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test]
    async fn five_hundred_connections_without_a_call_are_closed_and_an_idle_one_with_a_call_is_kept() {
        let dir = std::env::temp_dir().join(format!("nestor-idle-{}", std::process::id()));
        let socket = dir.join("csi.sock");
        let endpoint: Endpoint = socket.display().to_string().parse().unwrap();
        let identity = crate::identity::Identity::new("test", Default::default(), Default::default());
        let routes = Routes::new(IdentityServer::new(identity));
        let metrics = CallMetrics::register(&mut prometheus_client::registry::Registry::default());
        let (stop, connections) = (CancellationToken::new(), Connections::default());
        let part = Duration::from_millis(100);
        let limits = Limits { silent: part, max: 1, idle: part, interval: part };
        let bound = bind(&endpoint).await.unwrap();
        let serving =
            tokio::spawn(bound.serve_within(connections.clone(), limits, routes, metrics, stop.clone()));

        let mut client = IdentityClient::new(crate::client::connect(&socket).await.unwrap());
        client.get_plugin_info(crate::proto::GetPluginInfoRequest {}).await.unwrap();
        let sidecar = connections.peers().remove(0);
        let mut others = Vec::new();
        for number in 0..500 {
            let mut stream = UnixStream::connect(&socket).await.unwrap();
            if number % 2 == 0 {
                // HTTP/2 preface and empty settings.
                let words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
                stream.write_all(words).await.unwrap();
            }
            others.push(stream);
        }
        for stream in &mut others {
            let closed =
                tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut Vec::new())).await;
            closed.expect("it is still open").unwrap();
        }
        let kept = connections.peers();
        assert!(kept.len() == 1 && std::sync::Arc::ptr_eq(&kept[0], &sidecar), "{kept:?}");
        client.get_plugin_info(crate::proto::GetPluginInfoRequest {}).await.unwrap();
        drop((client, kept, sidecar));
        stop.cancel();
        serving.await.unwrap().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
