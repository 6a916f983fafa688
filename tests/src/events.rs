//! Events of both clusters, as reason and message.

use anyhow::Result;
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ListParams};

use crate::{PATIENCE, Scenario, eventually};

/// The reason and the message of an event.
pub type ReasonAndMessage = (String, String);

/// The events about objects of this kind and name in a namespace of a cluster, or about cluster-scoped objects.
async fn list(client: &Client, namespace: &str, kind: &str, name: &str) -> Result<Vec<ReasonAndMessage>> {
    let events: Api<Event> = Api::all(client.clone());
    let about = format!("involvedObject.kind={kind},involvedObject.name={name}");
    let list = events.list(&ListParams::default().fields(&about)).await?;
    Ok(list
        .into_iter()
        .filter(|event| {
            let of_object = event.involved_object.namespace.as_deref().unwrap_or_default();
            of_object.is_empty() || of_object == namespace
        })
        .map(|event| (event.reason.unwrap_or_default(), event.message.unwrap_or_default()))
        .collect())
}

/// Waits until one of the events that `list` returns is accepted.
async fn wait<F, R>(
    what: &str,
    list: F,
    accepts: impl Fn(&ReasonAndMessage) -> bool,
) -> Result<ReasonAndMessage>
where
    F: Fn() -> R,
    R: Future<Output = Result<Vec<ReasonAndMessage>>>,
{
    eventually(what, PATIENCE, || async {
        let events = list().await?;
        Ok(events.iter().find(|event| accepts(event)).cloned().ok_or_else(|| format!("{events:?}")))
    })
    .await
}

fn contains_all(message: &str, texts: &[&str]) -> bool {
    texts.iter().all(|text| message.contains(text))
}

impl Scenario {
    /// The events of a guest claim.
    pub async fn events(&self, claim: &str) -> Result<Vec<ReasonAndMessage>> {
        self.events_of("PersistentVolumeClaim", claim).await
    }

    /// The events of a guest object in the scenario's namespace, or of a cluster-scoped guest object.
    pub async fn events_of(&self, kind: &str, name: &str) -> Result<Vec<ReasonAndMessage>> {
        list(&self.guest, &self.name, kind, name).await
    }

    /// The events of an object in the guest's management namespace, or of a cluster-scoped management object.
    pub async fn management_events_of(&self, kind: &str, name: &str) -> Result<Vec<ReasonAndMessage>> {
        list(&self.management, &self.namespace, kind, name).await
    }

    /// Waits for an event on a guest claim whose message contains all of `texts`.
    pub async fn wait_for_event(&self, claim: &str, texts: &[&str]) -> Result<ReasonAndMessage> {
        self.wait_for_event_of("PersistentVolumeClaim", claim, texts).await
    }

    /// Waits for an event on a guest object whose message contains all of `texts`.
    pub async fn wait_for_event_of(
        &self,
        kind: &str,
        name: &str,
        texts: &[&str],
    ) -> Result<ReasonAndMessage> {
        let what = format!("an event on guest {kind} {name} with {texts:?}");
        wait(&what, || self.events_of(kind, name), |(_, message)| contains_all(message, texts)).await
    }

    /// Waits for an event on a guest object with this reason, whose message contains all of `texts`.
    pub async fn wait_for_reason_of(
        &self,
        kind: &str,
        name: &str,
        reason: &str,
        texts: &[&str],
    ) -> Result<()> {
        let what = format!("event {reason} on guest {kind} {name} with {texts:?}");
        let accepts = |(found, message): &ReasonAndMessage| found == reason && contains_all(message, texts);
        wait(&what, || self.events_of(kind, name), accepts).await.map(drop)
    }

    /// Waits for an event on a management claim whose message contains all of `texts`; returns the reason.
    pub async fn wait_for_management_event(&self, claim: &str, texts: &[&str]) -> Result<String> {
        Ok(self.wait_for_management_event_of("PersistentVolumeClaim", claim, texts).await?.0)
    }

    /// Waits for an event on a management object whose message contains all of `texts`.
    pub async fn wait_for_management_event_of(
        &self,
        kind: &str,
        name: &str,
        texts: &[&str],
    ) -> Result<ReasonAndMessage> {
        let what = format!("an event on management {kind} {name} with {texts:?}");
        let accepts = |(_, message): &ReasonAndMessage| contains_all(message, texts);
        wait(&what, || self.management_events_of(kind, name), accepts).await
    }

    /// Waits for an event on a management object with this reason, whose message contains all of `texts`.
    pub async fn wait_for_management_reason_of(
        &self,
        kind: &str,
        name: &str,
        reason: &str,
        texts: &[&str],
    ) -> Result<()> {
        let what = format!("event {reason} on management {kind} {name} with {texts:?}");
        let accepts = |(found, message): &ReasonAndMessage| found == reason && contains_all(message, texts);
        wait(&what, || self.management_events_of(kind, name), accepts).await.map(drop)
    }
}
