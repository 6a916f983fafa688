//! Comparison of two files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use infra_api::ProblemCode;

use crate::service::problems::{Failure, Result};

/// Bytes that are compared at a time.
const CHUNK: usize = 1 << 20;

/// Whether two files have the same content.
pub(super) fn is_equal(one: &Path, other: &Path) -> Result<bool> {
    compare(one, other).map_err(|error| {
        let detail = format!("cannot compare {} with {}: {error}", one.display(), other.display());
        Failure::new(ProblemCode::Unavailable, detail)
    })
}

fn compare(one: &Path, other: &Path) -> io::Result<bool> {
    #[cfg(test)]
    if let Some(sim) = crate::simulation::current() {
        return sim.is_equal(one, other);
    }
    let (one, other) = (File::open(one)?, File::open(other)?);
    let length = one.metadata()?.len();
    if other.metadata()?.len() != length {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 0;
    while at < length {
        let size = usize::try_from(length - at).unwrap_or(CHUNK).min(CHUNK);
        one.read_exact_at(&mut left[..size], at)?;
        other.read_exact_at(&mut right[..size], at)?;
        if left[..size] != right[..size] {
            return Ok(false);
        }
        at += size as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_equal_by_length_and_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, length: u64, last: u8| {
            let path = dir.path().join(name);
            let file = File::create(&path).unwrap();
            file.set_len(length).unwrap();
            file.write_all_at(&[last], length - 1).unwrap();
            path
        };
        let length = CHUNK as u64 + 5;
        let one = file("one", length, 7);
        assert!(is_equal(&one, &file("same", length, 7)).unwrap());
        assert!(!is_equal(&one, &file("other", length, 8)).unwrap());
        assert!(!is_equal(&one, &file("longer", length + 1, 7)).unwrap());
        assert!(is_equal(&one, &dir.path().join("none")).is_err());
    }
}
