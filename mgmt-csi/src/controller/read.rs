//! Reads from the management cluster within the deadline of a call.

use kube_kit::client::chain;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

/// The result of a request, if it comes before the deadline.
pub(super) async fn read<T>(
    what: &str,
    request: impl Future<Output = kube::Result<T>>,
    deadline: Instant,
) -> Result<T, Status> {
    match timeout_at(deadline, request).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Status::unavailable(format!(
            "failed to read {what} in the management cluster: {}",
            chain(&error)
        ))),
        Err(_) => {
            Err(Status::deadline_exceeded(format!("timed out reading {what} in the management cluster")))
        }
    }
}
