//! Pool scan: reads the images of a Ceph pool and their records without a catalog.

use std::path::Path;

use anyhow::Context;

use super::command::Ceph;
use super::output::DiskUsage;
use super::{MARKER, POOL_UUID, RbdLocation, object_of};
use crate::clock::Clock;
use crate::engine::scan::{FoundFile, Place, PoolScan};
use crate::lease::Lease;

/// Scans a Ceph pool. Read-only.
pub(in crate::engine) fn scan_pool(path: &Path) -> anyhow::Result<PoolScan> {
    let text = path.to_str().context("the location of the pool is not UTF-8")?;
    let location: RbdLocation = text.parse().map_err(anyhow::Error::msg)?;
    let ceph = Ceph::new(location, Lease::unlimited(), Clock::default());
    let marker = ceph.location.image(MARKER);
    let uuid =
        ceph.metadata(&marker, POOL_UUID).with_context(|| format!("cannot read the image {marker}"))?;
    let uuid = uuid.with_context(|| format!("{text} is not a pool of a server: it has no image {marker}"))?;
    let uuid = uuid.parse().with_context(|| format!("the image {marker} does not contain a UUID"))?;
    let usage: DiskUsage = ceph.rbd_here(&["du"]).map_err(crate::engine::EngineError::from)?;
    let usage = usage.by_image();
    let names: Vec<String> = ceph.names()?.into_iter().filter(|name| name != MARKER).collect();
    let mut files = Vec::new();
    for name in names {
        let image = ceph.location.image(name.clone());
        let record = ceph.record(&image).map_err(|error| error.to_string());
        let bytes = ceph.size(&image)?.unwrap_or(0);
        let allocated = usage.get(&name).copied().unwrap_or(0);
        files.push(FoundFile { object: object_of(&name), name, bytes, allocated, record });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let pool = ceph.record(&marker)?;
    let place = Place::Rbd(ceph.location);
    Ok(PoolScan { dir: path.to_owned(), place, uuid, pool, served_by: None, files })
}
