//! Probe of a disk's content: blkid's low-level probing (without cache), and reads of the disk itself.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use super::backup_superblock::{self, NonzeroData};
use super::foreign::Primary;
use super::marker::{self, FormatToken, MarkerBlock};
use super::{Content, classify};
use crate::blocking::blocking;
use crate::command::{self, CommandError, Output};
use crate::disk::Disk;

const BLKID_LIMIT: Duration = Duration::from_secs(60);

/// Number of bytes at each end of a disk that must be zero. All signatures of filesystems, RAID and partition tables that
/// blkid knows are there, and so is most accidental data. The range between them is sampled, see [`backup_superblock`].
pub(super) const ENDS: u64 = 1 << 20;

/// Result of blkid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Signatures {
    /// No signature.
    None,
    /// One signature.
    Known {
        /// blkid's TYPE: `ext4`, `LVM2_member`, `crypto_LUKS`.
        content: Option<String>,
        /// Partition table type.
        partition_table: Option<String>,
    },
    /// Several conflicting signatures.
    Ambivalent,
}

/// Failure to probe a disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// blkid failed.
    #[error(transparent)]
    Blkid(#[from] CommandError),
    /// blkid's exit code or output is unexpected.
    #[error("unexpected result of blkid: exit code {code}, {message:?}")]
    Answer {
        /// Exit code.
        code: i32,
        /// Standard error.
        message: String,
    },
    /// The disk cannot be read.
    #[error("failed to read {}: {source}", device.display())]
    Read {
        /// The device.
        device: PathBuf,
        /// OS error.
        source: io::Error,
    },
}

/// Determines the content of a disk.
pub(crate) async fn examine(disk: &Disk, token: Option<FormatToken>) -> Result<Content, ProbeError> {
    let fail = |source| ProbeError::Read { device: disk.path.clone(), source };
    examine_file(&disk.path, disk.file().map_err(fail)?, disk.size, disk.uuid, token).await
}

/// [`examine`] for an open disk or image.
pub(super) async fn examine_file(
    path: &Path,
    file: File,
    size: u64,
    uuid: Uuid,
    token: Option<FormatToken>,
) -> Result<Content, ProbeError> {
    let fail = |source| ProbeError::Read { device: path.to_owned(), source };
    let signatures = signatures(path, 0).await?;
    let look = move || {
        let mark = read_marker(&file, size, uuid, token)?;
        let (primary, partitions) = Primary::read(&file, size)?;
        // A disk with a filesystem or a signature is never formatted, so its data need not be read.
        let is_blank = signatures == Signatures::None && primary == Primary::None;
        let found = if is_blank { read(&file, size)? } else { None };
        Ok((signatures, mark, found, primary, partitions))
    };
    let (signatures, mark, found, mut primary, partitions) = blocking(look).await.map_err(fail)?;
    if let (Primary::One(kind), Signatures::Known { partition_table: Some(_), .. }) = (&primary, &signatures)
        && has_content(path, &partitions).await?
    {
        primary = Primary::Doubtful(*kind);
    }
    Ok(classify(signatures, mark, found, primary))
}

/// Whether blkid recognizes something at one of these offsets.
async fn has_content(path: &Path, offsets: &[u64]) -> Result<bool, ProbeError> {
    for offset in offsets {
        if signatures(path, *offset).await? != Signatures::None {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Asks blkid for the signatures from this offset.
async fn signatures(path: &Path, offset: u64) -> Result<Signatures, ProbeError> {
    let offset = offset.to_string();
    let options = ["-p", "-o", "export", "-O", &offset, "--"].map(OsStr::new);
    let args: Vec<&OsStr> = options.into_iter().chain([path.as_os_str()]).collect();
    understand(&command::run("blkid", &args, BLKID_LIMIT).await?)
}

/// Parses blkid's exit code and output (blkid(8), "EXIT STATUS").
pub(super) fn understand(output: &Output) -> Result<Signatures, ProbeError> {
    let value = |key: &str| {
        let line = output.stdout.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        line.filter(|value| !value.is_empty()).map(str::to_owned)
    };
    match output.code {
        0 => match (value("TYPE"), value("PTTYPE")) {
            // blkid found something without TYPE and PTTYPE, such as only a label.
            (None, None) => Ok(Signatures::Known {
                content: Some("an unknown signature".to_owned()),
                partition_table: None,
            }),
            (content, partition_table) => Ok(Signatures::Known { content, partition_table }),
        },
        // blkid also exits with 2 if it cannot read the device, but then it writes to stderr.
        2 if output.stderr.is_empty() && output.stdout.trim().is_empty() => Ok(Signatures::None),
        8 => Ok(Signatures::Ambivalent),
        code => Err(ProbeError::Answer { code, message: output.stderr.clone() }),
    }
}

/// Reads the marker block.
fn read_marker(file: &File, size: u64, disk: Uuid, token: Option<FormatToken>) -> io::Result<MarkerBlock> {
    if size < 2 * ENDS {
        let problem = format!("the device has {size} bytes: it is too small for a filesystem, or not ready");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let mut block = [0; marker::SIZE];
    let at = marker::offset(size);
    file.read_exact_at(&mut block, at)?;
    Ok(marker::read(&block, at, disk, token))
}

/// Searches for nonzero data: at both ends, and at samples between them. A backup superblock takes precedence over unknown
/// data.
fn read(file: &File, size: u64) -> io::Result<Option<NonzeroData>> {
    let mut data = None;
    for start in [0, size - ENDS] {
        let mut end = vec![0; ENDS as usize];
        file.read_exact_at(&mut end, start)?;
        data = data.or(end.iter().position(|byte| *byte != 0).map(|place| start + place as u64));
    }
    let between = backup_superblock::search(file, size)?;
    Ok(match between {
        Some(NonzeroData::BackupSuperblock(_)) => between,
        _ => data.map(NonzeroData::Data).or(between),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: i32, stdout: &str, stderr: &str) -> Result<Signatures, ProbeError> {
        understand(&Output { code, stdout: stdout.to_owned(), stderr: stderr.to_owned() })
    }

    #[test]
    fn blkids_results_are_parsed() {
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
