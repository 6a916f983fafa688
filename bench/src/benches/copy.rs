//! Bench: snapshots and clones of a volume, from the CSI call in the guest to its response. The floor is the storage
//! infra's own snapshot or clone of the same volume.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use crds::names;
use csi::proto::volume_content_source::{Type, VolumeSource};
use csi::proto::{CreateSnapshotRequest, DeleteSnapshotRequest, VolumeContentSource};
use infra_api::{SnapshotId, SnapshotSpec, VolumeId, VolumeSpec};
use tests::driver::new_volume;
use tests::{Scenario, unique};

use crate::cost::{Cost, metered};
use crate::report::Report;
use crate::work::Work;

/// Timeout of one copy.
const LONGEST: Duration = Duration::from_secs(60);
/// The volume's size, in bytes.
const SIZE: i64 = 1 << 30;
/// Amount of data in it, in MiB.
const DATA: u64 = 256;

/// The kind of copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copy {
    /// A snapshot.
    Snapshot,
    /// Another volume.
    Clone,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, copy: Copy) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work, copy).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, copy: Copy) -> Result<()> {
    let source = s.driver.create(new_volume(&s.csi_name(), SIZE, "nestor")).await?.volume_id;
    let infra_volume = s.infra_volume(&source).await?;
    fill(s.file_of(&infra_volume).await?).await?;
    for _ in 0..work.warm_up() {
        through_both_tiers(s, copy, &source).await?;
        by_the_infra(s, copy, &infra_volume.id).await?;
    }
    // Alternating, so that other load on the host affects both equally.
    let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
    for _ in 0..work.count() {
        floor.push(by_the_infra(s, copy, &infra_volume.id).await?);
        let (time, one) = metered(&s.lab, 1, through_both_tiers(s, copy, &source)).await?;
        times.push(time);
        cost.add(one);
    }
    report.times("one", &times, &floor);
    report.cost("one", &cost);
    Ok(())
}

/// Writes data that cannot be stored as holes.
async fn fill(file: std::path::PathBuf) -> Result<()> {
    let write = move || -> std::io::Result<()> {
        let file = std::fs::File::options().write(true).open(file)?;
        let block: Vec<u8> =
            (0..1u32 << 18).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        for mebibyte in 0..DATA {
            file.write_all_at(&block, mebibyte << 20)?;
        }
        file.sync_all()
    };
    Ok(tokio::task::spawn_blocking(write).await??)
}

async fn through_both_tiers(s: &Scenario, copy: Copy, source: &str) -> Result<Duration> {
    match copy {
        Copy::Snapshot => {
            let class = (names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS.to_owned(), "nestor".to_owned());
            let request = CreateSnapshotRequest {
                source_volume_id: source.to_owned(),
                name: unique("bench"),
                parameters: HashMap::from([class]),
                ..Default::default()
            };
            let start = Instant::now();
            let answer = s.driver.calls().create_snapshot(request).await?.into_inner();
            let took = start.elapsed();
            let snapshot = answer.snapshot.context("the response has no snapshot")?;
            anyhow::ensure!(snapshot.ready_to_use, "the snapshot is not ready");
            let delete = DeleteSnapshotRequest { snapshot_id: snapshot.snapshot_id, ..Default::default() };
            s.driver.calls().delete_snapshot(delete).await?;
            Ok(took)
        }
        Copy::Clone => {
            let volume = VolumeSource { volume_id: source.to_owned() };
            let mut request = new_volume(&s.csi_name(), SIZE, "nestor");
            request.volume_content_source = Some(VolumeContentSource { r#type: Some(Type::Volume(volume)) });
            let start = Instant::now();
            let made = s.driver.create(request).await?;
            let took = start.elapsed();
            s.driver.delete(&made.volume_id).await?;
            Ok(took)
        }
    }
}

async fn by_the_infra(s: &Scenario, copy: Copy, source: &VolumeId) -> Result<Duration> {
    let start = Instant::now();
    match copy {
        Copy::Snapshot => {
            let id = SnapshotId::new(unique("bench"))?;
            let spec = SnapshotSpec {
                volume: source.clone(),
                account: Default::default(),
                labels: Default::default(),
            };
            s.infra.put_snapshot(&id, &spec, LONGEST).await?;
            let took = start.elapsed();
            s.infra.delete_snapshot(&id).await?;
            Ok(took)
        }
        Copy::Clone => {
            let id = VolumeId::new(unique("bench"))?;
            let spec = VolumeSpec {
                source: Some(infra_api::VolumeSource::Volume(source.clone())),
                ..VolumeSpec::of_size(SIZE.unsigned_abs())
            };
            s.infra.put_volume(&id, &spec, LONGEST).await?;
            let took = start.elapsed();
            s.infra.delete_volume(&id).await?;
            Ok(took)
        }
    }
}
