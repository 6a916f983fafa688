//! Data that is exported, imported and copied: that of a source, extent by extent, and the incomplete file or image of an
//! object that is filled.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::file::{io_error, next_data};
use super::rbd::ImageData;
use super::{CopyProgress, Result};
use crate::hypervisor::DiskSource;
use crate::lease::Lease;

/// Number of bytes copied at a time.
const CHUNK: usize = 1 << 20;

/// The data of a file or an image, which is read.
#[derive(Debug)]
pub struct SourceFile {
    data: SourceData,
    size: u64,
}

#[derive(Debug)]
enum SourceData {
    File {
        file: File,
        path: PathBuf,
    },
    Image(ImageData),
    #[cfg(test)]
    Simulated(crate::simulation::Opened),
}

impl SourceData {
    fn open(source: &DiskSource) -> Result<Self> {
        #[cfg(test)]
        if let (Some(sim), DiskSource::File(path)) = (crate::simulation::current(), source) {
            return sim.open(path).map(Self::Simulated);
        }
        match source {
            DiskSource::File(path) => {
                let file = File::open(path).map_err(io_error("open", path))?;
                Ok(Self::File { file, path: path.clone() })
            }
            DiskSource::Rbd(source) => ImageData::of(source).map(Self::Image),
        }
    }

    fn next_data(&self, at: u64, size: u64) -> Result<Option<(u64, u64)>> {
        match self {
            Self::File { file, path } => next_data(file, at).map_err(io_error("search for data in", path)),
            Self::Image(image) => image.next_data(at, size),
            #[cfg(test)]
            Self::Simulated(opened) => Ok(opened.next_data(at)),
        }
    }

    fn read(&self, start: u64, length: usize) -> Result<Vec<u8>> {
        match self {
            Self::File { file, path } => {
                let mut data = vec![0; length];
                file.read_exact_at(&mut data, start).map_err(io_error("read", path))?;
                Ok(data)
            }
            Self::Image(image) => image.read(start, length),
            #[cfg(test)]
            Self::Simulated(opened) => Ok(opened.read(start, length)),
        }
    }
}

impl SourceFile {
    /// Opens what an engine located, of which this many bytes are read.
    pub fn open(source: &DiskSource, size: u64) -> Result<Self> {
        Ok(Self { data: SourceData::open(source)?, size })
    }

    /// Time of the last change of the content, in nanoseconds.
    pub fn modified(&self) -> Result<i128> {
        match &self.data {
            SourceData::File { file, path } => {
                let meta = file.metadata().map_err(io_error("read the metadata of", path))?;
                Ok(i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()))
            }
            SourceData::Image(image) => image.modified(),
            #[cfg(test)]
            SourceData::Simulated(opened) => Ok(opened.modified()),
        }
    }

    /// The next data at or after this offset: its offset, and at most `limit` bytes. `None` if there is none.
    pub fn next(&self, at: u64, limit: usize) -> Result<Option<(u64, Vec<u8>)>> {
        let Some((start, end)) = self.data.next_data(at, self.size)? else { return Ok(None) };
        let end = end.min(self.size);
        if start >= end {
            return Ok(None);
        }
        let length = usize::try_from(end - start).unwrap_or(limit).min(limit);
        Ok(Some((start, self.data.read(start, length)?)))
    }
}

/// The incomplete file or image of an object, open for writing.
#[derive(Debug)]
pub struct PartFile {
    pub(super) data: PartData,
    /// Of the server that writes.
    pub(super) lease: Lease,
}

#[derive(Debug)]
pub(super) enum PartData {
    /// A file at a path.
    File(File, PathBuf),
    /// An image.
    Image(ImageData),
}

impl PartFile {
    /// Writes data.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.lease.check()?;
        match &self.data {
            PartData::File(file, path) => file.write_all_at(data, offset).map_err(io_error("write", path)),
            PartData::Image(image) => image.write(offset, data),
        }
    }

    /// Makes all written data durable.
    pub fn sync(&self) -> Result<()> {
        match &self.data {
            PartData::File(file, path) => file.sync_all().map_err(io_error("sync", path)),
            PartData::Image(image) => image.flush(),
        }
    }
}

/// Whether data is zeros, as a hole reads. Ceph reports the whole rest of an object as data that has a single byte.
pub fn is_zero(data: &[u8]) -> bool {
    data.iter().all(|byte| *byte == 0)
}

/// Copies all data of a source, without its holes and zeros. The target must be empty.
pub(super) fn copy(from: &SourceFile, to: &PartFile, progress: &CopyProgress) -> Result<()> {
    let mut at = 0;
    while let Some((start, data)) = from.next(at, CHUNK)? {
        progress.proceed()?;
        if !is_zero(&data) {
            to.write(start, &data)?;
        }
        at = start + data.len() as u64;
        progress.set(at);
        std::thread::sleep(progress.pause_after(data.len() as u64));
    }
    progress.set(from.size);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::EngineError;
    use super::*;
    use crate::lease::clock;

    #[test]
    fn a_copy_writes_nothing_more_when_the_lease_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("source"), dir.path().join("target"));
        std::fs::write(&source, vec![7; 8 << 20]).unwrap();
        let (lease, copying) = (Lease::ended(), CopyProgress::default());
        lease.extend(clock(), Duration::from_millis(300));
        // A second for all of it.
        copying.set_rate(Some(8 << 20));
        copying.under(&lease);
        let from = SourceFile::open(&DiskSource::File(source), 8 << 20).unwrap();
        let file = File::create(&target).unwrap();
        let part = PartFile { data: PartData::File(file, target), lease };
        let copied = copy(&from, &part, &copying);
        assert!(matches!(copied, Err(EngineError::NotActive(_))), "{copied:?}");
        assert!((1..8 << 20).contains(&copying.copied()));
        assert!(matches!(part.write(0, b"x"), Err(EngineError::NotActive(_))));
    }
}
