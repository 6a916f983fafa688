//! Subject of a trace: the object from which a volume is followed.

use std::fmt;
use std::str::FromStr;

/// Kinds of objects that a trace starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// PersistentVolumeClaim.
    Claim,
    /// Pod.
    Pod,
    /// PersistentVolume.
    Volume,
    /// VolumeAttachment: the guest's of storage.k8s.io, or that of nestor.dev.
    Attachment,
}

impl Kind {
    /// Kind of a resource name as kubectl takes it.
    fn named(text: &str) -> Option<Self> {
        Some(match text {
            "pvc" | "pvcs" | "persistentvolumeclaim" | "persistentvolumeclaims" => Self::Claim,
            "pod" | "pods" | "po" => Self::Pod,
            "pv" | "pvs" | "persistentvolume" | "persistentvolumes" => Self::Volume,
            "va" | "volumeattachment" | "volumeattachments" | "nva" => Self::Attachment,
            _ => return None,
        })
    }

    /// Short resource name.
    fn short(self) -> &'static str {
        match self {
            Self::Claim => "pvc",
            Self::Pod => "pod",
            Self::Volume => "pv",
            Self::Attachment => "va",
        }
    }
}

/// An object to trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind.short(), self.name)
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(kind, name)| Some((Kind::named(kind)?, name)));
        match parsed.filter(|(_, name)| !name.is_empty() && !name.contains('/')) {
            Some((kind, name)) => Ok(Self { kind, name: name.to_owned() }),
            None => Err("expected pvc/NAME, pod/NAME, pv/NAME or va/NAME".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_is_a_kind_and_a_name() {
        let shown = |text: &str| text.parse::<Subject>().map(|subject| subject.to_string());
        assert_eq!(shown("persistentvolumeclaim/a").as_deref(), Ok("pvc/a"));
        assert_eq!(shown("nva/a").as_deref(), Ok("va/a"));
        assert!(["a", "pvc/", "job/a", "pvc/a/b"].iter().all(|bad| shown(bad).is_err()));
    }
}
