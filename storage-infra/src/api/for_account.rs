//! What answers show to a client of one account: nothing of other guests, and nothing of the infrastructure but the pool that
//! has the account's bytes. Pure.

use infra_api::{
    Condition, GUEST_LABEL, Health, Labels, List, Owner, Problem, ProblemCode, Snapshot, Volume,
};

/// An answer without what is of others.
pub(super) trait ForAccount {
    fn for_account(self) -> Self;
}

impl ForAccount for Volume {
    /// A volume that is shared is attached to VMs of other guests, its source may be another guest's, and the message of its
    /// condition is for the platform team.
    fn for_account(self) -> Self {
        let condition = Condition { message: None, ..self.condition };
        let labels = labels_of(&self.owner, self.labels);
        Self { attached_to: Vec::new(), source: None, condition, labels, moving: None, ..self }
    }
}

impl ForAccount for Snapshot {
    fn for_account(self) -> Self {
        let labels = labels_of(&self.owner, self.labels);
        Self { labels, ..self }
    }
}

/// The labels of an object, unless they are of an earlier owner.
fn labels_of(owner: &Owner, labels: Labels) -> Labels {
    let is_of_owner =
        labels.get(GUEST_LABEL).is_none_or(|guest| guest.is_empty() || guest == owner.account.as_str());
    if is_of_owner { labels } else { Labels::new() }
}

impl<T: ForAccount> ForAccount for List<T> {
    fn for_account(self) -> Self {
        Self { items: self.items.into_iter().map(T::for_account).collect(), next: self.next }
    }
}

/// An object, and whether it is new.
impl<T: ForAccount> ForAccount for (T, bool) {
    fn for_account(self) -> Self {
        (self.0.for_account(), self.1)
    }
}

impl ForAccount for () {
    fn for_account(self) {}
}

impl ForAccount for Health {
    /// Without the names of hypervisors, and why they cannot be reached.
    fn for_account(self) -> Self {
        Self { hypervisors: Vec::new(), ..self }
    }
}

/// A problem with the text of its code, unless the text is about the request and the account alone. The server's log has the
/// complete text.
pub(super) fn without_others(problem: Problem) -> Problem {
    let detail = match problem.code {
        ProblemCode::Invalid | ProblemCode::Forbidden | ProblemCode::NotFound | ProblemCode::OverBudget => {
            problem.detail
        }
        code => text(code).to_owned(),
    };
    Problem { detail, nodes: Vec::new(), rejections: Vec::new(), ..problem }
}

/// What a code means to a client of one account, and what to do.
fn text(code: ProblemCode) -> &'static str {
    match code {
        ProblemCode::Exists => "the ID is taken: choose another one",
        ProblemCode::InUse => {
            "a virtual machine may write to the volume, and its pool has no reflinks: detach the volume, and repeat the request"
        }
        ProblemCode::OutOfSpace => {
            "the pool of the volume has too little free space for the snapshot: ask the platform team for space"
        }
        ProblemCode::Unavailable => "the storage infra could not complete the request now: repeat it",
        ProblemCode::Suspended => {
            "the platform team suspended the volume: ask them when it can be used again"
        }
        ProblemCode::NotActive => "no server of the storage infra is active at present: repeat the request",
        ProblemCode::ReadOnly => "the storage is read-only at present: repeat the request later",
        ProblemCode::Internal
        | ProblemCode::Invalid
        | ProblemCode::Forbidden
        | ProblemCode::NotFound
        | ProblemCode::OverBudget
        | ProblemCode::Ended
        | ProblemCode::NodeNotRunning
        | ProblemCode::TooManyDisks
        | ProblemCode::NotReachable => {
            "the request failed: ask the platform team, and name the x-request-id of the response"
        }
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Account, NodeRef, ObjectKind, PoolName, PoolRejection, Rejection};
    use uuid::Uuid;

    use super::*;

    fn problem(code: ProblemCode) -> Problem {
        let node = NodeRef { uuid: Uuid::nil(), name: "vm-of-b".into() };
        let pool = PoolName::new("pool-x").unwrap();
        let rejection = PoolRejection { pool, reason: Rejection::TooSmall, free_bytes: 77 };
        let problem = Problem::new(code, "attached to vm-of-b in pool-x").about(ObjectKind::Volume, "v");
        problem.used_by(vec![node]).rejected_by(vec![rejection])
    }

    #[test]
    fn problems_name_no_nodes_pools_and_free_space() {
        for code in [
            ProblemCode::Exists,
            ProblemCode::InUse,
            ProblemCode::OutOfSpace,
            ProblemCode::Unavailable,
            ProblemCode::ReadOnly,
            ProblemCode::Suspended,
            ProblemCode::Internal,
        ] {
            let shown = without_others(problem(code));
            assert_eq!((shown.code, shown.status, shown.id.as_deref()), (code, code.status(), Some("v")));
            let json = serde_json::to_string(&shown).unwrap();
            assert!(!["vm-of-b", "pool-x", "77"].iter().any(|secret| json.contains(secret)), "{json}");
        }
    }

    #[test]
    fn labels_of_an_earlier_owner_are_not_shown() {
        let owner = Owner { account: Account::new("b").unwrap(), class: String::new() };
        let labels = |guest: &str| Labels::from([(GUEST_LABEL.to_owned(), guest.to_owned())]);
        assert_eq!(labels_of(&owner, labels("b")), labels("b"));
        assert_eq!(labels_of(&owner, labels("a")), Labels::new());
        let unlabelled = Labels::from([("x".to_owned(), "y".to_owned())]);
        assert_eq!(labels_of(&owner, unlabelled.clone()), unlabelled);
    }

    #[test]
    fn a_missing_object_and_one_of_others_have_one_answer() {
        let missing =
            Problem::new(ProblemCode::NotFound, "the volume v does not exist").about(ObjectKind::Volume, "v");
        assert_eq!(without_others(missing.clone()), missing);
    }
}
