//! Numbered, checksummed records, each durable before it counts: what no fault may lose once it was acknowledged.
//!
//! They are written to a file or a device in a ring, and say which writer they are from, so that neither an older
//! writer's bytes nor those of another volume pass for them.

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

/// One record: what a disk writes at once or not at all.
const RECORD: usize = 512;
/// Where a record's checksum begins; it is over all that is before.
const SUM: usize = RECORD - 32;
/// A writer in the background leaves so much time to others after each record.
const PACE: Duration = Duration::from_millis(5);

/// What is known of one writer's records, wherever they are. A clone sees what is appended meanwhile.
#[derive(Debug, Clone)]
pub struct Log {
    writer: Uuid,
    slots: u64,
    acknowledged: Arc<AtomicU64>,
}

/// The records of one writer on a file or a device that it has open.
#[derive(Debug)]
pub struct Records {
    file: File,
    log: Log,
}

impl Log {
    /// How many records are durable.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Goes on where the same bytes are found now, as after a detach and an attach.
    pub fn resume(self, path: &Path) -> Result<Records> {
        Ok(Records { file: open(path)?, log: self })
    }

    /// Fails unless every acknowledged record is there that no later one has replaced, as `path` shows it: the same
    /// file or device, or a copy that was made after the last acknowledgement.
    pub fn verify(&self, path: &Path) -> Result<()> {
        self.verify_since(self.acknowledged(), path)
    }

    /// As [`Self::verify`], for a copy that was made when at least `acknowledged` records were durable, and perhaps
    /// some of those that came after.
    pub fn verify_since(&self, acknowledged: u64, path: &Path) -> Result<()> {
        let file = File::open(path).with_context(|| format!("{}", path.display()))?;
        // What this host remembers is not what was written.
        fadvise(&file, 0, None, Advice::DontNeed)?;
        for number in (acknowledged + 1).saturating_sub(self.slots).max(1)..=acknowledged {
            let mut found = [0; RECORD];
            file.read_exact_at(&mut found, self.offset(number))
                .with_context(|| format!("record {number} of {acknowledged} on {}", path.display()))?;
            // A later one in its place is fine, and one more may have been on its way when the writer was stopped.
            let is_fine = parse(&found).is_ok_and(|(writer, there)| {
                let newest = self.acknowledged() + 1;
                writer == self.writer
                    && (number..=newest).contains(&there)
                    && (there - number).is_multiple_of(self.slots)
            });
            ensure!(
                is_fine,
                "{}: record {number} of {acknowledged} acknowledged ones is lost; in its place is {}",
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
    /// Begins a ring over the first `room` bytes of a file or a device that is there.
    pub fn begin(path: &Path, room: u64) -> Result<Self> {
        let slots = room / RECORD as u64;
        ensure!(slots > 0, "{room} bytes have no room for a record");
        Log { writer: Uuid::new_v4(), slots, acknowledged: Arc::default() }.resume(path)
    }

    /// What is known of them.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Closes the file or device.
    pub fn close(self) -> Log {
        self.log
    }

    /// Goes on where the same bytes are found now.
    pub fn moved_to(self, path: &Path) -> Result<Self> {
        self.close().resume(path)
    }

    /// See [`Log::verify_since`].
    pub fn verify_since(&self, acknowledged: u64, path: &Path) -> Result<()> {
        self.log.verify_since(acknowledged, path)
    }

    /// Writes the next record, and gives its number when it is durable.
    pub fn append(&mut self) -> Result<u64> {
        let number = self.log.acknowledged() + 1;
        self.file.write_all_at(&record(self.log.writer, number), self.log.offset(number))?;
        self.file.sync_data().with_context(|| format!("record {number} is not durable"))?;
        self.log.acknowledged.store(number, Ordering::SeqCst);
        Ok(number)
    }

    /// Goes on appending in the background.
    pub fn keep_appending(mut self) -> Writer {
        let log = self.log();
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                let outcome = self.append();
                match stopped.recv_timeout(PACE) {
                    Err(RecvTimeoutError::Timeout) if outcome.is_ok() => {}
                    // The error is told to who asks for the end.
                    _ => return (self, outcome.map(drop)),
                }
            }
        });
        Writer { log, stop, thread }
    }
}

/// Records that are being appended in the background.
pub struct Writer {
    log: Log,
    stop: Sender<()>,
    thread: JoinHandle<(Records, Result<()>)>,
}

impl Writer {
    /// What is known of them so far.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Ends it; fails when a record could not be written since it began.
    pub fn stop(self) -> Result<Records> {
        let log = self.log();
        let (records, outcome) = self.end()?;
        outcome.with_context(|| format!("after {} records", log.acknowledged()))?;
        Ok(records)
    }

    /// Ends it, however far it came: the file or device was to be lost to it.
    pub fn cut_off(self) -> Result<Records> {
        self.end().map(|(records, _)| records)
    }

    fn end(self) -> Result<(Records, Result<()>)> {
        // It may have ended by itself.
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
    // The number all over, so that a torn record is not the same as a whole one.
    for chunk in bytes[16..SUM].chunks_exact_mut(8) {
        chunk.copy_from_slice(&number.to_le_bytes());
    }
    let sum = Sha256::digest(&bytes[..SUM]);
    bytes[SUM..].copy_from_slice(&sum);
    bytes
}

/// What is where a record should be.
fn describe(bytes: &[u8; RECORD]) -> String {
    match parse(bytes) {
        Ok((writer, number)) => format!("record {number} of writer {writer}"),
        Err(_) if bytes.iter().all(|byte| *byte == 0) => "nothing".to_owned(),
        Err(error) => format!("{error:#}"),
    }
}

fn parse(bytes: &[u8; RECORD]) -> Result<(Uuid, u64)> {
    if Sha256::digest(&bytes[..SUM])[..] != bytes[SUM..] {
        bail!("no whole record");
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
    fn acknowledged_records_are_found_in_the_ring_and_a_lost_one_is_named() {
        let (_folder, path, mut records) = ring();
        for number in 1..=6 {
            records.log().verify(&path).unwrap();
            assert_eq!(records.append().unwrap(), number);
        }
        let log = records.close();
        log.verify(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        // The fifth is in the second place: the first was replaced by it.
        file.write_all_at(&record(log.writer, 1), RECORD as u64).unwrap();
        let error = log.verify(&path).unwrap_err().to_string();
        assert!(error.contains("record 5 of 6") && error.contains("is record 1 of writer"), "{error}");
        file.write_all_at(&[1; 9], RECORD as u64 + 99).unwrap();
        let error = log.verify(&path).unwrap_err().to_string();
        assert!(error.contains("no whole record"), "{error}");
    }

    #[test]
    fn a_copy_has_what_was_acknowledged_before_it_and_perhaps_more() {
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
    fn a_writer_in_the_background_ends_when_told_and_tells_what_failed() {
        let (_folder, path, records) = ring();
        let records = records.keep_appending().stop().unwrap();
        assert!(records.log().acknowledged() > 0);
        records.log().verify(&path).unwrap();
        let read_only = Records { file: File::open(&path).unwrap(), log: records.close() };
        let before = read_only.log().acknowledged();
        let writer = read_only.keep_appending();
        let error = format!("{:#}", writer.stop().unwrap_err());
        assert!(error.contains(&format!("after {before} records")), "{error}");
    }
}
