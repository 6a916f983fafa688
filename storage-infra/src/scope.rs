//! Which volumes and snapshots a client reaches. Pure: [`crate::api`] derives the scope from the client's certificate, and
//! [`crate::service`] applies it in the catalog transaction that reads the object.

use infra_api::{Account, GUEST_LABEL, Labels, Owner, Role, SnapshotSpec, TAKEN_BY_LABEL};

/// The objects that a client reaches. To the client, others do not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All objects.
    All,
    /// The objects of one account, for a client with this role.
    Account(Role, Account),
}

/// Why a client of one account is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutOfScope {
    /// The operation concerns all accounts.
    #[error(
        "the client certificate is for the account {0} only: use one for all accounts, for example of the role operator"
    )]
    AllAccounts(Account),
    /// The request names an account other than this one.
    #[error(
        "the client certificate is for the account {0}, so the snapshot counts for this account: leave the field account empty"
    )]
    OtherAccount(Account),
    /// No client with this role took the snapshot.
    #[error(
        "the client certificate has the role {0}, and the snapshot was not taken by this role: delete it in the program that \
         took it, or with a certificate of the role operator"
    )]
    TakenByOther(Role),
}

/// Whether a client may delete a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deletion {
    /// It may.
    Permitted,
    /// To the client, the snapshot does not exist.
    Missing,
    /// It may not.
    Refused(OutOfScope),
}

impl Scope {
    /// Whether the objects of an owner exist for the client. A snapshot has the owner that it counts for.
    pub fn includes(&self, owner: &Owner) -> bool {
        self.account().is_none_or(|account| *account == owner.account)
    }

    /// The only account whose objects exist for the client.
    pub fn account(&self) -> Option<&Account> {
        match self {
            Self::All => None,
            Self::Account(_, account) => Some(account),
        }
    }

    /// The snapshot that a request is for. It counts for the client's account and shows who took it.
    pub fn snapshot(&self, mut requested: SnapshotSpec) -> Result<SnapshotSpec, OutOfScope> {
        let Self::Account(role, account) = self else { return Ok(requested) };
        if !requested.account.is_nobody() && requested.account != *account {
            return Err(OutOfScope::OtherAccount(account.clone()));
        }
        requested.account = account.clone();
        requested.labels.insert(GUEST_LABEL.to_owned(), account.to_string());
        requested.labels.insert(TAKEN_BY_LABEL.to_owned(), role.to_string());
        Ok(requested)
    }

    /// Decides about the deletion of a snapshot.
    pub fn deletion(&self, owner: &Owner, labels: &Labels) -> Deletion {
        match self {
            Self::All => Deletion::Permitted,
            Self::Account(..) if !self.includes(owner) => Deletion::Missing,
            Self::Account(role, _) if labels.get(TAKEN_BY_LABEL).is_some_and(|by| by == role.name()) => {
                Deletion::Permitted
            }
            Self::Account(role, _) => Deletion::Refused(OutOfScope::TakenByOther(*role)),
        }
    }
}

#[cfg(test)]
mod tests {
    use infra_api::VolumeId;

    use super::*;

    fn account(name: &str) -> Account {
        Account::new(name).unwrap()
    }

    fn owner(name: &str) -> Owner {
        Owner { account: account(name), class: "gold".into() }
    }

    fn backup_of(name: &str) -> Scope {
        Scope::Account(Role::Backup, account(name))
    }

    fn requested(of: &str) -> SnapshotSpec {
        SnapshotSpec { volume: VolumeId::new("v").unwrap(), account: account(of), labels: Labels::new() }
    }

    #[test]
    fn an_account_includes_its_own_objects_only() {
        for owner in [owner("a"), owner("b"), owner("")] {
            assert!(Scope::All.includes(&owner));
            assert_eq!(backup_of("a").includes(&owner), owner.account == account("a"), "{owner:?}");
        }
        // Also not those of similar names.
        for other in ["A", "a.b", "aa"] {
            assert!(!backup_of("a").includes(&owner(other)), "{other}");
        }
    }

    #[test]
    fn a_snapshot_counts_for_the_account_of_the_certificate() {
        let scope = backup_of("a");
        for named in ["", "a"] {
            let mut request = requested(named);
            request.labels.insert(GUEST_LABEL.to_owned(), "b".to_owned());
            let spec = scope.snapshot(request).unwrap();
            assert_eq!(spec.account, account("a"));
            assert_eq!((&*spec.labels[GUEST_LABEL], &*spec.labels[TAKEN_BY_LABEL]), ("a", "backup"));
        }
        assert_eq!(scope.snapshot(requested("b")), Err(OutOfScope::OtherAccount(account("a"))));
        assert_eq!(Scope::All.snapshot(requested("b")), Ok(requested("b")));
    }

    #[test]
    fn an_account_deletes_its_own_snapshots_that_its_role_took() {
        let taken = backup_of("a").snapshot(requested("")).unwrap().labels;
        let (own, other) = (owner("a"), owner("b"));
        assert_eq!(backup_of("a").deletion(&own, &taken), Deletion::Permitted);
        let refused = Deletion::Refused(OutOfScope::TakenByOther(Role::Backup));
        assert_eq!(backup_of("a").deletion(&own, &Labels::new()), refused);
        for labels in [&taken, &Labels::new()] {
            assert_eq!(backup_of("a").deletion(&other, labels), Deletion::Missing);
            assert_eq!(Scope::All.deletion(&other, labels), Deletion::Permitted);
        }
    }
}
