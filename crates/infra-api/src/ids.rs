//! IDs and names chosen by clients. One syntax for all of them, so that each is also a safe file name and URL segment.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length in bytes. A file name may have 255, and the server appends `.raw` or another suffix.
const MAX: usize = 249;

/// The string is not a valid ID or name in this API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind} {value:?} is not valid: it must have 1 to {MAX} characters of a-z, 0-9, '-' and '.', \
     and begin and end with a letter or digit"
)]
pub struct InvalidId {
    kind: &'static str,
    value: String,
}

fn is_valid(value: &str) -> bool {
    let edge = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = value.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) => {
            bytes.len() <= MAX
                && edge(first)
                && edge(last)
                && bytes.iter().all(|&b| edge(b) || b == b'-' || b == b'.')
        }
        _ => false,
    }
}

macro_rules! id {
    ($name:ident, $kind:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(
            Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema,
        )]
        #[serde(try_from = "String", into = "String")]
        #[schema(value_type = String, pattern = "^[a-z0-9]([-a-z0-9.]{0,247}[a-z0-9])?$")]
        pub struct $name(String);

        impl $name {
            /// Validates the text.
            pub fn new(value: impl Into<String>) -> Result<Self, InvalidId> {
                let value = value.into();
                if is_valid(&value) { Ok(Self(value)) } else { Err(InvalidId { kind: $kind, value }) }
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(value: &str) -> Result<Self, InvalidId> {
                Self::new(value)
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                Self::new(value)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl<'a> From<&'a $name> for Cow<'a, str> {
            fn from(id: &'a $name) -> Cow<'a, str> {
                Cow::Borrowed(&id.0)
            }
        }
    };
}

id!(PoolName, "pool name", "Name of a pool.");
id!(VolumeId, "volume id", "ID of a volume, chosen by the client; also the name of its file.");
id!(SnapshotId, "snapshot id", "ID of a snapshot, chosen by the client.");
id!(AttachmentId, "attachment id", "ID of one attachment of one volume to one node, chosen by the client.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_safe_file_names() {
        for good in ["a", "pvc-1", "ns.name", "0", "a.b-c.9"] {
            assert!(VolumeId::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-a", "a-", "a.", ".a", "A", "a/b", "a_b", "a b", "ä", "../x", "a\0"] {
            assert!(VolumeId::new(bad).is_err(), "{bad:?}");
        }
        assert!(VolumeId::new("x".repeat(249)).is_ok());
        assert!(VolumeId::new("x".repeat(250)).is_err());
    }

    #[test]
    fn an_invalid_name_in_json_is_rejected_with_the_syntax() {
        let error = serde_json::from_str::<PoolName>("\"../etc\"").unwrap_err().to_string();
        assert!(error.contains("pool name") && error.contains("../etc"), "{error}");
    }
}
