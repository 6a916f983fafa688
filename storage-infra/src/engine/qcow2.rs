//! qcow2 images: what a header says, and the conversion to a raw file with qemu-img.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{CopyProgress, EngineError, Result};

const MAGIC: &[u8; 4] = b"QFI\xfb";
/// Length of the fields of the header that are read.
const HEADER: usize = 80;
/// Longest name of a backing file that the format allows.
const MAX_NAME: u64 = 1023;
/// Incompatible feature: the data is in another file.
const EXTERNAL_DATA: u64 = 1 << 2;

/// Format of an image file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The bytes of the disk.
    Raw,
    /// qcow2, with a disk of this size.
    Qcow2 {
        /// Size of the disk in bytes.
        size: u64,
    },
}

/// Reads the format of an image. Fails with a reason if it depends on other files, which the image names: they may be
/// any file of this host.
pub fn format_of(file: &File) -> io::Result<Result<Format, String>> {
    let mut header = [0; HEADER];
    let length = file.read_at(&mut header, 0)?;
    Ok(decode(&header[..length]))
}

/// The name of the file below an image, which it was given when it was made. `None` if the file is no layer.
pub(super) fn backing_of(file: &File) -> io::Result<Option<String>> {
    let mut header = [0; HEADER];
    let length = file.read_at(&mut header, 0)?;
    if length < HEADER || !header.starts_with(MAGIC) {
        return Ok(None);
    }
    let (at, size) = (number(&header, 8), number(&header, 16) >> 32);
    if at == 0 || size > MAX_NAME {
        return Ok(None);
    }
    let mut name = vec![0; usize::try_from(size).unwrap_or_default()];
    file.read_exact_at(&mut name, at)?;
    Ok(Some(String::from_utf8_lossy(&name).into_owned()))
}

/// Eight bytes of a header.
fn number(header: &[u8], at: usize) -> u64 {
    header[at..at + 8].iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
}

fn decode(header: &[u8]) -> Result<Format, String> {
    if !header.starts_with(MAGIC) {
        return Ok(Format::Raw);
    }
    if header.len() < HEADER {
        return Err("it is a truncated qcow2 image".to_owned());
    }
    let (version, encryption) = (number(header, 4) >> 32, number(header, 32) >> 32);
    let (backing, size) = (number(header, 8), number(header, 24));
    let features = if version >= 3 { number(header, 72) } else { 0 };
    match (backing, encryption, features & EXTERNAL_DATA) {
        (0, 0, 0) if version >= 2 => Ok(Format::Qcow2 { size }),
        (0, 0, 0) => Err(format!("it is a qcow image of version {version}")),
        (0, 0, _) => Err("its data is in another file; convert it with `qemu-img convert` first".to_owned()),
        (0, ..) => Err("it is encrypted; convert it with `qemu-img convert` first".to_owned()),
        _ => Err("it has a backing file; convert it with `qemu-img convert` first".to_owned()),
    }
}

/// Converts a qcow2 image into an existing raw file of the right size that reads as zeros.
pub(super) fn convert(image: &Path, raw: &Path, size: u64, progress: &CopyProgress) -> Result<()> {
    let failed = |why: String| EngineError::Conversion(format!("cannot convert {}: {why}", image.display()));
    check(image)?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-p", "-n", "--target-is-zero", "-f", "qcow2", "-O", "raw"]).arg(image).arg(raw);
    let child = convert.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child =
        child.map_err(|error| failed(format!("qemu-img cannot be started: {error}; install qemu-utils")))?;
    if let Some(mut output) = child.stdout.take() {
        let (mut line, mut byte) = (Vec::new(), [0]);
        while matches!(output.read(&mut byte), Ok(1)) {
            if byte == *b"\r" {
                progress.set(done(&line).map_or(0, |share| (size as f64 * share) as u64));
                line.clear();
                if progress.proceed().is_err() {
                    let _ = child.kill();
                }
            } else {
                line.push(byte[0]);
            }
        }
    }
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    progress.proceed()?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match why.contains("No space left on device") {
        true => Err(EngineError::NoSpace(format!("cannot convert {}", image.display()))),
        false => Err(failed(why)),
    }
}

/// Fails if an image is damaged: qemu-img reads what is missing at the end of one as zeros.
fn check(image: &Path) -> Result<()> {
    let failed = |why: &str| EngineError::Conversion(format!("cannot convert {}: {why}", image.display()));
    let output = Command::new("qemu-img")
        .args(["check", "-q", "-f", "qcow2"])
        .arg(image)
        .stdin(Stdio::null())
        .output();
    let output = output
        .map_err(|error| failed(&format!("qemu-img cannot be started: {error}; install qemu-utils")))?;
    match output.status.code() {
        // 3: clusters that nothing uses.
        Some(0 | 3) => Ok(()),
        _ => Err(failed(&format!("it is damaged: {}", String::from_utf8_lossy(&output.stderr).trim()))),
    }
}

/// The share that is done, of a line such as `    (12.34/100%)`.
fn done(line: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(line).ok()?.trim();
    let percent: f64 = text.strip_prefix('(')?.split('/').next()?.parse().ok()?;
    Some((percent / 100.0).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an image with qemu-img.
    fn create(dir: &tempfile::TempDir, name: &str, arguments: &[&str]) -> File {
        let path = dir.path().join(name);
        let mut create = Command::new("qemu-img");
        let output =
            create.args(["create", "-q", "-f", "qcow2"]).args(arguments).arg(&path).arg("8M").output();
        assert!(output.as_ref().unwrap().status.success(), "{output:?}");
        File::open(path).unwrap()
    }

    #[test]
    fn an_image_that_depends_on_other_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str, arguments: &[&str]| format_of(&create(&dir, name, arguments)).unwrap();
        assert_eq!(of("plain", &[]), Ok(Format::Qcow2 { size: 8 << 20 }));
        assert_eq!(of("old", &["-o", "compat=0.10"]), Ok(Format::Qcow2 { size: 8 << 20 }));
        let base = dir.path().join("plain");
        let backed = of("backed", &["-F", "qcow2", "-b", base.to_str().unwrap()]);
        assert!(backed.unwrap_err().contains("backing file"));
        let data = dir.path().join("data");
        let external = of("external", &["-o", &format!("data_file={}", data.display())]);
        assert!(external.unwrap_err().contains("another file"));
        assert_eq!(decode(b"QFI"), Ok(Format::Raw));
        assert!(decode(b"QFI\xfb\0\0\0\x03").is_err());
        assert_eq!(decode(&[0; HEADER]), Ok(Format::Raw));
    }

    #[test]
    fn the_progress_of_a_conversion_is_read_from_its_output() {
        assert_eq!(done(b"    (12.50/100%)"), Some(0.125));
        for bad in [&b""[..], b"(x/100%)", b"\xff"] {
            assert_eq!(done(bad), None);
        }
    }
}
