//! What can happen, drawn from a seed.

use std::fmt;

/// What happens in a step. Which object it is about is drawn with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Clients create, copy, change and delete volumes and snapshots.
    Create,
    Clone,
    Snapshot,
    Restore,
    DeleteSnapshot,
    Delete,
    Expand,
    /// Clients attach and detach them.
    Attach,
    AttachReadOnly,
    Detach,
    Fence,
    /// Clients move them.
    Move,
    CancelMove,
    /// A late copy of an earlier request arrives.
    Repeat,
    /// Guests write, and copies of disks go on.
    Write,
    /// Time passes.
    Wait,
    WaitLong,
    /// The server crashes at the n-th fail point from now on.
    Crash,
    /// It crashes at once, and again during its recovery.
    CrashTwice,
    /// Its lease ends at the n-th fail point from now on.
    LoseLease,
    /// The n-th effect from now on fails, or comes late.
    Fail,
    Late,
    /// A pool becomes full; all have space again.
    Fill,
    Free,
    /// A VM is turned off, or started.
    Off,
    Start,
    /// The wall clock jumps; the machine sleeps.
    Jump,
    Sleep,
    /// An administrator ends a block job, pauses or resumes a VM, detaches a disk, attaches one.
    Pivot,
    Abort,
    Pause,
    Resume,
    Unplug,
    Plug,
    /// A backup tool makes an overlay, and commits it later.
    Overlay,
    Commit,
    /// An administrator sets up a loop device on the file of a detached volume, and removes it later.
    Loop,
    NoLoop,
}

use Action::*;

/// How often each action is drawn.
const WEIGHTS: [(Action, u32); 38] = [
    (Create, 8),
    (Clone, 4),
    (Snapshot, 5),
    (Restore, 3),
    (DeleteSnapshot, 3),
    (Delete, 4),
    (Expand, 4),
    (Attach, 16),
    (AttachReadOnly, 2),
    (Detach, 12),
    (Fence, 3),
    (Move, 10),
    (CancelMove, 3),
    (Repeat, 3),
    (Write, 14),
    (Wait, 14),
    (WaitLong, 5),
    (Crash, 7),
    (CrashTwice, 2),
    (LoseLease, 2),
    (Fail, 8),
    (Late, 5),
    (Fill, 2),
    (Free, 3),
    (Off, 4),
    (Start, 8),
    (Jump, 1),
    (Sleep, 1),
    (Pivot, 4),
    (Abort, 2),
    (Pause, 2),
    (Resume, 5),
    (Unplug, 2),
    (Plug, 2),
    (Overlay, 2),
    (Commit, 3),
    (Loop, 2),
    (NoLoop, 3),
];

/// A step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) action: Action,
    /// Which object, how long, how many.
    pub(super) one: u32,
    pub(super) other: u32,
    /// Of the chance within the step.
    pub(super) seed: u64,
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} {}", self.action, self.one, self.other)
    }
}

/// The steps of a seed. Each seed leaves some actions out, so that others come together more often.
pub(super) fn draw(seed: u64, count: usize) -> Vec<Step> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let needed = [Create, Attach, Write, Wait, Free, Start, Resume];
    let mut weights = Vec::new();
    for (action, weight) in WEIGHTS {
        let is_out = !needed.contains(&action) && rng.u8(..5) == 0;
        if !is_out {
            weights.push((action, weight));
        }
    }
    let sum: u32 = weights.iter().map(|(_, weight)| weight).sum();
    let mut step = || {
        let mut at = rng.u32(..sum);
        let chosen = weights.iter().find(|(_, weight)| match at.checked_sub(*weight) {
            Some(less) => {
                at = less;
                false
            }
            None => true,
        });
        let action = chosen.map_or(Wait, |(action, _)| *action);
        Step { action, one: rng.u32(..1000), other: rng.u32(..1000), seed: rng.u64(..) }
    };
    (0..count).map(|_| step()).collect()
}
