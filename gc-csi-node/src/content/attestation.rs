//! What the storage infra attests of a disk, and which attestations are used up.
//!
//! "Blank" is true when the disk is plugged, and kubelet stages a volume again and again under the same
//! attachment. So an attestation permits one formatting: before the first mount of a disk, and before a
//! pod gets it raw, it is written down here that its attestation is used. The folder is the driver's own,
//! so the record survives a restart of the driver and of the machine.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use uuid::Uuid;

use crate::bind::change;
use crate::blocking::blocking;
use super::marker::FormatToken;

/// The folder within the driver's own.
const FOLDER: &str = "used-attestations";
/// A record that is being written.
const UNFINISHED: &str = "unfinished";
/// So many of the newest records stay whatever becomes of their disks: far more than a machine can have disks.
const KEPT: usize = 1000;

/// What the infra attests of a disk.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attested {
    /// Identifies the proof that it held no data before it was plugged.
    pub(crate) blank: Option<Uuid>,
    /// The volume's secret.
    pub(crate) token: Option<FormatToken>,
}

/// Whether a disk that looks empty may be formatted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// It is attested blank, and was not touched since.
    Blank(FormatToken),
    /// It was attested blank, and used since.
    Used,
    /// Nobody attests that it is blank.
    None,
}

/// Why the records cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {what} whether the attestation of a blank disk was used, in {}: {source}; nothing was mounted or handed out",
    path.display()
)]
pub(crate) struct RecordError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// The attestations that are used up: a file for each disk, with the attestation in it.
#[derive(Debug, Clone)]
pub(crate) struct UsedAttestations {
    folder: PathBuf,
    by_id: PathBuf,
}

impl UsedAttestations {
    /// In the driver's own folder; `by_id` is where the disks of the machine have their names.
    pub(crate) fn open(state_dir: &Path, by_id: &Path) -> io::Result<Self> {
        let folder = state_dir.join(FOLDER);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self { folder, by_id: by_id.to_owned() })
    }

    /// What an attestation permits for a disk.
    pub(crate) async fn permit(&self, disk: Uuid, attested: Attested) -> Result<Permit, RecordError> {
        let (Some(blank), Some(token)) = (attested.blank, attested.token) else { return Ok(Permit::None) };
        let records = self.clone();
        let is_used = blocking(move || records.is_used(disk, blank)).await?;
        Ok(if is_used { Permit::Used } else { Permit::Blank(token) })
    }

    /// Notes that a disk's attestation is used. On the machine's own disk when this returns.
    pub(crate) async fn use_up(&self, disk: Uuid, attested: Attested) -> Result<(), RecordError> {
        let records = self.clone();
        blocking(move || records.use_up_now(disk, attested)).await
    }

    /// The same. Blocks.
    pub(crate) fn use_up_now(&self, disk: Uuid, attested: Attested) -> Result<(), RecordError> {
        let Some(blank) = attested.blank else { return Ok(()) };
        if self.is_used(disk, blank)? {
            return Ok(());
        }
        change("record", || self.write(disk, blank)).map_err(|source| self.failed("record", disk, source))?;
        self.forget_old();
        Ok(())
    }

    fn path(&self, disk: Uuid) -> PathBuf {
        self.folder.join(disk.to_string())
    }

    fn failed(&self, what: &'static str, disk: Uuid, source: io::Error) -> RecordError {
        RecordError { what, path: self.path(disk), source }
    }

    /// A record that is not an attestation could be of any.
    fn is_used(&self, disk: Uuid, blank: Uuid) -> Result<bool, RecordError> {
        match fs::read_to_string(self.path(disk)) {
            Ok(text) => Ok(Uuid::try_parse(text.trim()).map_or(true, |used| used == blank)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed("read", disk, error)),
        }
    }

    fn write(&self, disk: Uuid, blank: Uuid) -> io::Result<()> {
        let unfinished = self.folder.join(format!("{disk}.{UNFINISHED}"));
        let mut file = File::create(&unfinished)?;
        writeln!(file, "{blank}")?;
        file.sync_all()?;
        fs::rename(&unfinished, self.path(disk))?;
        File::open(&self.folder)?.sync_all()
    }

    /// Removes records of disks that the machine does not have, when there are too many. Each is of an attachment that
    /// has ended, since whoever attaches a disk again gives it another attestation.
    fn forget_old(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let mut records: Vec<(SystemTime, PathBuf)> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
            })
            .collect();
        records.sort_unstable_by(|one, other| other.cmp(one));
        for (_, path) in records.into_iter().skip(KEPT).filter(|(_, path)| !self.is_disk_there(path)) {
            // What stays is looked at again next time.
            let _ = fs::remove_file(path);
        }
    }

    /// Whether the machine has the disk of a record.
    fn is_disk_there(&self, record: &Path) -> bool {
        let disk = record.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        crds::names::disk_by_id(disk).iter().any(|name| self.by_id.join(name).symlink_metadata().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attested(blank: u128) -> Attested {
        let token = FormatToken::parse("00000000-0000-0000-0000-000000000009");
        Attested { blank: Some(Uuid::from_u128(blank)), token }
    }

    fn records(root: &Path) -> UsedAttestations {
        UsedAttestations::open(&root.join("state"), root).unwrap()
    }

    #[tokio::test]
    async fn an_attestation_permits_one_formatting_also_after_a_restart() {
        let root = tempfile::tempdir().unwrap();
        let disk = Uuid::from_u128(1);
        let permit = async |blank| records(root.path()).permit(disk, attested(blank)).await.unwrap();
        assert!(matches!(permit(5).await, Permit::Blank(_)));
        records(root.path()).use_up(disk, attested(5)).await.unwrap();
        assert_eq!(permit(5).await, Permit::Used);
        assert!(matches!(permit(6).await, Permit::Blank(_)), "of another attachment");
        assert!(matches!(
            records(root.path()).permit(Uuid::from_u128(2), attested(5)).await.unwrap(),
            Permit::Blank(_)
        ));
        fs::write(records(root.path()).path(disk), "").unwrap();
        assert_eq!(permit(6).await, Permit::Used, "a record that cannot be read");
    }

    #[tokio::test]
    async fn without_an_attestation_or_its_secret_nothing_is_permitted_or_written() {
        let root = tempfile::tempdir().unwrap();
        let (records, disk) = (records(root.path()), Uuid::from_u128(1));
        for attested in [Attested::default(), Attested { token: None, ..attested(5) }] {
            assert_eq!(records.permit(disk, attested).await.unwrap(), Permit::None);
        }
        records.use_up(disk, Attested::default()).await.unwrap();
        assert!(!records.path(disk).exists());
    }

    #[test]
    fn records_of_disks_that_are_gone_do_not_pile_up() {
        let root = tempfile::tempdir().unwrap();
        let records = records(root.path());
        let there = Uuid::from_u128(1 << 100);
        fs::write(root.path().join(&crds::names::disk_by_id(&there.to_string())[0]), "").unwrap();
        records.write(there, Uuid::nil()).unwrap();
        let old = SystemTime::UNIX_EPOCH;
        File::options().write(true).open(records.path(there)).unwrap().set_modified(old).unwrap();
        for disk in 1..=KEPT as u128 + 3 {
            records.write(Uuid::from_u128(disk), Uuid::nil()).unwrap();
        }
        records.forget_old();
        assert_eq!(fs::read_dir(&records.folder).unwrap().count(), KEPT + 1);
        assert!(records.path(there).exists());
    }
}
