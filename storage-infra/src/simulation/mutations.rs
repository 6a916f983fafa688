//! Safety checks that are switched off, to show that the simulation finds what they prevent.

use std::cell::Cell;

use crate::safety::Check;

thread_local! {
    static OFF: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Each of these is found.
pub(super) const MUTATIONS: [Check; 21] = [
    Check::SingleWriter,
    Check::EndedIds,
    Check::LiveEvidence,
    Check::ProofOfDetach,
    Check::Lease,
    Check::PauseForSwitch,
    Check::Unpause,
    Check::Resume,
    Check::OpenFile,
    Check::InterruptedCopy,
    Check::ConsistentCopy,
    Check::Altered,
    Check::Layers,
    Check::Settled,
    Check::Mirrored,
    Check::Compared,
    Check::Incomplete,
    Check::UnpauseFirst,
    Check::OtherUsers,
    Check::Unfinished,
    Check::Discard,
];

/// Whether a check is made on this thread.
pub(crate) fn applies(check: Check) -> bool {
    OFF.get() != Some(check)
}

/// Switches a check off on this thread; `None` switches all on.
pub(super) fn switch_off(check: Option<Check>) {
    OFF.set(check);
}
