//! API discovery: versions and resources of optional APIs in a cluster.

use std::collections::BTreeMap;
use std::time::Duration;

use backon::Retryable;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroup;
use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::client::{chain, until_success};
use crate::health::Check;

/// Maximum delay between requests.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Versions of API groups that a cluster serves, by group.
pub type Served = BTreeMap<String, Vec<String>>;

/// Waits until the cluster serves a version of `group` that `choose` accepts, because its CustomResourceDefinitions may be
/// installed later. Returns None if `stop` is cancelled first.
pub async fn wait_for_version<V>(
    client: &Client,
    group: &str,
    choose: impl Fn(&[String]) -> Option<V>,
    check: &Check,
    stop: &CancellationToken,
) -> Option<V> {
    let choose = |served: &Served| {
        let served = served.get(group).map(Vec::as_slice).unwrap_or_default();
        choose(served).ok_or_else(|| {
            format!(
                "the cluster serves no supported version of {group}, only {served:?}: install its CustomResourceDefinitions"
            )
        })
    };
    wait_for_groups(client, choose, check, stop).await
}

/// Waits until the cluster serves API groups from which `choose` returns a value; its error says what is missing. Returns None if
/// `stop` is cancelled first.
pub async fn wait_for_groups<V>(
    client: &Client,
    choose: impl Fn(&Served) -> Result<V, String>,
    check: &Check,
    stop: &CancellationToken,
) -> Option<V> {
    let mut last_reason = String::new();
    let chosen = (|| async { choose(&served_groups(client).await?) }).retry(until_success(MAX_DELAY)).notify(
        |reason: &String, _| {
            if *reason != last_reason {
                tracing::warn!("{reason}");
                check.fail(reason.clone());
                last_reason = reason.clone();
            }
        },
    );
    let chosen = tokio::select! {
        () = stop.cancelled() => return None,
        chosen = chosen => chosen.ok()?,
    };
    check.pass();
    Some(chosen)
}

/// Waits until the cluster serves API groups that `is_wanted` accepts, with a request in each `interval`; a failed one says
/// nothing. Returns None if `stop` is cancelled first.
pub async fn until_served(
    client: &Client,
    is_wanted: impl Fn(&Served) -> bool,
    interval: Duration,
    stop: &CancellationToken,
) -> Option<()> {
    loop {
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(interval) => {}
        }
        if served_groups(client).await.is_ok_and(|served| is_wanted(&served)) {
            return Some(());
        }
    }
}

/// The API groups that the cluster serves.
async fn served_groups(client: &Client) -> Result<Served, String> {
    let groups = client
        .list_api_groups()
        .await
        .map_err(|error| format!("failed to list the API groups of the cluster: {}", chain(&error)))?;
    let versions = |group: APIGroup| group.versions.into_iter().map(|version| version.version).collect();
    Ok(groups.groups.into_iter().map(|group| (group.name.clone(), versions(group))).collect())
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
