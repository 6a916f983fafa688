//! Decisions of leader election about an observed Lease.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::Timings;

/// Next step of a replica that does not hold the Lease.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Try to acquire the Lease.
    Take,
    /// Wait until this time, or until the Lease changes.
    Wait(Instant),
}

/// Holder of a Lease.
pub(super) fn holder(lease: Option<&LeaseSpec>) -> Option<&str> {
    lease?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// Next step for a Lease that has been unchanged since some time. The Lease's own duration takes precedence over `duration`.
pub(super) fn next(
    lease: Option<&LeaseSpec>,
    unchanged_since: Instant,
    duration: Duration,
    now: Instant,
) -> Step {
    if holder(lease).is_none() {
        return Step::Take;
    }
    let set = lease.and_then(|lease| lease.lease_duration_seconds).and_then(|set| u64::try_from(set).ok());
    let ends = unchanged_since + set.map_or(duration, Duration::from_secs);
    if now >= ends { Step::Take } else { Step::Wait(ends) }
}

/// The Lease as acquired or renewed by `identity`. The timestamps are informational.
pub(super) fn claimed(lease: Option<&LeaseSpec>, identity: &str, timings: &Timings) -> LeaseSpec {
    let mut spec = lease.cloned().unwrap_or_default();
    let now = MicroTime(Timestamp::now());
    if holder(lease) != Some(identity) {
        spec.acquire_time = Some(now.clone());
        spec.lease_transitions = Some(lease.map_or(0, |lease| lease.lease_transitions.unwrap_or(0) + 1));
    }
    spec.holder_identity = Some(identity.to_owned());
    spec.lease_duration_seconds = i32::try_from(timings.duration.as_secs()).ok();
    spec.renew_time = Some(now);
    spec
}

/// The Lease without a holder.
pub(super) fn released(lease: Option<&LeaseSpec>) -> LeaseSpec {
    LeaseSpec { holder_identity: None, ..lease.cloned().unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMINGS: Timings = Timings {
        duration: Duration::from_secs(15),
        renew_deadline: Duration::from_secs(10),
        retry_period: Duration::from_secs(2),
    };

    fn held_by(identity: &str, seconds: Option<i32>) -> LeaseSpec {
        LeaseSpec { lease_duration_seconds: seconds, ..claimed(None, identity, &TIMINGS) }
    }

    #[test]
    fn a_lease_without_a_holder_is_acquired_immediately() {
        let now = Instant::now();
        let released = released(Some(&held_by("a", Some(15))));
        let empty = LeaseSpec { holder_identity: Some(String::new()), ..LeaseSpec::default() };
        for lease in [None, Some(&released), Some(&empty), Some(&LeaseSpec::default())] {
            assert_eq!(next(lease, now, TIMINGS.duration, now), Step::Take, "{lease:?}");
        }
    }

    #[test]
    fn a_held_lease_is_acquired_after_the_duration_that_its_holder_set() {
        let since = Instant::now();
        for (set, rests) in [(Some(40), 40), (Some(3), 3), (None, 15), (Some(-1), 15)] {
            let lease = held_by("a", set);
            let ends = since + Duration::from_secs(rests);
            let just_before = ends - Duration::from_millis(1);
            assert_eq!(next(Some(&lease), since, TIMINGS.duration, just_before), Step::Wait(ends), "{set:?}");
            assert_eq!(next(Some(&lease), since, TIMINGS.duration, ends), Step::Take, "{set:?}");
        }
    }

    #[test]
    fn timestamps_of_other_replicas_are_ignored() {
        let since = Instant::now();
        for text in ["1970-01-01T00:00:00Z", "2999-01-01T00:00:00Z"] {
            let mut lease = held_by("a", Some(15));
            lease.renew_time = Some(MicroTime(text.parse().unwrap()));
            let ends = since + TIMINGS.duration;
            assert_eq!(next(Some(&lease), since, TIMINGS.duration, since), Step::Wait(ends), "{text}");
        }
    }

    #[test]
    fn a_change_of_holder_is_a_transition_and_a_renewal_is_not() {
        let first = claimed(None, "a", &TIMINGS);
        assert_eq!((holder(Some(&first)), first.lease_transitions), (Some("a"), Some(0)));
        let renewed = claimed(Some(&first), "a", &TIMINGS);
        assert_eq!((&renewed.acquire_time, renewed.lease_transitions), (&first.acquire_time, Some(0)));
        let taken = claimed(Some(&renewed), "b", &TIMINGS);
        assert_eq!((holder(Some(&taken)), taken.lease_transitions), (Some("b"), Some(1)));
        let again = claimed(Some(&released(Some(&taken))), "b", &TIMINGS);
        assert_eq!(again.lease_transitions, Some(2));
    }

    #[test]
    fn other_fields_of_the_lease_are_kept() {
        let lease = LeaseSpec { strategy: Some("OldestEmulationVersion".into()), ..held_by("a", None) };
        assert_eq!(claimed(Some(&lease), "b", &TIMINGS).strategy, lease.strategy);
        assert_eq!(released(Some(&lease)).strategy, lease.strategy);
    }
}
