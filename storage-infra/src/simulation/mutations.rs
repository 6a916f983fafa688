//! Safety checks that are switched off, to show that the simulation finds what they prevent.

use std::cell::Cell;

use crate::safety::Check;

thread_local! {
    static OFF: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Each of these is missed within few seeds.
pub(super) const FOUND_SOON: [Check; 9] = [
    Check::SingleWriter,
    Check::EndedIds,
    Check::ProofOfDetach,
    Check::Unpause,
    Check::Resume,
    Check::OpenFile,
    Check::Altered,
    Check::OtherUsers,
    Check::Discard,
];

/// Each of these is missed within many.
pub(super) const FOUND_LATE: [Check; 9] = [
    Check::LiveEvidence,
    Check::Lease,
    Check::ConsistentCopy,
    Check::Layers,
    Check::Settled,
    Check::Compared,
    Check::Incomplete,
    Check::UnpauseFirst,
    Check::Unfinished,
];

/// Whether a check is made on this thread.
pub(crate) fn applies(check: Check) -> bool {
    OFF.get() != Some(check)
}

/// Switches a check off on this thread; `None` switches all on.
pub(super) fn switch_off(check: Option<Check>) {
    OFF.set(check);
}
