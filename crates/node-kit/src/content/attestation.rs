//! Attestations of blank disks, and the record of used ones.
//!
//! The storage infra attests that a disk was blank when it was attached. kubelet may stage a volume several times under
//! the same attachment, so an attestation permits formatting only once: before the first mount of a disk, and before a
//! pod gets it as a block device, the driver records the attestation as used. The record is in the driver's state
//! directory and survives restarts of the driver and the node.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use uuid::Uuid;

use super::marker::FormatToken;
use crate::bind::change;
use crate::blocking::blocking;

/// Directory within the state directory.
const DIRECTORY: &str = "used-attestations";
/// Suffix of a record file that is being written.
const TEMP_SUFFIX: &str = "unfinished";
/// Number of newest records that are always kept; far more than a node can have disks.
const MIN_RECORDS: usize = 1000;

/// Attestations of the storage infra about a disk.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attestations {
    /// ID of the attestation that the disk was blank before it was attached.
    pub(crate) blank: Option<Uuid>,
    /// Format token: the volume's secret.
    pub(crate) token: Option<FormatToken>,
}

/// Permission to format a disk that reads as empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// Attestations blank, and not used since.
    Blank(FormatToken),
    /// Attestations blank, but used since.
    Used,
    /// Not attested blank.
    None,
}

/// Failure to read or write a record.
#[derive(Debug, thiserror::Error)]
#[error(
    "failed to {what} the record of used blank-disk attestations {}: {source}; nothing was mounted or published",
    path.display()
)]
pub(crate) struct RecordError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Record of used attestations: one file per disk, which contains the attestation's ID.
#[derive(Debug, Clone)]
pub struct UsedAttestations {
    dir: PathBuf,
    by_id: PathBuf,
}

impl UsedAttestations {
    /// Opens the record in the state directory, or beside the socket. `by_id` is the directory of disk names.
    pub fn of(socket: &Path, state_dir: Option<&Path>, by_id: &Path) -> anyhow::Result<Self> {
        let dir = state_dir.or_else(|| socket.parent()).unwrap_or(Path::new(""));
        Self::open(dir, by_id).with_context(|| {
            format!(
                "failed to open the state directory {}; choose another one with --state-dir",
                dir.display()
            )
        })
    }

    /// Opens the record in the state directory.
    pub fn open(state_dir: &Path, by_id: &Path) -> io::Result<Self> {
        let dir = state_dir.join(DIRECTORY);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(Self { dir, by_id: by_id.to_owned() })
    }

    /// Returns what the attestations permit for a disk.
    pub(crate) async fn permit(&self, disk: Uuid, attestations: Attestations) -> Result<Permit, RecordError> {
        let (Some(blank), Some(token)) = (attestations.blank, attestations.token) else {
            return Ok(Permit::None);
        };
        let records = self.clone();
        let is_used = blocking(move || records.is_used(disk, blank)).await?;
        Ok(if is_used { Permit::Used } else { Permit::Blank(token) })
    }

    /// Records the disk's attestation as used. The record is synced to disk when this returns.
    pub(crate) async fn mark_used(&self, disk: Uuid, attestations: Attestations) -> Result<(), RecordError> {
        let records = self.clone();
        blocking(move || records.mark_used_blocking(disk, attestations)).await
    }

    /// Blocking variant of [`Self::mark_used`].
    pub(crate) fn mark_used_blocking(
        &self,
        disk: Uuid,
        attestations: Attestations,
    ) -> Result<(), RecordError> {
        let Some(blank) = attestations.blank else { return Ok(()) };
        if self.is_used(disk, blank)? {
            return Ok(());
        }
        change("record", || self.write(disk, blank)).map_err(|source| self.failed("write", disk, source))?;
        self.remove_old();
        Ok(())
    }

    fn path(&self, disk: Uuid) -> PathBuf {
        self.dir.join(disk.to_string())
    }

    fn failed(&self, what: &'static str, disk: Uuid, source: io::Error) -> RecordError {
        RecordError { what, path: self.path(disk), source }
    }

    /// An unreadable record counts as used.
    fn is_used(&self, disk: Uuid, blank: Uuid) -> Result<bool, RecordError> {
        match fs::read_to_string(self.path(disk)) {
            Ok(text) => Ok(Uuid::try_parse(text.trim()).map_or(true, |used| used == blank)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed("read", disk, error)),
        }
    }

    fn write(&self, disk: Uuid, blank: Uuid) -> io::Result<()> {
        let unfinished = self.dir.join(format!("{disk}.{TEMP_SUFFIX}"));
        let mut file = File::create(&unfinished)?;
        writeln!(file, "{blank}")?;
        file.sync_all()?;
        fs::rename(&unfinished, self.path(disk))?;
        File::open(&self.dir)?.sync_all()
    }

    /// Removes the oldest records of disks that are not attached, if there are too many. Their attachments have ended: a new
    /// attachment of the same disk has another attestation.
    fn remove_old(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        let mut records: Vec<(SystemTime, PathBuf)> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
            })
            .collect();
        records.sort_unstable_by(|one, other| other.cmp(one));
        for (_, path) in records.into_iter().skip(MIN_RECORDS).filter(|(_, path)| !self.is_attached(path)) {
            // A record that remains is removed by a later call.
            let _ = fs::remove_file(path);
        }
    }

    /// Whether the disk of a record is attached to this node.
    fn is_attached(&self, record: &Path) -> bool {
        let disk = record.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        crds::names::disk_by_id(disk).iter().any(|name| self.by_id.join(name).symlink_metadata().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attestations(blank: u128) -> Attestations {
        let token = FormatToken::parse("00000000-0000-0000-0000-000000000009");
        Attestations { blank: Some(Uuid::from_u128(blank)), token }
    }

    fn records(root: &Path) -> UsedAttestations {
        UsedAttestations::open(&root.join("state"), root).unwrap()
    }

    #[tokio::test]
    async fn an_attestation_permits_formatting_once_across_restarts() {
        let root = tempfile::tempdir().unwrap();
        let disk = Uuid::from_u128(1);
        let permit = async |blank| records(root.path()).permit(disk, attestations(blank)).await.unwrap();
        assert!(matches!(permit(5).await, Permit::Blank(_)));
        records(root.path()).mark_used(disk, attestations(5)).await.unwrap();
        assert_eq!(permit(5).await, Permit::Used);
        assert!(matches!(permit(6).await, Permit::Blank(_)), "of another attachment");
        assert!(matches!(
            records(root.path()).permit(Uuid::from_u128(2), attestations(5)).await.unwrap(),
            Permit::Blank(_)
        ));
        fs::write(records(root.path()).path(disk), "").unwrap();
        assert_eq!(permit(6).await, Permit::Used, "a record that cannot be read");
    }

    #[tokio::test]
    async fn without_an_attestation_and_its_token_nothing_is_permitted_or_recorded() {
        let root = tempfile::tempdir().unwrap();
        let (records, disk) = (records(root.path()), Uuid::from_u128(1));
        for attestations in [Attestations::default(), Attestations { token: None, ..attestations(5) }] {
            assert_eq!(records.permit(disk, attestations).await.unwrap(), Permit::None);
        }
        records.mark_used(disk, Attestations::default()).await.unwrap();
        assert!(!records.path(disk).exists());
    }

    #[test]
    fn records_of_detached_disks_are_limited() {
        let root = tempfile::tempdir().unwrap();
        let records = records(root.path());
        let there = Uuid::from_u128(1 << 100);
        fs::write(root.path().join(&crds::names::disk_by_id(&there.to_string())[0]), "").unwrap();
        records.write(there, Uuid::nil()).unwrap();
        let old = SystemTime::UNIX_EPOCH;
        File::options().write(true).open(records.path(there)).unwrap().set_modified(old).unwrap();
        for disk in 1..=MIN_RECORDS as u128 + 3 {
            records.write(Uuid::from_u128(disk), Uuid::nil()).unwrap();
        }
        records.remove_old();
        assert_eq!(fs::read_dir(&records.dir).unwrap().count(), MIN_RECORDS + 1);
        assert!(records.path(there).exists());
    }
}
