//! Orphaned claims: management claims whose guest PersistentVolume is gone although no DeleteVolume deleted them. They
//! are marked, reported and counted, and deleted only with `--remove-orphans-after`.
//!
//! A claim whose guest PersistentVolume had the reclaim policy Retain is no orphan: it is marked as retained and stays.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names;
use csi::locks::VolumeLocks;
use k8s_openapi::jiff::Timestamp;
use kube_kit::events::Events;
use kube_kit::queue::NextAction;
use process_kit::duration;
use tokio::time::Instant;

use super::metrics::{OrphanGauges, RepairKind, RepairMetrics};
use crate::events::Event;
use crate::guest::{ClaimState, Guest};
use crate::management::Management;
use crate::management::claims::{DesiredMetadata, ProvisionedClaim};
use crate::management::provisioner::DeleteError;
use crds::names::ClaimName;

/// How long a list of the guest's PersistentVolumes is reused, so that many orphans need few lists.
const LIST_TTL: Duration = Duration::from_secs(5);
/// How long to wait until a claim is deleted.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);
/// Retry interval for an orphan that must not be deleted: the cause may be something that is not watched.
const REFUSED_RETRY: Duration = Duration::from_secs(3600);
/// How long the replica that deletes an orphan must have observed it, by its monotonic clock, unless
/// `--remove-orphans-after` is shorter: the wall clock of the mark, or the present one, may be wrong.
const MIN_OBSERVED: Duration = Duration::from_secs(86_400);
/// Maximum requeue delay.
const MAX_REQUEUE: Duration = Duration::from_secs(86_400);

/// Why a claim has no PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest PersistentVolume had the reclaim policy Retain.
    Retained,
    /// The guest PersistentVolume and the guest claim are gone.
    VolumeGone,
    /// The guest claim exists and lost its volume.
    ClaimLost,
}

/// Marks, counts and deletes orphans.
pub(super) struct Orphans {
    guest: Guest,
    management: Management,
    locks: VolumeLocks,
    events: Events,
    grace: Duration,
    remove_after: Option<Duration>,
    gauges: OrphanGauges,
    metrics: RepairMetrics,
    unnamed_since: Mutex<HashMap<ClaimName, Instant>>,
    classified: Mutex<HashMap<ClaimName, (State, u64)>>,
    reported_errors: Mutex<HashMap<ClaimName, String>>,
    marked: Mutex<HashMap<ClaimName, Mark>>,
    listed: tokio::sync::Mutex<Option<(Instant, HashSet<ClaimName>)>>,
}

/// A mark, as first observed in this lease term.
#[derive(Debug, Clone)]
struct Mark {
    /// The time in the annotation.
    since: String,
    /// Age by the wall clock when first observed.
    age: Duration,
    first_observed: Instant,
}

impl Mark {
    fn new(since: &str) -> Self {
        let age = since.parse().ok().and_then(|since| Timestamp::now().duration_since(since).try_into().ok());
        Self { since: since.to_owned(), age: age.unwrap_or_default(), first_observed: Instant::now() }
    }

    /// Age: the initial age plus the time since, by the monotonic clock.
    fn age(&self) -> Duration {
        self.age + self.first_observed.elapsed()
    }

    /// Time until the claim may be deleted, for a retention of `after`.
    fn left(&self, after: Duration) -> Duration {
        let unobserved = after.min(MIN_OBSERVED).saturating_sub(self.first_observed.elapsed());
        after.saturating_sub(self.age()).max(unobserved)
    }
}

impl State {
    fn reason(self) -> &'static str {
        match self {
            Self::Retained => "Retained",
            Self::VolumeGone => "VolumeGone",
            Self::ClaimLost => "ClaimLost",
        }
    }
}

/// The state of a claim without a PersistentVolume; None while the volume is being created or bound.
fn state(claim: &ProvisionedClaim, claim_state: ClaimState) -> Option<State> {
    match claim_state {
        ClaimState::Pending => None,
        _ if claim.retain => Some(State::Retained),
        ClaimState::Gone => Some(State::VolumeGone),
        ClaimState::Bound => Some(State::ClaimLost),
    }
}

/// The claim's desired annotations; `now` is the time of a new mark.
fn desired_marks(claim: &ProvisionedClaim, state: Option<State>, now: &str) -> DesiredMetadata {
    let (mut since, mut reason, mut retained) = (None, None, None);
    match state {
        None => {}
        Some(State::Retained) => retained = Some(claim.retained.clone().unwrap_or_else(|| now.to_owned())),
        Some(state) => {
            since = Some(claim.orphaned.clone().map_or_else(|| now.to_owned(), |(since, _)| since));
            reason = Some(state.reason().to_owned());
        }
    }
    let annotations = [
        (names::ANNOTATION_ORPHANED_SINCE, since),
        (names::ANNOTATION_ORPHANED_REASON, reason),
        (names::ANNOTATION_RETAINED_SINCE, retained),
    ];
    DesiredMetadata {
        annotations: annotations.map(|(key, value)| (key.to_owned(), value)).into(),
        ..DesiredMetadata::default()
    }
}

impl Orphans {
    pub(super) fn new(
        guest: Guest,
        management: Management,
        locks: VolumeLocks,
        (grace, remove_after): (Duration, Option<Duration>),
        gauges: OrphanGauges,
        metrics: RepairMetrics,
    ) -> Self {
        Self {
            events: management.claims.events(),
            guest,
            management,
            locks,
            grace,
            remove_after,
            gauges,
            metrics,
            unnamed_since: Mutex::default(),
            classified: Mutex::default(),
            reported_errors: Mutex::default(),
            marked: Mutex::default(),
            listed: tokio::sync::Mutex::default(),
        }
    }

    /// Restarts all grace periods and observation times.
    pub(super) fn forget_observations(&self) {
        lock(&self.unnamed_since).clear();
        lock(&self.marked).clear();
    }

    /// Marks, unmarks or deletes the claim with this handle.
    pub(super) async fn reconcile(&self, handle: &ClaimName) -> Result<NextAction, String> {
        let Some(claim) = self.management.claims.provisioned(handle) else {
            self.forget(handle);
            return Ok(NextAction::AwaitChange);
        };
        if !self.guest.volumes_of(handle).is_empty() {
            self.forget(handle);
            self.mark(handle, &claim, None).await?;
            return Ok(NextAction::AwaitChange);
        }
        let is_marked = claim.orphaned.is_some() || claim.retained.is_some();
        if !is_marked {
            let since = *lock(&self.unnamed_since).entry(handle.to_owned()).or_insert_with(Instant::now);
            let left = self.grace.saturating_sub(since.elapsed());
            if !left.is_zero() {
                return Ok(NextAction::RequeueAfter(left));
            }
        }
        let claim_state = match &claim.guest_claim {
            Some(guest_claim) => self.guest.claim_state(guest_claim, &claim.volume).await?,
            None => ClaimState::Gone,
        };
        let Some(state) = state(&claim, claim_state) else {
            return Ok(NextAction::RequeueAfter(self.grace.max(LIST_TTL)));
        };
        if self.is_named(handle, LIST_TTL).await? {
            // The informer lags and pushes the handle when it catches up.
            return Ok(NextAction::RequeueAfter(LIST_TTL));
        }
        self.mark(handle, &claim, Some(state)).await?;
        lock(&self.classified).insert(handle.to_owned(), (state, claim.bytes));
        self.update_gauges();
        self.delete_if_due(handle, &claim, state).await
    }

    /// Updates the marks and reports changes.
    async fn mark(
        &self,
        handle: &ClaimName,
        claim: &ProvisionedClaim,
        state: Option<State>,
    ) -> Result<(), String> {
        let description =
            desired_marks(claim, state, &Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let written = self.management.claims.update_metadata(handle, &description).await;
        if !written.map_err(|error| error.to_string())? {
            return Ok(());
        }
        let name = self.management.claims.full_name(handle);
        match state {
            None if claim.orphaned.is_some() => {
                let note = "a PersistentVolume of the guest names this claim again: it is no longer orphaned";
                tracing::info!(claim = name, "{note}");
                Event::NotOrphaned.report(&self.events, claim.reference.clone(), note.to_owned());
            }
            Some(State::Retained) => {
                tracing::info!(
                    claim = name,
                    "the guest deleted the PersistentVolume with reclaim policy Retain: the claim stays"
                );
            }
            Some(state) if claim.orphaned.is_none() => {
                let note = format!(
                    "no PersistentVolume of the guest names this claim; it belonged to PersistentVolume {}{}; {}",
                    claim.volume,
                    match state {
                        State::ClaimLost => ", to which the guest's claim is still bound",
                        _ => "",
                    },
                    match self.remove_after {
                        Some(after) => format!("it will be deleted in {}", duration::show(after)),
                        None => "it is kept until it is deleted manually".to_owned(),
                    },
                );
                tracing::warn!(claim = name, "{note}");
                Event::Orphaned.report(&self.events, claim.reference.clone(), note);
            }
            _ => {}
        }
        Ok(())
    }

    /// Deletes an orphan whose retention has passed, if configured.
    async fn delete_if_due(
        &self,
        handle: &ClaimName,
        claim: &ProvisionedClaim,
        state: State,
    ) -> Result<NextAction, String> {
        // A claim whose guest claim exists still holds data, and claims that were created manually are never deleted.
        let Some(after) = self.remove_after.filter(|_| claim.is_dynamic && state == State::VolumeGone) else {
            return Ok(NextAction::AwaitChange);
        };
        // The mark was written just now; that change pushes the claim again.
        let Some((since, _)) = &claim.orphaned else { return Ok(NextAction::AwaitChange) };
        let marked = self.marked(handle, since);
        let (age, left) = (marked.age(), marked.left(after));
        if !left.is_zero() {
            return Ok(NextAction::RequeueAfter(left.min(MAX_REQUEUE)));
        }
        // Held so that no CreateVolume returns the claim meanwhile.
        let Ok(_guard) = self.locks.acquire(&claim.volume) else {
            return Ok(NextAction::RequeueAfter(LIST_TTL));
        };
        if self.is_named(handle, Duration::ZERO).await? || !self.is_guest_claim_gone(claim).await? {
            return Ok(NextAction::RequeueAfter(LIST_TTL));
        }
        let note =
            match self.management.provisioner.delete(handle, &[], Instant::now() + DELETE_TIMEOUT).await {
                Ok(()) => {
                    let note = format!("deleted after it was orphaned for {}", duration::show(age));
                    tracing::warn!(claim = handle.as_str(), "{note}");
                    Event::OrphanRemoved.report(&self.events, claim.reference.clone(), note);
                    self.metrics.count(RepairKind::OrphanRemoved);
                    return Ok(NextAction::AwaitChange);
                }
                Err(error @ (DeleteError::Api { .. } | DeleteError::Deadline { .. })) => {
                    return Err(error.to_string());
                }
                Err(error) => format!("orphaned for {}, but not deleted: {error}", duration::show(age)),
            };
        let before = lock(&self.reported_errors).insert(handle.to_owned(), note.clone());
        if before.is_none() {
            tracing::warn!(claim = handle.as_str(), "{note}");
            Event::OrphanNotRemoved.report(&self.events, claim.reference.clone(), note);
        }
        Ok(NextAction::RequeueAfter(REFUSED_RETRY))
    }

    /// The mark of a claim; a changed time counts as a new mark.
    fn marked(&self, handle: &ClaimName, since: &str) -> Mark {
        let mut marked = lock(&self.marked);
        let known = marked.get(handle).filter(|known| known.since == since).cloned();
        known.unwrap_or_else(|| marked.entry(handle.to_owned()).insert_entry(Mark::new(since)).get().clone())
    }

    /// Whether the guest's claim is gone, read from the API server.
    async fn is_guest_claim_gone(&self, claim: &ProvisionedClaim) -> Result<bool, String> {
        let Some(guest_claim) = &claim.guest_claim else { return Ok(true) };
        Ok(self.guest.claim_state_live(guest_claim, &claim.volume).await? == ClaimState::Gone)
    }

    /// Whether a guest PersistentVolume names the handle, from a list that is at most `age` old.
    async fn is_named(&self, handle: &ClaimName, age: Duration) -> Result<bool, String> {
        let mut listed = self.listed.lock().await;
        if let Some((at, handles)) = &*listed
            && at.elapsed() < age
        {
            return Ok(handles.contains(handle));
        }
        let at = Instant::now();
        let handles = self.guest.live_handles().await?;
        let is_named = handles.contains(handle);
        *listed = Some((at, handles));
        Ok(is_named)
    }

    fn forget(&self, handle: &ClaimName) {
        lock(&self.unnamed_since).remove(handle);
        lock(&self.reported_errors).remove(handle);
        lock(&self.marked).remove(handle);
        if lock(&self.classified).remove(handle).is_some() {
            self.update_gauges();
        }
    }

    fn update_gauges(&self) {
        let found = lock(&self.classified);
        let (retained, orphaned): (Vec<_>, Vec<_>) =
            found.values().partition(|(state, _)| *state == State::Retained);
        let bytes: u64 = orphaned.iter().map(|(_, bytes)| bytes).sum();
        self.gauges.retained.set(i64::try_from(retained.len()).unwrap_or(i64::MAX));
        self.gauges.orphaned.set(i64::try_from(orphaned.len()).unwrap_or(i64::MAX));
        self.gauges.orphaned_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(retain: bool, orphaned: Option<&str>) -> ProvisionedClaim {
        ProvisionedClaim {
            volume: crds::names::CsiName::new("pvc-1"),
            guest_claim: None,
            is_dynamic: true,
            retain,
            orphaned: orphaned.map(|since| (since.to_owned(), "VolumeGone".to_owned())),
            retained: None,
            bytes: 1,
            reference: Default::default(),
        }
    }

    #[test]
    fn pending_volumes_are_not_orphaned_and_retained_ones_are_marked_as_such() {
        assert_eq!(state(&claim(false, None), ClaimState::Pending), None);
        assert_eq!(state(&claim(true, None), ClaimState::Pending), None);
        assert_eq!(state(&claim(true, None), ClaimState::Gone), Some(State::Retained));
        assert_eq!(state(&claim(false, None), ClaimState::Gone), Some(State::VolumeGone));
        assert_eq!(state(&claim(false, None), ClaimState::Bound), Some(State::ClaimLost));
    }

    #[tokio::test(start_paused = true)]
    async fn an_orphan_is_deleted_when_its_mark_is_old_and_was_observed_long_enough() {
        let day = MIN_OBSERVED;
        let mark = |age| Mark { since: String::new(), age, first_observed: Instant::now() };
        let (fresh, old) = (mark(Duration::ZERO), mark(100 * day));
        assert_eq!((fresh.left(30 * day), old.left(30 * day)), (30 * day, day));
        assert_eq!(old.left(day / 2), day / 2);
        tokio::time::sleep(day).await;
        assert_eq!((fresh.left(30 * day), old.left(30 * day)), (29 * day, Duration::ZERO));
        assert_eq!(old.age(), 101 * day);
        // A mark in the future or with an invalid time counts from now.
        assert_eq!(Mark::new("2200-01-01T00:00:00Z").age(), Duration::ZERO);
        assert_eq!(Mark::new("soon").age(), Duration::ZERO);
    }

    #[test]
    fn the_first_time_of_a_mark_is_kept_and_all_marks_are_removed_together() {
        let annotations = |claim: &ProvisionedClaim, state| {
            let all = desired_marks(claim, state, "now").annotations;
            let keys = [
                names::ANNOTATION_ORPHANED_SINCE,
                names::ANNOTATION_ORPHANED_REASON,
                names::ANNOTATION_RETAINED_SINCE,
            ];
            keys.map(|key| all[key].clone().unwrap_or_default())
        };
        assert_eq!(annotations(&claim(false, None), Some(State::VolumeGone)), ["now", "VolumeGone", ""]);
        assert_eq!(
            annotations(&claim(false, Some("then")), Some(State::ClaimLost)),
            ["then", "ClaimLost", ""]
        );
        assert_eq!(annotations(&claim(true, Some("then")), Some(State::Retained)), ["", "", "now"]);
        assert_eq!(annotations(&claim(false, Some("then")), None), ["", "", ""]);
    }
}
