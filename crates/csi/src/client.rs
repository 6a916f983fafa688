//! gRPC client of a driver's socket, for tests, benchmarks and command-line tools.

use std::path::Path;

use tonic::transport::{Channel, Endpoint, Error};

/// Connects to the unix socket at `path`.
pub async fn connect(path: &Path) -> Result<Channel, Error> {
    endpoint(path)?.connect().await
}

/// Connects to the unix socket at `path` with the first request.
pub fn connect_lazy(path: &Path) -> Result<Channel, Error> {
    Ok(endpoint(path)?.connect_lazy())
}

fn endpoint(path: &Path) -> Result<Endpoint, Error> {
    Endpoint::try_from(format!("unix://{}", path.display()))
}
