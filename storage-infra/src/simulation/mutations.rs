//! Safety checks that a simulation can switch off, to show that it finds what they prevent.

use std::cell::Cell;

thread_local! {
    static OFF: Cell<Option<Check>> = const { Cell::new(None) };
}

/// A safety check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// Of the simulated world, and never off alone: QEMU opens no image that another QEMU of the host has locked.
    ImageLock,
    /// Engines remove no file that a process of this host has open.
    OpenFile,
}

impl Check {
    /// Whether the check is made.
    pub(crate) fn applies(self) -> bool {
        OFF.get() != Some(self)
    }

    /// Switches a check off on this thread; `None` switches all on.
    pub(super) fn switch_off(check: Option<Self>) {
        OFF.set(check);
    }
}
