//! Looks at a disk: blkid's low-level probing (no cache), and the bytes themselves.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use uuid::Uuid;

use crate::blocking::blocking;
use crate::command::{self, CommandError, Output};
use crate::disk::Disk;
use super::marker::{self, FormatToken, Mark};
use super::remains::{self, Found};
use super::{Content, classify};

const BLKID_LIMIT: Duration = Duration::from_secs(60);

/// How much of each end of a disk must be zero, in bytes: where every filesystem, RAID and partition
/// table that blkid knows has its signature, and more than a stray write would spare. Between them, see [`remains`].
const ENDS: u64 = 1 << 20;

/// What blkid found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signatures {
    /// Nothing.
    None,
    /// One thing.
    Known {
        /// What blkid calls it: `ext4`, `LVM2_member`, `crypto_LUKS`.
        content: Option<String>,
        /// Kind of the partition table.
        partition_table: Option<String>,
    },
    /// Several things that exclude each other.
    Ambivalent,
}

/// Why a disk could not be looked at.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// blkid did not answer.
    #[error(transparent)]
    Blkid(#[from] CommandError),
    /// blkid's answer is not understood.
    #[error("blkid's answer is not understood: exit code {code}, {said:?}")]
    Answer {
        /// Its exit code.
        code: i32,
        /// What it said.
        said: String,
    },
    /// The disk cannot be read.
    #[error("cannot read {}: {source}", device.display())]
    Read {
        /// The device.
        device: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What is on the disk.
pub(crate) async fn examine(disk: &Disk, token: Option<FormatToken>) -> Result<Content, ProbeError> {
    let args = ["-p".as_ref(), "-o".as_ref(), "export".as_ref(), "--".as_ref(), disk.path.as_os_str()];
    let signatures = understand(&command::run("blkid", &args, BLKID_LIMIT).await?)?;
    let fail = |source| ProbeError::Read { device: disk.path.clone(), source };
    let (file, size, uuid) = (disk.file().map_err(fail)?, disk.size, disk.uuid);
    let look = move || {
        let mark = read_mark(&file, size, uuid, token)?;
        // What blkid knows is not going to be formatted.
        let found = if signatures == Signatures::None { read(&file, size)? } else { None };
        Ok(classify(signatures, mark, found))
    };
    blocking(look).await.map_err(fail)
}

/// Understands blkid's exit code and output (blkid(8), "EXIT STATUS").
fn understand(output: &Output) -> Result<Signatures, ProbeError> {
    let value = |key: &str| {
        let line = output.stdout.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.filter(|value| !value.is_empty()).map(str::to_owned)
    };
    match output.code {
        0 => match (value("TYPE"), value("PTTYPE")) {
            // Something was found that has neither type nor partitions, as a lone label.
            (None, None) => Ok(Signatures::Known {
                content: Some("an unknown signature".to_owned()),
                partition_table: None,
            }),
            (content, partition_table) => Ok(Signatures::Known { content, partition_table }),
        },
        // blkid also answers 2 when it cannot read the device, but then it complains.
        2 if output.stderr.is_empty() && output.stdout.trim().is_empty() => Ok(Signatures::None),
        8 => Ok(Signatures::Ambivalent),
        code => Err(ProbeError::Answer { code, said: output.stderr.clone() }),
    }
}

/// What stands where a mark would.
fn read_mark(file: &File, size: u64, disk: Uuid, token: Option<FormatToken>) -> io::Result<Mark> {
    if size < 2 * ENDS {
        let problem = format!("the device has {size} bytes: too few for a filesystem, or it is not ready");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut block = [0; marker::SIZE];
    let at = marker::offset(size);
    file.read_exact_at(&mut block, at)?;
    Ok(marker::read(&block, at, disk, token))
}

/// What is not zero on the disk, as far as that is looked for: both ends, and many places between them. What is left of a
/// filesystem comes before what nothing knows.
fn read(file: &File, size: u64) -> io::Result<Option<Found>> {
    let mut data = None;
    for start in [0, size - ENDS] {
        let mut end = vec![0; ENDS as usize];
        file.read_exact_at(&mut end, start)?;
        data = data.or(end.iter().position(|byte| *byte != 0).map(|place| start + place as u64));
    }
    let between = remains::look(file, size)?;
    Ok(match between {
        Some(Found::Remains(_)) => between,
        _ => data.map(Found::Data).or(between),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: i32, stdout: &str, stderr: &str) -> Result<Signatures, ProbeError> {
        understand(&Output { code, stdout: stdout.to_owned(), stderr: stderr.to_owned() })
    }

    #[test]
    fn blkids_answers_are_understood() {
        assert_eq!(answer(2, "", "").unwrap(), Signatures::None);
        assert_eq!(answer(8, "", "ambivalent result").unwrap(), Signatures::Ambivalent);
        assert_eq!(
            answer(0, "DEVNAME=/dev/sdb\nSEC_TYPE=ext2\nTYPE=ext4\nUSAGE=filesystem\n", "").unwrap(),
            Signatures::Known { content: Some("ext4".to_owned()), partition_table: None }
        );
        assert_eq!(
            answer(0, "DEVNAME=/dev/sdb\nPTUUID=1\nPTTYPE=gpt\n", "").unwrap(),
            Signatures::Known { content: None, partition_table: Some("gpt".to_owned()) }
        );
    }

    #[test]
    fn a_disk_that_blkid_cannot_read_is_not_empty() {
        assert!(answer(2, "", "error: /dev/sdb: Input/output error").is_err());
        assert!(answer(4, "", "usage").is_err());
        assert_ne!(answer(0, "DEVNAME=/dev/sdb\nLABEL=x\n", "").unwrap(), Signatures::None);
    }
}
