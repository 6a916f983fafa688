//! Finds out in which version the cluster serves `VirtualMachine`.

use std::time::Duration;

use crds::newest_virtual_machine_version;
use kube::Client;
use kube_kit::client::chain;
use kube_kit::health::Check;
use tokio_util::sync::CancellationToken;

const GROUP: &str = "vmoperator.vmware.com";

/// The newest version that is served and known, as soon as there is one: the definitions may be installed
/// after the shim. None when `stop` came first.
pub(crate) async fn newest_served(
    client: &Client,
    check: &Check,
    stop: &CancellationToken,
) -> Option<&'static str> {
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
                    .filter(|group| group.name == GROUP)
                    .flat_map(|group| group.versions)
                    .map(|version| version.version)
                    .collect();
                if let Some(version) = newest_virtual_machine_version(&served) {
                    check.pass();
                    return Some(version);
                }
                format!(
                    "the management cluster serves no known version of VirtualMachine ({GROUP}), but {served:?}: install \
                     the CustomResourceDefinition"
                )
            }
            Err(error) => format!("cannot ask the management cluster for its API groups: {}", chain(&error)),
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
