//! Pools of the storage infra: own pools of a scenario, and labels on the lab's pools.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use infra_api::{OnFull, Pool, PoolName, PoolSpec};
use lab::process::{command, run};

use crate::{PATIENCE, Scenario, eventually, unique};

/// Size of a pool's filesystem (sparse). Much smaller than the lab's pools, so that no other volume is placed there.
const BYTES: u64 = 1 << 30;

/// A pool of one scenario on its own filesystem, so that only the scenario changes its free space.
#[derive(Debug, Clone)]
pub struct OwnPool {
    /// Its name.
    pub name: PoolName,
    /// Its directory.
    pub path: PathBuf,
    mount: PathBuf,
    image: PathBuf,
    reflink: bool,
}

impl OwnPool {
    fn away(&self) -> PathBuf {
        self.path.with_extension("away")
    }

    /// Moves its directory away.
    pub fn hide(&self) -> Result<()> {
        std::fs::rename(&self.path, self.away())
            .with_context(|| format!("cannot rename {}", self.path.display()))
    }

    /// Moves its directory back, if it is away.
    pub fn show(&self) -> Result<()> {
        match self.away().exists() {
            true => std::fs::rename(self.away(), &self.path)
                .with_context(|| format!("cannot restore {}", self.path.display())),
            false => Ok(()),
        }
    }

    /// Fills its filesystem up to `left` bytes with a file; returns the file.
    pub async fn fill_up_to(&self, left: u64) -> Result<PathBuf> {
        let has = rustix::fs::statvfs(&self.mount)?;
        let taken = (has.f_bavail * has.f_frsize).checked_sub(left).context("the pool has less")?;
        let filler = self.mount.join("filler");
        run(command("fallocate", ["--length", &taken.to_string()]).arg(&filler)).await?;
        Ok(filler)
    }

    async fn make(&self) -> Result<()> {
        std::fs::create_dir_all(&self.mount)?;
        std::fs::File::create(&self.image)?.set_len(BYTES)?;
        let reflink = format!("reflink={}", u8::from(self.reflink));
        run(command("mkfs.xfs", ["-q", "-m", &reflink]).arg(&self.image)).await?;
        run(command("mount", ["-o", "loop"]).arg(&self.image).arg(&self.mount)).await?;
        std::fs::create_dir(&self.path).with_context(|| format!("cannot make {}", self.path.display()))
    }

    async fn unmake(&self) -> Result<()> {
        if std::fs::read_to_string("/proc/self/mounts")?.contains(&format!(" {} ", self.mount.display())) {
            // storage-infra may be reading it.
            eventually(&format!("{} unmounted", self.mount.display()), PATIENCE, || async {
                let unmounted = run(&mut command("umount", [&self.mount])).await;
                Ok(unmounted.map(drop).map_err(|error| format!("{error:#}")))
            })
            .await?;
        }
        std::fs::remove_dir(&self.mount)
            .with_context(|| format!("cannot remove {}", self.mount.display()))?;
        std::fs::remove_file(&self.image).with_context(|| format!("cannot remove {}", self.image.display()))
    }
}

/// A frozen filesystem (fsfreeze): writes block until this is dropped.
pub struct FrozenFilesystem(PathBuf);

impl Drop for FrozenFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

/// Freezes the filesystem of a volume's file, so that a copy in it cannot complete.
pub fn freeze_filesystem_of(file: &Path) -> Result<FrozenFilesystem> {
    let dir = file.parent().context("a volume's file is in no directory")?;
    let status = Command::new("fsfreeze").arg("--freeze").arg(dir).status()?;
    ensure!(status.success(), "cannot freeze the filesystem of {}", dir.display());
    Ok(FrozenFilesystem(dir.to_owned()))
}

impl Scenario {
    /// Registers a pool for the scenario with these labels.
    pub async fn pool(&self, labels: &[(&str, &str)]) -> Result<OwnPool> {
        self.make_pool(labels, true).await
    }

    /// Registers a pool on a filesystem without reflink, where snapshots and clones are full copies.
    pub async fn pool_of_copies(&self, labels: &[(&str, &str)]) -> Result<OwnPool> {
        self.make_pool(labels, false).await
    }

    async fn make_pool(&self, labels: &[(&str, &str)], reflink: bool) -> Result<OwnPool> {
        let name = PoolName::new(unique(&self.name))?;
        // Everything mounted below the run folder is unmounted with the lab.
        let beside = self.lab.dir().join("pools");
        let mount = beside.join(name.as_str());
        let image = beside.join(format!("{name}.xfs"));
        let pool = OwnPool { path: mount.join("pool"), name, mount, image, reflink };
        self.made().pools.push(pool.clone());
        pool.make().await?;
        self.label_own_pool(&pool, labels).await?;
        Ok(pool)
    }

    /// Sets the labels of the scenario's pool.
    pub async fn label_own_pool(&self, pool: &OwnPool, labels: &[(&str, &str)]) -> Result<()> {
        let beside = self.infra.list_pools().await?.into_iter().next().context("the infra has no pool")?;
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let path = pool.path.display().to_string();
        let on_full = OnFull::default();
        let spec = PoolSpec { engine: beside.engine, path, labels, cordoned: false, on_full };
        self.infra.put_pool(&pool.name, &spec).await?;
        Ok(())
    }

    /// Sets what happens to a VM that writes while the scenario's pool is full.
    pub async fn set_on_full(&self, pool: &OwnPool, on_full: OnFull) -> Result<()> {
        let known = self.infra.get_pool(&pool.name).await?.context("the pool is gone")?;
        let spec = PoolSpec { on_full, ..spec_of(known) };
        let set = self.infra.put_pool(&pool.name, &spec).await?;
        ensure!(set.on_full == on_full, "{set:?}");
        Ok(())
    }

    /// Adds a label to one of the lab's pools until the scenario ends.
    pub async fn label_pool(&self, key: &str, value: &str) -> Result<()> {
        let pool = self.infra.list_pools().await?.into_iter().next().context("the infra has no pool")?;
        let name = pool.name.clone();
        self.made().pool_labels.push((name.clone(), key.to_owned()));
        let mut spec = spec_of(pool);
        spec.labels.insert(key.to_owned(), value.to_owned());
        self.infra.put_pool(&name, &spec).await?;
        Ok(())
    }

    /// Moves hidden pools of the scenario back, so that their volumes can be deleted.
    pub(crate) fn show_pools(&self) -> Result<()> {
        self.made().pools.iter().try_for_each(OwnPool::show)
    }

    /// A command in the mount namespace of the lab's libvirt.
    fn beside_libvirt(&self, program: &str) -> Result<tokio::process::Command> {
        let pid = self.lab.pid("libvirtd").context("the lab has no libvirt")?.to_string();
        Ok(command("nsenter", ["--mount", "--target", &pid, program]))
    }

    async fn libvirt_sees(&self, pool: &OwnPool) -> Result<bool> {
        Ok(run(self.beside_libvirt("mountpoint")?.arg("-q").arg(&pool.mount)).await.is_ok())
    }

    /// Mounts the scenario's pool in libvirt's mount namespace. If the host's mounts are not shared, libvirt has only
    /// those that existed at its start.
    pub async fn show_to_libvirt(&self, pool: &OwnPool) -> Result<()> {
        if self.libvirt_sees(pool).await? {
            return Ok(());
        }
        let device = run(command("findmnt", ["--noheadings", "--output", "SOURCE"]).arg(&pool.mount)).await?;
        run(self.beside_libvirt("mount")?.arg(device.trim()).arg(&pool.mount)).await.map(drop)
    }

    async fn hide_from_libvirt(&self, pool: &OwnPool) -> Result<()> {
        if self.libvirt_sees(pool).await? {
            run(self.beside_libvirt("umount")?.arg(&pool.mount)).await?;
        }
        Ok(())
    }

    /// Removes the scenario's pools and labels.
    pub(crate) async fn clean_pools(&self) -> Result<()> {
        let pools = std::mem::take(&mut self.made().pools);
        for pool in pools {
            self.infra.delete_pool(&pool.name).await?;
            self.hide_from_libvirt(&pool).await?;
            pool.unmake().await?;
        }
        let labels = std::mem::take(&mut self.made().pool_labels);
        for (name, key) in labels {
            let pool = self.infra.get_pool(&name).await?.context("a pool went away")?;
            let mut spec = spec_of(pool);
            spec.labels.remove(&key);
            self.infra.put_pool(&name, &spec).await?;
        }
        Ok(())
    }
}

/// The spec of a registered pool.
fn spec_of(pool: Pool) -> PoolSpec {
    let Pool { engine, path, labels, cordoned, on_full, .. } = pool;
    PoolSpec { engine, path, labels, cordoned, on_full }
}
