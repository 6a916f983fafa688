//! Pools of the storage infra: own pools of a scenario, and labels on the lab's pools.

use anyhow::{Context, Result, ensure};
use crds::StoragePool;
use infra_api::{EngineKind, OnFull, Pool, PoolName, PoolSpec};
use kube::api::Api;
use lab::process::{command, run};

use crate::own_pool::OwnPool;
use crate::{Scenario, unique};

impl Scenario {
    /// StoragePools of the management cluster.
    pub fn storage_pools(&self) -> Api<StoragePool> {
        Api::all(self.management.clone())
    }

    /// Registers a pool for the scenario with these labels.
    pub async fn pool(&self, labels: &[(&str, &str)]) -> Result<OwnPool> {
        self.create_pool(labels, true).await
    }

    /// Registers a pool on a filesystem without reflink, where snapshots and clones are full copies.
    pub async fn pool_of_copies(&self, labels: &[(&str, &str)]) -> Result<OwnPool> {
        self.create_pool(labels, false).await
    }

    async fn create_pool(&self, labels: &[(&str, &str)], reflink: bool) -> Result<OwnPool> {
        let name = PoolName::new(unique(&self.name))?;
        // Everything mounted below the run folder is unmounted with the lab.
        let pool = OwnPool::in_folder(&self.lab.dir().join("pools"), name, reflink);
        self.created().pools.push(pool.clone());
        pool.create().await?;
        self.label_own_pool(&pool, labels).await?;
        Ok(pool)
    }

    /// Sets the labels of the scenario's pool.
    pub async fn label_own_pool(&self, pool: &OwnPool, labels: &[(&str, &str)]) -> Result<()> {
        let any = self.infra.list_pools().await?.into_iter().next().context("the infra has no pool")?;
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let path = pool.path.display().to_string();
        let on_full = OnFull::default();
        let spec =
            PoolSpec { engine: EngineKind::File, path, labels, cordoned: false, on_full, hosts: any.hosts };
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
        self.created().pool_labels.push((name.clone(), key.to_owned()));
        let mut spec = spec_of(pool);
        spec.labels.insert(key.to_owned(), value.to_owned());
        self.infra.put_pool(&name, &spec).await?;
        Ok(())
    }

    /// Moves hidden pools of the scenario back, so that their volumes can be deleted.
    pub(crate) fn show_pools(&self) -> Result<()> {
        self.created().pools.iter().try_for_each(OwnPool::show)
    }

    /// A command in the mount namespace of the lab's libvirt.
    fn in_libvirts_mounts(&self, program: &str) -> Result<tokio::process::Command> {
        let pid = self.lab.pid("libvirtd").context("the lab has no libvirt")?.to_string();
        Ok(command("nsenter", ["--mount", "--target", &pid, program]))
    }

    /// Whether the lab has a libvirt, and the pool is mounted for it.
    async fn libvirt_sees(&self, pool: &OwnPool) -> Result<bool> {
        Ok(self.lab.pid("libvirtd").is_some()
            && run(self.in_libvirts_mounts("mountpoint")?.arg("-q").arg(pool.mount())).await.is_ok())
    }

    /// Mounts the scenario's pool in libvirt's mount namespace. If the host's mounts are not shared, libvirt has only
    /// those that existed at its start.
    pub async fn show_to_libvirt(&self, pool: &OwnPool) -> Result<()> {
        if self.libvirt_sees(pool).await? {
            return Ok(());
        }
        let device =
            run(command("findmnt", ["--noheadings", "--output", "SOURCE"]).arg(pool.mount())).await?;
        run(self.in_libvirts_mounts("mount")?.arg(device.trim()).arg(pool.mount())).await.map(drop)
    }

    async fn hide_from_libvirt(&self, pool: &OwnPool) -> Result<()> {
        if self.libvirt_sees(pool).await? {
            run(self.in_libvirts_mounts("umount")?.arg(pool.mount())).await?;
        }
        Ok(())
    }

    /// Removes the scenario's pools and labels.
    pub(crate) async fn remove_pools(&self) -> Result<()> {
        let pools = std::mem::take(&mut self.created().pools);
        for pool in pools {
            self.infra.delete_pool(&pool.name).await?;
            self.hide_from_libvirt(&pool).await?;
            pool.remove().await?;
        }
        let labels = std::mem::take(&mut self.created().pool_labels);
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
    let Pool { engine, path, labels, cordoned, on_full, hosts, .. } = pool;
    PoolSpec { engine, path, labels, cordoned, on_full, hosts }
}
