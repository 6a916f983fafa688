//! Anti-affinity of volumes: those of one group are placed in different pools. Parameters of StorageClasses in both tiers, and
//! the annotation with which a guest's class reaches mgmt-csi.

use std::fmt;
use std::str::FromStr;

use crate::names::{MAX_LABEL, PARAMETER_ANTI_AFFINITY, PARAMETER_ANTI_AFFINITY_GROUP};

/// Maximum length of a group in bytes: a namespace, a slash and the name of a claim.
const MAX_GROUP: usize = 63 + 1 + 253;

/// Whether the volumes of a group may share a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strength {
    /// If no pool without a volume of the group has the capacity, they share one.
    Preferred,
    /// Never: a volume without a pool of its own is not created.
    Required,
}

impl Strength {
    fn as_str(self) -> &'static str {
        match self {
            Self::Preferred => "preferred",
            Self::Required => "required",
        }
    }

    fn of(text: &str) -> Option<Self> {
        [Self::Preferred, Self::Required].into_iter().find(|one| one.as_str() == text)
    }
}

/// Volumes of the same group are placed in different pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AntiAffinity {
    /// Whether they may share one.
    pub strength: Strength,
    /// The group, unique within one guest.
    pub group: String,
}

impl fmt::Display for AntiAffinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.strength.as_str(), self.group)
    }
}

impl FromStr for AntiAffinity {
    type Err = String;

    /// Reads the annotation, which a guest may have written.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(strength, group)| Some((Strength::of(strength)?, group)));
        match parts {
            Some((strength, group)) if is_group(group) => Ok(Self { strength, group: group.to_owned() }),
            _ => Err(format!(
                "must be preferred:GROUP or required:GROUP, with 1 to {MAX_GROUP} letters, digits, '-', '_', '.' or '/' as the \
                 group"
            )),
        }
    }
}

/// The parameters of a StorageClass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassParameters {
    strength: Strength,
    group: Option<String>,
}

impl ClassParameters {
    /// Reads both parameters: None if the class requests no anti-affinity.
    pub fn read(strength: Option<&str>, group: Option<&str>) -> Result<Option<Self>, String> {
        let Some(text) = strength else {
            return match group {
                None => Ok(None),
                Some(_) => Err(format!(
                    "parameter {PARAMETER_ANTI_AFFINITY_GROUP} has no effect without {PARAMETER_ANTI_AFFINITY}: add \
                     {PARAMETER_ANTI_AFFINITY}: preferred, or required"
                )),
            };
        };
        let strength = Strength::of(text).ok_or_else(|| {
            format!("parameter {PARAMETER_ANTI_AFFINITY} is {text:?}: use \"preferred\" or \"required\"")
        })?;
        if let Some(group) =
            group.filter(|group| group.len() > MAX_LABEL || group.contains('/') || !is_group(group))
        {
            return Err(format!(
                "parameter {PARAMETER_ANTI_AFFINITY_GROUP} is {group:?}: use 1 to {MAX_LABEL} letters, digits, '-', '_' or '.'"
            ));
        }
        Ok(Some(Self { strength, group: group.map(str::to_owned) }))
    }

    /// The anti-affinity of the volume of a claim. Without a group in the class, the claims of a StatefulSet's template are
    /// one: those with the same name except for the ordinal.
    pub fn of_claim(&self, namespace: &str, claim: &str) -> AntiAffinity {
        let by_name = || format!("{namespace}/{}", without_ordinal(claim));
        AntiAffinity { strength: self.strength, group: self.group.clone().unwrap_or_else(by_name) }
    }

    /// The anti-affinity of a volume whose claim is unknown: None unless the class names the group.
    pub fn of_unknown_claim(&self) -> Option<AntiAffinity> {
        Some(AntiAffinity { strength: self.strength, group: self.group.clone()? })
    }
}

fn is_group(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    (1..=MAX_GROUP).contains(&text.len()) && text.chars().all(is_allowed)
}

/// A claim's name without the ordinal that a StatefulSet appends.
fn without_ordinal(claim: &str) -> &str {
    match claim.rsplit_once('-') {
        Some((stem, ordinal))
            if !stem.is_empty()
                && !ordinal.is_empty()
                && ordinal.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            stem
        }
        _ => claim,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_claim(group: Option<&str>, claim: &str) -> String {
        ClassParameters::read(Some("required"), group).unwrap().unwrap().of_claim("shop", claim).to_string()
    }

    #[test]
    fn the_claims_of_a_statefulset_are_a_group() {
        assert_eq!(of_claim(None, "data-db-0"), "required:shop/data-db");
        assert_eq!(of_claim(None, "data-db-12"), "required:shop/data-db");
        for single in ["data", "data-v2", "-1", "data-"] {
            assert_eq!(of_claim(None, single), format!("required:shop/{single}"));
        }
        assert_eq!(of_claim(Some("db"), "data-db-0"), "required:db");
    }

    #[test]
    fn the_annotation_is_bounded() {
        let longest = of_claim(None, &"c".repeat(244));
        assert_eq!(longest.parse::<AntiAffinity>().unwrap().to_string(), longest);
        let long = format!("preferred:{}", "g".repeat(MAX_GROUP + 1));
        for bad in ["", "db", "preferred", "preferred:", "always:db", "required:a b", "required:ü", &long] {
            assert!(bad.parse::<AntiAffinity>().is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_parameters_are_refused() {
        assert_eq!(ClassParameters::read(None, None), Ok(None));
        for (strength, group, expected) in [
            (None, Some("db"), "no effect without antiAffinity"),
            (Some("Required"), None, "\"Required\""),
            (Some("preferred"), Some(""), "antiAffinityGroup"),
            (Some("preferred"), Some("other/data"), "other/data"),
        ] {
            let refused = ClassParameters::read(strength, group).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
