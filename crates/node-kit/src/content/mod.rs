//! Content of a disk, and the decision to format it, mount it or refuse it. The driver formats a disk only if the storage
//! infra attests that it is blank and it reads as blank, or if it carries the marker of such a format that was
//! interrupted.

mod attestation;
mod backup_superblock;
mod format;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod marker;
mod probe;

use uuid::Uuid;

pub use self::attestation::UsedAttestations;
pub(crate) use self::attestation::{Attestations, Permit, RecordError};
use self::backup_superblock::{BackupSuperblock, NonzeroData};
pub(crate) use self::format::{FormatError, format};
pub(crate) use self::marker::FormatToken;
use self::marker::MarkerBlock;
use self::probe::Signatures;
pub(crate) use self::probe::{ProbeError, examine};
use super::filesystem::Filesystem;

/// Content of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// Empty: no signature, and zeros at all examined offsets.
    Empty,
    /// Valid marker of an interrupted format of this disk.
    InterruptedFormat(FormatToken),
    /// Marker for this disk UUID with another token: the disk is a copy of one that was being formatted, or a pod wrote it.
    InvalidMarker(Uuid),
    /// One signature that blkid recognizes: a filesystem, RAID member, encrypted disk or swap.
    Known(String),
    /// Partition table of this type.
    PartitionTable(String),
    /// Several conflicting signatures.
    Ambivalent,
    /// Filesystem with a damaged primary superblock.
    Damaged(BackupSuperblock),
    /// Unknown data, first found at this offset in bytes.
    Unknown(u64),
}

/// Decision for a disk that is to be mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Create the filesystem, with a marker of this token during mkfs.
    Format(Filesystem, FormatToken),
    /// Mount the existing filesystem.
    Use(Filesystem),
}

/// Reason to refuse a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Another filesystem or content than requested.
    #[error(
        "it contains {found}, but the request is for {requested}; it was not changed. \
         Request what it contains (fsType), or erase it with wipefs if its data is not needed"
    )]
    Foreign {
        /// Existing content.
        found: String,
        /// Requested filesystem.
        requested: Filesystem,
    },
    /// Partition table.
    #[error(
        "it has a {0} partition table; it was not changed. Volumes are whole disks: \
         use it as a block volume, or erase it with wipefs if its data is not needed"
    )]
    Partitioned(String),
    /// Several signatures.
    #[error(
        "it has the signatures of several filesystems; it was not changed. \
         List them with `wipefs --no-act`, and erase the wrong ones"
    )]
    Ambivalent,
    /// Damaged filesystem.
    #[error(
        "its primary superblock is damaged, but its {0} is intact; it was not changed. The data can probably be \
         recovered: copy the disk, and run `{repair} COPY`", repair = .0.repair()
    )]
    Damaged(BackupSuperblock),
    /// Unknown data.
    #[error(
        "it has no filesystem, but it is not empty: there is data at byte {0}; it was not changed. \
         Use it as a block volume, or erase it (blkdiscard -z) if its data is not needed"
    )]
    Unknown(u64),
    /// Invalid format marker.
    #[error(
        "it has no filesystem, and a format marker for disk {0} that does not match this volume's format token; it was not \
         changed. It may be a copy of a disk that was being formatted, or an earlier version of the driver may have started to \
         format it: in these cases it contains no data, and {MANUAL_FORMAT}"
    )]
    InvalidMarker(Uuid),
    /// Not attested blank.
    #[error(
        "it reads as empty, but it is not attested blank, as only a volume is that was created without a source and never \
         written; it was not changed. If its data is not needed, {MANUAL_FORMAT}."
    )]
    NotAttested,
    /// Used since it was attested blank.
    #[error(
        "it reads as empty, but under this attachment it was already mounted or published as a block device: its data was \
         erased or is at offsets that the driver does not examine; it was not changed. Restore it from a snapshot; if its data is \
         not needed, {MANUAL_FORMAT}"
    )]
    Erased,
    /// Empty and read-only.
    #[error(
        "it is empty and {0}, so {1} cannot be created on it; it was not changed. \
         Mount it writable once, or use a volume that has a filesystem"
    )]
    EmptyReadOnly(&'static str, Filesystem),
}

/// Instructions for a disk that the driver does not format.
const MANUAL_FORMAT: &str = "you can create the filesystem manually (mkfs in a privileged pod that uses it as a block \
                          volume), or delete the volume and create a new one";

/// Decides what to do with a disk. `requested` is None if every supported filesystem is accepted; `read_only` is the reason
/// why the disk must not be written, if there is one.
pub(crate) fn plan(
    content: Content,
    requested: Option<Filesystem>,
    read_only: Option<&'static str>,
    permit: Permit,
) -> Result<Plan, Refusal> {
    let filesystem = requested.unwrap_or(Filesystem::Ext4);
    let make = |token| match read_only {
        None => Ok(Plan::Format(filesystem, token)),
        Some(reason) => Err(Refusal::EmptyReadOnly(reason, filesystem)),
    };
    match content {
        Content::InterruptedFormat(token) => make(token),
        Content::Empty => match (permit, read_only) {
            (Permit::Blank(token), _) => make(token),
            (Permit::Used, _) => Err(Refusal::Erased),
            (Permit::None, Some(reason)) => Err(Refusal::EmptyReadOnly(reason, filesystem)),
            (Permit::None, None) => Err(Refusal::NotAttested),
        },
        Content::Known(found) => match found.parse::<Filesystem>() {
            Ok(found) if requested.is_none_or(|requested| requested == found) => Ok(Plan::Use(found)),
            _ => Err(Refusal::Foreign { found, requested: filesystem }),
        },
        Content::PartitionTable(kind) => Err(Refusal::Partitioned(kind)),
        Content::Ambivalent => Err(Refusal::Ambivalent),
        Content::Unknown(at) => Err(Refusal::Unknown(at)),
        Content::Damaged(backup) => Err(Refusal::Damaged(backup)),
        Content::InvalidMarker(disk) => Err(Refusal::InvalidMarker(disk)),
    }
}

/// Combines blkid's result, the marker block, and the data found elsewhere on the disk.
fn classify(signatures: Signatures, mark: MarkerBlock, found: Option<NonzeroData>) -> Content {
    match (mark, signatures) {
        // The marker takes precedence: other signatures are leftovers of the interrupted mkfs.
        (MarkerBlock::Valid(token), _) => Content::InterruptedFormat(token),
        (_, Signatures::Ambivalent) => Content::Ambivalent,
        (_, Signatures::Known { partition_table: Some(kind), .. }) => Content::PartitionTable(kind),
        (_, Signatures::Known { content: Some(known), .. }) => Content::Known(known),
        (_, Signatures::Known { .. }) => Content::Ambivalent,
        (mark, Signatures::None) => match (found, mark) {
            (Some(NonzeroData::BackupSuperblock(backup)), _) => Content::Damaged(backup),
            (_, MarkerBlock::Invalid(disk)) => Content::InvalidMarker(disk),
            (Some(NonzeroData::Data(at)), _) | (None, MarkerBlock::Data(at)) => Content::Unknown(at),
            (None, MarkerBlock::Zeros) => Content::Empty,
            (None, MarkerBlock::Valid(token)) => Content::InterruptedFormat(token),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Option<Filesystem> = Some(Filesystem::Xfs);

    fn known(content: &str) -> Signatures {
        Signatures::Known { content: Some(content.to_owned()), partition_table: None }
    }

    fn token() -> FormatToken {
        FormatToken::parse("00000000-0000-0000-0000-000000000009").unwrap()
    }

    #[test]
    fn only_attested_blank_disks_and_own_interrupted_formats_are_formatted() {
        let format = Ok(Plan::Format(Filesystem::Xfs, token()));
        let blank = Permit::Blank(token());
        let empty = || classify(Signatures::None, MarkerBlock::Zeros, None);
        assert_eq!(plan(empty(), WANTED, None, blank), format);
        assert_eq!(plan(empty(), WANTED, None, Permit::None), Err(Refusal::NotAttested));
        assert_eq!(plan(empty(), WANTED, None, Permit::Used), Err(Refusal::Erased));
        for permit in [Permit::None, Permit::Used, blank] {
            for left in [Signatures::None, Signatures::Ambivalent, known("xfs"), known("ext4")] {
                let content = classify(left, MarkerBlock::Valid(token()), Some(NonzeroData::Data(0)));
                assert_eq!(plan(content, WANTED, None, permit), format);
            }
        }
        let table = Signatures::Known { content: None, partition_table: Some("gpt".to_owned()) };
        let neither = Signatures::Known { content: None, partition_table: None };
        for (signatures, mark, found) in [
            (Signatures::None, MarkerBlock::Zeros, Some(NonzeroData::Data(512))),
            (Signatures::None, MarkerBlock::Data(1 << 40), None),
            (Signatures::None, MarkerBlock::Invalid(Uuid::from_u128(2)), None),
            (Signatures::Ambivalent, MarkerBlock::Zeros, None),
            (table, MarkerBlock::Zeros, None),
            (neither, MarkerBlock::Zeros, None),
            (known("ext4"), MarkerBlock::Invalid(Uuid::from_u128(2)), None),
            (known("crypto_LUKS"), MarkerBlock::Data(0), None),
        ] {
            let content = classify(signatures, mark, found);
            assert!(plan(content.clone(), WANTED, None, blank).is_err(), "{content:?}");
        }
    }

    #[test]
    fn an_existing_filesystem_is_used_if_it_is_requested_or_the_request_names_none() {
        let plan = |found: &str, requested, read_only| {
            plan(Content::Known(found.to_owned()), requested, read_only, Permit::Blank(token()))
        };
        assert_eq!(plan("btrfs", Some(Filesystem::Btrfs), None), Ok(Plan::Use(Filesystem::Btrfs)));
        assert_eq!(plan("btrfs", None, Some("read-only")), Ok(Plan::Use(Filesystem::Btrfs)));
        let refusal = plan("btrfs", Some(Filesystem::Ext4), None).unwrap_err().to_string();
        assert!(refusal.contains("contains btrfs, but the request is for ext4"), "{refusal}");
        assert!(plan("ntfs", None, None).is_err());
    }

    #[test]
    fn a_read_only_disk_is_not_formatted() {
        let refused = Err(Refusal::EmptyReadOnly("read-only", Filesystem::Ext4));
        for (content, permit) in [
            (Content::Empty, Permit::Blank(token())),
            (Content::Empty, Permit::None),
            (Content::InterruptedFormat(token()), Permit::None),
        ] {
            assert_eq!(plan(content, None, Some("read-only"), permit), refused);
        }
    }
}
