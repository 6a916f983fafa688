//! Comparison of two files by the parts that have data.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use infra_api::ProblemCode;
use tokio_util::sync::CancellationToken;

use super::decide::Content;
use crate::engine::file::next_data;
use crate::service::problems::{Failure, Result};

/// Bytes that are compared at a time.
const CHUNK: usize = 1 << 20;

/// Tells whether a file was replaced or changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// `None` if there is no such file.
    pub(super) fn of(path: &Path) -> Result<Option<Self>> {
        #[cfg(test)]
        if let Some(sim) = crate::simulation::current() {
            return Ok(simulated::stamp(&sim, path));
        }
        let found = match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(failed(path))?,
        };
        Ok(Some(Self {
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }))
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |error| Failure::new(ProblemCode::Unavailable, format!("cannot read {}: {error}", path.display()))
}

/// Compares the new file of a move with the old one. While a VM writes to the old one, only whether the new one has data counts.
pub(super) fn compare(
    old: &Path,
    new: &Path,
    old_is_written: bool,
    stop: &CancellationToken,
) -> Result<Content> {
    #[cfg(test)]
    if let Some(sim) = crate::simulation::current() {
        return simulated::compare(&sim, old, new, old_is_written);
    }
    let one = File::open(old).map_err(failed(old))?;
    let other = match File::open(new) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Blank),
        other => other.map_err(failed(new))?,
    };
    if is_empty(&other).map_err(failed(new))? {
        return Ok(Content::Blank);
    }
    if old_is_written {
        return Ok(Content::Different);
    }
    content(&one, &other, stop).map_err(|error| {
        let detail = format!("cannot compare {} with {}: {error}", old.display(), new.display());
        Failure::new(ProblemCode::Unavailable, detail)
    })
}

fn content(old: &File, new: &File, stop: &CancellationToken) -> io::Result<Content> {
    if !is_covered(old, new, stop)? {
        return Ok(Content::Incomplete);
    }
    Ok(if is_equal(old, new, stop)? { Content::Equal } else { Content::Different })
}

/// Whether the new file has data wherever the old one has data other than zeros.
fn is_covered(old: &File, new: &File, stop: &CancellationToken) -> io::Result<bool> {
    let mut at = 0;
    while let Some((start, end)) = next_data(old, at)? {
        at = end;
        let mut from = start;
        while from < end {
            refuse_stopped(stop)?;
            let data = next_data(new, from)?;
            let hole_end = data.map_or(end, |(start, _)| start.min(end));
            if !is_zero(old, from, hole_end)? {
                return Ok(false);
            }
            from = data.map_or(end, |(_, data_end)| data_end.min(end));
        }
    }
    Ok(true)
}

fn refuse_stopped(stop: &CancellationToken) -> io::Result<()> {
    if stop.is_cancelled() {
        return Err(io::Error::new(io::ErrorKind::Interrupted, "the server stops"));
    }
    Ok(())
}

fn is_empty(file: &File) -> io::Result<bool> {
    let mut at = 0;
    while let Some((start, end)) = next_data(file, at)? {
        if !is_zero(file, start, end)? {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}

fn is_zero(file: &File, start: u64, end: u64) -> io::Result<bool> {
    let mut bytes = vec![0; CHUNK];
    for (at, size) in chunks(start, end) {
        file.read_exact_at(&mut bytes[..size], at)?;
        if bytes[..size].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_equal(one: &File, other: &File, stop: &CancellationToken) -> io::Result<bool> {
    let length = one.metadata()?.len();
    if other.metadata()?.len() != length {
        return Ok(false);
    }
    let mut left = vec![0; CHUNK];
    let mut right = vec![0; CHUNK];
    let mut at = 0;
    // What is a hole in both is zero in both.
    while let Some((start, end)) = next_part(one, other, at)? {
        let end = end.min(length);
        for (at, size) in chunks(start, end) {
            refuse_stopped(stop)?;
            one.read_exact_at(&mut left[..size], at)?;
            other.read_exact_at(&mut right[..size], at)?;
            if left[..size] != right[..size] {
                return Ok(false);
            }
        }
        at = end;
        if at >= length {
            break;
        }
    }
    Ok(true)
}

/// The next part where at least one of the files has data, and which of them is the same throughout.
fn next_part(one: &File, other: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    let found = [next_data(one, at)?, next_data(other, at)?];
    Ok(found.into_iter().flatten().min())
}

fn chunks(start: u64, end: u64) -> impl Iterator<Item = (u64, usize)> {
    (start..end).step_by(CHUNK).map(move |at| {
        let size = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
        (at, size)
    })
}

/// The same for simulated files.
#[cfg(test)]
mod simulated {
    use super::*;
    use crate::simulation::Sim;

    pub(super) fn stamp(sim: &Sim, path: &Path) -> Option<Stamp> {
        let (inode, blocks, changed) = sim.look(path)?;
        let changed = (changed.cast_signed(), 0);
        Some(Stamp { inode, length: blocks.len() as u64, modified: changed, changed })
    }

    pub(super) fn compare(sim: &Sim, old: &Path, new: &Path, old_is_written: bool) -> Result<Content> {
        let missing = || Failure::new(ProblemCode::Unavailable, "a simulated file is missing");
        let (_, one, _) = sim.look(old).ok_or_else(missing)?;
        let is_absent = |(old, new): (&u64, &u64)| *old != 0 && *new == 0;
        Ok(match sim.look(new) {
            None => Content::Blank,
            Some((_, other, _)) if other.iter().all(|block| *block == 0) => Content::Blank,
            Some(_) if old_is_written => Content::Different,
            Some((_, other, _)) if one.iter().zip(&other).any(is_absent) => Content::Incomplete,
            Some((_, other, _)) if one == other => Content::Equal,
            Some(_) => Content::Different,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn file(dir: &Path, name: &str, length: u64, data: &[(u64, u8)]) -> std::path::PathBuf {
        let path = dir.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(length).unwrap();
        for (at, byte) in data {
            file.write_all_at(&[*byte], *at).unwrap();
        }
        path
    }

    fn content(old: &Path, new: &Path) -> Content {
        compare(old, new, false, &CancellationToken::new()).unwrap()
    }

    #[test]
    fn files_are_equal_by_length_and_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let length = 3 * CHUNK as u64 + 5;
        let make = |name: &str, length, data: &[(u64, u8)]| file(dir.path(), name, length, data);
        let one = make("one", length, &[(0, 1), (length - 1, 7)]);
        assert_eq!(content(&one, &make("same", length, &[(0, 1), (length - 1, 7)])), Content::Equal);
        assert_eq!(content(&one, &make("other", length, &[(0, 1), (length - 1, 8)])), Content::Different);
        assert_eq!(content(&one, &make("less", length, &[(0, 1)])), Content::Incomplete);
        assert_eq!(content(&make("less2", length, &[(0, 1)]), &one), Content::Different);
        let written = make("written", length, &[(0, 2), (2 * CHUNK as u64, 5)]);
        assert_eq!(content(&one, &written), Content::Incomplete, "its end was not copied");
        assert_eq!(
            content(&one, &make("longer", length + 1, &[(0, 1), (length - 1, 7)])),
            Content::Different
        );
        let zeros = make("zeros", length, &[(0, 1), (CHUNK as u64, 0), (length - 1, 7)]);
        assert_eq!(content(&one, &zeros), Content::Equal, "a hole is zero");
        assert_eq!(content(&one, &make("blank", length, &[(5, 0)])), Content::Blank);
        let none = dir.path().join("none");
        assert_eq!(content(&one, &none), Content::Blank);
        assert!(compare(&none, &one, false, &CancellationToken::new()).is_err());
    }

    #[test]
    fn only_data_is_read_and_a_written_file_is_not_compared() {
        let dir = tempfile::tempdir().unwrap();
        // Far more than could be read in the time of a test.
        let length = 1 << 42;
        let data = [(1 << 30, 1), ((1 << 41) + 5, 2)];
        let one = file(dir.path(), "one", length, &data);
        let other = file(dir.path(), "other", length, &data);
        assert!(one.metadata().unwrap().blocks() < 1 << 10);
        assert_eq!(content(&one, &other), Content::Equal);
        let written = compare(&one, &other, true, &CancellationToken::new()).unwrap();
        assert_eq!(written, Content::Different);
        let stopped = CancellationToken::new();
        stopped.cancel();
        assert!(compare(&one, &other, false, &stopped).is_err());
    }

    #[test]
    fn a_stamp_tells_a_write_and_a_replacement() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(dir.path(), "one", 9, &[(0, 1)]);
        let before = Stamp::of(&path).unwrap();
        assert!(before.is_some() && Stamp::of(&path).unwrap() == before);
        let other = file(dir.path(), "other", 9, &[(0, 1)]);
        std::fs::rename(&other, &path).unwrap();
        assert_ne!(Stamp::of(&path).unwrap(), before);
        assert_eq!(Stamp::of(&other).unwrap(), None);
    }
}
