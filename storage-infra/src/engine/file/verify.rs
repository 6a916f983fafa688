//! Whether a volume's file is the one that it should be, and whether the pool is in its present state.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{FileEngine, exists, io_error, record_xattr};
use crate::engine::{EngineError, Expected, Object, Record, Result};

/// What is known about the files of a pool.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Inode numbers of files whose record named the volume. A file that is exchanged has another one.
    inodes: Mutex<HashMap<Object, u64>>,
    /// The lowest number in the marker of the pool's present state.
    generation: AtomicU64,
}

impl FileEngine {
    /// What is wrong with the file of a volume. `may_know`: its record need not be read again if its inode is known.
    fn problem(&self, object: &Object, expected: Expected, may_know: bool) -> Result<Option<String>> {
        let path = self.file(object);
        let meta = match fs::metadata(&path) {
            Ok(meta) => meta,
            Err(_) if !exists(&path)? => {
                return Ok(Some(format!("the file of {object} is missing: {}", path.display())));
            }
            Err(error) => return Err(io_error("read the metadata of", &path)(error)),
        };
        if let Some(why) = shorter(&path, &meta, object, expected) {
            return Ok(Some(why));
        }
        let mut inodes = self.known.inodes.lock().unwrap_or_else(PoisonError::into_inner);
        if may_know && inodes.get(object) == Some(&meta.ino()) {
            return Ok(None);
        }
        let problem = match record_xattr::read(&path) {
            Ok(Some(found)) if found.identity() == expected.identity => {
                inodes.insert(object.clone(), meta.ino());
                return Ok(None);
            }
            Ok(Some(_)) => "it has the record of another object".to_owned(),
            Ok(None) if !expected.recorded => return Ok(None),
            Ok(None) => {
                "it has no record, so it was exchanged, or restored without extended attributes".to_owned()
            }
            Err(error) => error.to_string(),
        };
        inodes.remove(object);
        let id = match object {
            Object::Volume(id) => id.as_str(),
            Object::Snapshot(id) => id.as_str(),
        };
        let path = path.display();
        Ok(Some(format!(
            "{path} is not the file of {object}: {problem}. Put the right file back; if the content of this one is the volume's, \
             accept it with storage-infra volume accept {id}"
        )))
    }

    pub(super) fn find_damaged(
        &self,
        expected: &HashMap<Object, Expected>,
    ) -> Result<HashMap<Object, String>> {
        let mut found = HashMap::new();
        for (object, expected) in expected {
            if let Some(problem) = self.problem(object, *expected, true)? {
                found.insert(object.clone(), problem);
            }
        }
        Ok(found)
    }

    pub(super) fn verify_file(&self, object: &Object, expected: Expected) -> Result<()> {
        match self.problem(object, expected, false)? {
            None => Ok(()),
            Some(problem) => Err(EngineError::Missing(problem)),
        }
    }

    pub(super) fn accept(&self, record: &Record, expected: Expected) -> Result<()> {
        let Some(object) = record.object() else { return Ok(()) };
        let path = self.file(&object);
        if record_xattr::read(&path)?.is_some() {
            return self.verify_file(&object, expected);
        }
        self.refuse_open(&object)?;
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let meta = file.metadata().map_err(io_error("read the metadata of", &path))?;
        if let Some(why) = shorter(&path, &meta, &object, expected) {
            return Err(EngineError::Missing(why));
        }
        record_xattr::write(&file, &path, record)?;
        file.sync_all().map_err(io_error("sync", &path))
    }

    /// Fails if the pool was set back to an earlier state.
    pub(super) fn refuse_earlier_state(&self) -> Result<()> {
        let least = self.known.generation.load(Ordering::SeqCst);
        if least == 0 {
            return Ok(());
        }
        let found = record_xattr::read_generation(&self.marker())?;
        if found >= least {
            return Ok(());
        }
        Err(EngineError::Unhealthy(format!(
            "{} is in an earlier state than this server left it: its marker has the generation {found}, and {least} was written. \
             It was restored from a snapshot or a copy. Mount its present state; if it is lost, stop the server and rebuild the \
             catalog from what is there with `storage-infra recover`",
            self.dir.display()
        )))
    }

    pub(super) fn write_generation(&self, generation: u64) -> Result<()> {
        let path = self.marker();
        let file = File::open(&path).map_err(io_error("open", &path))?;
        record_xattr::write_generation(&file, &path, generation)?;
        file.sync_all().map_err(io_error("sync", &path))
    }

    pub(super) fn raise_generation(&self, generation: u64) {
        self.known.generation.fetch_max(generation, Ordering::SeqCst);
    }
}

fn shorter(path: &Path, meta: &Metadata, object: &Object, expected: Expected) -> Option<String> {
    (meta.len() < expected.bytes).then(|| {
        format!(
            "{} has {} bytes, and {object} has {}: somebody has truncated it; restore it from a backup or a snapshot",
            path.display(),
            meta.len(),
            expected.bytes
        )
    })
}
