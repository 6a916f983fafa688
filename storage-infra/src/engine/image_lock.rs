//! Open file holders: which process or loop device has an image file open, according to the kernel.
//!
//! QEMU (`block/file-posix.c`) locks single bytes of an open image: byte 100 + n for each permission n that it uses,
//! byte 200 + n for each permission that it does not share. All are read locks of an open file description, so a test
//! for a write lock on these bytes conflicts with any of them. The kernel drops them when the last process with the
//! description ends, however it ends. Other hosts see them if the filesystem forwards locks, as NFS does unless mounted
//! with `nolock` or `local_lock`. QEMU holds no lock on the image of an incoming migration that has not completed, nor
//! with `locking=off`, which libvirt never sets.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The first byte that QEMU locks.
const FIRST_BYTE: libc::off_t = 100;
/// Number of bytes that QEMU may lock from there: a hundred of each kind.
const BYTE_COUNT: libc::off_t = 200;

/// The holder of an open image file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// A process holds QEMU's image lock. Lists the processes that have the file open, as far as they are visible here.
    Locked(Vec<Process>),
    /// A loop device of this host is backed by the image.
    Loop(PathBuf),
    /// Processes have the file open without a lock.
    Open(Vec<Process>),
    /// Clients of a Ceph cluster with these addresses have the image open for writing.
    Watching(Vec<String>),
}

/// A process that has an image open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Process ID on this host.
    pub pid: u32,
    /// Name of the program.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked(processes) if processes.is_empty() => {
                write!(f, "a process that is not visible on this host (it holds the image lock)")
            }
            Self::Locked(processes) => {
                write!(f, "{} (it holds the image lock)", names(processes))
            }
            Self::Open(processes) => f.write_str(&names(processes)),
            Self::Watching(clients) => write!(f, "the Ceph client {}", clients.join(", ")),
            Self::Loop(device) => write!(f, "the loop device {}", device.display()),
        }
    }
}

fn names(processes: &[Process]) -> String {
    let names = processes.iter().map(|one| format!("process {} ({})", one.pid, one.name));
    names.collect::<Vec<_>>().join(", ")
}

/// Like [`holder`], for a file that is about to be attached: all holders, and also processes that have it open without a lock, as far
/// as they are visible here. A lock that is expected is left out: then no process is searched for.
pub fn users(path: &Path, is_lock_expected: bool) -> io::Result<Vec<Holder>> {
    #[cfg(test)]
    if let Some(sim) = crate::simulation::current() {
        return Ok(sim.users(path, is_lock_expected));
    }
    let file = File::open(path)?;
    let image = file.metadata()?;
    let by_processes = match is_locked(&file)? {
        true if is_lock_expected => None,
        true => Some(Holder::Locked(openers(&image))),
        false => Some(openers(&image)).filter(|processes| !processes.is_empty()).map(Holder::Open),
    };
    let device = loop_device(path, &image)?.map(Holder::Loop);
    Ok(by_processes.into_iter().chain(device).collect())
}

/// The holder of the image at this path; `None` if the file is not open or does not exist.
///
/// Treat an error as if the image were open.
pub fn holder(path: &Path) -> io::Result<Option<Holder>> {
    #[cfg(test)]
    if let Some(sim) = crate::simulation::current() {
        return Ok(sim.holder(path));
    }
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

/// Whether another open file description holds a lock on the bytes that QEMU locks.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: FIRST_BYTE,
        l_len: BYTE_COUNT,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// The processes that have a file open, as far as they are visible here. The kernel does not tell which process owns a
/// lock of an open file description.
fn openers(image: &Metadata) -> Vec<Process> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let opener = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let process = entry.path();
        let has_it_open =
            pid != std::process::id() && has_open(&process, image)? && outlasts_exec(&process, image)?;
        let name = || fs::read_to_string(process.join("comm")).unwrap_or_default().trim().to_owned();
        has_it_open.then(|| Process { pid, name: name() })
    };
    processes.flatten().filter_map(opener).collect()
}

fn has_open(process: &Path, image: &Metadata) -> Option<bool> {
    let mut files = fs::read_dir(process.join("fd")).ok()?.flatten();
    Some(files.any(|file| is_open_as(process, &file, image)))
}

/// Whether a process has an image open that does not lose it with `exec`. A program that this process starts has the files
/// of this process until then.
fn outlasts_exec(process: &Path, image: &Metadata) -> Option<bool> {
    let program = |process: &Path| fs::read_link(process.join("exe"));
    let is_child = parent(process)? == std::process::id();
    let is_before_exec = is_child && program(process).ok() == program(Path::new("/proc/self")).ok();
    if is_before_exec { Some(false) } else { has_open(process, image) }
}

fn parent(process: &Path) -> Option<u32> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

/// Whether an open file of a process is an image. The kernel tells the inode number without access to the file's filesystem,
/// which may hang (`fdinfo`, Linux 5.14).
fn is_open_as(process: &Path, file: &fs::DirEntry, image: &Metadata) -> bool {
    // Sockets and pipes have no path.
    if !fs::read_link(file.path()).is_ok_and(|path| path.is_absolute()) {
        return false;
    }
    let info = fs::read_to_string(process.join("fdinfo").join(file.file_name())).unwrap_or_default();
    let inode = info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok());
    inode.is_none_or(|inode: u64| inode == image.ino())
        && fs::metadata(file.path()).is_ok_and(|meta| is_same(&meta, image))
}

/// The loop device of this host that is backed by an image.
fn loop_device(path: &Path, image: &Metadata) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        // Only a device in use has this file; it may disappear meanwhile.
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = Path::new(backing.trim_end_matches('\n'));
        let is_backed = match fs::metadata(backing) {
            Ok(meta) => is_same(&meta, image),
            // The path is not visible here (another mount namespace, or the file was unlinked): compare the file names.
            Err(_) => backing.file_name() == path.file_name(),
        };
        if is_backed {
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

    /// A `qemu-io` process that has an image open until it is dropped.
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
    fn a_qemu_process_is_reported_while_it_has_the_image_open_for_reading_or_writing() {
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
    fn a_loop_device_is_reported_and_a_missing_file_has_no_holder() {
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

    #[test]
    fn a_program_that_is_being_started_is_no_user_of_the_files_of_this_process() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(&dir);
        let open = File::open(&image).unwrap();
        std::thread::scope(|threads| {
            let starting = threads.spawn(|| {
                for _ in 0..400 {
                    assert!(Command::new("true").status().unwrap().success());
                }
            });
            while !starting.is_finished() {
                assert_eq!(users(&image, false).unwrap(), []);
            }
        });
        drop(open);
    }

    #[test]
    fn a_program_that_this_process_started_is_a_user_of_the_file_that_it_opened() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(&dir);
        let stdin = File::open(&image).unwrap();
        let mut child = Command::new("sleep").arg("60").stdin(stdin).spawn().unwrap();
        let found = users(&image, false);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.unwrap(), [Holder::Open(vec![Process { pid: child.id(), name: "sleep".into() }])]);
    }
}
