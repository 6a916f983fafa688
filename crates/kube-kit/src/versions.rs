//! Finds out what a cluster serves of the APIs that others install.

use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::client::chain;
use crate::health::Check;

/// The version that `choose` picks among those that the cluster serves of `group`, as soon as there is one:
/// the definitions may be installed later. None when `stop` came first.
pub async fn served<V>(
    client: &Client,
    group: &str,
    choose: impl Fn(&[String]) -> Option<V>,
    check: &Check,
    stop: &CancellationToken,
) -> Option<V> {
    let mut delay = Duration::from_millis(200);
    let mut last_reason = String::new();
    loop {
        let answer = tokio::select! {
            () = stop.cancelled() => return None,
            answer = client.list_api_groups() => answer,
        };
        let reason = match answer {
            Ok(groups) => {
                let served: Vec<String> = groups
                    .groups
                    .into_iter()
                    .filter(|found| found.name == group)
                    .flat_map(|found| found.versions)
                    .map(|version| version.version)
                    .collect();
                if let Some(version) = choose(&served) {
                    check.pass();
                    return Some(version);
                }
                format!(
                    "the cluster serves no version of {group} that is known here, but {served:?}: install its \
                     CustomResourceDefinitions"
                )
            }
            Err(error) => format!("cannot ask the cluster for its API groups: {}", chain(&error)),
        };
        if reason != last_reason {
            tracing::warn!("{reason}");
            check.fail(reason.clone());
            last_reason = reason;
        }
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(Duration::from_secs(10));
    }
}

/// Whether the cluster serves `resource`, in the plural, of `group_version` now, asked until it answers. None when
/// `stop` came first.
pub async fn serves(
    client: &Client,
    group_version: &str,
    resource: &str,
    check: &Check,
    stop: &CancellationToken,
) -> Option<bool> {
    let mut delay = Duration::from_millis(200);
    loop {
        let answer = tokio::select! {
            () = stop.cancelled() => return None,
            answer = client.list_api_group_resources(group_version) => answer,
        };
        let served = match answer {
            Ok(list) => list.resources.iter().any(|one| one.name == resource),
            Err(kube::Error::Api(status)) if status.code == 404 => false,
            Err(error) => {
                let reason = format!("cannot ask the cluster for {group_version}: {}", chain(&error));
                tracing::warn!("{reason}; trying again in {delay:?}");
                check.fail(reason);
                tokio::select! {
                    () = stop.cancelled() => return None,
                    () = tokio::time::sleep(delay) => {}
                }
                delay = (delay * 2).min(Duration::from_secs(10));
                continue;
            }
        };
        check.pass();
        return Some(served);
    }
}
