//! The data of images, which is read and written through a session, without a block device.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::de::DeserializeOwned;

use super::RbdEngine;
use super::location::RbdLocation;
use super::session::{Call, Session};
use crate::engine::transfer::{PartData, copy};
use crate::engine::{Clearance, CopyProgress, EngineError, Object, PartFile, Record, Result, SourceFile};
use crate::hypervisor::{DiskSource, RbdImage, RbdSource};

/// Bytes of an image that are searched for data at a time.
const WINDOW: u64 = 1 << 30;

/// An image whose data is read or written. It is closed some time after the drop.
pub(in crate::engine) struct ImageData {
    image: RbdImage,
    open: Arc<Mutex<Open>>,
}

struct Open {
    session: Session,
    known: Extents,
}

impl fmt::Debug for ImageData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ImageData").field(&self.image).finish()
    }
}

impl ImageData {
    /// An image that is opened when its data is first used.
    pub(in crate::engine) fn of(source: &RbdSource) -> Result<Self> {
        let session = Session::for_data(&RbdLocation::of(source))?;
        let open = Open { session, known: Extents::default() };
        Ok(Self { image: source.image.clone(), open: Arc::new(Mutex::new(open)) })
    }

    fn call<T: DeserializeOwned>(&self, call: &Call<'_>, data: &[u8]) -> Result<T> {
        Ok(locked(&self.open).session.call(call, data)?)
    }

    /// Time of the last change of the data, in nanoseconds. Ceph notes it at most once a minute.
    pub(in crate::engine) fn modified(&self) -> Result<i128> {
        let seconds: i64 = self.call(&Call::Modified { image: (&self.image).into() }, &[])?;
        Ok(i128::from(seconds) * 1_000_000_000)
    }

    /// Start and end of the next data at or after `at`; `None` if there is none before `size`.
    pub(in crate::engine) fn next_data(&self, mut at: u64, size: u64) -> Result<Option<(u64, u64)>> {
        let mut open = locked(&self.open);
        while at < size {
            if !open.known.covers(at) {
                let (image, length) = ((&self.image).into(), WINDOW.min(size - at));
                let found = open.session.call(&Call::Extents { image, offset: at, length }, &[])?;
                open.known = Extents { from: at, until: at + length, found };
            }
            match open.known.next(at) {
                Some(extent) => return Ok(Some(extent)),
                None => at = open.known.until,
            }
        }
        Ok(None)
    }

    pub(in crate::engine) fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        let image = (&self.image).into();
        let data = locked(&self.open).session.read(&Call::Read { image, offset, length }, length)?;
        match data.len() == length {
            true => Ok(data),
            false => Err(EngineError::Io {
                what: format!("cannot read the image {}", self.image),
                source: std::io::ErrorKind::UnexpectedEof.into(),
            }),
        }
    }

    pub(in crate::engine) fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.call(&Call::Write { image: (&self.image).into(), offset, length: data.len() }, data)
    }

    /// Makes all written data durable.
    pub(in crate::engine) fn flush(&self) -> Result<()> {
        self.call(&Call::Flush { image: (&self.image).into() }, &[])
    }

    /// Closes the image: on return, Ceph does not count its client as one that has it open.
    pub(in crate::engine) fn close(self) -> Result<()> {
        self.call(&Call::Close, &[])
    }
}

impl Drop for ImageData {
    /// Does not wait. A process that is killed keeps the image open until Ceph notices that, so it ends by itself.
    fn drop(&mut self) {
        let open = self.open.clone();
        std::thread::spawn(move || locked(&open).session.call::<()>(&Call::Close, &[]).is_ok());
    }
}

fn locked(open: &Mutex<Open>) -> MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The data of a part of an image.
#[derive(Debug, Default)]
struct Extents {
    from: u64,
    until: u64,
    /// Offset and length, ascending.
    found: Vec<(u64, u64)>,
}

impl Extents {
    fn covers(&self, at: u64) -> bool {
        (self.from..self.until).contains(&at)
    }

    /// Start and end of the first data at or after `at`.
    fn next(&self, at: u64) -> Option<(u64, u64)> {
        let after = self.found.partition_point(|(offset, length)| offset + length <= at);
        let (offset, length) = self.found.get(after)?;
        Some((at.max(*offset), self.until.min(offset + length)))
    }
}

impl RbdEngine {
    /// Opens the incomplete image of an object, with this size, and removes everything from byte `keep` on.
    pub(super) fn reopen_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> Result<PartFile> {
        self.check()?;
        if keep == 0 {
            return self.create_part(cleared.object(), bytes);
        }
        let part = self.part(cleared.object());
        self.take_over_part(cleared.object())?;
        match self.ceph.size(&part)? {
            Some(length) if length >= keep => {}
            found => {
                return Err(EngineError::Missing(format!(
                    "the image {part} has {} bytes instead of at least {keep}",
                    found.unwrap_or(0)
                )));
            }
        }
        self.ceph.cut(&part, keep, bytes)?;
        self.open_image(part)
    }

    /// Gives what an earlier server received this one's name, once that server has it open no longer.
    fn take_over_part(&self, object: &Object) -> Result<()> {
        let part = self.part(object);
        if self.ceph.size(&part)?.is_some() {
            return Ok(());
        }
        let Some(left) = self.left_parts(object)?.into_iter().next() else { return Ok(()) };
        if let Some(holder) = self.watched_by(&left)? {
            return Err(EngineError::Unhealthy(format!(
                "the image {left} is still open in a server that was replaced: {holder}; retry"
            )));
        }
        self.ceph.rename(&left, &part).map(drop)
    }

    /// Creates the incomplete image of an object, empty, and opens it; removes the previous one.
    pub(super) fn create_part(&self, object: &Object, bytes: u64) -> Result<PartFile> {
        let part = self.clear_part(object)?;
        self.ceph.create(&part, bytes)?;
        self.open_image(part)
    }

    fn open_image(&self, part: RbdImage) -> Result<PartFile> {
        let client = self.ceph.location.client(self.uuid);
        let data = ImageData::of(&RbdSource { image: part, client })?;
        Ok(PartFile { data: PartData::Image(data), lease: self.ceph.lease.clone() })
    }

    /// Fills an object with the data of a file, or of an image elsewhere.
    pub(super) fn copy_into(
        &self,
        object: &Object,
        from: &DiskSource,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        let from = SourceFile::open(from, bytes)?;
        let part = self.create_part(object, bytes)?;
        copy(&from, &part, progress)?;
        self.finish_part(object, part, bytes, record)
    }

    /// Gives an incomplete image its record and its name once all of it is durable.
    pub(super) fn finish_part(
        &self,
        object: &Object,
        part: PartFile,
        bytes: u64,
        record: &Record,
    ) -> Result<()> {
        let PartData::Image(image) = part.data else {
            return Err(EngineError::Unsupported(format!("the file of {object} is not in this pool")));
        };
        image.flush()?;
        image.close()?;
        self.complete(object, bytes, record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_found_from_any_byte_of_the_range_that_was_searched() {
        let known = Extents { from: 10, until: 100, found: vec![(20, 10), (40, 10), (90, 20)] };
        assert!(known.covers(10) && known.covers(99) && !known.covers(9) && !known.covers(100));
        assert_eq!(known.next(10), Some((20, 30)));
        assert_eq!(known.next(25), Some((25, 30)));
        assert_eq!(known.next(30), Some((40, 50)));
        assert_eq!(known.next(50), Some((90, 100)));
        assert!(!Extents::default().covers(0));
        assert_eq!(Extents { from: 0, until: 5, found: Vec::new() }.next(0), None);
    }
}
