//! Who has an image file, by what the kernel knows: QEMU's own image lock, and loop devices.
//!
//! QEMU (`block/file-posix.c`) locks single bytes of an image that it has: byte 100 + n for each permission n that it
//! uses, byte 200 + n for each that it does not share. All are read locks of an open file description, so that somebody
//! who asks for a write lock on these bytes meets any of them. They are gone as soon as the last process that has the
//! description is, however it ended; and they are seen from other hosts too where the filesystem passes locks on, as NFS
//! does unless it is mounted with `nolock` or `local_lock`. QEMU has no lock on an image of a migration that has not come
//! in yet, nor where it was told `locking=off`, which libvirt never does.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The first byte that QEMU locks.
const FIRST: libc::off_t = 100;
/// How many bytes QEMU may lock from there on: a hundred for each kind.
const BYTES: libc::off_t = 200;

/// Who has an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Somebody holds QEMU's image lock.
    Locked(Vec<Process>),
    /// A loop device of this host is backed by the image.
    Loop(PathBuf),
}

/// A process that has an image open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number on this host.
    pub pid: u32,
    /// The program's name.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked(processes) if processes.is_empty() => {
                write!(f, "a process that is not seen from here (it holds the image lock)")
            }
            Self::Locked(processes) => {
                let names: Vec<String> =
                    processes.iter().map(|one| format!("process {} ({})", one.pid, one.name)).collect();
                write!(f, "{} (it holds the image lock)", names.join(", "))
            }
            Self::Loop(device) => write!(f, "the loop device {}", device.display()),
        }
    }
}

/// Who has the image at this path. None where nobody has, and where there is no such file.
///
/// Fails where that cannot be told, which must be taken as if somebody had it.
pub fn holder(path: &Path) -> io::Result<Option<Holder>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let image = file.metadata()?;
    if is_locked(&file)? {
        return Ok(Some(Holder::Locked(openers(&image))));
    }
    Ok(loop_device(path, &image)?.map(Holder::Loop))
}

/// Whether anybody but this process holds a lock on the bytes that QEMU locks.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: FIRST,
        l_len: BYTES,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// The processes that have a file open, as far as they are seen from here. A lock of an open file description says
/// nothing of its process.
fn openers(image: &Metadata) -> Vec<Process> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let opener = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let mut files = fs::read_dir(entry.path().join("fd")).ok()?.flatten();
        let has = pid != std::process::id()
            && files.any(|file| fs::metadata(file.path()).is_ok_and(|meta| is_same(&meta, image)));
        let name = || fs::read_to_string(entry.path().join("comm")).unwrap_or_default().trim().to_owned();
        has.then(|| Process { pid, name: name() })
    };
    processes.flatten().filter_map(opener).collect()
}

/// The loop device of this host that is backed by an image.
fn loop_device(path: &Path, image: &Metadata) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        // Only a device that is in use has it; it may go away meanwhile.
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = Path::new(backing.trim_end_matches('\n'));
        let is_it = match fs::metadata(backing) {
            Ok(meta) => is_same(&meta, image),
            // Set up under another root, or the file's name is gone: what is left of its path must do.
            Err(_) => backing.file_name() == path.file_name(),
        };
        if is_it {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// A real QEMU program that has an image until it is dropped.
    struct Qemu(Child);

    impl Qemu {
        fn open(image: &Path, more: &[&str]) -> Self {
            let mut command = Command::new("qemu-io");
            command.args(["--format", "raw"]).args(more).arg(image);
            let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let qemu = Self(child);
            let start = Instant::now();
            while holder(image).unwrap().is_none() {
                assert!(start.elapsed() < Duration::from_secs(30), "qemu-io takes no lock");
                std::thread::sleep(Duration::from_millis(5));
            }
            qemu
        }
    }

    impl Drop for Qemu {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn image(dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join("v.raw");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        path
    }

    #[test]
    fn a_qemu_that_has_an_image_is_named_until_it_is_gone_whether_it_writes_or_reads() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(&dir);
        assert_eq!(holder(&image).unwrap(), None);
        for how in [&[][..], &["--read-only"]] {
            let qemu = Qemu::open(&image, how);
            let Some(Holder::Locked(processes)) = holder(&image).unwrap() else { panic!("{how:?}") };
            assert_eq!(processes, [Process { pid: qemu.0.id(), name: "qemu-io".into() }], "{how:?}");
            drop(qemu);
            assert_eq!(holder(&image).unwrap(), None, "{how:?}");
        }
    }

    #[test]
    fn a_loop_device_has_its_image_and_what_is_not_there_nobody_has() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(&dir);
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&image).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        let found = holder(&image);
        assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
        assert_eq!(found.unwrap(), Some(Holder::Loop(device)));
        assert_eq!(holder(&dir.path().join("w.raw")).unwrap(), None);
    }
}
