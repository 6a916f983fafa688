//! The transition logic of one `VolumeAttachment`, without I/O: from what is known, the next step. The
//! reconciler does the step, adds what came of it to what is known, and asks again, until there is nothing
//! left to do.
//!
//! What it keeps, in any order of steps, failures and restarts:
//! - the infra is asked to plug only while the finalizer is held;
//! - the finalizer is dropped only after the infra said in this very pass that the disk is gone, also one that an
//!   earlier order of this name left behind;
//! - the disk of an earlier order is touched only after the API server said that this order is the one of its name now,
//!   so that the earlier one is over;
//! - `attached` is written only from the infra's own word, and a failure that says nothing of the disk
//!   doesn't take it back;
//! - what is written already is not written again.
//!
//! The model of the whole protocol (crate `model`) runs this very function.

use crds::VolumeAttachmentStatus;
use infra_api::{AttachmentId, AttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::failure::{Again, Disk, Failure};
use super::status;
use crate::infra::PluggedDisk;

/// What is known of one order.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether the finalizer is there.
    pub held: bool,
    /// Its generation.
    pub generation: i64,
    /// Whether it was first seen only now, so that the claim's or volume's news may be on their way.
    pub fresh: bool,
    /// What was answered so far.
    pub status: VolumeAttachmentStatus,
    /// What the infra is to do, from the order, its claim and its volume; or why that can't be said.
    pub target: Result<AttachmentSpec, Failure>,
    /// What was learned in this pass.
    pub infra: Infra,
}

/// What was learned in this pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Infra {
    /// Nothing: the infra was not asked.
    Unasked,
    /// The infra was asked to plug, and its answer was not waited for.
    Asked,
    /// The disk is plugged.
    Plugged(PluggedDisk),
    /// The order was told to go in the infra, so it can't be carried out under its id any more.
    Ended,
    /// Another order of the same name has the disk in the machine.
    Namesake(AttachmentId),
    /// That one is over: the API server says that this order is the one of its name.
    Over(AttachmentId),
    /// The disk is gone.
    Unplugged,
    /// So are those of all other orders of the same name.
    Clear,
    /// It failed.
    Failed(Failure),
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Add the finalizer.
    Hold,
    /// Ask the infra to plug.
    Plug {
        /// What.
        spec: AttachmentSpec,
        /// Whose disk it may take over: that of an order that is over.
        replaces: Option<AttachmentId>,
    },
    /// Ask the infra to unplug.
    Unplug,
    /// Ask the infra whether another order of the same name has a disk in the machine.
    Look,
    /// Read from the API server whether this order is still the one of its name.
    Confirm(AttachmentId),
    /// Ask the infra to unplug the disk of an order that is over.
    UnplugEarlier(AttachmentId),
    /// Write this answer.
    Report(VolumeAttachmentStatus),
    /// Delete the order: whoever made it makes a new one, which gets a new id.
    Renew,
    /// Drop the finalizer.
    Release,
    /// Nothing for a moment: the watches of claims and volumes may be behind that of orders.
    Settle,
    /// Nothing, until an object changes.
    Done,
    /// Nothing now; begin again after a while.
    Retry(Failure),
}

/// What to do for an order that is not there any more, and perhaps another one of its name is: the disk that was asked
/// for in this pass is nobody's. Only under its own id, so that it can't be another order's.
pub fn decide_gone(learned: &Infra) -> Step {
    match learned {
        Infra::Unasked | Infra::Unplugged | Infra::Clear => Step::Done,
        Infra::Asked
        | Infra::Plugged(_)
        | Infra::Ended
        | Infra::Namesake(_)
        | Infra::Over(_)
        | Infra::Failed(_) => Step::Unplug,
    }
}

/// The next step.
pub fn decide(view: &View, now: &Time) -> Step {
    if view.deleting { decide_deleting(view, now) } else { decide_wanted(view, now) }
}

fn decide_wanted(view: &View, now: &Time) -> Step {
    let spec = match &view.target {
        Ok(spec) => spec,
        Err(_) if view.fresh => return Step::Settle,
        Err(failure) => return failed(view, failure, now),
    };
    if !view.held {
        return Step::Hold;
    }
    match &view.infra {
        Infra::Unasked | Infra::Asked | Infra::Unplugged | Infra::Clear => {
            Step::Plug { spec: spec.clone(), replaces: None }
        }
        Infra::Namesake(other) => Step::Confirm(other.clone()),
        Infra::Over(earlier) => Step::Plug { spec: spec.clone(), replaces: Some(earlier.clone()) },
        Infra::Ended => Step::Renew,
        Infra::Plugged(disk) => {
            let answer = status::plugged(&view.status, disk, view.generation, now);
            if answer == view.status { Step::Done } else { Step::Report(answer) }
        }
        Infra::Failed(failure) => failed(view, failure, now),
    }
}

fn decide_deleting(view: &View, now: &Time) -> Step {
    if !view.held {
        return Step::Done;
    }
    match &view.infra {
        Infra::Unasked | Infra::Asked | Infra::Plugged(_) | Infra::Ended => Step::Unplug,
        // A disk that was plugged by this order is no other's.
        Infra::Unplugged if !view.status.attached => Step::Look,
        Infra::Namesake(other) => Step::Confirm(other.clone()),
        Infra::Over(earlier) => Step::UnplugEarlier(earlier.clone()),
        Infra::Unplugged | Infra::Clear => Step::Release,
        Infra::Failed(failure) => report(view, failure, now),
    }
}

/// A wanted disk that fails. One that is known to be plugged is not put in doubt by not knowing: an infra
/// that is away for a while, or a claim that went away under a plugged disk, changes nothing in the machine.
fn failed(view: &View, failure: &Failure, now: &Time) -> Step {
    if view.status.attached && failure.disk == Disk::Unknown {
        return again(failure);
    }
    report(view, failure, now)
}

fn report(view: &View, failure: &Failure, now: &Time) -> Step {
    let answer = status::failed(&view.status, failure, view.generation, now);
    if answer == view.status { again(failure) } else { Step::Report(answer) }
}

fn again(failure: &Failure) -> Step {
    match failure.again {
        Again::OnChange => Step::Done,
        Again::Later => Step::Retry(failure.clone()),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Access, VolumeId};
    use k8s_openapi::jiff::Timestamp;

    use super::*;
    use crate::infra::{AttachError, DetachError, Trouble};

    const DISK: uuid::Uuid = uuid::Uuid::from_u128(1);

    fn at(seconds: i64) -> Time {
        Time(Timestamp::from_second(seconds).unwrap())
    }

    fn spec() -> AttachmentSpec {
        AttachmentSpec {
            volume: VolumeId::new("v").unwrap(),
            node: uuid::Uuid::nil(),
            read_only: false,
            access: Access::SingleNode,
        }
    }

    fn new_order() -> View {
        View {
            deleting: false,
            held: true,
            generation: 1,
            fresh: false,
            status: VolumeAttachmentStatus::default(),
            target: Ok(spec()),
            infra: Infra::Unasked,
        }
    }

    /// Does every step as the API server and an infra that always says `infra` would; gives the steps.
    fn run(view: &mut View, infra: &Infra, now: i64) -> Vec<Step> {
        view.infra = Infra::Unasked;
        let mut steps = Vec::new();
        loop {
            let step = decide(view, &at(now));
            match &step {
                Step::Hold => view.held = true,
                Step::Release => view.held = false,
                Step::Plug { .. } | Step::Unplug => view.infra = infra.clone(),
                Step::Look => view.infra = Infra::Clear,
                Step::Confirm(other) => view.infra = Infra::Over(other.clone()),
                Step::UnplugEarlier(_) => view.infra = Infra::Unasked,
                Step::Renew => view.deleting = true,
                Step::Report(status) => view.status = status.clone(),
                Step::Settle | Step::Done | Step::Retry(_) => return steps,
            }
            steps.push(step);
            assert!(steps.len() < 10, "does not end: {steps:?}");
        }
    }

    fn plugged() -> Infra {
        let blank_attestation = Some(uuid::Uuid::from_u128(2));
        Infra::Plugged(PluggedDisk {
            uuid: DISK,
            blank_attestation,
            format_token: "00000000-0000-0000-0000-000000000003".parse().ok(),
        })
    }

    fn in_use() -> Infra {
        Infra::Failed(AttachError::InUse("on vm-2".into()).into())
    }

    fn away() -> Infra {
        Infra::Failed(AttachError::Trouble(Trouble::Unreachable("nobody answers".into())).into())
    }

    #[test]
    fn an_attach_is_one_call_and_one_write() {
        let mut view = new_order();
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
        assert!(view.status.attached);
        let told = |number: u128| Some(uuid::Uuid::from_u128(number).to_string());
        assert_eq!(view.status.disk_uuid, told(1));
        assert_eq!((&view.status.blank_attestation, &view.status.format_token), (&told(2), &told(3)));
        assert_eq!(view.status.observed_generation, Some(1));
        assert_eq!(view.status.conditions[0].status, "True");
    }

    #[test]
    fn after_a_restart_an_attached_disk_is_looked_at_and_nothing_is_written() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        assert!(matches!(run(&mut view, &plugged(), 9)[..], [Step::Plug { .. }]));
    }

    #[test]
    fn an_order_without_our_finalizer_gets_it_before_the_infra_is_touched() {
        let mut view = View { held: false, ..new_order() };
        assert!(matches!(
            run(&mut view, &plugged(), 5)[..],
            [Step::Hold, Step::Plug { .. }, Step::Report(_)]
        ));
    }

    #[test]
    fn a_failure_is_written_once_and_with_the_time_it_was_first_seen() {
        let mut view = new_order();
        assert!(matches!(run(&mut view, &in_use(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
        assert!(matches!(run(&mut view, &in_use(), 9)[..], [Step::Plug { .. }]));
        let error = view.status.error.clone().unwrap();
        assert_eq!((error.reason.as_str(), error.time), ("VolumeInUse", at(5)));
        run(&mut view, &plugged(), 12);
        assert!(view.status.attached && view.status.error.is_none());
    }

    #[test]
    fn an_infra_that_is_away_does_not_put_a_plugged_disk_in_doubt_but_its_word_does() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        assert!(matches!(run(&mut view, &away(), 9)[..], [Step::Plug { .. }]));
        assert!(view.status.attached);
        run(&mut view, &in_use(), 9);
        let VolumeAttachmentStatus { attached, disk_uuid, blank_attestation, format_token, .. } =
            &view.status;
        assert_eq!((*attached, disk_uuid, blank_attestation, format_token), (false, &None, &None, &None));
    }

    #[test]
    fn a_missing_claim_is_told_without_asking_the_infra() {
        let mut view = new_order();
        view.target = Err(Failure::of_objects("ClaimNotFound", "no claim".into()));
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Report(_)]));
        assert_eq!(decide(&view, &at(6)), Step::Done);
    }

    #[test]
    fn a_claim_that_is_just_being_bound_is_not_called_missing() {
        let mut view = View { fresh: true, ..new_order() };
        view.target = Err(Failure::of_objects("ClaimNotBound", "not bound".into()));
        assert_eq!(decide(&view, &at(5)), Step::Settle);
        view.target = Ok(spec());
        assert!(matches!(run(&mut view, &plugged(), 5)[..], [Step::Plug { .. }, Step::Report(_)]));
    }

    #[test]
    fn a_detach_is_one_call_and_one_write_and_needs_no_claim() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        view.deleting = true;
        view.target = Err(Failure::of_objects("ClaimNotFound", "no claim".into()));
        assert_eq!(run(&mut view, &Infra::Unplugged, 9), [Step::Unplug, Step::Release]);
        assert_eq!(decide(&view, &at(9)), Step::Done);
    }

    #[test]
    fn the_finalizer_stays_until_the_infra_says_that_the_disk_is_gone() {
        let mut view = new_order();
        run(&mut view, &plugged(), 5);
        view.deleting = true;
        let failed = Infra::Failed(DetachError(Trouble::Failed("busy".into())).into());
        assert!(matches!(run(&mut view, &failed, 9)[..], [Step::Unplug, Step::Report(_)]));
        assert!(view.held && view.status.attached);
        assert_eq!(view.status.error.as_ref().unwrap().reason, "DetachFailed");
        // What was said in an attach that a deletion overtook is not an answer to the detach.
        view.infra = plugged();
        assert_eq!(decide(&view, &at(9)), Step::Unplug);
    }

    #[test]
    fn a_detach_of_what_was_never_plugged_looks_for_what_an_earlier_order_left() {
        let mut view = View { deleting: true, ..new_order() };
        assert_eq!(run(&mut view, &Infra::Unplugged, 9), [Step::Unplug, Step::Look, Step::Release]);
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let view = View { deleting: true, infra: Infra::Namesake(earlier.clone()), ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Confirm(earlier.clone()));
        let view = View { infra: Infra::Over(earlier.clone()), ..view };
        assert_eq!(decide(&view, &at(5)), Step::UnplugEarlier(earlier));
    }

    #[test]
    fn the_disk_of_an_order_that_is_over_is_taken_over() {
        let earlier = AttachmentId::new("a.b.c").unwrap();
        let view = View { infra: Infra::Namesake(earlier.clone()), ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Confirm(earlier.clone()));
        let view = View { infra: Infra::Over(earlier.clone()), ..view };
        assert_eq!(decide(&view, &at(5)), Step::Plug { spec: spec(), replaces: Some(earlier) });
    }

    #[test]
    fn an_order_whose_id_is_over_makes_room_for_a_new_one() {
        let mut view = View { infra: Infra::Ended, ..new_order() };
        assert_eq!(decide(&view, &at(5)), Step::Renew);
        view.deleting = true;
        assert_eq!(decide(&view, &at(5)), Step::Unplug);
    }

    #[test]
    fn what_was_plugged_for_an_order_that_is_gone_is_unplugged() {
        assert_eq!(decide_gone(&Infra::Unasked), Step::Done);
        assert_eq!(decide_gone(&Infra::Unplugged), Step::Done);
        for asked in [Infra::Asked, plugged(), away()] {
            assert_eq!(decide_gone(&asked), Step::Unplug);
        }
    }
}
