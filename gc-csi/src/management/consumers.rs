//! Consumer records: annotations on a shared claim that name the guests that use it. The platform team sees them, and
//! the owning guest cannot delete the claim while there are any. The owner needs no record; its label identifies it.

use crds::names;
use kube_kit::partial::PersistentVolumeClaim;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::claims::Claims;
use super::cluster_owner::removal_patch;
use super::error::ApiError;
use super::identity::{GuestIdentity, Relation, is_read_only_share};
use crate::compatibility::PvRequirements;
use crds::names::ClaimName;

/// Use of a claim by a guest that does not own it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumer {
    /// The guest's PersistentVolume; empty if not known yet.
    pub pv: String,
    /// `rw` or `ro`.
    pub mode: String,
}

impl Consumer {
    /// Use by a guest PersistentVolume, read-only or writable.
    pub fn new(pv: impl Into<String>, read_only: bool) -> Self {
        Self { pv: pv.into(), mode: if read_only { "ro" } else { "rw" }.to_owned() }
    }

    /// Combined use by all guest PersistentVolumes of one claim; None without any.
    pub(crate) fn of(volumes: &[PvRequirements]) -> Option<Self> {
        let first = volumes.first()?;
        let read_only = volumes.iter().all(PvRequirements::reads_only);
        Some(Self::new(first.volume.clone().unwrap_or_default(), read_only))
    }
}

/// A consumer record could not be updated.
#[derive(Debug, thiserror::Error)]
pub enum ConsumerError {
    /// The claim is being deleted.
    #[error("management PersistentVolumeClaim {0} is being deleted: use another claim")]
    Deleting(ClaimName),
    /// The API request failed.
    #[error("failed to update the consumer record on management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// Name of the management claim.
        claim: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Writes this guest's records.
#[derive(Clone, Debug)]
pub(crate) struct Consumers {
    identity: GuestIdentity,
    claims: Claims,
}

impl Consumers {
    pub(super) fn new(identity: GuestIdentity, claims: Claims) -> Self {
        Self { identity, claims }
    }

    /// Records that this guest uses a shared claim, and removes the owning guest's ownerReference from it. Does nothing
    /// for claims that are the guest's own or not usable by it.
    pub(crate) async fn record(&self, name: &ClaimName, consumer: &Consumer) -> Result<(), ConsumerError> {
        let Some((claim, Relation::Shared { .. })) = self.claims.usable(name) else { return Ok(()) };
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(ConsumerError::Deleting(name.to_owned()));
        }
        let metadata = if consumer_on(&claim, &self.identity.consumer_annotation()).as_ref() == Some(consumer)
        {
            claim.metadata.clone()
        } else {
            let written = self.write(name, &claim, &json!(json!(consumer).to_string())).await?;
            // The owner may have deleted the claim before it could see this record.
            let written = written.filter(|claim| claim.metadata.deletion_timestamp.is_none());
            written.ok_or_else(|| ConsumerError::Deleting(name.to_owned()))?.metadata
        };
        // The claim must outlive the owning guest. This does not depend on that guest's gc-csi.
        let Some(patch) = removal_patch(&metadata) else { return Ok(()) };
        match self.claims.patch(name, json!({"metadata": patch})).await {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(source) => Err(ConsumerError::Api { claim: name.to_owned(), source }),
        }
    }

    /// Removes the record, also from a claim that is no longer shared with this guest, so that the owner can delete it.
    pub(crate) async fn remove(&self, name: &ClaimName) -> Result<(), ConsumerError> {
        let Some(claim) = self.claims.get(name) else { return Ok(()) };
        if !self.is_recorded(&claim) {
            return Ok(());
        }
        self.write(name, &claim, &Value::Null).await.map(|_| ())
    }

    /// Whether this guest is recorded on a claim.
    pub(super) fn is_recorded(&self, claim: &PersistentVolumeClaim) -> bool {
        let key = self.identity.consumer_annotation();
        annotations(claim).any(|(found, _)| *found == key)
    }

    /// Whether several guests use the volume of a claim: it is shared, or another guest is recorded on it.
    pub(super) fn is_shared(&self, claim: &PersistentVolumeClaim) -> bool {
        is_shared(claim, self.identity.cluster.as_str())
    }

    /// The other guests that are recorded on a claim, with their PersistentVolumes.
    pub(super) fn others(&self, claim: &PersistentVolumeClaim) -> Vec<String> {
        others(claim, self.identity.cluster.as_str())
    }

    /// Writes the annotation. Returns the claim after the write, or None if it does not exist.
    async fn write(
        &self,
        name: &ClaimName,
        claim: &PersistentVolumeClaim,
        value: &Value,
    ) -> Result<Option<PersistentVolumeClaim>, ConsumerError> {
        // With the UID, the API server refuses the patch if the claim was replaced by one of the same name.
        let patch = json!({
            "metadata": {"uid": claim.metadata.uid, "annotations": {self.identity.consumer_annotation(): value}},
        });
        match self.claims.patch(name, patch).await {
            Ok(claim) => Ok(Some(claim)),
            Err(ApiError::NotFound(_)) => Ok(None),
            Err(source) => Err(ConsumerError::Api { claim: name.to_owned(), source }),
        }
    }
}

fn annotations(claim: &PersistentVolumeClaim) -> impl Iterator<Item = (&String, &String)> {
    claim.metadata.annotations.iter().flatten()
}

fn consumer_on(claim: &PersistentVolumeClaim, key: &str) -> Option<Consumer> {
    let (_, text) = annotations(claim).find(|(found, _)| *found == key)?;
    serde_json::from_str(text).ok()
}

/// The label of the owner and those of shares are on the claims of all guests that share the volume.
fn is_shared(claim: &PersistentVolumeClaim, own: &str) -> bool {
    let shares = |(key, value): (&String, &String)| {
        key.starts_with(names::LABEL_SHARE_PREFIX) && is_read_only_share(value).is_some()
            || key == names::LABEL_CLUSTER_ID && value != own
    };
    claim.metadata.labels.iter().flatten().any(shares) || !others(claim, own).is_empty()
}

/// A record that cannot be parsed counts too: its key names the guest.
pub(super) fn others(claim: &PersistentVolumeClaim, own: &str) -> Vec<String> {
    annotations(claim)
        .filter_map(|(key, text)| Some((key.strip_prefix(names::ANNOTATION_CONSUMER_PREFIX)?, text)))
        .filter(|(guest, _)| *guest != own)
        .map(|(guest, text)| match serde_json::from_str::<Consumer>(text) {
            Ok(Consumer { pv, .. }) if !pv.is_empty() => format!("{guest} (PersistentVolume {pv})"),
            _ => guest.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(annotations: &[(&str, &str)]) -> PersistentVolumeClaim {
        let mut claim = PersistentVolumeClaim::default();
        claim.metadata.annotations =
            Some(annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect());
        claim
    }

    #[test]
    fn a_volume_is_shared_by_labels_and_by_records() {
        let labelled = |labels: &[(&str, &str)]| {
            let mut labelled = PersistentVolumeClaim::default();
            labelled.metadata.labels =
                Some(labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect());
            labelled
        };
        let own = (names::LABEL_CLUSTER_ID, "own");
        assert!(!is_shared(&labelled(&[own, ("team", "a")]), "own"));
        assert!(!is_shared(&labelled(&[own, ("share.nestor.dev/b", "")]), "own"));
        assert!(is_shared(&labelled(&[own, ("share.nestor.dev/b", "ro")]), "own"));
        assert!(is_shared(
            &labelled(&[(names::LABEL_CLUSTER_ID, "b"), ("share.nestor.dev/own", "rw")]),
            "own"
        ));
        assert!(is_shared(&claim(&[("consumer.nestor.dev/b", "{}")]), "own"));
        assert!(!is_shared(&claim(&[("consumer.nestor.dev/own", "{}")]), "own"));
    }

    #[test]
    fn a_record_can_be_read_back() {
        let consumer = Consumer::new("pv-1", true);
        let text = json!(consumer).to_string();
        assert_eq!(text, r#"{"mode":"ro","pv":"pv-1"}"#);
        let claim = claim(&[("consumer.nestor.dev/guest-1", &text)]);
        assert_eq!(consumer_on(&claim, "consumer.nestor.dev/guest-1"), Some(consumer));
        assert_eq!(consumer_on(&claim, "consumer.nestor.dev/guest-2"), None);
    }

    #[test]
    fn a_guest_is_a_writer_if_one_of_its_volumes_is() {
        let requirements = |name: &str, mode: &str| PvRequirements {
            volume: Some(name.to_owned()),
            modes: vec![mode.to_owned()],
            ..PvRequirements::default()
        };
        let (reader, writer) = (requirements("a", "ReadOnlyMany"), requirements("b", "ReadWriteOnce"));
        assert_eq!(Consumer::of(&[reader.clone(), writer]), Some(Consumer::new("a", false)));
        assert_eq!(Consumer::of(&[reader]), Some(Consumer::new("a", true)));
        assert_eq!(Consumer::of(&[]), None);
    }

    #[test]
    fn other_guests_are_listed_even_if_their_record_is_damaged() {
        let claim = claim(&[
            ("consumer.nestor.dev/own", r#"{"pv":"a","mode":"rw"}"#),
            ("consumer.nestor.dev/guest-1", r#"{"pv":"b","mode":"ro"}"#),
            ("consumer.nestor.dev/guest-2", "{"),
            ("nestor.dev/guest-pv", "c"),
        ]);
        assert_eq!(others(&claim, "own"), ["guest-1 (PersistentVolume b)", "guest-2"]);
        assert_eq!(others(&PersistentVolumeClaim::default(), "own"), [""; 0]);
    }
}
