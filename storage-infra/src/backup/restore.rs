//! Restoration of a catalog from a backup.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use infra_api::{PoolName, VolumeId};

use super::compare::differences;
use crate::catalog;
use crate::catalog::backup::{self, Content, Origin, Summary};
use crate::catalog::integrity::{self, CATALOG_FILE, Registered};
use crate::engine::file::private_dir;
use crate::engine::scan::{PoolScan, scan_pool};
use crate::recover::replace;

/// Inputs of a restoration.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directory of the catalog.
    pub data_dir: PathBuf,
    /// The backup.
    pub from: PathBuf,
    /// Whether a catalog with content may be replaced. It is kept under another name.
    pub replace: bool,
}

/// A verified restoration. It holds the lock of the data directory, so no server can run with it.
pub struct Restore {
    /// Where the backup comes from. `None` if another program made the copy.
    pub origin: Option<Origin>,
    /// What the backup contains.
    pub summary: Summary,
    /// What changed after the backup, as far as the pools can be read.
    pub differences: Vec<String>,
    /// Why pools could not be compared with the backup.
    pub not_compared: Vec<String>,
    data_dir: PathBuf,
    fresh: PathBuf,
    registered: Registered,
    /// Pools that changed after the backup or could not be compared, with the volumes that certainly changed.
    stale: BTreeMap<PoolName, Vec<VolumeId>>,
    _lock: File,
}

impl Restore {
    /// Verifies the backup and compares it with the pools. Changes neither the catalog nor the pools.
    pub fn prepare(options: &Options) -> Result<Self> {
        let Options { data_dir, from, replace } = options;
        ensure!(from.is_file(), "--from: {} is not a file; name a backup of a catalog", from.display());
        private_dir(data_dir).with_context(|| format!("--data-dir: cannot create {}", data_dir.display()))?;
        let lock = catalog::lock(data_dir, Duration::ZERO)?;
        let current = data_dir.join(CATALOG_FILE);
        ensure!(!is_same(from, &current), "--from: {} is the catalog itself; name a backup", from.display());
        if !replace && backup::has_content(&current) {
            bail!(
                "{} is a catalog with content, or cannot be read; nothing was changed. Use --replace to restore the backup \
                 nevertheless: the catalog is kept under another name",
                current.display()
            );
        }
        let fresh = data_dir.join("catalog.restored");
        // Left behind by an interrupted restoration.
        replace::remove_database(&fresh)?;
        let read = backup::restore_to(from, &fresh).and_then(|found| {
            let known = integrity::read_registered(data_dir)?;
            Ok((found, known))
        });
        let ((content, summary, origin), known) = match read {
            Ok(found) => found,
            Err(error) => {
                replace::remove_database(&fresh)?;
                return Err(error.into());
            }
        };
        let mut restore = Self {
            origin,
            summary,
            differences: Vec::new(),
            not_compared: Vec::new(),
            data_dir: data_dir.clone(),
            fresh,
            registered: content.registered.clone(),
            stale: BTreeMap::new(),
            _lock: lock,
        };
        restore.add_later_registered(known);
        restore.compare(&content);
        Ok(restore)
    }

    /// Whether the pools show no change after the backup.
    pub fn is_current(&self) -> bool {
        self.differences.is_empty() && self.not_compared.is_empty()
    }

    /// Writes the catalog. Returns the new name of the previous one.
    ///
    /// In the catalog, pools that may have changed after the backup are marked: until `recover`, the server removes nothing
    /// there. Their records alone would show that only while the catalog's revision is lower than theirs.
    pub fn write(self) -> Result<Option<PathBuf>> {
        backup::mark_stale(&self.fresh, &self.stale).context("cannot mark the changed pools")?;
        File::open(&self.fresh)?.sync_all().context("cannot sync the restored catalog")?;
        integrity::write_registered(&self.data_dir, &self.registered)?;
        replace::catalog(&self.data_dir, &self.fresh)
    }

    /// Keeps pools and nodes that were registered after the backup in the list beside the catalog: `recover` reads it.
    fn add_later_registered(&mut self, known: Registered) {
        for pool in known.pools {
            if !self.registered.pools.iter().any(|one| one.path == pool.path) {
                let (name, path) = (&pool.name, pool.path.display());
                self.differences.push(format!("pool {name} at {path} is not in the backup"));
                self.registered.pools.push(pool);
            }
        }
        for node in known.nodes {
            if !self.registered.nodes.iter().any(|one| one.uuid == node.uuid) {
                let (name, uuid) = (&node.spec.name, node.uuid);
                self.differences.push(format!("node {name} ({uuid}) is not in the backup"));
                self.registered.nodes.push(node);
            }
        }
    }

    fn compare(&mut self, content: &Content) {
        let mut scans: Vec<PoolScan> = Vec::new();
        for pool in &content.pools {
            match scan_pool(Path::new(&pool.spec.path)) {
                Ok(scan) => scans.push(scan),
                Err(error) => {
                    self.not_compared.push(format!("pool {}: {error:#}", pool.name));
                    self.stale.entry(pool.name.clone()).or_default();
                }
            }
        }
        for found in differences(content, &scans) {
            if found.is_later {
                self.stale.entry(found.pool).or_default().extend(found.volume);
            }
            self.differences.push(found.text);
        }
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        // After `write`, there is nothing under this name.
        if let Err(error) = replace::remove_database(&self.fresh) {
            tracing::warn!(error = format!("{error:#}"), "a catalog that was not restored stays behind");
        }
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    fs::canonicalize(one).is_ok_and(|one| fs::canonicalize(other).is_ok_and(|other| one == other))
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::backup::file;
    use crate::catalog::Catalog;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            drop(Catalog::open(&place.data(), Duration::ZERO).unwrap());
            file::write(&place.data(), &place.backup(), Timestamp::now(), false).unwrap();
            place
        }

        fn data(&self) -> PathBuf {
            self.0.path().join("data")
        }

        fn backup(&self) -> PathBuf {
            self.0.path().join("backup")
        }

        fn prepare(&self, from: &Path, replace: bool) -> Result<Restore> {
            Restore::prepare(&Options { data_dir: self.data(), from: from.to_owned(), replace })
        }

        fn refused(&self, from: &Path) -> String {
            let said = format!("{:#}", self.prepare(from, true).err().unwrap());
            let files = fs::read_dir(self.data()).unwrap().map(|entry| entry.unwrap().file_name());
            assert!(files.into_iter().all(|name| !name.to_string_lossy().contains("restored")));
            said
        }
    }

    #[test]
    fn a_corrupt_or_cut_backup_and_another_file_are_refused() {
        let place = Place::new();
        let good = fs::read(place.backup()).unwrap();
        let mut page = good.clone();
        page[4096..8192].fill(0x55);
        for bytes in [page, good[..good.len() / 2].to_vec(), b"text".repeat(999), Vec::new()] {
            let bad = place.0.path().join("bad");
            fs::write(&bad, &bytes).unwrap();
            let said = place.refused(&bad);
            assert!(
                said.contains("is not a usable backup") && said.contains("storage-infra recover"),
                "{said}"
            );
            assert_eq!(fs::read(&bad).unwrap(), bytes);
        }
        assert!(place.refused(&place.data().join("catalog.sqlite")).contains("is the catalog itself"));
        assert!(place.refused(&place.0.path().join("none")).contains("is not a file"));
    }

    #[test]
    fn a_backup_of_a_newer_schema_is_refused() {
        let place = Place::new();
        let connection = rusqlite::Connection::open(place.backup()).unwrap();
        connection.pragma_update(None, "user_version", 1000).unwrap();
        drop(connection);
        let said = place.refused(&place.backup());
        assert!(
            said.contains("schema version 1000") && said.contains("run the version that wrote it"),
            "{said}"
        );
    }

    #[tokio::test]
    async fn a_server_and_a_catalog_with_content_are_respected() {
        let place = Place::new();
        let catalog = Catalog::open(&place.data(), Duration::ZERO).unwrap();
        assert!(place.refused(&place.backup()).contains("another server runs on"));
        let node = uuid::Uuid::new_v4();
        let spec: infra_api::NodeSpec =
            serde_json::from_value(serde_json::json!({"name": "n", "hypervisor": "h"})).unwrap();
        let row = crate::catalog::NodeRow { uuid: node, spec };
        catalog.run(move |tx| tx.put_node(&row)).await.unwrap();
        catalog.save_registered().await.unwrap();
        drop(catalog);
        let said = place.prepare(&place.backup(), false).err().unwrap().to_string();
        assert!(said.contains("--replace"), "{said}");

        let restore = place.prepare(&place.backup(), true).unwrap();
        assert!(!restore.is_current() && restore.differences[0].contains(&node.to_string()));
        let kept = restore.write().unwrap().unwrap();
        assert!(backup::has_content(&kept) && !backup::has_content(&place.data().join(CATALOG_FILE)));
        // `recover` still finds the node.
        assert_eq!(integrity::read_registered(&place.data()).unwrap().nodes[0].uuid, node);
    }

    #[test]
    fn an_empty_catalog_is_replaced_and_a_copy_by_another_program_is_accepted() {
        let place = Place::new();
        let connection = rusqlite::Connection::open(place.backup()).unwrap();
        connection.execute_batch("DROP TABLE backup").unwrap();
        drop(connection);
        let restore = place.prepare(&place.backup(), false).unwrap();
        assert!(restore.origin.is_none() && restore.is_current());
        restore.write().unwrap();
        Catalog::open(&place.data(), Duration::ZERO).unwrap();
    }
}
