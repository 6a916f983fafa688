//! Files that are exported and imported: the data of a source, extent by extent, and the incomplete file of a volume
//! whose content arrives from a client.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::file::{io_error, next_data};
use super::{EngineError, Result};
use crate::hypervisor::DiskSource;

/// A file that is read for an export.
#[derive(Debug)]
pub struct SourceFile {
    file: File,
    path: PathBuf,
    size: u64,
}

impl SourceFile {
    /// Opens what an engine located, of which this many bytes are exported.
    pub fn open(source: DiskSource, size: u64) -> Result<Self> {
        let path = source.file().map_err(EngineError::Unsupported)?.to_owned();
        let file = File::open(&path).map_err(io_error("open", &path))?;
        Ok(Self { file, path, size })
    }

    /// Time of the last change of the content, in nanoseconds.
    pub fn modified(&self) -> Result<i128> {
        let meta = self.file.metadata().map_err(io_error("read the metadata of", &self.path))?;
        Ok(i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()))
    }

    /// The next data at or after this offset: its offset, and at most `limit` bytes. `None` if there is none.
    pub fn next(&self, at: u64, limit: usize) -> Result<Option<(u64, Vec<u8>)>> {
        let failed = || io_error("read", &self.path);
        let Some((start, end)) = next_data(&self.file, at).map_err(failed())? else { return Ok(None) };
        let end = end.min(self.size);
        if start >= end {
            return Ok(None);
        }
        let length = usize::try_from(end - start).unwrap_or(limit).min(limit);
        let mut data = vec![0; length];
        self.file.read_exact_at(&mut data, start).map_err(failed())?;
        Ok(Some((start, data)))
    }
}

/// The incomplete file of a volume, open for writing.
#[derive(Debug)]
pub struct PartFile {
    pub(super) file: File,
    pub(super) path: PathBuf,
}

impl PartFile {
    /// Writes data.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.file.write_all_at(data, offset).map_err(io_error("write", &self.path))
    }

    /// Makes all written data durable.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(io_error("sync", &self.path))
    }
}
