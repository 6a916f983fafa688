//! Faults of pools, each in a pool of its own.

use anyhow::{Context, Result};
use infra_api::{VolumeId, VolumeSpec};
use serde_json::json;
use tests::own_pool::OwnPool;
use tests::{MIB, PATIENCE, eventually};

use super::faults::Watch;
use crate::alerts::site::Site;

/// A volume of this size that can only be in a pool.
fn only_in(pool: &OwnPool, bytes: u64) -> Result<(VolumeId, VolumeSpec)> {
    let spec = json!({"capacityBytes": bytes, "placement": {"pool": pool.name}});
    Ok((VolumeId::new(format!("pvc-{}", uuid::Uuid::new_v4()))?, serde_json::from_value(spec)?))
}

/// The folder of a pool with a volume of the guest disappears.
pub(super) async fn disappears(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let pool = site.s.pool(&[]).await?;
    let (_, class) = site.s.classes(&[("pool", pool.name.as_str())]).await?;
    site.s.claim("disappears", &class, "4Mi").await?;
    site.s.bound("disappears").await?;
    pool.hide()?;
    let fired = alerts.fire().await;
    pool.show()?;
    fired
}

/// Something else than volumes fills the filesystem of a pool.
pub(super) async fn fills_up(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let pool = site.s.pool(&[]).await?;
    // The first value, from which the rate is computed.
    let value = format!("nestor_storage_infra_pool_used_bytes{{pool=\"{}\"}}", pool.name);
    site.prometheus.has(&value).await?;
    let capacity = site.s.infra.get_pool(&pool.name).await?.context("the pool is gone")?.capacity_bytes;
    let filler = pool.fill_up_to(capacity / 4).await?;
    alerts.these_fire(|(name, _)| *name == "NestorPoolFillsSoon").await?;
    // The space of a removed file is not free at once.
    let first = filler.with_extension("first");
    std::fs::rename(filler, &first)?;
    let filler = pool.fill_up_to(64 << 10).await?;
    alerts.fire().await?;
    std::fs::remove_file(first)?;
    Ok(std::fs::remove_file(filler)?)
}

/// A volume reserves all of a pool.
pub(super) async fn is_reserved(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let infra = &site.s.infra;
    let pool = site.s.pool(&[]).await?;
    let free = infra.get_pool(&pool.name).await?.context("the pool is gone")?.free_bytes;
    let (volume, spec) = only_in(&pool, free - MIB as u64)?;
    infra.put_volume(&volume, &spec, PATIENCE).await?;
    alerts.fire().await?;
    eventually("the volume is deleted, with all hypervisors reachable", PATIENCE, || async {
        Ok(infra.delete_volume(&volume).await.map_err(|error| error.to_string()))
    })
    .await
}

/// Somebody copies a file into a pool.
pub(super) async fn has_an_unknown_file(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let pool = site.s.pool(&[]).await?;
    let file = pool.path.join("copy-of-somebody");
    std::fs::write(&file, "data")?;
    alerts.fire().await?;
    Ok(std::fs::remove_file(file)?)
}
