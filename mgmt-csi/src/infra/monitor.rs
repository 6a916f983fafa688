//! Reachability probe of the storage infra, for `/readyz` and for work that is retried once it is reachable again.

use std::sync::Arc;
use std::time::Duration;

use kube_kit::health::Check;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::storage_infra::StorageInfra;

/// Interval while it is reachable.
const INTERVAL: Duration = Duration::from_secs(10);
/// Interval while it is unreachable.
const INTERVAL_FAILING: Duration = Duration::from_secs(1);

/// Probes until `stop`: updates `check`, and notifies `back` when the storage infra is reachable again.
pub async fn monitor(infra: Arc<dyn StorageInfra>, check: Check, back: &Notify, stop: CancellationToken) {
    let mut failing = true;
    loop {
        let answer = tokio::select! {
            () = stop.cancelled() => return,
            answer = infra.ping() => answer,
        };
        match answer {
            Ok(()) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("the storage infra is reachable");
                    back.notify_one();
                }
                check.pass();
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!("{error}");
                }
                check.fail(error.to_string());
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(if failing { INTERVAL_FAILING } else { INTERVAL }) => {}
        }
    }
}
