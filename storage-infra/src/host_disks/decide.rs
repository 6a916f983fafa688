//! Whether a disk can become a pool. No I/O.

use std::fmt;

use super::{Facts, Signature};

/// Smallest disk that becomes a pool.
pub(crate) const MIN_BYTES: u64 = 1 << 30;

/// Why a disk cannot become a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// It has less than [`MIN_BYTES`].
    TooSmall(u64),
    /// It refuses writes.
    ReadOnly,
    /// It has partitions.
    Partitions(Vec<String>),
    /// Other devices are built on it.
    Holders(Vec<String>),
    /// It is mounted.
    Mounted(Vec<String>),
    /// It is swap space.
    Swap,
    /// Loop devices use it.
    Loops(Vec<String>),
    /// It is an attached volume of a pool.
    Volume(String),
    /// It has a signature.
    Signature(String),
    /// It is unknown whether it has one.
    Unclear(String),
    /// Another program has it open.
    Busy,
    /// It has bytes without a known signature.
    Data,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall(bytes) => write!(f, "too small: {bytes} bytes of at least {MIN_BYTES}"),
            Self::ReadOnly => f.write_str("read-only"),
            Self::Partitions(names) => write!(f, "has partitions: {}", names.join(", ")),
            Self::Holders(names) => write!(f, "used by {}", names.join(", ")),
            Self::Mounted(paths) => write!(f, "mounted at {}", paths.join(", ")),
            Self::Swap => f.write_str("used as swap space"),
            Self::Loops(names) => write!(f, "backing file of {}", names.join(", ")),
            Self::Volume(file) => write!(f, "the volume {file} of a pool"),
            Self::Signature(what) => write!(f, "has a signature: {what}"),
            Self::Unclear(why) => write!(f, "its content is unknown: {why}"),
            Self::Busy => f.write_str("open exclusively by the kernel or another program"),
            Self::Data => f.write_str("has data without a known signature"),
        }
    }
}

/// All reasons why a disk cannot become a pool.
pub(super) fn unusable(facts: &Facts) -> Vec<Unusable> {
    let list = |names: &[String]| (!names.is_empty()).then(|| names.to_vec());
    let when = |is: bool, reason: Unusable| is.then_some(reason);
    let signature = match &facts.signature {
        Signature::None => None,
        Signature::Found(what) => Some(Unusable::Signature(what.clone())),
        Signature::Unclear(why) => Some(Unusable::Unclear(why.clone())),
    };
    let data = facts.has_data && signature.is_none();
    [
        when(facts.bytes < MIN_BYTES, Unusable::TooSmall(facts.bytes)),
        when(facts.read_only, Unusable::ReadOnly),
        list(&facts.partitions).map(Unusable::Partitions),
        list(&facts.holders).map(Unusable::Holders),
        list(&facts.mounts).map(Unusable::Mounted),
        when(facts.is_swap, Unusable::Swap),
        list(&facts.loops).map(Unusable::Loops),
        facts.volume.clone().map(Unusable::Volume),
        signature,
        when(facts.is_busy, Unusable::Busy),
        when(data, Unusable::Data),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blank() -> Facts {
        Facts { bytes: MIN_BYTES, ..Facts::default() }
    }

    #[test]
    fn only_a_blank_disk_is_usable() {
        assert_eq!(unusable(&blank()), []);
        let name = || vec!["x".to_owned()];
        let with = [
            Facts { bytes: MIN_BYTES - 1, ..blank() },
            Facts { read_only: true, ..blank() },
            Facts { partitions: name(), ..blank() },
            Facts { holders: name(), ..blank() },
            Facts { mounts: name(), ..blank() },
            Facts { is_swap: true, ..blank() },
            Facts { loops: name(), ..blank() },
            Facts { volume: Some("x".into()), ..blank() },
            Facts { signature: Signature::Found("xfs".into()), ..blank() },
            Facts { signature: Signature::Unclear("I/O error".into()), ..blank() },
            Facts { is_busy: true, ..blank() },
            Facts { has_data: true, ..blank() },
        ];
        for facts in with {
            let reasons = unusable(&facts);
            assert!(reasons.len() == 1 && !reasons[0].to_string().is_empty(), "{facts:?}: {reasons:?}");
        }
    }

    #[test]
    fn all_reasons_are_told() {
        let facts = Facts {
            mounts: vec!["/data".into()],
            is_busy: true,
            has_data: true,
            signature: Signature::Found("ext4".into()),
            ..blank()
        };
        let texts: Vec<String> = unusable(&facts).iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        assert_eq!(texts[..2], ["mounted at /data", "has a signature: ext4"]);
    }
}
