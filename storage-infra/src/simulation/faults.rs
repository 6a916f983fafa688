//! Faults of effects, and crashes.

use std::time::Duration;

use uuid::Uuid;

use super::world::World;

/// What happens to an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is done, and reports an error.
    Done,
    /// It is not done, and reports an error.
    NotDone,
    /// It is done after this time, even if nobody waits for it any more.
    Late(Duration),
    /// There is no space.
    NoSpace,
}

/// An effect that is still to come.
pub(super) struct Late {
    pub(super) due: Duration,
    pub(super) node: Uuid,
    pub(super) work: Box<dyn FnOnce(&mut World) + Send>,
}

/// Faults that are to come.
#[derive(Default)]
pub(super) struct Faults {
    /// Number of the server that runs.
    pub(super) life: u32,
    /// A server runs that is not active any more.
    pub(super) is_old: bool,
    /// The server crashed.
    pub(super) is_dead: bool,
    /// It crashes at this pass of a fail point.
    crash: Option<u32>,
    /// The lease ends at this pass of a fail point.
    lose: Option<u32>,
    /// The lease ended.
    pub(super) is_lost: bool,
    /// This happens to this effect from now on.
    effect: Option<(u32, Fault)>,
    pub(super) late: Vec<Late>,
    /// Passes of fail points so far.
    pub(super) passed: Option<Vec<String>>,
}

/// Counts down; true at the end.
fn is_due(count: &mut Option<u32>) -> bool {
    match count {
        Some(0) => {
            *count = None;
            true
        }
        Some(more) => {
            *more -= 1;
            false
        }
        None => false,
    }
}

impl Faults {
    /// Passes a fail point; true if the server crashes now.
    pub(super) fn pass(&mut self, point: &str) -> bool {
        if let Some(passed) = &mut self.passed {
            passed.push(point.to_owned());
        }
        self.is_lost |= is_due(&mut self.lose);
        let crashes = !self.is_dead && is_due(&mut self.crash);
        self.is_dead |= crashes;
        crashes
    }

    /// Whether the server that runs crashed.
    pub(super) fn is_over(&self) -> bool {
        self.is_dead && !self.is_old
    }

    pub(super) fn crash_after(&mut self, passes: u32) {
        self.crash = Some(passes);
    }

    pub(super) fn lose_lease_after(&mut self, passes: u32) {
        self.lose = Some(passes);
    }

    pub(super) fn fail_after(&mut self, effects: u32, fault: Fault) {
        self.effect = Some((effects, fault));
    }

    /// What happens to the effect that begins.
    pub(super) fn next(&mut self) -> Option<Fault> {
        let (count, fault) = self.effect.as_mut()?;
        if *count > 0 {
            *count -= 1;
            return None;
        }
        let fault = *fault;
        self.effect = None;
        Some(fault)
    }

    /// Ends all faults that have not begun.
    pub(super) fn clear(&mut self) {
        self.crash = None;
        self.lose = None;
        self.effect = None;
    }

    /// Whether an effect on a VM is still to come: others on it wait.
    pub(super) fn is_busy(&self, node: Uuid) -> bool {
        self.late.iter().any(|late| late.node == node)
    }
}
