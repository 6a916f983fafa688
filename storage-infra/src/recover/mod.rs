//! Catalog recovery: rebuilds a lost or damaged catalog from the records in the pools and from the disks that
//! hypervisors have attached.
//!
//! Recovery only reads the pools. It renames the previous catalog and keeps it.

mod plan;
pub mod replace;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::catalog::{self, Catalog, Result as CatalogResult, Tx, integrity};
use crate::engine::scan::scan_pool;
use crate::hypervisor::{DiskLocation, Hypervisor};

pub(crate) use plan::identified;
pub use plan::{FoundDisk, Plan};

/// Timeout of a hypervisor's list of attached disks.
const HYPERVISOR_TIMEOUT: Duration = Duration::from_secs(60);

/// Inputs of a recovery.
pub struct Options {
    /// Directory of the catalog.
    pub data_dir: PathBuf,
    /// Pool directories in addition to those listed in the data directory.
    pub pools: Vec<PathBuf>,
    /// Pool directories to leave out.
    pub skip_pools: Vec<PathBuf>,
    /// The hypervisors, by name.
    pub hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
}

/// A prepared recovery. It holds the lock of the data directory, so no server can run with it.
pub struct Recovery {
    /// The catalog to write.
    pub plan: Plan,
    data_dir: PathBuf,
    _lock: File,
}

impl Recovery {
    /// Scans the pools and queries the hypervisors. Changes nothing.
    pub async fn prepare(options: Options) -> anyhow::Result<Self> {
        let Options { data_dir, pools, skip_pools, hypervisors } = options;
        let lock = catalog::lock(&data_dir, Duration::ZERO)?;
        let mut conflicts = Vec::new();
        let mut dirs: Vec<PathBuf> = Vec::new();
        let known = integrity::read_registered(&data_dir)?;
        let listed_dirs = known.pools.into_iter().map(|pool| pool.path);
        for dir in listed_dirs.chain(pools) {
            if !skip_pools.contains(&dir) && !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        if dirs.is_empty() {
            conflicts.push(format!(
                "{} lists no pool; add each pool's directory with --pool DIR",
                data_dir.display()
            ));
        }
        let mut scans = Vec::new();
        for dir in &dirs {
            match scan_pool(dir) {
                Ok(found) => scans.push(found),
                Err(error) => conflicts.push(format!(
                    "{error:#}; mount it, or leave this pool and its volumes out of the catalog with --skip-pool {}",
                    dir.display()
                )),
            }
        }
        let mut attached_disks = Vec::new();
        for (name, hypervisor) in hypervisors {
            let disks = match tokio::time::timeout(HYPERVISOR_TIMEOUT, hypervisor.attached_disks()).await {
                Ok(disks) => disks.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no response within {HYPERVISOR_TIMEOUT:?}")),
            };
            match disks {
                Ok(disks) => {
                                        attached_disks.extend(disks.into_iter().map(|mut disk| {
                                            disk.layers = disk.layers.into_iter().map(canonical).collect();
                                            FoundDisk { hypervisor: name.clone(), disk }
                    }));
                }
                Err(why) => conflicts.push(format!(
                    "cannot list the attached disks of hypervisor {name}: {why}; make it available, or leave it out if the \
                     records in the pools are enough"
                )),
            }
        }
        let mut plan = Plan::new(&scans, &attached_disks, known.nodes, &jiff::Timestamp::now().to_string());
        plan.conflicts.splice(0..0, conflicts);
        Ok(Self { plan, data_dir, _lock: lock })
    }

    /// Writes the catalog. Returns the new name of the previous catalog.
    pub fn write(self) -> anyhow::Result<Option<PathBuf>> {
        let fresh = self.data_dir.join("catalog.recovered");
        // Left behind by an interrupted recovery.
        replace::remove_database(&fresh)?;
        let known =
            Catalog::build(&fresh, |tx| fill(tx, &self.plan)).context("cannot write the new catalog")?;
        File::open(&fresh)?.sync_all().context("cannot sync the new catalog")?;
        // Before the previous catalog is renamed: if recovery is interrupted in between, a server must not start with
        // an empty catalog.
        integrity::write_registered(&self.data_dir, &known)?;
        replace::catalog(&self.data_dir, &fresh)
    }
}

/// The path without symbolic links: a hypervisor may report the path as the pool was registered.
fn canonical(location: DiskLocation) -> DiskLocation {
    let real = location.path().and_then(|path| fs::canonicalize(path).ok());
    real.map_or(location, DiskLocation::File)
}

fn fill(tx: &Tx<'_>, plan: &Plan) -> CatalogResult<()> {
    tx.raise_revision(plan.revision)?;
    plan.pools.iter().try_for_each(|row| tx.insert_pool(row))?;
    plan.volumes.iter().try_for_each(|row| tx.insert_volume(row))?;
    plan.snapshots.iter().try_for_each(|row| tx.insert_snapshot(row))?;
    plan.nodes.iter().try_for_each(|row| tx.put_node(row))?;
    plan.attachments.iter().try_for_each(|row| tx.insert_attachment(row))
}
