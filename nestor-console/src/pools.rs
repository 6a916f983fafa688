//! Pools of the storage infra, read at an interval: a page costs the storage infra nothing.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{Client, Health, Pool};
use jiff::Timestamp;
use kube_kit::client::chain;
use kube_kit::health::Check;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Interval of the reads.
const INTERVAL: Duration = Duration::from_secs(15);

/// What is known of the pools.
#[derive(Debug, Clone, Default)]
pub struct Pools {
    /// The last complete read.
    pub read: Option<Arc<Read>>,
    /// Why the last read failed.
    pub error: Option<String>,
}

/// One read of the storage infra.
#[derive(Debug, Clone)]
pub struct Read {
    /// When.
    pub time: Timestamp,
    /// The pools.
    pub pools: Vec<Pool>,
    /// The health of the server and of its hypervisors.
    pub health: Health,
}

/// Starts to read the pools, until `stop`.
pub fn start(client: Client, check: Check, stop: CancellationToken) -> watch::Receiver<Pools> {
    let (sender, receiver) = watch::channel(Pools::default());
    process_kit::supervise::background("reader of the pools", stop.clone(), async move {
        loop {
            let outcome = read(&client).await;
            report(&check, outcome.as_ref().err());
            sender.send_modify(|pools| remember(pools, outcome));
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    });
    receiver
}

async fn read(client: &Client) -> Result<Read, String> {
    let both = futures::future::try_join(client.list_pools(), client.health()).await;
    let (pools, health) = both.map_err(|error| chain(&error))?;
    Ok(Read { time: Timestamp::now(), pools, health })
}

fn report(check: &Check, error: Option<&String>) {
    match error {
        None => check.pass(),
        Some(reason) => check.fail(reason.clone()),
    }
}

/// A failed read keeps what an earlier one returned.
fn remember(pools: &mut Pools, outcome: Result<Read, String>) {
    match outcome {
        Ok(read) => *pools = Pools { read: Some(Arc::new(read)), error: None },
        Err(error) => pools.error = Some(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::pool::testing::pool;

    #[test]
    fn a_failed_read_keeps_the_earlier_one() {
        let health = Health {
            healthy: true,
            version: String::new(),
            catalog_writable: true,
            pools_healthy: 1,
            pools_total: 1,
            unknown_files: 0,
            hypervisors: Vec::new(),
        };
        let mut pools = Pools::default();
        remember(&mut pools, Ok(Read { time: Timestamp::UNIX_EPOCH, pools: vec![pool("a", 1)], health }));
        remember(&mut pools, Err("refused".to_owned()));
        assert_eq!(pools.error.as_deref(), Some("refused"));
        assert_eq!(pools.read.unwrap().pools.len(), 1);
    }
}
