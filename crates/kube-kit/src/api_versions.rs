//! API discovery: versions and resources of optional APIs in a cluster.

use std::time::Duration;

use backon::Retryable;
use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::client::{chain, until_success};
use crate::health::Check;

/// Maximum delay between requests.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Waits until the cluster serves a version of `group` that `choose` accepts, because its CustomResourceDefinitions may be
/// installed later. Returns None if `stop` is cancelled first.
pub async fn wait_for_version<V>(
    client: &Client,
    group: &str,
    choose: impl Fn(&[String]) -> Option<V>,
    check: &Check,
    stop: &CancellationToken,
) -> Option<V> {
    let mut last_reason = String::new();
    let version = (|| served_version(client, group, &choose)).retry(until_success(MAX_DELAY)).notify(
        |reason: &String, _| {
            if *reason != last_reason {
                tracing::warn!("{reason}");
                check.fail(reason.clone());
                last_reason = reason.clone();
            }
        },
    );
    let version = tokio::select! {
        () = stop.cancelled() => return None,
        version = version => version.ok()?,
    };
    check.pass();
    Some(version)
}

/// The version of `group` that `choose` accepts, or why there is none.
async fn served_version<V>(
    client: &Client,
    group: &str,
    choose: impl Fn(&[String]) -> Option<V>,
) -> Result<V, String> {
    let groups = client
        .list_api_groups()
        .await
        .map_err(|error| format!("failed to list the API groups of the cluster: {}", chain(&error)))?;
    let served: Vec<String> = groups
        .groups
        .into_iter()
        .filter(|found| found.name == group)
        .flat_map(|found| found.versions)
        .map(|version| version.version)
        .collect();
    choose(&served).ok_or_else(|| {
        format!(
            "the cluster serves no supported version of {group}, only {served:?}: install its CustomResourceDefinitions"
        )
    })
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
    let is_not_found = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.code == 404);
    let answer = (|| client.list_api_group_resources(group_version))
        .retry(until_success(MAX_DELAY))
        .when(|error| !is_not_found(error))
        .notify(|error, delay| {
            let reason = format!("failed to list the resources of {group_version}: {}", chain(error));
            tracing::warn!("{reason}; retrying in {delay:?}");
            check.fail(reason);
        });
    let answer = tokio::select! {
        () = stop.cancelled() => return None,
        answer = answer => answer,
    };
    check.pass();
    Some(answer.is_ok_and(|list| list.resources.iter().any(|one| one.name == resource)))
}
