//! A backup as a file: written under a temporary name, verified, and renamed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::Serialize;

use crate::catalog::backup::{self, Origin, Summary};
use crate::catalog::beside;
use crate::recover::replace::remove_database;

/// Suffix of the temporary name.
pub(super) const PARTIAL: &str = ".partial";
/// Time in the names of files.
const TIME: &str = "%Y%m%dT%H%M%SZ";

/// A verified backup.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Backup {
    /// The file.
    pub file: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Where it comes from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What it contains.
    #[serde(flatten)]
    pub summary: Summary,
}

/// Where a backup of this data directory would come from.
pub(super) fn origin(data_dir: &Path, now: Timestamp, scheduled: bool) -> Result<Origin> {
    let data_dir = fs::canonicalize(data_dir)
        .with_context(|| format!("cannot access the data directory {}", data_dir.display()))?;
    Ok(Origin {
        created_at: now.to_string(),
        program_version: env!("CARGO_PKG_VERSION").to_owned(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        data_dir,
        scheduled,
    })
}

/// Name of a backup with this prefix.
pub fn name_at(prefix: &str, now: Timestamp) -> String {
    format!("{prefix}{}.sqlite", now.strftime(TIME))
}

/// Time in the name of a backup with this prefix. `None` for any name that [`name_at`] does not give: what is read as a backup
/// is removed when it is old.
pub(crate) fn time_of(prefix: &str, name: &str) -> Option<Timestamp> {
    let text = name.strip_prefix(prefix)?.strip_suffix(".sqlite")?;
    let time = TimeZone::UTC.to_timestamp(DateTime::strptime(TIME, text).ok()?).ok()?;
    // strptime also accepts signs, and numbers with fewer digits.
    (name_at(prefix, time) == name).then_some(time)
}

/// Backs up the catalog of a data directory, which a server may be using, to a file that must not exist.
pub fn write(data_dir: &Path, target: &Path, now: Timestamp, scheduled: bool) -> Result<Backup> {
    let origin = origin(data_dir, now, scheduled)?;
    let partial = Partial::create(target)?;
    ensure!(!target.exists(), "{} already exists; choose another file", target.display());
    let failed = || format!("cannot back up the catalog in {} to {}", data_dir.display(), target.display());
    backup::write(data_dir, &partial.0, &origin).with_context(failed)?;
    let summary = backup::verify(&partial.0).context("the backup was not written correctly")?;
    let bytes = partial.publish(target).with_context(failed)?;
    Ok(Backup { file: target.to_owned(), bytes, origin, summary })
}

/// A backup that is being written. Removed unless it is published.
struct Partial(PathBuf);

impl Partial {
    fn create(target: &Path) -> Result<Self> {
        let path = beside(target, PARTIAL);
        let created = File::options().write(true).create_new(true).mode(0o600).open(&path);
        if created.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            anyhow::bail!(
                "{} exists: a backup is being written, or was interrupted; if none is running, remove it",
                path.display()
            );
        }
        created.with_context(|| format!("cannot write the backup {}", path.display()))?;
        Ok(Self(path))
    }

    /// Makes the file durable and gives it its name; returns its size.
    fn publish(&self, target: &Path) -> io::Result<u64> {
        let file = File::open(&self.0)?;
        file.sync_all()?;
        fs::rename(&self.0, target)?;
        File::open(folder(target))?.sync_all()?;
        Ok(file.metadata()?.len())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = remove_database(&self.0) {
            tracing::warn!(error = format!("{error:#}"), "an incomplete backup stays behind");
        }
    }
}

fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;
    use crate::catalog::Catalog;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_backup_of_a_catalog_in_use_is_one_private_file() {
        let (data, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let catalog = Catalog::open(data.path(), Duration::ZERO).unwrap();
        catalog.run(|tx| tx.raise_revision(41)).await.unwrap();
        let target = out.path().join("backup");
        let made = write(data.path(), &target, Timestamp::now(), false).unwrap();
        assert_eq!((made.summary.revision, made.summary.volumes), (41, 0));
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&target).unwrap().len(), made.bytes);
        assert_eq!(names(out.path()), ["backup"]);
        assert_eq!(backup::origin(&target).unwrap().unwrap(), made.origin);
        let json = serde_json::to_value(&made).unwrap();
        assert_eq!((&json["schemaVersion"], &json["scheduled"]), (&18.into(), &false.into()));

        let again = write(data.path(), &target, Timestamp::now(), false).unwrap_err().to_string();
        assert!(again.contains("already exists"), "{again}");
        assert_eq!(names(out.path()), ["backup"]);
    }

    #[test]
    fn a_failed_backup_leaves_nothing_behind() {
        let (data, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = out.path().join("backup");
        let failed =
            |target: &Path| format!("{:#}", write(data.path(), target, Timestamp::now(), false).unwrap_err());
        assert!(failed(&target).contains("there is no catalog at"));
        fs::write(data.path().join("catalog.sqlite"), "not a database, but longer than a header".repeat(99))
            .unwrap();
        assert!(failed(&target).contains("not a database"), "{}", failed(&target));
        assert!(failed(&out.path().join("no/folder")).contains("cannot write the backup"));
        assert_eq!(names(out.path()), [""; 0]);
    }

    #[test]
    fn the_time_is_in_the_name() {
        let now: Timestamp = "2026-11-23T20:15:30Z".parse().unwrap();
        let name = name_at("catalog-", now);
        assert_eq!(
            (name.as_str(), time_of("catalog-", &name)),
            ("catalog-20261123T201530Z.sqlite", Some(now))
        );
        for other in [
            "catalog-x.sqlite",
            "catalog-20261123T201530Z.sqlite.partial",
            "20261123T201530Z.sqlite",
            "catalog--0260101T00401Z.sqlite",
            "catalog-20261123T20153Z.sqlite",
            "catalog-+20261123T201530Z.sqlite",
        ] {
            assert_eq!(time_of("catalog-", other), None, "{other}");
        }
    }
}
