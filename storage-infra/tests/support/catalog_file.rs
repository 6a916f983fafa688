//! The catalog of a site as a file.

use std::fs;

use super::Site;

/// The catalog of a site.
pub const CATALOG: &str = "data/catalog.sqlite";

/// Removes SQLite's files beside the catalog.
pub fn remove_wal(site: &Site) {
    for beside in ["-wal", "-shm"] {
        let _ = fs::remove_file(site.path(&format!("{CATALOG}{beside}")));
    }
}

/// The catalog as one file, while no server runs: a killed server leaves a WAL beside it.
pub fn backup(site: &Site) -> Vec<u8> {
    site.catalog().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    remove_wal(site);
    fs::read(site.path(CATALOG)).unwrap()
}

/// Restores an earlier catalog, while no server runs.
pub fn restore(site: &Site, catalog: &[u8]) {
    remove_wal(site);
    fs::write(site.path(CATALOG), catalog).unwrap();
}

/// Counts background work that is left.
pub const DUE: &str = "SELECT (SELECT count(*) FROM volumes WHERE record_due OR state <> 'ready') \
     + (SELECT count(*) FROM snapshots WHERE record_due OR state <> 'ready') \
     + (SELECT count(*) FROM moves)";

/// Whether the server has no background work left.
pub fn is_idle(site: &Site) -> bool {
    site.catalog().query_row(DUE, [], |row| row.get::<_, i64>(0)).unwrap() == 0
}

/// Waits until the server has no background work left.
#[cfg(feature = "ceph-tests")]
pub async fn wait_until_idle(site: &Site) {
    super::until("all records are written", async || is_idle(site)).await;
}
