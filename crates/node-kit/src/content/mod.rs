//! Content of a disk, and the decision to format it, mount it or refuse it. The driver formats a disk only if the storage
//! infra attests that it is blank and it reads as blank, or if it carries the marker of such a format that was
//! interrupted.

mod attestation;
mod backup_superblock;
mod foreign;
mod format;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod marker;
mod probe;

use uuid::Uuid;

pub use self::attestation::UsedAttestations;
pub(crate) use self::attestation::{Attestations, Permit, RecordError};
use self::backup_superblock::{BackupSuperblock, NonzeroData};
use self::foreign::Primary;
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
         Request what it contains (fsType), or use another volume"
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
         use it as a block volume, or use another volume"
    )]
    Partitioned(String),
    /// Several signatures.
    #[error(
        "it has the signatures of several filesystems, and not exactly one of them (ext4, xfs, btrfs) has an intact superblock; \
         it was not changed. List them with `blkid -p` at a block volume, and recover the data from a copy of the disk"
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
         Use it as a block volume, or use another volume"
    )]
    Unknown(u64),
    /// Invalid format marker.
    #[error(
        "it has no filesystem, and a format marker for disk {0} that does not match this volume's format token; it was not \
         changed. It may be a copy of a disk that was being formatted, or an earlier version of the driver may have started to \
         format it: in these cases it contains no data; {NEW_VOLUME}"
    )]
    InvalidMarker(Uuid),
    /// Not attested blank.
    #[error(
        "it reads as empty, but it is not attested blank, as only a volume is that was created without a source and never \
         written; it was not changed. To have a filesystem, {NEW_VOLUME}."
    )]
    NotAttested,
    /// Used since it was attested blank.
    #[error(
        "it reads as empty, but under this attachment it was already mounted or published as a block device: its data was \
         erased or is at offsets that the driver does not examine; it was not changed. Restore it from a snapshot, or {NEW_VOLUME}"
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
const NEW_VOLUME: &str = "use a new volume, and keep this one until you know that nothing on it is needed";

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

/// Combines blkid's result, the marker block, the data found elsewhere on the disk, and the intact superblock.
fn classify(
    signatures: Signatures,
    mark: MarkerBlock,
    found: Option<NonzeroData>,
    primary: Primary,
) -> Content {
    match (mark, primary, signatures) {
        // The marker takes precedence: other signatures are leftovers of the interrupted mkfs.
        (MarkerBlock::Valid(token), ..) => Content::InterruptedFormat(token),
        // Another filesystem, of which blkid is sure.
        (_, Primary::One(filesystem), Signatures::Known { content: Some(known), .. })
            if known.parse().is_ok_and(|known: Filesystem| known != filesystem) =>
        {
            Content::Ambivalent
        }
        (_, Primary::One(filesystem), _) => Content::Known(filesystem.name().to_owned()),
        (_, Primary::Several, _) | (_, _, Signatures::Ambivalent) => Content::Ambivalent,
        (_, _, Signatures::Known { partition_table: Some(kind), .. }) => Content::PartitionTable(kind),
        (_, _, Signatures::Known { content: Some(known), .. }) => Content::Known(known),
        (_, _, Signatures::Known { .. }) => Content::Ambivalent,
        (_, Primary::Doubtful(_), Signatures::None) => Content::Ambivalent,
        (mark, Primary::None, Signatures::None) => match (found, mark) {
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
        let empty = || classify(Signatures::None, MarkerBlock::Zeros, None, Primary::None);
        assert_eq!(plan(empty(), WANTED, None, blank), format);
        assert_eq!(plan(empty(), WANTED, None, Permit::None), Err(Refusal::NotAttested));
        assert_eq!(plan(empty(), WANTED, None, Permit::Used), Err(Refusal::Erased));
        for permit in [Permit::None, Permit::Used, blank] {
            for left in [Signatures::None, Signatures::Ambivalent, known("xfs"), known("ext4")] {
                let found = Some(NonzeroData::Data(0));
                let content = classify(left, MarkerBlock::Valid(token()), found, Primary::None);
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
            let content = classify(signatures, mark, found, Primary::None);
            assert!(plan(content.clone(), WANTED, None, blank).is_err(), "{content:?}");
        }
    }

    #[test]
    fn an_intact_filesystem_is_not_doubted_for_signatures_inside_it() {
        let table = || Signatures::Known { content: None, partition_table: Some("dos".to_owned()) };
        let content = |signatures, primary| classify(signatures, MarkerBlock::Zeros, None, primary);
        for foreign in [Signatures::Ambivalent, Signatures::None, table(), known("zfs_member"), known("xfs")]
        {
            let found = content(foreign.clone(), Primary::One(Filesystem::Xfs));
            assert_eq!(found, Content::Known("xfs".to_owned()), "{foreign:?}");
        }
        for (signatures, primary, expected) in [
            (known("ext4"), Primary::One(Filesystem::Xfs), Content::Ambivalent),
            (known("xfs"), Primary::Several, Content::Ambivalent),
            (Signatures::None, Primary::Several, Content::Ambivalent),
            (Signatures::Ambivalent, Primary::Doubtful(Filesystem::Xfs), Content::Ambivalent),
            (Signatures::None, Primary::Doubtful(Filesystem::Xfs), Content::Ambivalent),
            (table(), Primary::Doubtful(Filesystem::Xfs), Content::PartitionTable("dos".to_owned())),
            (known("xfs"), Primary::Doubtful(Filesystem::Xfs), Content::Known("xfs".to_owned())),
        ] {
            assert_eq!(content(signatures.clone(), primary.clone()), expected, "{signatures:?} {primary:?}");
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
