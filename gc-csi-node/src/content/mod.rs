//! What is on a disk, and what may be done with it. The one rule: a disk is formatted only when the storage
//! infra attests that it is blank and nothing on it says otherwise, or when it carries the mark of such a
//! format that was interrupted.

mod attestation;
mod format;
mod marker;
mod probe;
mod remains;

use uuid::Uuid;

pub(crate) use self::attestation::{Attested, Permit, RecordError, UsedAttestations};
pub(crate) use self::format::{FormatError, format};
pub(crate) use self::marker::FormatToken;
use self::marker::Mark;
use self::probe::Signatures;
pub(crate) use self::probe::{ProbeError, examine};
use self::remains::{Found, Remains};
use super::filesystem::Filesystem;

/// What is on a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nothing: no signature, and zeros wherever was looked.
    Empty,
    /// The mark of a format of this very disk that did not end, by who knows this secret.
    InterruptedFormat(FormatToken),
    /// The mark of a format for this disk UUID, made by who did not know the secret of this volume: a copy of a disk
    /// that was being formatted, or written by a pod.
    ForeignMark(Uuid),
    /// One thing that blkid knows: a filesystem, a RAID member, an encrypted disk, swap.
    Known(String),
    /// A partition table of this kind.
    PartitionTable(String),
    /// Signatures of several things.
    Ambivalent,
    /// A filesystem whose beginning is damaged.
    Damaged(Remains),
    /// Data that nothing knows, first seen at this byte.
    Unknown(u64),
}

/// What to do with a disk whose filesystem is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Make the filesystem, marked by this secret meanwhile.
    Format(Filesystem, FormatToken),
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
    /// Its filesystem has lost its beginning.
    #[error(
        "its beginning is damaged, but there is still the {0}; it was not touched. What is on it can be \
         saved: copy the disk, and try `{repair} COPY`", repair = .0.repair()
    )]
    Damaged(Remains),
    /// It has data.
    #[error(
        "it has no filesystem, but it is not empty: there is data at byte {0}; it was not touched. \
         Use it as a block volume, or erase it on purpose (blkdiscard -z) if nobody needs it"
    )]
    Unknown(u64),
    /// It has a mark that proves nothing.
    #[error(
        "it has the mark of a formatting of disk {0} that does not prove itself, and no filesystem; it was not \
         touched. A copy of a disk that was being formatted has it, and a disk whose formatting an earlier version \
         did not end: then nothing is on it, and {ON_PURPOSE}"
    )]
    ForeignMark(Uuid),
    /// Nobody attests that it is blank.
    #[error(
        "it looks empty, but nothing attests that it is blank, which only a volume is that was made from nothing and \
         never written to; it was not touched. If nobody needs what may be on it, {ON_PURPOSE}; where \
         VirtualMachine.status.volumes has no blankAttestation for any new disk, the VM Operator or the storage infra \
         does not attest it, and every new disk needs that"
    )]
    NotAttested,
    /// It was attested blank, and used since.
    #[error(
        "it looks empty, but it was mounted or handed to a pod as a block device before, under this attachment: what was \
         on it was erased, or is where nobody looks; it was not touched. Restore it from a snapshot; if nobody needs it, \
         {ON_PURPOSE}"
    )]
    Erased,
    /// It is empty and must not be written.
    #[error(
        "it is empty and {0}, so that {1} cannot be made on it; it was not touched. \
         Use it writable once, or give a volume that has a filesystem"
    )]
    EmptyReadOnly(&'static str, Filesystem),
}

/// How to go on with a disk that is not formatted by itself.
const ON_PURPOSE: &str = "make the filesystem on purpose (mkfs from a privileged pod that has it as a block volume), or \
                          delete the volume and make a new one";

/// Decides. `wanted` is none where any supported filesystem will do; `read_only` says why nothing may
/// be written, if so.
pub(crate) fn plan(
    content: Content,
    wanted: Option<Filesystem>,
    read_only: Option<&'static str>,
    permit: Permit,
) -> Result<Plan, Refusal> {
    let asked = wanted.unwrap_or(Filesystem::Ext4);
    let make = |token| match read_only {
        None => Ok(Plan::Format(asked, token)),
        Some(why) => Err(Refusal::EmptyReadOnly(why, asked)),
    };
    match content {
        Content::InterruptedFormat(token) => make(token),
        Content::Empty => match (permit, read_only) {
            (Permit::Blank(token), _) => make(token),
            (Permit::Used, _) => Err(Refusal::Erased),
            (Permit::None, Some(why)) => Err(Refusal::EmptyReadOnly(why, asked)),
            (Permit::None, None) => Err(Refusal::NotAttested),
        },
        Content::Known(found) => match found.parse::<Filesystem>() {
            Ok(found) if wanted.is_none_or(|wanted| wanted == found) => Ok(Plan::Use(found)),
            _ => Err(Refusal::Foreign { found, wanted: asked }),
        },
        Content::PartitionTable(kind) => Err(Refusal::Partitioned(kind)),
        Content::Ambivalent => Err(Refusal::Ambivalent),
        Content::Unknown(at) => Err(Refusal::Unknown(at)),
        Content::Damaged(remains) => Err(Refusal::Damaged(remains)),
        Content::ForeignMark(disk) => Err(Refusal::ForeignMark(disk)),
    }
}

/// Puts together what blkid says, what stands where a mark would, and what is not zero elsewhere.
fn classify(signatures: Signatures, mark: Mark, found: Option<Found>) -> Content {
    match (mark, signatures) {
        // Before anything else: what stands beside the mark is what the interrupted tool left.
        (Mark::Own(token), _) => Content::InterruptedFormat(token),
        (_, Signatures::Ambivalent) => Content::Ambivalent,
        (_, Signatures::Known { partition_table: Some(kind), .. }) => Content::PartitionTable(kind),
        (_, Signatures::Known { content: Some(known), .. }) => Content::Known(known),
        (_, Signatures::Known { .. }) => Content::Ambivalent,
        (mark, Signatures::None) => match (found, mark) {
            (Some(Found::Remains(remains)), _) => Content::Damaged(remains),
            (_, Mark::Foreign(disk)) => Content::ForeignMark(disk),
            (Some(Found::Data(at)), _) | (None, Mark::Data(at)) => Content::Unknown(at),
            (None, Mark::Nothing) => Content::Empty,
            (None, Mark::Own(token)) => Content::InterruptedFormat(token),
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
    fn only_an_attested_blank_disk_and_our_own_interrupted_format_are_formatted() {
        let format = Ok(Plan::Format(Filesystem::Xfs, token()));
        let blank = Permit::Blank(token());
        let empty = || classify(Signatures::None, Mark::Nothing, None);
        assert_eq!(plan(empty(), WANTED, None, blank), format);
        assert_eq!(plan(empty(), WANTED, None, Permit::None), Err(Refusal::NotAttested));
        assert_eq!(plan(empty(), WANTED, None, Permit::Used), Err(Refusal::Erased));
        for permit in [Permit::None, Permit::Used, blank] {
            for left in [Signatures::None, Signatures::Ambivalent, known("xfs"), known("ext4")] {
                let content = classify(left, Mark::Own(token()), Some(Found::Data(0)));
                assert_eq!(plan(content, WANTED, None, permit), format);
            }
        }
        let table = Signatures::Known { content: None, partition_table: Some("gpt".to_owned()) };
        let neither = Signatures::Known { content: None, partition_table: None };
        for (signatures, mark, found) in [
            (Signatures::None, Mark::Nothing, Some(Found::Data(512))),
            (Signatures::None, Mark::Data(1 << 40), None),
            (Signatures::None, Mark::Foreign(Uuid::from_u128(2)), None),
            (Signatures::Ambivalent, Mark::Nothing, None),
            (table, Mark::Nothing, None),
            (neither, Mark::Nothing, None),
            (known("ext4"), Mark::Foreign(Uuid::from_u128(2)), None),
            (known("crypto_LUKS"), Mark::Data(0), None),
        ] {
            let content = classify(signatures, mark, found);
            assert!(plan(content.clone(), WANTED, None, blank).is_err(), "{content:?}");
        }
    }

    #[test]
    fn the_filesystem_that_is_there_is_used_when_it_is_wanted_or_none_is_named() {
        let plan = |found: &str, wanted, read_only| {
            plan(Content::Known(found.to_owned()), wanted, read_only, Permit::Blank(token()))
        };
        assert_eq!(plan("btrfs", Some(Filesystem::Btrfs), None), Ok(Plan::Use(Filesystem::Btrfs)));
        assert_eq!(plan("btrfs", None, Some("read-only")), Ok(Plan::Use(Filesystem::Btrfs)));
        let refusal = plan("btrfs", Some(Filesystem::Ext4), None).unwrap_err().to_string();
        assert!(refusal.contains("has btrfs, and ext4 is asked for"), "{refusal}");
        assert!(plan("ntfs", None, None).is_err());
    }

    #[test]
    fn nothing_is_made_on_a_disk_that_must_not_be_written() {
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
