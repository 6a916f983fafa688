//! Bytes of volumes: written to and read from the infra's files, and the disks of machines that this host plays.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names;
use lab::LoopNode;

/// Bytes that look like nothing any tool knows.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Writes to the beginning of a file or a device that is there.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::options().write(true).open(path).with_context(|| format!("{}", path.display()))?;
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

/// Reads so many bytes from the beginning of a file or a device.
pub fn read(path: &Path, bytes: usize) -> Result<Vec<u8>> {
    read_at(path, 0, bytes)
}

/// Reads so many bytes of a file or a device from there on.
pub fn read_at(path: &Path, start: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut file = File::open(path).with_context(|| format!("{}", path.display()))?;
    file.seek(SeekFrom::Start(start))?;
    let mut read = vec![0; bytes];
    file.read_exact(&mut read)?;
    Ok(read)
}

/// The disk of a machine that this host plays.
pub fn device(node: &LoopNode, disk: &str) -> PathBuf {
    let [link, ..] = names::disk_by_id(disk);
    node.by_id_dir.join(link)
}

/// SHA-256 of a file's bytes, in hex.
pub async fn checksum(file: &Path) -> Result<String> {
    let said = lab::process::run(&mut lab::process::command("sha256sum", [file])).await?;
    Ok(said.split_whitespace().next().context("sha256sum says nothing")?.to_owned())
}
