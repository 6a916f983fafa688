//! gRPC client of a driver's socket, for tests, benchmarks and command-line tools.

use std::path::Path;

use tonic::transport::{Channel, Error};

/// Connects to the unix socket at `path`.
pub async fn connect(path: &Path) -> Result<Channel, Error> {
    tonic::transport::Endpoint::try_from(format!("unix://{}", path.display()))?.connect().await
}
