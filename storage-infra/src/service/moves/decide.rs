//! What to do with a move, by what the VM has open, the copy that runs, and what is durably known. Pure.
//!
//! A move is settled while its other file certainly was no VM's source: then that file may be discarded. From the moment a copy
//! may run, any hand can finish it, so the move is unsettled until the VM, or both files, show which one the VM used.

use infra_api::MovePhase;

use crate::catalog::{MoveNote, Side};
use crate::safety::Check;

/// A job of the hypervisor on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Job {
    /// It copies into the other file.
    Copying,
    /// All data is in the other file: whoever asks for it, the VM changes to that file.
    Ready,
    /// The VM is changing to the other file.
    Pivoting,
    /// The copy is being ended.
    Aborting,
    /// It goes elsewhere: somebody else began it.
    Foreign,
}

/// What the VM that has the volume attached has open as its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The volume is not attached, and nobody has its files open.
    Detached,
    /// The VM is proven not to have the disk.
    Gone,
    /// It is not proven what the VM has.
    Unknown,
    /// The old file.
    Old(Option<Job>),
    /// The new file.
    New(Option<Job>),
    /// Something else.
    Foreign,
}

/// What a comparison of both files showed, if nobody changed them since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// They were not compared.
    Unknown,
    /// Both have the same data.
    Equal,
    /// The new file has no data at all: nothing was ever copied.
    Blank,
    /// The new file has nothing where the old one has data: the copy was not complete.
    Incomplete,
    /// They differ.
    Different,
}

/// What is known about a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) phase: MovePhase,
    pub(super) cancelled: bool,
    /// Whether this move may have paused a VM.
    pub(super) is_paused: bool,
    pub(super) note: Option<MoveNote>,
    /// The file that an operator chose.
    pub(super) chosen: Option<Side>,
    pub(super) seen: Seen,
    /// The copy of the old file that this server saw running when it last saw the disk.
    pub(super) last: Option<Job>,
    pub(super) content: Content,
}

/// What a move waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// A job that is ending.
    Ending,
    /// Somebody else's job or file.
    Foreign,
    /// Proof of what the VM has.
    Proof,
    /// The VM does not have the disk.
    Disk,
    /// An operator has to choose a file.
    Choice,
}

/// The next step of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Copy the file of the detached volume.
    Copy,
    /// Let the hypervisor copy the disk.
    BeginMirror,
    /// Wait for the copy.
    Follow,
    /// Let the VM change to the new file.
    Switch,
    /// Follow the copy again after a switch that did not happen.
    FollowAgain,
    /// Make the new file the volume's.
    TakeNew,
    /// The new file was no VM's source: begin again.
    KeepOld,
    /// End the copy in the hypervisor.
    EndMirror,
    /// Discard the new file and end the move.
    Undo,
    /// Compare both files.
    Compare,
    /// Keep the old file as the volume's, and the new one under another name.
    SetAside,
    /// Let the VM run that this move may have paused.
    Unpause,
    /// Remove the old file.
    Finish,
    /// Nothing, for this reason.
    Wait(Wait),
}

impl Step {
    /// Whether a VM that the move paused stays paused: it may be on the new file, which is not durably the volume's yet.
    fn keeps_paused(self) -> bool {
        matches!(self, Self::TakeNew | Self::Finish | Self::Wait(Wait::Ending | Wait::Proof))
    }
}

/// Whether the other file may be discarded in this phase.
fn is_settled(phase: MovePhase) -> bool {
    matches!(phase, MovePhase::Waiting | MovePhase::Copying)
}

/// The next step. A VM that may be paused for this move runs before anything else, unless it may be on the new file.
pub(super) fn decide(facts: &Facts) -> Step {
    let step = next(facts);
    let is_first = facts.is_paused && !step.keeps_paused() && Check::UnpauseFirst.applies();
    if is_first { Step::Unpause } else { step }
}

fn next(facts: &Facts) -> Step {
    match (facts.phase, facts.seen) {
        (MovePhase::Removing, _) => Step::Finish,
        // Whoever brought it there, and in whatever phase.
        (_, Seen::New(None)) => Step::TakeNew,
        (_, Seen::New(Some(_)) | Seen::Foreign | Seen::Old(Some(Job::Foreign))) => Step::Wait(Wait::Foreign),
        (_, Seen::Old(Some(Job::Pivoting | Job::Aborting))) => Step::Wait(Wait::Ending),
        (phase, seen) if is_settled(phase) && facts.note.is_none() => settled(facts.cancelled, seen),
        (_, Seen::Old(job)) => on_old(facts, job),
        (_, Seen::Detached | Seen::Gone) => without_disk(facts),
        (_, Seen::Unknown) => Step::Wait(Wait::Proof),
    }
}

fn settled(cancelled: bool, seen: Seen) -> Step {
    match seen {
        Seen::Old(Some(_)) => Step::EndMirror,
        _ if cancelled => Step::Undo,
        Seen::Old(None) => Step::BeginMirror,
        Seen::Detached => Step::Copy,
        _ => Step::Wait(Wait::Disk),
    }
}

/// The VM has the old file, in an unsettled move.
fn on_old(facts: &Facts, job: Option<Job>) -> Step {
    if facts.note == Some(MoveNote::Used) {
        // It had the new one before: only an operator knows which file counts.
        return match (job, facts.chosen) {
            (None, Some(Side::Old)) => Step::SetAside,
            _ => Step::Wait(Wait::Choice),
        };
    }
    match (job, facts.phase) {
        (Some(_), _) if facts.cancelled => Step::EndMirror,
        (Some(Job::Ready), MovePhase::Mirroring) => Step::Switch,
        (Some(_), MovePhase::Mirroring) => Step::Follow,
        (Some(_), _) => Step::FollowAgain,
        (None, _) if facts.chosen == Some(Side::Old) => Step::SetAside,
        (None, _) if facts.chosen == Some(Side::New) => Step::Wait(Wait::Choice),
        // Its copy was seen there, or this server ended it: the VM did not leave the file in between.
        (None, _) if facts.note == Some(MoveNote::AbortAsked) || facts.last.is_some() => Step::KeepOld,
        // The copy may have been finished, and the VM started again with the old file.
        (None, _) => by_content(facts.content),
    }
}

/// No VM has the disk, in an unsettled move.
fn without_disk(facts: &Facts) -> Step {
    match facts.chosen {
        Some(Side::New) => return Step::TakeNew,
        Some(Side::Old) => return Step::SetAside,
        None => {}
    }
    match (facts.note, facts.last) {
        // It has all that the old one has, and what was written since.
        (Some(MoveNote::Used), _) => Step::TakeNew,
        // It was being copied, and was not complete when the VM lost the disk: nobody could finish that copy.
        (None | Some(MoveNote::AbortAsked), Some(Job::Copying))
            if facts.content == Content::Incomplete || !Check::Incomplete.applies() =>
        {
            Step::KeepOld
        }
        _ => by_content(facts.content),
    }
}

fn by_content(content: Content) -> Step {
    match content {
        _ if !Check::Compared.applies() => Step::KeepOld,
        Content::Unknown => Step::Compare,
        Content::Equal | Content::Blank => Step::KeepOld,
        Content::Incomplete | Content::Different => Step::Wait(Wait::Choice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOBS: [Option<Job>; 6] = [
        None,
        Some(Job::Copying),
        Some(Job::Ready),
        Some(Job::Pivoting),
        Some(Job::Aborting),
        Some(Job::Foreign),
    ];

    /// Every combination.
    fn all() -> Vec<Facts> {
        let phases = [
            MovePhase::Waiting,
            MovePhase::Copying,
            MovePhase::Mirroring,
            MovePhase::Switching,
            MovePhase::Removing,
        ];
        let notes = [None, Some(MoveNote::PivotAsked), Some(MoveNote::AbortAsked), Some(MoveNote::Used)];
        let chosen = [None, Some(Side::Old), Some(Side::New)];
        let contents =
            [Content::Unknown, Content::Equal, Content::Blank, Content::Incomplete, Content::Different];
        let mut seen = vec![Seen::Detached, Seen::Gone, Seen::Unknown, Seen::Foreign];
        seen.extend(JOBS.map(Seen::Old));
        seen.extend(JOBS.map(Seen::New));
        let mut all = Vec::new();
        for phase in phases {
            for (cancelled, is_paused) in [(false, false), (false, true), (true, false), (true, true)] {
                for note in notes {
                    for chosen in chosen {
                        for seen in &seen {
                            for last in [None, Some(Job::Copying), Some(Job::Ready)] {
                                for content in contents {
                                    let seen = *seen;
                                    all.push(Facts {
                                        phase,
                                        cancelled,
                                        is_paused,
                                        note,
                                        chosen,
                                        seen,
                                        last,
                                        content,
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// Whether a step discards the new file, now or as soon as the move begins again.
    fn discards(step: Step) -> bool {
        matches!(step, Step::Copy | Step::BeginMirror | Step::KeepOld | Step::Undo)
    }

    #[test]
    fn a_file_that_was_or_may_have_been_a_source_is_never_discarded() {
        for facts in all() {
            let step = decide(&facts);
            if !discards(step) {
                continue;
            }
            assert!(!matches!(facts.seen, Seen::New(_) | Seen::Foreign), "{step:?}: {facts:?}");
            assert!(
                facts.note != Some(MoveNote::Used) && facts.phase != MovePhase::Removing,
                "{step:?}: {facts:?}"
            );
            assert!(facts.chosen.is_none() || is_settled(facts.phase), "{step:?}: {facts:?}");
            let ended = facts.note == Some(MoveNote::AbortAsked) || facts.last.is_some();
            let is_proven = match facts.seen {
                _ if matches!(facts.content, Content::Equal | Content::Blank) => true,
                _ if is_settled(facts.phase) && facts.note.is_none() => true,
                Seen::Old(None) => ended,
                Seen::Detached | Seen::Gone => {
                    let was_copying = facts.last == Some(Job::Copying);
                    was_copying
                        && facts.note != Some(MoveNote::PivotAsked)
                        && facts.content == Content::Incomplete
                }
                _ => false,
            };
            assert!(is_proven, "{step:?}: {facts:?}");
        }
    }

    #[test]
    fn a_vm_that_has_the_new_file_and_no_job_leads_to_taking_it_in_every_phase() {
        for facts in all().iter().filter(|one| one.seen == Seen::New(None)) {
            let expected = if facts.phase == MovePhase::Removing { Step::Finish } else { Step::TakeNew };
            assert_eq!(decide(facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn a_job_that_is_ending_is_waited_for() {
        let is_ending = |job| matches!(job, Seen::Old(Some(Job::Pivoting | Job::Aborting)));
        for facts in all().iter().filter(|one| is_ending(one.seen) && one.phase != MovePhase::Removing) {
            assert_eq!(decide(facts), Step::Wait(Wait::Ending), "{facts:?}");
        }
    }

    #[test]
    fn a_paused_vm_runs_before_anything_else_unless_it_may_be_on_the_new_file() {
        for facts in all().iter().filter(|one| one.is_paused) {
            let may_be_on_new = match facts.seen {
                Seen::New(None) | Seen::Unknown | Seen::Old(Some(Job::Pivoting | Job::Aborting)) => true,
                // Taking the new file ends with letting the VM run.
                Seen::Detached | Seen::Gone => next(facts) == Step::TakeNew,
                _ => false,
            };
            let is_done_first = decide(facts) == Step::Unpause;
            assert!(is_done_first || may_be_on_new || facts.phase == MovePhase::Removing, "{facts:?}");
        }
    }

    #[test]
    fn a_choice_is_asked_for_only_where_nothing_else_tells() {
        for facts in all().iter().filter(|one| decide(one) == Step::Wait(Wait::Choice)) {
            let is_back_on_old = matches!(facts.seen, Seen::Old(_)) && facts.note == Some(MoveNote::Used);
            let is_against_choice = facts.seen == Seen::Old(None) && facts.chosen == Some(Side::New);
            let differ = matches!(facts.content, Content::Different | Content::Incomplete);
            assert!(differ || is_back_on_old || is_against_choice, "{facts:?}");
        }
    }

    /// What a step leads to, if it succeeds; `None` where it waits for something outside.
    fn after(step: Step, facts: Facts) -> Option<Facts> {
        let settled = Facts { phase: MovePhase::Waiting, note: None, chosen: None, ..facts };
        Some(match step {
            Step::Unpause => Facts { is_paused: false, ..facts },
            Step::TakeNew => Facts { phase: MovePhase::Removing, is_paused: false, note: None, ..facts },
            Step::KeepOld => settled,
            Step::EndMirror => Facts { seen: Seen::Old(None), note: Some(MoveNote::AbortAsked), ..facts },
            Step::FollowAgain => Facts { phase: MovePhase::Mirroring, ..facts },
            Step::Compare => Facts { phase: MovePhase::Switching, content: Content::Different, ..facts },
            Step::Switch => Facts {
                phase: MovePhase::Switching,
                is_paused: true,
                note: Some(MoveNote::PivotAsked),
                seen: Seen::New(None),
                ..facts
            },
            Step::Copy
            | Step::BeginMirror
            | Step::Follow
            | Step::Undo
            | Step::SetAside
            | Step::Finish
            | Step::Wait(_) => return None,
        })
    }

    #[test]
    fn every_move_comes_to_an_end_or_waits_for_something_outside_with_the_vm_running() {
        for facts in all() {
            let mut now = facts;
            let mut steps = 0;
            while let Some(next) = after(decide(&now), now) {
                now = next;
                steps += 1;
                assert!(steps < 8, "{facts:?}");
            }
            let step = decide(&now);
            assert!(!now.is_paused || step.keeps_paused(), "{facts:?}: {now:?}");
        }
    }
}
