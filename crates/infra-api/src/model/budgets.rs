//! Budgets: limits of the space and the number of objects per account, and what the account uses.

use std::collections::BTreeMap;
use std::fmt;

use process_kit::size;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::volumes::Owner;
use crate::account::Account;

/// Limits of an account: the body of `PUT /v1/budgets/{account}`. An absent limit does not apply.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BudgetSpec {
    /// Maximum bytes of all volumes and snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Maximum number of volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<u64>,
    /// Maximum number of snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<u64>,
    /// Maximum number of snapshots of one volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_per_volume: Option<u64>,
    /// Limits per class, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub classes: BTreeMap<String, ClassLimits>,
}

/// Limits of an account for one class. An absent limit does not apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClassLimits {
    /// Maximum bytes of volumes of the class and of their snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Maximum number of volumes of the class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<u64>,
}

/// What an account uses. A volume counts with its size, during an expansion with its new size; a snapshot with the bytes
/// that are reserved for it. Both count from the request until their data is removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Bytes of volumes and snapshots.
    pub bytes: u64,
    /// Number of volumes.
    pub volumes: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// The same per class, by its name; empty for objects without a class.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub classes: BTreeMap<String, ClassUsage>,
}

/// What an account uses of one class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClassUsage {
    /// Bytes of volumes of the class and of their snapshots.
    pub bytes: u64,
    /// Number of volumes of the class.
    pub volumes: u64,
    /// Number of snapshots of volumes of the class.
    pub snapshots: u64,
}

impl Usage {
    /// Adds what is used of a class.
    pub fn add(&mut self, class: String, used: ClassUsage) {
        self.bytes += used.bytes;
        self.volumes += used.volumes;
        self.snapshots += used.snapshots;
        self.classes.insert(class, used);
    }
}

/// The budget of an account, and what it uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Budget {
    /// The account. Empty: objects of no guest.
    pub account: Account,
    /// Its limits; absent if it has no budget.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<BudgetSpec>,
    /// What it uses.
    pub used: Usage,
}

/// A limit of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetLimit {
    /// Bytes of all volumes and snapshots.
    Bytes,
    /// Number of volumes.
    Volumes,
    /// Number of snapshots.
    Snapshots,
    /// Number of snapshots of one volume.
    SnapshotsPerVolume,
    /// Bytes of one class.
    ClassBytes,
    /// Number of volumes of one class.
    ClassVolumes,
    /// A limit that this client version does not know.
    #[serde(other)]
    Other,
}

/// The limit that a request exceeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetExcess {
    /// Whom the request counts for.
    pub owner: Owner,
    /// The limit.
    pub limit: BudgetLimit,
    /// What is used.
    pub used: u64,
    /// What the request adds.
    pub requested: u64,
    /// The limit's value.
    pub allowed: u64,
}

impl BudgetLimit {
    fn unit(self) -> &'static str {
        match self {
            Self::Bytes | Self::ClassBytes => "of volumes and snapshots",
            Self::Volumes | Self::ClassVolumes => "volumes",
            Self::Snapshots => "snapshots",
            Self::SnapshotsPerVolume => "snapshots of one volume",
            Self::Other => "of a resource",
        }
    }

    fn is_of_class(self) -> bool {
        matches!(self, Self::ClassBytes | Self::ClassVolumes)
    }

    fn show(self, number: u64) -> String {
        if matches!(self, Self::Bytes | Self::ClassBytes) { size::exact(number) } else { number.to_string() }
    }
}

impl fmt::Display for BudgetExcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, limit, .. } = self;
        let [allowed, used, requested] =
            [self.allowed, self.used, self.requested].map(|number| limit.show(number));
        let class = if limit.is_of_class() { format!(" of class {}", owner.class) } else { String::new() };
        let (account, unit) = (&owner.account, limit.unit());
        write!(
            f,
            "the storage budget of guest {account} allows {allowed} {unit}{class}: {used} used, {requested} more requested"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_numbers_of_the_limit() {
        let owner = Owner { account: Account::new("g1").unwrap(), class: "gold".into() };
        let of = |limit, used, requested, allowed| {
            BudgetExcess { owner: owner.clone(), limit, used, requested, allowed }.to_string()
        };
        assert_eq!(
            of(BudgetLimit::ClassBytes, 6 << 20, 4097, 1 << 30),
            "the storage budget of guest g1 allows 1Gi of volumes and snapshots of class gold: 6Mi used, 4097 more requested"
        );
        assert_eq!(
            of(BudgetLimit::SnapshotsPerVolume, 2, 1, 2),
            "the storage budget of guest g1 allows 2 snapshots of one volume: 2 used, 1 more requested"
        );
    }
}
