//! Warning events about management claims, so that a call can report the cause of a failure in the management cluster
//! at once. Their text becomes part of the guest's answer, so only events of the controllers that serve claims count: several
//! guests can share the namespace, and others may create events there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crds::names::{ClaimName, MANAGEMENT_DRIVER};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::text::one_line;
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
    #[serde(default)]
    source: Source,
    /// `reportingController` in the API group events.k8s.io.
    reporting_component: Option<String>,
}

/// A claim in the event's namespace.
#[derive(Debug, Clone, Default, Deserialize)]
struct InvolvedObject {
    name: Option<String>,
    uid: Option<String>,
}

/// Reporter of an event that was created in the core API group.
#[derive(Debug, Clone, Default, Deserialize)]
struct Source {
    component: Option<String>,
}

/// Longest text of a warning, in characters. The API server accepts 1024 bytes.
const MAX_TEXT: usize = 1024;

impl Warning {
    /// Whether a controller that serves claims reported it: mgmt-csi and its sidecars, or kube-controller-manager.
    fn is_trusted(&self) -> bool {
        let reporter = self.reporting_component.as_deref().filter(|reporter| !reporter.is_empty());
        let reporter = reporter.or(self.source.component.as_deref()).unwrap_or_default();
        // csi-provisioner appends its host name, and csi-resizer puts its name in front.
        let sidecar = reporter.strip_prefix("external-resizer ").unwrap_or(reporter);
        let driver = sidecar.split_once('_').map_or(sidecar, |(driver, _)| driver);
        driver == MANAGEMENT_DRIVER
            || ["mgmt-csi", "persistentvolume-controller", "volume_expand"].contains(&reporter)
    }

    /// Whether it is about the claim with this UID, and not an earlier one of the same name.
    fn is_about(&self, uid: Option<&str>) -> bool {
        self.involved_object.uid.is_some() && self.involved_object.uid.as_deref() == uid
    }

    fn text(&self) -> String {
        let [reason, message] = [&self.reason, &self.message].map(Option::as_deref);
        let text = format!("{}: {}", reason.unwrap_or("Warning"), message.unwrap_or("no message"));
        one_line(&text).chars().take(MAX_TEXT).collect()
    }
}

#[derive(Debug, Default)]
struct Table {
    count: u64,
    latest: HashMap<ClaimName, (u64, Arc<Warning>)>,
}

impl Table {
    fn record(&mut self, claim: &ClaimName, event: Arc<Warning>) {
        self.count += 1;
        self.latest.insert(claim.to_owned(), (self.count, event));
    }

    fn remove(&mut self, claim: &ClaimName) {
        self.latest.remove(claim);
    }

    /// The latest warning after `mark` about the claim with this UID.
    fn since(&self, mark: u64, claim: &ClaimName, uid: Option<&str>) -> Option<String> {
        let (_, event) = self.latest.get(claim).filter(|(number, _)| *number > mark)?;
        event.is_about(uid).then(|| event.text())
    }
}

/// The latest warning about each claim, numbered in the order of arrival.
#[derive(Debug, Clone)]
pub(super) struct Warnings {
    table: Arc<Mutex<Table>>,
    namespace: String,
    claims: Informer<PersistentVolumeClaim>,
}

impl Warnings {
    /// Watches the events of a namespace. A warning wakes the calls that wait for its claim.
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        claims: Informer<PersistentVolumeClaim>,
        check: Check,
        stop: &CancellationToken,
    ) -> Self {
        let warnings =
            Self { table: Arc::default(), namespace: namespace.to_owned(), claims: claims.clone() };
        let known = warnings.clone();
        Informer::builder("warnings about management claims", Api::namespaced(client.clone(), namespace))
            .config(
                watcher::Config::default().fields("involvedObject.kind=PersistentVolumeClaim,type=Warning"),
            )
            .trim(|event: &mut Warning| {
                event.metadata.annotations = None;
                event.metadata.labels = None;
            })
            .on_change(move |change| {
                let event = change.new.or(change.old).filter(|event| event.is_trusted());
                let name = event.and_then(|event| event.involved_object.name.clone());
                let Some(claim) = name.map(ClaimName::new) else { return };
                match change.new {
                    Some(event) => {
                        known.table().record(&claim, event.clone());
                        claims.wake(&Key::new(change.key.namespace.clone(), claim.as_str()));
                    }
                    None => known.table().remove(&claim),
                }
            })
            .start(check, stop.clone());
        warnings
    }

    /// Number of the latest warning; later warnings have higher numbers.
    pub(super) fn mark(&self) -> u64 {
        self.table().count
    }

    /// The latest warning about a claim that arrived after `mark`.
    pub(super) fn since(&self, mark: u64, claim: &ClaimName) -> Option<String> {
        let found = self.claims.get(&Key::new(self.namespace.as_str(), claim.as_str()))?;
        self.table().since(mark, claim, found.metadata.uid.as_deref())
    }

    /// The latest warning about a claim.
    pub(super) fn latest(&self, claim: &ClaimName) -> Option<String> {
        self.since(0, claim)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn warning(fields: Value) -> Arc<Warning> {
        let mut event = json!({
            "metadata": {"name": "e", "namespace": "n"}, "type": "Warning", "reportingComponent": "mgmt-csi",
            "involvedObject": {"kind": "PersistentVolumeClaim", "namespace": "n", "name": "c", "uid": "u"},
        });
        event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Arc::new(serde_json::from_value::<Warning>(event).unwrap())
    }

    #[test]
    fn the_latest_warning_about_a_claim_is_returned() {
        let (mut table, c) = (Table::default(), ClaimName::new("c"));
        table.record(&c, warning(json!({"reason": "ProvisioningFailed", "message": "no space"})));
        assert_eq!(table.since(0, &c, Some("u")).as_deref(), Some("ProvisioningFailed: no space"));
        let mark = table.count;
        assert_eq!(table.since(mark, &c, Some("u")), None);
        table.record(&c, warning(json!({})));
        assert_eq!(table.since(mark, &c, Some("u")).as_deref(), Some("Warning: no message"));
    }

    #[test]
    fn a_warning_about_an_earlier_claim_of_the_same_name_or_without_a_uid_is_ignored() {
        let (mut table, c) = (Table::default(), ClaimName::new("c"));
        table.record(&c, warning(json!({})));
        assert_eq!(table.since(0, &c, Some("another")), None);
        assert_eq!(table.since(0, &c, None), None);
        table.record(&c, warning(json!({"involvedObject": {"name": "c"}})));
        assert_eq!(table.since(0, &c, None), None);
    }

    #[test]
    fn only_the_controllers_that_serve_claims_are_trusted() {
        let of = |reporting: &str, component: &str| {
            warning(json!({"reportingComponent": reporting, "source": {"component": component}})).is_trusted()
        };
        for component in [
            "mgmt.csi.nestor.dev_host-1_8c1f",
            "external-resizer mgmt.csi.nestor.dev",
            "persistentvolume-controller",
            "volume_expand",
        ] {
            assert!(of("", component) && of(component, component) && of(component, ""), "{component}");
        }
        assert!(of("mgmt-csi", ""));
        for forged in
            ["", "guest.csi.nestor.dev", "mgmt.csi.nestor.dev.evil_h", "my-controller", "mgmt-csi-2"]
        {
            assert!(!of("", forged), "{forged}");
            // The reporter of the newer API group counts.
            assert!(forged.is_empty() || !of(forged, "persistentvolume-controller"), "{forged}");
        }
    }

    #[test]
    fn texts_are_bounded_and_in_one_line() {
        let text = warning(json!({"message": format!("a\nb{}", "x".repeat(5000))})).text();
        assert!(!text.contains('\n') && text.chars().count() == MAX_TEXT, "{text}");
    }
}
