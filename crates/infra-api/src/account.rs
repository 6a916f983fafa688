//! Accounts: whom the space of volumes and snapshots counts for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length in bytes, that of a Kubernetes label value.
const MAX: usize = 63;

/// The string is not a valid account.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "account {0:?} is not valid: it must have at most {MAX} characters of a-z, A-Z, 0-9, '-', '_' and '.', and begin and \
     end with a letter or digit"
)]
pub struct InvalidAccount(String);

/// Account that an object counts for: the cluster ID of a guest. Empty: no guest.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^([a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?)?$")]
pub struct Account(String);

impl Account {
    /// Validates the text.
    pub fn new(value: impl Into<String>) -> Result<Self, InvalidAccount> {
        let value = value.into();
        if is_valid(&value) { Ok(Self(value)) } else { Err(InvalidAccount(value)) }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is no guest's.
    pub fn is_nobody(&self) -> bool {
        self.0.is_empty()
    }
}

fn is_valid(value: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [value.bytes().next(), value.bytes().last()];
    value.len() <= MAX
        && value.bytes().all(is_inner)
        && ends.into_iter().flatten().all(|byte| byte.is_ascii_alphanumeric())
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Account {
    type Err = InvalidAccount;

    fn from_str(value: &str) -> Result<Self, InvalidAccount> {
        Self::new(value)
    }
}

impl TryFrom<String> for Account {
    type Error = InvalidAccount;

    fn try_from(value: String) -> Result<Self, InvalidAccount> {
        Self::new(value)
    }
}

impl From<Account> for String {
    fn from(account: Account) -> Self {
        account.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_label_values() {
        for good in ["", "a", "A_b.c-9", "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab"] {
            assert!(Account::new(good).is_ok(), "{good}");
        }
        let long = "a".repeat(64);
        for bad in ["-a", "a.", "a/b", "a b", "ä", &long] {
            assert!(Account::new(bad).is_err(), "{bad}");
        }
    }
}
