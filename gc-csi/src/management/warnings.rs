//! Warnings that the management cluster raised about claims, so that a call can tell its caller at once
//! what stands in the way below, in the words of the tier that failed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::runtime::watcher;
use kube::{Api, Client};
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Default)]
struct Seen {
    count: u64,
    latest: HashMap<String, (u64, String)>,
}

/// The latest warning about each claim, numbered in the order in which they came.
#[derive(Debug, Clone, Default)]
pub(super) struct Warnings(Arc<Mutex<Seen>>);

impl Warnings {
    /// Watches the events of a namespace; whoever waits on a claim is woken by a warning about it.
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        claims: Informer<PersistentVolumeClaim>,
        check: Check,
        stop: &CancellationToken,
    ) -> Self {
        let warnings = Self::default();
        let seen = warnings.clone();
        Informer::builder("warnings about management claims", Api::namespaced(client.clone(), namespace))
            .config(
                watcher::Config::default().fields("involvedObject.kind=PersistentVolumeClaim,type=Warning"),
            )
            .trim(|event: &mut Event| {
                // The text is kept here, once per claim; the watch needs only the event's identity.
                event.source = None;
                event.related = None;
                event.reporting_component = None;
            })
            .on_change(move |change| {
                let name = change.old.or(change.new).and_then(|event| event.involved_object.name.clone());
                let Some(claim) = name else { return };
                match change.new {
                    Some(event) => {
                        seen.note(&claim, event);
                        claims.wake(&Key::new(
                            event.involved_object.namespace.clone().unwrap_or_default(),
                            claim,
                        ));
                    }
                    None => seen.forget(&claim),
                }
            })
            .start(check, stop.clone());
        warnings
    }

    /// How many warnings were seen so far: what comes later is newer.
    pub(super) fn mark(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// The latest warning about a claim, if it came after `mark`.
    pub(super) fn since(&self, mark: u64, claim: &str) -> Option<String> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.latest.get(claim).filter(|(number, _)| *number > mark).map(|(_, text)| text.clone())
    }

    /// The latest warning about a claim, however old.
    pub(super) fn latest(&self, claim: &str) -> Option<String> {
        self.since(0, claim)
    }

    fn note(&self, claim: &str, event: &Event) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.count += 1;
        let text = format!(
            "{}: {}",
            event.reason.as_deref().unwrap_or("Warning"),
            event.message.as_deref().unwrap_or("no message")
        );
        let number = seen.count;
        seen.latest.insert(claim.to_owned(), (number, text));
    }

    fn forget(&self, claim: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).latest.remove(claim);
    }
}
