//! Management claims whose PersistentVolume in the guest is gone though nobody deleted them: marked, told and counted,
//! and deleted only where the guest's policy says so.
//!
//! One that the guest let go of with reclaim policy Retain is no orphan: it is marked as retained, and stays.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names;
use csi::locks::VolumeLocks;
use k8s_openapi::jiff::Timestamp;
use kube_kit::duration;
use kube_kit::events::Events;
use kube_kit::queue::Next;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::repair_metrics::{ORPHAN_REMOVED, RepairMetrics};
use crate::guest::{ClaimState, Guest};
use crate::management::Management;
use crate::management::claims::DeleteError;
use crate::management::metadata::DesiredMetadata;
use crate::management::orphans::ProvisionedClaim;

/// How long one reading of the guest's volumes serves to mark claims, so that many orphans don't cost many readings.
const LIST_TTL: Duration = Duration::from_secs(5);
/// How long a claim may take to be gone.
const DELETE_TIMEOUT: Duration = Duration::from_secs(60);
/// How soon a claim is looked at again that may not be deleted: the cause need not be something that is watched.
const REFUSED_RETRY: Duration = Duration::from_secs(3600);
/// For how long the replica that deletes an orphan has seen it so itself, by a clock that nobody sets, unless
/// `--remove-orphans-after` is less: the time that stands in a mark is of a clock that may have been wrong, and so may be the
/// one that it is compared with.
const MIN_OBSERVED: Duration = Duration::from_secs(86_400);
/// The longest sleep: what is to be deleted in a year is looked at every day.
const MAX_REQUEUE: Duration = Duration::from_secs(86_400);

/// How many there are.
#[derive(Debug, Clone)]
pub(super) struct Gauges {
    orphaned: Gauge,
    orphaned_bytes: Gauge,
    retained: Gauge,
}

/// What a claim without a PersistentVolume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest's PersistentVolume said Retain.
    Retained,
    /// The volume is gone, and so is the guest's claim.
    VolumeGone,
    /// The guest's claim is there and has lost its volume.
    ClaimLost,
}

/// Marks and counts orphans.
pub(super) struct Orphans {
    guest: Guest,
    management: Management,
    locks: VolumeLocks,
    events: Events,
    grace: Duration,
    remove_after: Option<Duration>,
    gauges: Gauges,
    metrics: RepairMetrics,
    unnamed_since: Mutex<HashMap<String, Instant>>,
    classified: Mutex<HashMap<String, (State, u64)>>,
    reported_errors: Mutex<HashMap<String, String>>,
    marked: Mutex<HashMap<String, Mark>>,
    listed: tokio::sync::Mutex<Option<(Instant, HashSet<String>)>>,
}

/// A mark, as it was first seen in this term.
#[derive(Debug, Clone)]
struct Mark {
    /// The time that it says.
    since: String,
    /// How old it was by the wall clock then.
    age: Duration,
    seen: Instant,
}

impl Mark {
    fn new(since: &str) -> Self {
        let age = since.parse().ok().and_then(|since| Timestamp::now().duration_since(since).try_into().ok());
        Self { since: since.to_owned(), age: age.unwrap_or_default(), seen: Instant::now() }
    }

    /// How old it is: from when it was first seen on, by a clock that nobody sets.
    fn age(&self) -> Duration {
        self.age + self.seen.elapsed()
    }

    /// How long the claim is kept yet that is to go after so long.
    fn left(&self, after: Duration) -> Duration {
        let unseen = after.min(MIN_OBSERVED).saturating_sub(self.seen.elapsed());
        after.saturating_sub(self.age()).max(unseen)
    }
}

impl Gauges {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let gauge = |registry: &mut Registry, name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        Self {
            orphaned: gauge(
                registry,
                "orphaned_claims",
                "Management claims of this guest that nothing in it names",
            ),
            orphaned_bytes: gauge(registry, "orphaned_claims_bytes", "What orphaned claims have"),
            retained: gauge(
                registry,
                "retained_claims",
                "Management claims whose PersistentVolume in the guest said Retain and is gone",
            ),
        }
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

/// What a claim is whose volume nothing names; None while one is being made or bound.
fn state(claim: &ProvisionedClaim, claim_state: ClaimState) -> Option<State> {
    match claim_state {
        ClaimState::Pending => None,
        _ if claim.retain => Some(State::Retained),
        ClaimState::Gone => Some(State::VolumeGone),
        ClaimState::Bound => Some(State::ClaimLost),
    }
}

/// What the claim's annotations should be; `now` where it was not marked before.
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
        gauges: Gauges,
        metrics: RepairMetrics,
    ) -> Self {
        Self {
            events: management.events(),
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

    /// Lets the grace of each that is not marked yet begin anew, and that of each before it is deleted.
    pub(super) fn forget_observations(&self) {
        lock(&self.unnamed_since).clear();
        lock(&self.marked).clear();
    }

    /// Looks whether the guest still has a volume of this handle.
    pub(super) async fn reconcile(&self, handle: &str) -> Result<Next, String> {
        let Some(claim) = self.management.provisioned_claim(handle) else {
            self.forget(handle);
            return Ok(Next::Wait);
        };
        if !self.guest.volumes_of(handle).is_empty() {
            self.forget(handle);
            self.mark(handle, &claim, None).await?;
            return Ok(Next::Wait);
        }
        let is_marked = claim.orphaned.is_some() || claim.retained.is_some();
        if !is_marked {
            let since = *lock(&self.unnamed_since).entry(handle.to_owned()).or_insert_with(Instant::now);
            let left = self.grace.saturating_sub(since.elapsed());
            if !left.is_zero() {
                return Ok(Next::After(left));
            }
        }
        let claim_state = match &claim.guest_claim {
            Some(guest_claim) => self.guest.claim_state(guest_claim, &claim.volume).await?,
            None => ClaimState::Gone,
        };
        let Some(state) = state(&claim, claim_state) else {
            return Ok(Next::After(self.grace.max(LIST_TTL)));
        };
        if self.is_named(handle, LIST_TTL).await? {
            // The watch is behind, and pushes when it is not.
            return Ok(Next::After(LIST_TTL));
        }
        self.mark(handle, &claim, Some(state)).await?;
        lock(&self.classified).insert(handle.to_owned(), (state, claim.bytes));
        self.update_gauges();
        self.delete_if_due(handle, &claim, state).await
    }

    /// Brings the marks up to date, and tells of a change.
    async fn mark(&self, handle: &str, claim: &ProvisionedClaim, state: Option<State>) -> Result<(), String> {
        let description =
            desired_marks(claim, state, &Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let written = self.management.patch_claim_metadata(handle, &description).await;
        if !written.map_err(|error| error.to_string())? {
            return Ok(());
        }
        let name = self.management.full_name(handle);
        match state {
            None if claim.orphaned.is_some() => {
                let note = "a PersistentVolume of the guest names this claim again: it is no orphan any more";
                tracing::info!(claim = name, "{note}");
                self.events.normal(claim.reference.clone(), "Check", "NotOrphaned", note.to_owned());
            }
            Some(State::Retained) => {
                tracing::info!(
                    claim = name,
                    "the guest let go of the claim's volume with reclaim policy Retain: kept"
                );
            }
            Some(state) if claim.orphaned.is_none() => {
                let note = format!(
                    "no PersistentVolume of the guest names this claim any more; it was PersistentVolume {}{}; {}",
                    claim.volume,
                    match state {
                        State::ClaimLost => ", which the guest's claim still says it has",
                        _ => "",
                    },
                    match self.remove_after {
                        Some(after) => format!("it is deleted {} from now", duration::show(after)),
                        None => "it is kept until somebody deletes it".to_owned(),
                    },
                );
                tracing::warn!(claim = name, "{note}");
                self.events.warning(claim.reference.clone(), "Check", "Orphaned", note);
            }
            _ => {}
        }
        Ok(())
    }

    /// Deletes an orphan whose time is over, where that is wanted at all.
    async fn delete_if_due(
        &self,
        handle: &str,
        claim: &ProvisionedClaim,
        state: State,
    ) -> Result<Next, String> {
        // A claim that lost its volume still stands for somebody's data, and one that a person made is a person's.
        let Some(after) = self.remove_after.filter(|_| claim.is_dynamic && state == State::VolumeGone) else {
            return Ok(Next::Wait);
        };
        // Marked just now: the mark itself pushes the claim again.
        let Some((since, _)) = &claim.orphaned else { return Ok(Next::Wait) };
        let marked = self.marked(handle, since);
        let (age, left) = (marked.age(), marked.left(after));
        if !left.is_zero() {
            return Ok(Next::After(left.min(MAX_REQUEUE)));
        }
        // So that nobody is given it meanwhile.
        let Ok(_guard) = self.locks.acquire(&claim.volume) else { return Ok(Next::After(LIST_TTL)) };
        if self.is_named(handle, Duration::ZERO).await? || !self.is_guest_claim_gone(claim).await? {
            return Ok(Next::After(LIST_TTL));
        }
        let note = match self.management.delete_claim(handle, &[], Instant::now() + DELETE_TIMEOUT).await {
            Ok(()) => {
                let note = format!("deleted, since it was an orphan for {}", duration::show(age));
                tracing::warn!(claim = handle, "{note}");
                self.events.warning(claim.reference.clone(), "Delete", "OrphanRemoved", note);
                self.metrics.count(ORPHAN_REMOVED);
                return Ok(Next::Wait);
            }
            Err(error @ (DeleteError::Api { .. } | DeleteError::Deadline { .. })) => {
                return Err(error.to_string());
            }
            Err(error) => format!("an orphan for {}, but not deleted: {error}", duration::show(age)),
        };
        let before = lock(&self.reported_errors).insert(handle.to_owned(), note.clone());
        if before.is_none() {
            tracing::warn!(claim = handle, "{note}");
            self.events.warning(claim.reference.clone(), "Delete", "OrphanNotRemoved", note);
        }
        Ok(Next::After(REFUSED_RETRY))
    }

    /// The mark of a claim, which counts from when it was first seen with this time.
    fn marked(&self, handle: &str, since: &str) -> Mark {
        let mut marked = lock(&self.marked);
        let known = marked.get(handle).filter(|known| known.since == since).cloned();
        known.unwrap_or_else(|| marked.entry(handle.to_owned()).insert_entry(Mark::new(since)).get().clone())
    }

    /// Whether the guest's claim is gone, as its API says now.
    async fn is_guest_claim_gone(&self, claim: &ProvisionedClaim) -> Result<bool, String> {
        let Some(guest_claim) = &claim.guest_claim else { return Ok(true) };
        Ok(self.guest.claim_state_live(guest_claim, &claim.volume).await? == ClaimState::Gone)
    }

    /// Whether one of the guest's volumes names the handle, as its API said within `age`.
    async fn is_named(&self, handle: &str, age: Duration) -> Result<bool, String> {
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

    fn forget(&self, handle: &str) {
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
            volume: "pvc-1".to_owned(),
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
    fn a_volume_that_is_being_made_is_no_orphan_and_one_that_was_let_go_is_retained() {
        assert_eq!(state(&claim(false, None), ClaimState::Pending), None);
        assert_eq!(state(&claim(true, None), ClaimState::Pending), None);
        assert_eq!(state(&claim(true, None), ClaimState::Gone), Some(State::Retained));
        assert_eq!(state(&claim(false, None), ClaimState::Gone), Some(State::VolumeGone));
        assert_eq!(state(&claim(false, None), ClaimState::Bound), Some(State::ClaimLost));
    }

    #[tokio::test(start_paused = true)]
    async fn an_orphan_goes_when_its_mark_is_old_and_was_seen_for_long_by_a_clock_that_nobody_sets() {
        let day = MIN_OBSERVED;
        let mark = |age| Mark { since: String::new(), age, seen: Instant::now() };
        let (fresh, old) = (mark(Duration::ZERO), mark(100 * day));
        assert_eq!((fresh.left(30 * day), old.left(30 * day)), (30 * day, day));
        assert_eq!(old.left(day / 2), day / 2);
        tokio::time::sleep(day).await;
        assert_eq!((fresh.left(30 * day), old.left(30 * day)), (29 * day, Duration::ZERO));
        assert_eq!(old.age(), 101 * day);
        // A mark from the future, and one that is no time, are of now.
        assert_eq!(Mark::new("2200-01-01T00:00:00Z").age(), Duration::ZERO);
        assert_eq!(Mark::new("soon").age(), Duration::ZERO);
    }

    #[test]
    fn the_time_of_a_mark_is_that_of_the_first_and_all_marks_go_together() {
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
