//! Safety checks by name. The simulation of the tests switches one off at a time, to show that it finds what the check prevents.

/// A check without which data is lost, or an operation never ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// A single-node volume has one attachment.
    SingleWriter,
    /// The ID of an ended attachment is not used again.
    EndedIds,
    /// Nothing is removed that a VM has open by its hypervisor's live state.
    LiveEvidence,
    /// An attachment ends only with the proof that its disk is detached.
    ProofOfDetach,
    /// A server without a lease has no effect.
    Lease,
    /// A VM that was paused runs again.
    Unpause,
    /// A VM that ran out of space runs again when there is space.
    Resume,
    /// What a VM has open decides which file has the data of a volume that is moved.
    OpenFile,
    /// A volume is copied block by block only while nobody writes to it.
    ConsistentCopy,
    /// A volume whose VM writes elsewhere is not attached, copied or detached.
    Altered,
    /// A volume is not used while a layer beside it has later data.
    Layers,
    /// The move of a volume is settled before its disk is attached or detached.
    Settled,
    /// The new file of a move is discarded only if it is proven that no VM used it.
    Compared,
    /// A copy that was running when it was last seen counts as incomplete only if it is.
    Incomplete,
    /// A VM that a move has paused runs before anything else is done.
    UnpauseFirst,
    /// A volume is not attached while a device of the host uses its file.
    OtherUsers,
    /// Operations that a crash interrupted are completed.
    Unfinished,
    /// The incomplete file of an object is removed with its row.
    Discard,
}

impl Check {
    /// Whether the check is made.
    #[inline]
    pub(crate) fn applies(self) -> bool {
        #[cfg(test)]
        let applies = crate::simulation::applies(self);
        #[cfg(not(test))]
        let applies = true;
        applies
    }
}
