//! Looks at a disk: blkid's low-level probing (no cache), and the bytes themselves.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use super::super::blocking::blocking;
use super::super::command::{self, CommandError, Output};
use super::super::disk::Disk;
use super::{Content, classify, marker};

const BLKID_LIMIT: Duration = Duration::from_secs(60);

/// How much of each end of a disk must be zero, in bytes: where every filesystem, RAID and partition
/// table that blkid knows has its signature, and more than a stray write would spare.
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
pub(crate) async fn examine(disk: &Disk) -> Result<Content, ProbeError> {
    let args = ["-p".as_ref(), "-o".as_ref(), "export".as_ref(), "--".as_ref(), disk.path.as_os_str()];
    let signatures = understand(&command::run("blkid", &args, BLKID_LIMIT).await?)?;
    let fail = |source| ProbeError::Read { device: disk.path.clone(), source };
    let (file, size) = (disk.file().map_err(fail)?, disk.size);
    let (mark, data_at) = blocking(move || read(&file, size)).await.map_err(fail)?;
    Ok(classify(disk.uuid, signatures, mark, data_at))
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

/// What stands where a mark would, and the first byte at an end of the disk that is not zero.
fn read(file: &File, size: u64) -> io::Result<(marker::Mark, Option<u64>)> {
    if size < 2 * ENDS {
        let problem = format!("the device has {size} bytes: too few for a filesystem, or it is not ready");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let at = marker::offset(size);
    let mut block = [0; marker::SIZE];
    file.read_exact_at(&mut block, at)?;
    let mark = marker::read(&block);
    let mut data = None;
    for start in [0, size - ENDS] {
        let mut end = vec![0; ENDS as usize];
        file.read_exact_at(&mut end, start)?;
        data = data.or(end.iter().position(|byte| *byte != 0).map(|place| start + place as u64));
    }
    Ok((mark, data.or((mark != marker::Mark::Nothing).then_some(at))))
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
