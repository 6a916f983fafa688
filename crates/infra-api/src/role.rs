//! Roles of clients. A client's role is an organization (`O`) in the subject of its certificate, as Kubernetes reads groups.

use std::fmt;

/// What the organizations of roles begin with.
const PREFIX: &str = "nestor:";

/// What a client may do; `storage-infra` decides for each operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// mgmt-csi: creates, changes, attaches and deletes volumes and snapshots.
    Driver,
    /// An administrator: everything.
    Operator,
    /// nestor-console and monitoring: reads.
    Reader,
    /// A backup: takes snapshots, and reads volumes and snapshots.
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
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the organizations of a certificate say about the role of its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RoleClaim {
    /// One role.
    Role(Role),
    /// No organization is meant as a role.
    None,
    /// Organizations that are not exactly one known role.
    Invalid(Vec<String>),
}

impl RoleClaim {
    /// Reads the organizations of a certificate's subject. Those of others, without the prefix, are ignored.
    pub fn of<'a>(organizations: impl IntoIterator<Item = &'a str>) -> Self {
        let meant: Vec<&str> = organizations.into_iter().filter(|one| one.starts_with(PREFIX)).collect();
        let known = |one: &str| Role::ALL.into_iter().find(|role| role.organization() == one);
        match meant[..] {
            [] => Self::None,
            [one] => known(one).map_or_else(|| Self::Invalid(vec![one.to_owned()]), Self::Role),
            _ => Self::Invalid(meant.iter().map(ToString::to_string).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_has_one_known_role_or_none() {
        for role in Role::ALL {
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
}
