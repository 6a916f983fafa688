//! What is on a disk, and what may be done with it. The one rule: a disk is formatted only when it is
//! proven empty, or carries the mark of our own format that was interrupted.

mod format;
mod marker;
mod probe;

use uuid::Uuid;

pub(crate) use self::format::{FormatError, format};
use self::marker::Mark;
use self::probe::Signatures;
pub(crate) use self::probe::{ProbeError, examine};
use super::filesystem::Filesystem;

/// What is on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nothing: no signature, and zeros wherever was looked.
    Empty,
    /// The mark of a format of this very disk that did not end.
    InterruptedFormat,
    /// The mark of a format of another disk: a copy of a disk that was being formatted.
    CopyOfInterruptedFormat(Uuid),
    /// One thing that blkid knows: a filesystem, a RAID member, an encrypted disk, swap.
    Known(String),
    /// A partition table of this kind.
    PartitionTable(String),
    /// Signatures of several things.
    Ambivalent,
    /// Data that nothing knows, first seen at this byte.
    Unknown(u64),
}

/// What to do with a disk whose filesystem is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Make the filesystem.
    Format(Filesystem),
    /// Use the one that is there.
    Use(Filesystem),
}

/// Why a disk's content is not touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// It has something else than what is wanted.
    #[error(
        "it has {found}, and {wanted} is asked for; it was not touched. \
         Ask for what it has (fsType), or erase it on purpose with wipefs if nobody needs it"
    )]
    Foreign {
        /// What it has.
        found: String,
        /// What is wanted.
        wanted: Filesystem,
    },
    /// It has partitions.
    #[error(
        "it has a {0} partition table; it was not touched. Volumes are whole disks: \
         use it as a block volume, or erase it on purpose with wipefs if nobody needs it"
    )]
    Partitioned(String),
    /// It has several signatures.
    #[error(
        "it has the signatures of several filesystems at once; it was not touched. \
         Look at it with `wipefs --no-act`, and erase the wrong one"
    )]
    Ambivalent,
    /// It has data.
    #[error(
        "it has no filesystem, but it is not empty: there is data at byte {0}; it was not touched. \
         Use it as a block volume, or erase it on purpose (blkdiscard -z) if nobody needs it"
    )]
    Unknown(u64),
    /// It is a copy of a disk that was being formatted.
    #[error(
        "it is a copy of disk {0}, made while that was being formatted; it was not touched. \
         There is no data in it: delete it and make a new one"
    )]
    CopyOfInterruptedFormat(Uuid),
    /// It is empty and must not be written.
    #[error(
        "it is empty and {0}, so that {1} cannot be made on it; it was not touched. \
         Use it writable once, or give a volume that has a filesystem"
    )]
    EmptyReadOnly(&'static str, Filesystem),
}

/// Decides. `wanted` is none where any supported filesystem will do; `read_only` says why nothing may
/// be written, if so.
pub(crate) fn plan(
    content: Content,
    wanted: Option<Filesystem>,
    read_only: Option<&'static str>,
) -> Result<Plan, Refusal> {
    let asked = wanted.unwrap_or(Filesystem::Ext4);
    match content {
        Content::Empty | Content::InterruptedFormat => match read_only {
            None => Ok(Plan::Format(asked)),
            Some(why) => Err(Refusal::EmptyReadOnly(why, asked)),
        },
        Content::Known(found) => match found.parse::<Filesystem>() {
            Ok(found) if wanted.is_none_or(|wanted| wanted == found) => Ok(Plan::Use(found)),
            _ => Err(Refusal::Foreign { found, wanted: asked }),
        },
        Content::PartitionTable(kind) => Err(Refusal::Partitioned(kind)),
        Content::Ambivalent => Err(Refusal::Ambivalent),
        Content::Unknown(at) => Err(Refusal::Unknown(at)),
        Content::CopyOfInterruptedFormat(uuid) => Err(Refusal::CopyOfInterruptedFormat(uuid)),
    }
}

/// Puts together what blkid says, where a mark would stand, and the first byte that is not zero.
fn classify(disk: Uuid, signatures: Signatures, mark: Mark, data_at: Option<u64>) -> Content {
    match (mark, signatures) {
        // Before anything else: what stands beside the mark is what the interrupted tool left.
        (Mark::Of(uuid), _) if uuid == disk => Content::InterruptedFormat,
        (_, Signatures::Ambivalent) => Content::Ambivalent,
        (_, Signatures::Known { partition_table: Some(kind), .. }) => Content::PartitionTable(kind),
        (_, Signatures::Known { content: Some(known), .. }) => Content::Known(known),
        (Mark::Of(uuid), Signatures::None | Signatures::Known { .. }) => {
            Content::CopyOfInterruptedFormat(uuid)
        }
        (Mark::Nothing | Mark::Data, Signatures::None | Signatures::Known { .. }) => match data_at {
            Some(at) => Content::Unknown(at),
            None => Content::Empty,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Uuid = Uuid::from_u128(1);

    fn known(content: &str) -> Signatures {
        Signatures::Known { content: Some(content.to_owned()), partition_table: None }
    }

    #[test]
    fn only_an_empty_disk_and_our_own_interrupted_format_are_formatted() {
        let format = Ok(Plan::Format(Filesystem::Xfs));
        let wanted = Some(Filesystem::Xfs);
        assert_eq!(plan(classify(DISK, Signatures::None, Mark::Nothing, None), wanted, None), format);
        for left in [Signatures::None, Signatures::Ambivalent, known("xfs"), known("ext4")] {
            assert_eq!(plan(classify(DISK, left, Mark::Of(DISK), Some(0)), wanted, None), format);
        }
        let table = Signatures::Known { content: None, partition_table: Some("gpt".to_owned()) };
        for (signatures, mark, data) in [
            (Signatures::None, Mark::Nothing, Some(512)),
            (Signatures::None, Mark::Data, Some(1 << 40)),
            (Signatures::None, Mark::Of(Uuid::from_u128(2)), Some(0)),
            (Signatures::Ambivalent, Mark::Nothing, None),
            (table, Mark::Nothing, None),
            (known("ext4"), Mark::Nothing, None),
            (known("crypto_LUKS"), Mark::Data, None),
        ] {
            let content = classify(DISK, signatures, mark, data);
            assert!(plan(content.clone(), wanted, None).is_err(), "{content:?}");
        }
    }

    #[test]
    fn the_filesystem_that_is_there_is_used_when_it_is_wanted_or_none_is_named() {
        let content = || Content::Known("btrfs".to_owned());
        assert_eq!(plan(content(), Some(Filesystem::Btrfs), None), Ok(Plan::Use(Filesystem::Btrfs)));
        assert_eq!(plan(content(), None, Some("read-only")), Ok(Plan::Use(Filesystem::Btrfs)));
        let refusal = plan(content(), Some(Filesystem::Ext4), None).unwrap_err().to_string();
        assert!(refusal.contains("has btrfs, and ext4 is asked for"), "{refusal}");
        assert!(plan(Content::Known("ntfs".to_owned()), None, None).is_err());
    }

    #[test]
    fn nothing_is_made_on_a_disk_that_must_not_be_written() {
        for content in [Content::Empty, Content::InterruptedFormat] {
            let refusal = plan(content, None, Some("read-only")).unwrap_err();
            assert_eq!(refusal, Refusal::EmptyReadOnly("read-only", Filesystem::Ext4));
        }
    }
}
