//! Asks the infra now and then whether it answers, for `/readyz`, the people who read it, and
//! the work that waits for its return.

use std::sync::Arc;
use std::time::Duration;

use kube_kit::health::Check;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::StorageInfra;

const INTERVAL: Duration = Duration::from_secs(10);
/// While it doesn't answer, its return should be noticed soon.
const INTERVAL_FAILING: Duration = Duration::from_secs(1);

/// Keeps `check` up to date until `stop`, and notifies `back` when the infra answers again.
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
                    tracing::info!("the storage infra answers");
                    back.notify_one();
                }
                check.pass();
            }
            Err(trouble) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!("{trouble}");
                }
                check.fail(trouble.to_string());
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(if failing { INTERVAL_FAILING } else { INTERVAL }) => {}
        }
    }
}
