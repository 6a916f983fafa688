//! Roles of clients. A client's role is an organization (`O`) in the subject of its certificate, as Kubernetes reads groups.
//! A second organization names the account of a role that is for one account.

use std::fmt;

use crate::account::Account;

/// What the organizations of roles begin with.
const PREFIX: &str = "nestor:";
/// What the organizations of accounts begin with. A server that does not know accounts takes them for roles, and refuses
/// certificates with two.
const ACCOUNT_PREFIX: &str = "nestor:account:";

/// What a client may do; `storage-infra` decides for each operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// mgmt-csi: creates, changes, attaches and deletes volumes and snapshots.
    Driver,
    /// An administrator: everything.
    Operator,
    /// nestor-console and monitoring: reads.
    Reader,
    /// A backup of one account: takes snapshots, and reads volumes and snapshots.
    Backup,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Operator, Self::Reader, Self::Backup];

    /// Its name, which is also the name of its certificate's files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Operator => "operator",
            Self::Reader => "reader",
            Self::Backup => "backup",
        }
    }

    /// The organization in the subject of its certificates.
    pub fn organization(self) -> String {
        format!("{PREFIX}{self}")
    }

    /// Whether each of its certificates is for one account.
    pub fn is_of_one_account(self) -> bool {
        match self {
            Self::Driver | Self::Operator | Self::Reader => false,
            Self::Backup => true,
        }
    }

    /// The role with this organization.
    fn of(organization: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.organization() == organization)
    }
}

/// The organization in the subject of certificates for an account.
pub fn account_organization(account: impl fmt::Display) -> String {
    format!("{ACCOUNT_PREFIX}{account}")
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the organizations of a certificate say about the role of its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoleClaim {
    /// One role, for all accounts.
    Role(Role),
    /// One role, for one account.
    OfAccount(Role, Account),
    /// A role that is for one account, without an account.
    WithoutAccount(Role),
    /// No organization is meant as a role.
    None,
    /// Organizations that are not exactly one known role, with an account exactly if the role is for one.
    Invalid(Vec<String>),
}

impl RoleClaim {
    /// Reads the organizations of a certificate's subject. Those of others, without the prefix, are ignored.
    pub fn of<'a>(organizations: impl IntoIterator<Item = &'a str>) -> Self {
        let meant: Vec<&str> = organizations.into_iter().filter(|one| one.starts_with(PREFIX)).collect();
        if meant.is_empty() {
            return Self::None;
        }
        Self::read(&meant).unwrap_or_else(|| Self::Invalid(meant.iter().map(ToString::to_string).collect()))
    }

    fn read(meant: &[&str]) -> Option<Self> {
        let (accounts, roles): (Vec<&str>, Vec<&str>) =
            meant.iter().partition(|one| one.starts_with(ACCOUNT_PREFIX));
        let [role] = roles[..] else { return None };
        let role = Role::of(role)?;
        match (role.is_of_one_account(), &accounts[..]) {
            (false, []) => Some(Self::Role(role)),
            (true, []) => Some(Self::WithoutAccount(role)),
            (true, [account]) => Some(Self::OfAccount(role, named(account)?)),
            _ => None,
        }
    }
}

/// The account that an organization names.
fn named(organization: &str) -> Option<Account> {
    let account = Account::new(organization.strip_prefix(ACCOUNT_PREFIX)?).ok()?;
    Some(account).filter(|account| !account.is_nobody())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_one_known_role_or_none() {
        for role in Role::ALL.into_iter().filter(|role| !role.is_of_one_account()) {
            let organization = role.organization();
            assert_eq!(RoleClaim::of(["Example Inc.", &organization]), RoleClaim::Role(role));
        }
        assert_eq!(RoleClaim::of([]), RoleClaim::None);
        assert_eq!(RoleClaim::of(["driver"]), RoleClaim::None);
        let invalid = |all: &[&str]| RoleClaim::Invalid(all.iter().map(ToString::to_string).collect());
        assert_eq!(RoleClaim::of(["nestor:root"]), invalid(&["nestor:root"]));
        let two = ["nestor:reader", "nestor:operator"];
        assert_eq!(RoleClaim::of(two), invalid(&two));
    }

    #[test]
    fn a_backup_is_of_exactly_one_account_and_no_other_role_is_of_any() {
        let account = Account::new("A_b.c-9").unwrap();
        let of_account = account_organization(&account);
        let claim = RoleClaim::OfAccount(Role::Backup, account);
        assert_eq!(RoleClaim::of([&*of_account, "nestor:backup"]), claim);
        assert_eq!(RoleClaim::of(["nestor:backup", "Example Inc.", &of_account]), claim);
        assert_eq!(RoleClaim::of(["nestor:backup"]), RoleClaim::WithoutAccount(Role::Backup));
        let invalid: [&[&str]; 7] = [
            &["nestor:account:a"],
            &["nestor:backup", "nestor:account:"],
            &["nestor:backup", "nestor:account:a/b"],
            &["nestor:backup", "nestor:account:a", "nestor:account:b"],
            &["nestor:backup", "nestor:reader", "nestor:account:a"],
            &["nestor:reader", "nestor:account:a"],
            &["nestor:operator", "nestor:account:a"],
        ];
        for all in invalid {
            assert!(matches!(RoleClaim::of(all.iter().copied()), RoleClaim::Invalid(_)), "{all:?}");
        }
    }
}
