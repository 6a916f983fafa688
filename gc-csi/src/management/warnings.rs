//! Warning events about management claims, so that a call can report the cause of a failure in the management cluster
//! at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crds::names::ClaimName;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::PersistentVolumeClaim;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

/// The fields of an event that are read.
#[derive(Debug, Clone, Deserialize, Resource)]
#[resource(inherit = "Event")]
#[serde(rename_all = "camelCase")]
struct Warning {
    metadata: ObjectMeta,
    #[serde(default)]
    involved_object: InvolvedObject,
    reason: Option<String>,
    message: Option<String>,
}

/// A claim in the event's namespace.
#[derive(Debug, Clone, Default, Deserialize)]
struct InvolvedObject {
    name: Option<String>,
}

#[derive(Debug, Default)]
struct Table {
    count: u64,
    latest: HashMap<ClaimName, (u64, Arc<Warning>)>,
}

/// The latest warning about each claim, numbered in the order of arrival.
#[derive(Debug, Clone, Default)]
pub(super) struct Warnings(Arc<Mutex<Table>>);

impl Warnings {
    /// Watches the events of a namespace. A warning wakes the calls that wait for its claim.
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        claims: Informer<PersistentVolumeClaim>,
        check: Check,
        stop: &CancellationToken,
    ) -> Self {
        let warnings = Self::default();
        let table = warnings.clone();
        Informer::builder("warnings about management claims", Api::namespaced(client.clone(), namespace))
            .config(
                watcher::Config::default().fields("involvedObject.kind=PersistentVolumeClaim,type=Warning"),
            )
            .trim(|event: &mut Warning| {
                event.metadata.annotations = None;
                event.metadata.labels = None;
            })
            .on_change(move |change| {
                let name = change.old.or(change.new).and_then(|event| event.involved_object.name.clone());
                let Some(claim) = name.map(ClaimName::new) else { return };
                match change.new {
                    Some(event) => {
                        table.record(&claim, event.clone());
                        claims.wake(&Key::new(change.key.namespace.clone(), claim.as_str()));
                    }
                    None => table.remove(&claim),
                }
            })
            .start(check, stop.clone());
        warnings
    }

    /// Number of the latest warning; later warnings have higher numbers.
    pub(super) fn mark(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// The latest warning about a claim that arrived after `mark`.
    pub(super) fn since(&self, mark: u64, claim: &ClaimName) -> Option<String> {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, event) = table.latest.get(claim).filter(|(number, _)| *number > mark)?;
        let [reason, message] = [&event.reason, &event.message].map(Option::as_deref);
        Some(format!("{}: {}", reason.unwrap_or("Warning"), message.unwrap_or("no message")))
    }

    /// The latest warning about a claim.
    pub(super) fn latest(&self, claim: &ClaimName) -> Option<String> {
        self.since(0, claim)
    }

    fn record(&self, claim: &ClaimName, event: Arc<Warning>) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.count += 1;
        let number = table.count;
        table.latest.insert(claim.to_owned(), (number, event));
    }

    fn remove(&self, claim: &ClaimName) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).latest.remove(claim);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_latest_warning_about_a_claim_is_returned() {
        let event = |words: serde_json::Value| {
            let mut event = json!({
                "metadata": {"name": "e", "namespace": "n"}, "type": "Warning",
                "involvedObject": {"kind": "PersistentVolumeClaim", "namespace": "n", "name": "c"},
            });
            event.as_object_mut().unwrap().extend(words.as_object().unwrap().clone());
            Arc::new(serde_json::from_value::<Warning>(event).unwrap())
        };
        let (warnings, c) = (Warnings::default(), ClaimName::new("c"));
        let first = event(json!({"reason": "ProvisioningFailed", "message": "no space"}));
        assert_eq!(first.involved_object.name.as_deref(), Some("c"));
        warnings.record(&c, first);
        assert_eq!(warnings.latest(&c).as_deref(), Some("ProvisioningFailed: no space"));
        let mark = warnings.mark();
        assert_eq!(warnings.since(mark, &c), None);
        warnings.record(&c, event(json!({})));
        assert_eq!(warnings.since(mark, &c).as_deref(), Some("Warning: no message"));
        warnings.remove(&c);
        assert_eq!(warnings.latest(&c), None);
    }
}
