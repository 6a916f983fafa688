//! API discovery: versions and resources of optional APIs in a cluster.

use std::time::Duration;

use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::client::chain;
use crate::health::Check;

/// Waits until the cluster serves a version of `group` that `choose` accepts, because its CustomResourceDefinitions may be
/// installed later. Returns None if `stop` is cancelled first.
pub async fn wait_for_version<V>(
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
                    "the cluster serves no supported version of {group}, only {served:?}: install its \
                     CustomResourceDefinitions"
                )
            }
            Err(error) => format!("failed to list the API groups of the cluster: {}", chain(&error)),
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

/// Whether the cluster serves `resource` (plural) of `group_version`. Retries until the API server answers. Returns None if
/// `stop` is cancelled first.
pub async fn is_served(
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
                let reason = format!("failed to list the resources of {group_version}: {}", chain(&error));
                tracing::warn!("{reason}; retrying in {delay:?}");
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
