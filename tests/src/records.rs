//! Durability check: numbered, checksummed records, each durable before it counts as acknowledged.
//!
//! They are written to a file or device as a ring with the writer's ID, so that neither older data nor data of another
//! volume is mistaken for them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::{Advice, fadvise};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// Size of a record: a sector, which a disk writes atomically.
const RECORD: usize = 512;
/// Offset of a record's checksum, which covers everything before it.
const SUM: usize = RECORD - 32;
/// Pause of a background writer after each record.
const PACE: Duration = Duration::from_millis(5);

/// The state of one writer, independent of the file. Clones observe later appends.
#[derive(Debug, Clone)]
pub struct Log {
    writer: Uuid,
    slots: u64,
    acknowledged: Arc<AtomicU64>,
}

/// The records of one writer on an open file or device.
#[derive(Debug)]
pub struct Records {
    file: File,
    log: Log,
}

impl Log {
    /// Number of durable records.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Continues on another path to the same data, as after a detach and an attach.
    pub fn resume(self, path: &Path) -> Result<Records> {
        Ok(Records { file: open(path)?, log: self })
    }

    /// Verifies that every acknowledged record that no later one replaced exists on `path`: the same file or device, or a
    /// copy made after the last acknowledgement.
    pub fn verify(&self, path: &Path) -> Result<()> {
        self.verify_since(self.acknowledged(), path)
    }

    /// Like [`Self::verify`], for a copy that was made when at least `acknowledged` records were durable.
    pub fn verify_since(&self, acknowledged: u64, path: &Path) -> Result<()> {
        let file = File::open(path).with_context(|| format!("{}", path.display()))?;
        // Drop the page cache, to read what was written to the disk.
        fadvise(&file, 0, None, Advice::DontNeed)?;
        for number in (acknowledged + 1).saturating_sub(self.slots).max(1)..=acknowledged {
            let mut found = [0; RECORD];
            file.read_exact_at(&mut found, self.offset(number))
                .with_context(|| format!("record {number} of {acknowledged} on {}", path.display()))?;
            // A later record in the slot is valid; one more may have been in flight when the writer stopped.
            let is_valid = parse(&found).is_ok_and(|(writer, there)| {
                let newest = self.acknowledged() + 1;
                writer == self.writer
                    && (number..=newest).contains(&there)
                    && (there - number).is_multiple_of(self.slots)
            });
            ensure!(
                is_valid,
                "{}: record {number} of {acknowledged} acknowledged ones is lost; the slot holds {}",
                path.display(),
                describe(&found)
            );
        }
        Ok(())
    }

    fn offset(&self, number: u64) -> u64 {
        number % self.slots * RECORD as u64
    }
}

impl Records {
    /// Starts a ring in the first `size` bytes of an existing file or device.
    pub fn begin(path: &Path, size: u64) -> Result<Self> {
        let slots = size / RECORD as u64;
        ensure!(slots > 0, "{size} bytes are too few for a record");
        Log { writer: Uuid::new_v4(), slots, acknowledged: Arc::default() }.resume(path)
    }

    /// The writer's state.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Closes the file or device.
    pub fn close(self) -> Log {
        self.log
    }

    /// See [`Log::verify_since`].
    pub fn verify_since(&self, acknowledged: u64, path: &Path) -> Result<()> {
        self.log.verify_since(acknowledged, path)
    }

    /// Writes the next record; returns its number when it is durable.
    pub fn append(&mut self) -> Result<u64> {
        let number = self.log.acknowledged() + 1;
        self.file.write_all_at(&record(self.log.writer, number), self.log.offset(number))?;
        self.file.sync_data().with_context(|| format!("record {number} is not durable"))?;
        self.log.acknowledged.store(number, Ordering::SeqCst);
        Ok(number)
    }

    /// Appends records in a background thread.
    pub fn append_in_background(mut self) -> Writer {
        let log = self.log();
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                let outcome = self.append();
                match stopped.recv_timeout(PACE) {
                    Err(RecvTimeoutError::Timeout) if outcome.is_ok() => {}
                    // The error is returned by `stop`.
                    _ => return (self, outcome.map(drop)),
                }
            }
        });
        Writer { log, stop, thread }
    }
}

/// A background writer.
pub struct Writer {
    log: Log,
    stop: Sender<()>,
    thread: JoinHandle<(Records, Result<()>)>,
}

impl Writer {
    /// The writer's state.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Stops the writer; fails if a record could not be written.
    pub fn stop(self) -> Result<Records> {
        let log = self.log();
        let (records, outcome) = self.end()?;
        outcome.with_context(|| format!("after {} records", log.acknowledged()))?;
        Ok(records)
    }

    /// Stops the writer and ignores write errors: the file or device was expected to fail.
    pub fn stop_ignoring_errors(self) -> Result<Records> {
        self.end().map(|(records, _)| records)
    }

    fn end(self) -> Result<(Records, Result<()>)> {
        // The thread may have ended already.
        let _ = self.stop.send(());
        self.thread.join().map_err(|_| anyhow!("the writer of records panicked"))
    }
}

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).open(path);
    file.with_context(|| format!("cannot write records to {}", path.display()))
}

fn record(writer: Uuid, number: u64) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..16].copy_from_slice(writer.as_bytes());
    // The number fills the record, so that a torn record differs from a complete one.
    for chunk in bytes[16..SUM].chunks_exact_mut(8) {
        chunk.copy_from_slice(&number.to_le_bytes());
    }
    let sum = Sha256::digest(&bytes[..SUM]);
    bytes[SUM..].copy_from_slice(&sum);
    bytes
}

/// Describes the content of a slot.
fn describe(bytes: &[u8; RECORD]) -> String {
    match parse(bytes) {
        Ok((writer, number)) => format!("record {number} of writer {writer}"),
        Err(_) if bytes.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
        Err(error) => format!("{error:#}"),
    }
}

fn parse(bytes: &[u8; RECORD]) -> Result<(Uuid, u64)> {
    if Sha256::digest(&bytes[..SUM])[..] != bytes[SUM..] {
        bail!("no valid record");
    }
    let number = bytes[16..24].try_into().map(u64::from_le_bytes)?;
    Ok((Uuid::from_slice(&bytes[..16])?, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> (tempfile::TempDir, std::path::PathBuf, Records) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 4 * RECORD]).unwrap();
        let records = Records::begin(&path, 4 * RECORD as u64).unwrap();
        (folder, path, records)
    }

    #[test]
    fn acknowledged_records_are_found_in_the_ring_and_a_lost_one_is_reported() {
        let (_folder, path, mut records) = ring();
        for number in 1..=6 {
            records.log().verify(&path).unwrap();
            assert_eq!(records.append().unwrap(), number);
        }
        let log = records.close();
        log.verify(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // The fifth record replaced the first one, in the second slot.
        file.write_all_at(&record(log.writer, 1), RECORD as u64).unwrap();
        let error = log.verify(&path).unwrap_err().to_string();
        assert!(error.contains("record 5 of 6") && error.contains("holds record 1 of writer"), "{error}");
        file.write_all_at(&[1; 9], RECORD as u64 + 99).unwrap();
        let error = log.verify(&path).unwrap_err().to_string();
        assert!(error.contains("no valid record"), "{error}");
    }

    #[test]
    fn a_copy_has_the_records_acknowledged_before_it() {
        let (folder, path, mut records) = ring();
        let copy = folder.path().join("copy");
        for _ in 0..3 {
            records.append().unwrap();
        }
        std::fs::copy(&path, &copy).unwrap();
        records.append().unwrap();
        let log = records.log();
        log.verify_since(2, &copy).unwrap();
        log.verify_since(3, &copy).unwrap();
        log.verify(&copy).unwrap_err();
    }

    #[test]
    fn a_background_writer_stops_on_request_and_reports_errors() {
        let (_folder, path, records) = ring();
        let records = records.append_in_background().stop().unwrap();
        assert!(records.log().acknowledged() > 0);
        records.log().verify(&path).unwrap();
        let read_only = Records { file: File::open(&path).unwrap(), log: records.close() };
        let before = read_only.log().acknowledged();
        let writer = read_only.append_in_background();
        let error = format!("{:#}", writer.stop().unwrap_err());
        assert!(error.contains(&format!("after {before} records")), "{error}");
    }
}
