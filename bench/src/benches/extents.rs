//! Bench: filesystem metadata of a volume that is written in random order, block by block, so that each block is an
//! extent in the file's extent tree. Pools reserve this space.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{ioctl_ficlone, statvfs, syncfs};

use crate::report::Report;

const BLOCK: usize = 4096;
const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits().cast_signed();

/// Runs the bench, with volumes of this size in MiB.
pub async fn run(report: &Report, mebibytes: u64) -> Result<()> {
    let report = report.clone();
    tests::run(move |s| async move {
        let pool = s.pool(&[]).await?;
        let folder = pool.path.parent().context("a pool without a filesystem")?.to_owned();
        tokio::task::spawn_blocking(move || measure(&report, &Folder(folder), mebibytes << 20)).await?
    })
    .await
}

struct Folder(PathBuf);

impl Folder {
    fn available(&self) -> Result<u64> {
        syncfs(File::open(&self.0)?)?;
        let has = statvfs(&self.0)?;
        Ok(has.f_bavail * has.f_frsize)
    }

    /// The space that `work` takes in addition to the `bytes` bytes that it writes, in bytes per block.
    fn beyond(&self, bytes: u64, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let before = self.available()?;
        work()?;
        let taken = before.saturating_sub(self.available()?);
        Ok((taken as f64 - bytes as f64) / bytes as f64 * BLOCK as f64)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Writes every `every`-th block of a file once, in random order, with direct I/O like QEMU.
fn write_randomly(path: &Path, bytes: u64, every: usize) -> Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).custom_flags(DIRECT).open(path)?;
    file.set_len(bytes)?;
    let mut offsets: Vec<u64> = (0..bytes).step_by(BLOCK * every).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut offsets);
    let memory = vec![7; 2 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let block = &memory[start..start + BLOCK];
    offsets.into_iter().try_for_each(|offset| file.write_all_at(block, offset))?;
    Ok(file.sync_all()?)
}

fn measure(report: &Report, folder: &Folder, bytes: u64) -> Result<()> {
    let (dense, sparse, snapshot) = (folder.file("dense"), folder.file("sparse"), folder.file("snapshot"));
    let record = |case: &str, extra| report.number(case, "metadata", "bytes per 4 KiB", extra);
    record("every block", folder.beyond(bytes, || write_randomly(&dense, bytes, 1))?);
    record("every second block", folder.beyond(bytes / 2, || write_randomly(&sparse, bytes, 2))?);
    let again = folder.beyond(bytes, || {
        ioctl_ficlone(File::create(&snapshot)?, File::open(&dense)?)?;
        write_randomly(&dense, bytes, 1)
    })?;
    record("every block again, after a snapshot", again);
    Ok(())
}
