//! Decisions: the state of a row, since when it lasts, why, and what to do next. Pure: no I/O.

pub mod disk;
pub mod pool;
pub mod volume;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use remedies::remedy_or_reference;

use crate::feed::EventRow;

/// Age of a warning that no longer explains a state: controllers repeat it every five minutes at the latest.
const MAX_WARNING_AGE: SignedDuration = SignedDuration::from_mins(15);

/// State of a row, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Ok,
    /// Not needed now.
    Idle,
    /// In progress.
    Waiting,
    /// It works, but needs attention.
    Warning,
    /// In progress for longer than usual.
    Late,
    /// It does not proceed without help, or reports an error.
    Failed,
}

impl State {
    /// The word that the page shows.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Idle => "idle",
            Self::Waiting => "waiting",
            Self::Warning => "warning",
            Self::Late => "late",
            Self::Failed => "failed",
        }
    }

    /// Whether a person or a controller has something left to do.
    pub fn is_open(self) -> bool {
        self >= Self::Waiting
    }
}

/// Since when a state lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Since {
    /// The time.
    pub time: Timestamp,
    /// No object tells the time: this is when the console first saw the state.
    pub at_least: bool,
}

impl Since {
    /// A time that an object tells.
    pub fn at(time: Timestamp) -> Self {
        Self { time, at_least: false }
    }

    /// When the console first saw the state.
    pub fn at_least(time: Timestamp) -> Self {
        Self { time, at_least: true }
    }
}

/// The decision about a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The state.
    pub state: State,
    /// The state in a few words.
    pub summary: String,
    /// Since when it lasts.
    pub since: Option<Since>,
    /// Why, in the words of the part that failed.
    pub cause: Option<String>,
    /// The next thing to do.
    pub next: Option<String>,
}

impl Verdict {
    /// A state without an explanation.
    pub fn new(state: State, summary: impl Into<String>) -> Self {
        Self { state, summary: summary.into(), since: None, cause: None, next: None }
    }

    /// Sets the time since which the state lasts.
    #[must_use]
    pub fn since(mut self, since: Option<Since>) -> Self {
        self.since = since;
        self
    }

    /// Sets the cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// Sets the next thing to do.
    #[must_use]
    pub fn next(mut self, action: impl Into<String>) -> Self {
        self.next = Some(action.into());
        self
    }

    /// Sets the next thing to do by the text of the cause.
    #[must_use]
    pub fn with_remedy(mut self) -> Self {
        self.next = self.cause.as_deref().map(|cause| remedy_or_reference(cause).to_owned());
        self
    }

    /// Explains a wait by the newest warning about the object, if it is recent. Then it is a failure.
    #[must_use]
    pub fn explained_by(self, warning: Option<&EventRow>, now: Timestamp) -> Self {
        let is_recent = |event: &&EventRow| now.duration_since(event.time) < MAX_WARNING_AGE;
        match warning.filter(is_recent) {
            Some(event) if self.state == State::Waiting && self.cause.is_none() => {
                let state = State::Failed;
                Self { state, ..self }.because(format!("{}: {}", event.reason, event.message)).with_remedy()
            }
            _ => self,
        }
    }

    /// Marks a wait that has lasted longer than `limit`.
    #[must_use]
    pub fn late_after(mut self, limit: SignedDuration, now: Timestamp) -> Self {
        let is_old = self.since.is_some_and(|since| now.duration_since(since.time) > limit);
        if self.state == State::Waiting && is_old {
            self.state = State::Late;
        }
        self
    }
}

/// Creation time of an object.
pub fn created(meta: &ObjectMeta) -> Option<Since> {
    meta.creation_timestamp.as_ref().map(|time| Since::at(time.0))
}

/// When the deletion of an object was requested.
pub fn deleted(meta: &ObjectMeta) -> Option<Since> {
    meta.deletion_timestamp.as_ref().map(|time| Since::at(time.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feed::testing::warning;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn ago(minutes: i64) -> Timestamp {
        NOW - SignedDuration::from_mins(minutes)
    }

    #[test]
    fn a_wait_is_late_after_the_limit_and_other_states_never_are() {
        let limit = SignedDuration::from_mins(2);
        let state = |state, minutes| {
            let verdict = Verdict::new(state, "x").since(Some(Since::at(ago(minutes))));
            verdict.late_after(limit, NOW).state
        };
        assert_eq!(state(State::Waiting, 1), State::Waiting);
        assert_eq!(state(State::Waiting, 3), State::Late);
        assert_eq!(state(State::Ok, 3), State::Ok);
        assert_eq!(state(State::Failed, 3), State::Failed);
        assert_eq!(Verdict::new(State::Waiting, "x").late_after(limit, NOW).state, State::Waiting);
    }

    #[test]
    fn a_recent_warning_explains_a_wait_and_an_old_one_does_not() {
        let waiting = || Verdict::new(State::Waiting, "Pending").next("wait");
        let failed =
            waiting().explained_by(Some(&warning("ProvisioningFailed", "exceeded quota", ago(1))), NOW);
        assert_eq!(failed.state, State::Failed);
        assert_eq!(failed.cause.as_deref(), Some("ProvisioningFailed: exceeded quota"));
        assert!(failed.next.unwrap().contains("ResourceQuota"));
        let old = warning("ProvisioningFailed", "exceeded quota", ago(20));
        assert_eq!(waiting().explained_by(Some(&old), NOW), waiting());
        assert_eq!(waiting().explained_by(None, NOW), waiting());
        let ok = Verdict::new(State::Ok, "Bound");
        assert_eq!(ok.clone().explained_by(Some(&warning("A", "b", ago(1))), NOW), ok);
    }
}
