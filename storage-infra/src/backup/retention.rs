//! Retention: which scheduled backups are removed once a newer one is verified.
//!
//! Only scheduled backups of the same data directory are ever removed: by their name, and by what is written in them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::file::{Backup, PARTIAL, time_of};
use crate::catalog::backup::{self, Origin};

/// Prefix of the names of a data directory's scheduled backups.
pub(super) fn prefix(origin: &Origin) -> String {
    format!("catalog-{}-", backup::tag(origin))
}

/// A file with the name of a scheduled backup of this data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    path: PathBuf,
    pub(super) time: Timestamp,
}

/// Files with names of scheduled backups of this data directory, the oldest first.
pub(super) fn list(dir: &Path, origin: &Origin) -> io::Result<Vec<Found>> {
    let prefix = prefix(origin);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let time = entry.file_name().to_str().and_then(|name| time_of(&prefix, name));
        let is_file = entry.file_type()?.is_file();
        found.extend(time.filter(|_| is_file).map(|time| Found { path: entry.path(), time }));
    }
    found.sort_by_key(|one| one.time);
    Ok(found)
}

/// Removes what interrupted scheduled backups of this data directory left. None may be running.
pub(super) fn remove_partial(dir: &Path, origin: &Origin) -> io::Result<()> {
    let prefix = prefix(origin);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let complete = name.to_str().and_then(|name| Some(name.split_once(PARTIAL)?.0));
        if complete.and_then(|name| time_of(&prefix, name)).is_some() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes the oldest scheduled backups, so that `keep` remain with the new one. Returns how many were removed.
pub(super) fn apply(dir: &Path, new: &Backup, keep: usize) -> anyhow::Result<usize> {
    let older: Vec<Found> = list(dir, &new.origin)?.into_iter().filter(|one| one.path != new.file).collect();
    let ours: Vec<Found> = older.into_iter().filter(|one| is_ours(&one.path, new)).collect();
    let ours = by_age(ours, |path| backup::revision(path).ok());
    let surplus = (ours.len() + 1).saturating_sub(keep);
    if surplus == 0 {
        return Ok(0);
    }
    if let Some(newer) = ours.iter().find(|path| is_of_later_catalog(path, new)) {
        tracing::warn!(
            backup = %newer.display(),
            "no old backup is removed: this one has changes that the catalog lacks; if an older catalog was restored, \
             rebuild it with `storage-infra recover`, or move the backup to another directory"
        );
        return Ok(0);
    }
    ours.iter().take(surplus).try_for_each(fs::remove_file)?;
    Ok(surplus)
}

/// The oldest first, by the catalog's revision: the times in the names are those of a clock that may have jumped. One that cannot be
/// read is not taken for old.
fn by_age(mut found: Vec<Found>, revision: impl Fn(&Path) -> Option<u64>) -> Vec<PathBuf> {
    found.sort_by_cached_key(|one| (revision(&one.path).unwrap_or(u64::MAX), one.time));
    found.into_iter().map(|one| one.path).collect()
}

fn is_ours(path: &Path, new: &Backup) -> bool {
    let origin = backup::origin(path).ok().flatten();
    origin.is_some_and(|origin| origin.scheduled && origin.is_of_the_same_catalog(&new.origin))
}

/// Whether a backup has a higher revision: then an older catalog, or an empty one, is in use now.
fn is_of_later_catalog(path: &Path, new: &Backup) -> bool {
    backup::revision(path).is_ok_and(|revision| revision > new.summary.revision)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backup::file::{self, name_at};
    use crate::catalog::Catalog;

    struct Place {
        data: tempfile::TempDir,
        out: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Self {
            let data = tempfile::tempdir().unwrap();
            drop(Catalog::open(data.path(), Duration::ZERO).unwrap());
            Self { data, out: tempfile::tempdir().unwrap() }
        }

        fn back_up(&self, second: i64) -> Backup {
            let now = Timestamp::from_second(second).unwrap();
            let origin = file::origin(self.data.path(), now, true).unwrap();
            let target = self.out.path().join(name_at(&prefix(&origin), now));
            file::write(self.data.path(), &target, now, true).unwrap()
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.out.path()).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    #[test]
    fn the_oldest_are_told_by_the_revision_whatever_the_clock_said() {
        let found =
            |path: &str, second| Found { path: path.into(), time: Timestamp::from_second(second).unwrap() };
        // The clock was a day ahead at b.
        let all = vec![found("/c", 30), found("/d", 40), found("/e", 50), found("/b", 90_000)];
        let revision = |path: &Path| match path.to_str() {
            Some("/b") => Some(2),
            Some("/c" | "/d") => Some(3),
            _ => None,
        };
        assert_eq!(by_age(all, revision), ["/b", "/c", "/d", "/e"].map(PathBuf::from));
    }

    #[test]
    fn the_oldest_are_removed_and_no_files_of_others() {
        let place = Place::new();
        let out = place.out.path();
        let made: Vec<Backup> = (1..=4).map(|second| place.back_up(second)).collect();
        // Files of others: a note, one that only has the name of a backup, one made on demand, one of another catalog.
        fs::write(out.join("notes.txt"), "").unwrap();
        let named = made[0].file.with_file_name(name_at(&prefix(&made[0].origin), Timestamp::UNIX_EPOCH));
        fs::write(&named, "").unwrap();
        let other = Place::new();
        let manual = out.join("manual.sqlite");
        file::write(other.data.path(), &manual, Timestamp::now(), false).unwrap();
        let foreign = other.back_up(0);
        let moved = made[0]
            .file
            .with_file_name(name_at(&prefix(&made[0].origin), Timestamp::from_second(-9).unwrap()));
        fs::copy(&foreign.file, &moved).unwrap();

        assert_eq!(apply(out, &made[3], 9).unwrap(), 0);
        assert_eq!(apply(out, &made[3], 2).unwrap(), 2);
        let left = place.names();
        assert_eq!(left.len(), 6, "{left:?}");
        assert!(
            !made[0].file.exists()
                && !made[1].file.exists()
                && made[2].file.exists()
                && made[3].file.exists()
        );
        for kept in [named, manual, moved, out.join("notes.txt")] {
            assert!(kept.exists(), "{}", kept.display());
        }
    }

    #[test]
    fn the_new_backup_stays_even_if_others_have_later_times() {
        let place = Place::new();
        let (future, new) = (place.back_up(9_000_000_000), place.back_up(1));
        assert_eq!(apply(place.out.path(), &new, 1).unwrap(), 1);
        assert!(new.file.exists() && !future.file.exists());
    }

    #[tokio::test]
    async fn an_older_catalog_does_not_displace_the_backups_of_a_later_one() {
        let place = Place::new();
        let catalog = Catalog::open(place.data.path(), Duration::ZERO).unwrap();
        catalog.run(|tx| tx.raise_revision(100)).await.unwrap();
        drop(catalog);
        let good = place.back_up(1);
        fs::remove_file(place.data.path().join("catalog.sqlite")).unwrap();
        drop(Catalog::open(place.data.path(), Duration::ZERO).unwrap());
        assert_eq!(apply(place.out.path(), &place.back_up(2), 1).unwrap(), 0);
        assert!(good.file.exists());
    }

    #[test]
    fn what_an_interrupted_backup_left_is_removed() {
        let place = Place::new();
        let made = place.back_up(1);
        for name in
            [format!("{}.partial", made.file.display()), format!("{}.partial-journal", made.file.display())]
        {
            fs::write(name, "").unwrap();
        }
        fs::write(place.out.path().join("other.partial"), "").unwrap();
        remove_partial(place.out.path(), &made.origin).unwrap();
        assert_eq!(place.names().len(), 2, "{:?}", place.names());
    }
}
