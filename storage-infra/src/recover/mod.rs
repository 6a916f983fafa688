//! Making a catalog again from what is on disk, when there is no good one any more: from what is noted with the bytes in
//! the pools, and from what the hypervisors have open.
//!
//! Pools are only read. The catalog that was there is kept under another name.

mod plan;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;

use crate::catalog::{self, Catalog, Result as CatalogResult, Tx, whole};
use crate::engine::file::survey;
use crate::hypervisor::Hypervisor;

pub use plan::{Live, Plan};

/// How long a hypervisor may take to say what it has open.
const PATIENCE: Duration = Duration::from_secs(60);
/// What SQLite keeps beside a catalog.
const BESIDE: [&str; 3] = ["", "-wal", "-shm"];

/// Where to look, and where the catalog is to be.
pub struct Options {
    /// Where the catalog is, or was.
    pub data_dir: PathBuf,
    /// Directories of pools, besides those that are listed there.
    pub pools: Vec<PathBuf>,
    /// Directories of pools to leave out.
    pub skip_pools: Vec<PathBuf>,
    /// The hypervisors, by name.
    pub hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>,
}

/// A recovery that was drawn up. While it is there, no server can run on its data directory.
pub struct Recovery {
    /// The catalog that it would make.
    pub plan: Plan,
    data_dir: PathBuf,
    _lock: File,
}

impl Recovery {
    /// Looks at everything. Changes nothing.
    pub async fn draw(options: Options) -> anyhow::Result<Self> {
        let Options { data_dir, pools, skip_pools, hypervisors } = options;
        let lock = catalog::lock(&data_dir, Duration::ZERO)?;
        let mut obstacles = Vec::new();
        let mut dirs: Vec<PathBuf> = Vec::new();
        let known = whole::known(&data_dir)?;
        let listed = known.pools.into_iter().map(|pool| pool.path);
        for dir in listed.chain(pools) {
            if !skip_pools.contains(&dir) && !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        if dirs.is_empty() {
            obstacles
                .push(format!("{} does not list any pool; name each with --pool DIR", data_dir.display()));
        }
        let mut surveys = Vec::new();
        for dir in &dirs {
            match survey(dir) {
                Ok(found) => surveys.push(found),
                Err(error) => obstacles.push(format!(
                    "{error:#}; mount it, or leave its volumes out for good: --skip-pool {}",
                    dir.display()
                )),
            }
        }
        let mut live = Vec::new();
        for (name, hypervisor) in hypervisors {
            let plugged = match tokio::time::timeout(PATIENCE, hypervisor.plugged()).await {
                Ok(plugged) => plugged.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no answer within {PATIENCE:?}")),
            };
            match plugged {
                Ok(plugged) => {
                    live.extend(plugged.into_iter().map(|mut plugged| {
                        plugged.path = real(plugged.path);
                        Live { hypervisor: name.clone(), plugged }
                    }));
                }
                Err(why) => obstacles.push(format!(
                    "the hypervisor {name} cannot say what it has open: {why}; bring it back, or leave it out where what \
                     is noted in the pools is enough"
                )),
            }
        }
        let mut plan = Plan::new(&surveys, &live, known.nodes, &jiff::Timestamp::now().to_string());
        plan.obstacles.splice(0..0, obstacles);
        Ok(Self { plan, data_dir, _lock: lock })
    }

    /// Makes the catalog, and says what the one that was there is called now.
    pub fn write(self) -> anyhow::Result<Option<PathBuf>> {
        let fresh = self.data_dir.join("catalog.recovered");
        for beside in BESIDE {
            // Left by a recovery that was broken off.
            remove(&with(&fresh, beside))?;
        }
        let known =
            Catalog::build(&fresh, |tx| fill(tx, &self.plan)).context("cannot write the new catalog")?;
        File::open(&fresh)?.sync_all().context("cannot sync the new catalog")?;
        // Before the old one is set aside: where this ends in between, a server must not begin with nothing.
        whole::write_known(&self.data_dir, &known)?;
        let current = self.data_dir.join(whole::FILE);
        let aside = self.set_aside(&current)?;
        fs::rename(&fresh, &current).context("cannot put the new catalog in its place")?;
        File::open(&self.data_dir)?.sync_all().context("cannot sync the data directory")?;
        Ok(aside)
    }

    /// Gives the old catalog another name. What is not checkpointed goes first: without it nothing is served.
    fn set_aside(&self, current: &Path) -> anyhow::Result<Option<PathBuf>> {
        let moment = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
        let name = |number: usize| self.data_dir.join(format!("catalog.{moment}-{number}.old"));
        let free = |path: &PathBuf| BESIDE.iter().all(|beside| !with(path, beside).exists());
        let aside = (0..).map(name).find(free).context("there are too many old catalogs")?;
        let mut moved = false;
        for beside in BESIDE {
            let from = with(current, beside);
            if from.exists() {
                let to = with(&aside, beside);
                fs::rename(&from, &to).with_context(|| format!("cannot rename {}", from.display()))?;
                moved = true;
            }
        }
        Ok(moved.then_some(aside))
    }
}

/// A file without symbolic links: a hypervisor may say what it was told, which is the pool's path as it was registered.
fn real(path: PathBuf) -> PathBuf {
    fs::canonicalize(&path).unwrap_or(path)
}

fn with(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn fill(tx: &Tx<'_>, plan: &Plan) -> CatalogResult<()> {
    tx.raise_revision(plan.revision)?;
    plan.pools.iter().try_for_each(|row| tx.insert_pool(row))?;
    plan.volumes.iter().try_for_each(|row| tx.insert_volume(row))?;
    plan.snapshots.iter().try_for_each(|row| tx.insert_snapshot(row))?;
    plan.nodes.iter().try_for_each(|row| tx.put_node(row))?;
    plan.attachments.iter().try_for_each(|row| tx.insert_attachment(row))
}
