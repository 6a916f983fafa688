//! Reads from the management cluster within the deadline of a call.

use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use crate::infra::Message;

/// The result of a request, if it comes before the deadline.
pub(super) async fn read<T>(
    what: &str,
    request: impl Future<Output = kube::Result<T>>,
    deadline: Instant,
) -> Result<T, Status> {
    match timeout_at(deadline, request).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(Message::of_cluster(&format!("read {what}"), &error).status(Code::Unavailable)),
        Err(_) => {
            Err(Status::deadline_exceeded(format!("timed out reading {what} in the management cluster")))
        }
    }
}
