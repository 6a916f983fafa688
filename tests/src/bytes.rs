//! Test data: bytes written to and read from volume files and disks of loop nodes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names;
use lab::LoopNode;

/// Pseudo-random bytes that match no known format.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Writes to the beginning of an existing file or device.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::options().write(true).open(path).with_context(|| format!("{}", path.display()))?;
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

/// Reads `bytes` bytes from the beginning of a file or device.
pub fn read(path: &Path, bytes: usize) -> Result<Vec<u8>> {
    read_at(path, 0, bytes)
}

/// Reads `bytes` bytes of a file or device from offset `start`.
pub fn read_at(path: &Path, start: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut file = File::open(path).with_context(|| format!("{}", path.display()))?;
    file.seek(SeekFrom::Start(start))?;
    let mut read = vec![0; bytes];
    file.read_exact(&mut read)?;
    Ok(read)
}

/// The disk's device link on a loop node.
pub fn device(node: &LoopNode, disk: &str) -> PathBuf {
    let [link, ..] = names::disk_by_id(disk);
    node.by_id_dir.join(link)
}

/// SHA-256 of a file's bytes, in hex.
pub async fn checksum(file: &Path) -> Result<String> {
    let output = lab::process::run(&mut lab::process::command("sha256sum", [file])).await?;
    Ok(output.split_whitespace().next().context("sha256sum printed nothing")?.to_owned())
}
