//! Turns a blank disk into the filesystem of a pool: format, mount at every start, mount.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use infra_api::PoolName;
use uuid::Uuid;

use super::{Disk, fstab, probe};

/// Directory of a pool in its filesystem. Without the mount it does not exist, so that nothing is written elsewhere.
const POOL_DIR: &str = "pool";

/// A pool to create on a disk.
#[derive(Debug, Clone)]
pub(crate) struct NewPool {
    /// Name of the pool.
    pub(crate) name: PoolName,
    /// The disk, as it was shown.
    pub(crate) disk: Disk,
    /// Where the filesystem is mounted.
    pub(crate) target: PathBuf,
    /// The file with the mounts of the host.
    pub(crate) fstab: PathBuf,
}

impl NewPool {
    /// Directory of the pool.
    pub(crate) fn path(&self) -> PathBuf {
        self.target.join(POOL_DIR)
    }

    /// Fails if the disk can't become this pool. Changes nothing.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let Self { disk, target, fstab, .. } = self;
        let device = disk.device.display();
        let reasons: Vec<String> = disk.unusable().iter().map(ToString::to_string).collect();
        ensure!(
            reasons.is_empty(),
            "{device} cannot become a pool: {}; nothing was changed. Use a blank disk, or mount the filesystem that is on it and \
             add a directory of it with `storage-infra pool add`",
            reasons.join("; ")
        );
        let has_files = fs::read_dir(target).map(|mut entries| entries.next().is_some()).unwrap_or(false);
        ensure!(
            !has_files,
            "{} is not empty: choose another --name or --mount-dir; nothing was changed",
            target.display()
        );
        ensure!(
            !fstab::mounts_at(&self.mounts()?, target),
            "{} has an entry for {} already: choose another --name or --mount-dir, or remove the entry; nothing was changed",
            fstab.display(),
            target.display()
        );
        Ok(())
    }

    fn mounts(&self) -> anyhow::Result<String> {
        match fs::read_to_string(&self.fstab) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            read => read.with_context(|| format!("cannot read {}", self.fstab.display())),
        }
    }

    /// Fails unless the device still is the disk that was shown, and still empty.
    fn check_again(&self) -> anyhow::Result<()> {
        let now = probe::find(&self.disk.device)?;
        ensure!(
            now.id == self.disk.id,
            "{} is another disk than before: its ID is {}, not {}; nothing was changed. Run `storage-infra pool discover`",
            self.disk.device.display(),
            now.id,
            self.disk.id
        );
        Self { disk: now, ..self.clone() }.check()
    }

    fn add_to_fstab(&self, filesystem: Uuid) -> anyhow::Result<()> {
        let entry = fstab::entry(self.name.as_str(), filesystem, &self.target);
        let addition = fstab::addition(&self.mounts()?, &entry);
        let write = || {
            let mut file = fs::OpenOptions::new().append(true).create(true).open(&self.fstab)?;
            file.write_all(addition.as_bytes())?;
            file.sync_all()
        };
        write().with_context(|| format!("cannot add an entry to {}", self.fstab.display()))
    }

    fn mount(&self) -> anyhow::Result<()> {
        let (device, target) = (&self.disk.device, &self.target);
        run(Command::new("mount").arg("--fstab").arg(&self.fstab).arg("--target").arg(target))?;
        ensure!(
            probe::is_mounted_at(device, target)?,
            "{} is not the filesystem at {}",
            device.display(),
            target.display()
        );
        Ok(())
    }
}

/// Formats the disk, and mounts it now and at every start. Immediately before, the disk is checked once more. A failure after
/// the format says what is left to do; nothing is undone.
pub(crate) fn prepare(new: &NewPool) -> anyhow::Result<()> {
    new.check_again()?;
    let filesystem = Uuid::new_v4();
    format(&new.disk.device, filesystem)?;
    let device = new.disk.device.display();
    mount_always(new, filesystem).with_context(|| {
        format!(
            "{device} now has the XFS filesystem {filesystem}, but is not a pool yet: mount it at {} by an entry in {}, make the \
             directory {}, and run `storage-infra pool add {} --path {}`",
            new.target.display(),
            new.fstab.display(),
            new.path().display(),
            new.name,
            new.path().display(),
        )
    })
}

/// mkfs.xfs opens the disk exclusively and refuses one with a known signature, because it is not forced.
fn format(device: &Path, filesystem: Uuid) -> anyhow::Result<()> {
    let options = format!("reflink=1,uuid={filesystem}");
    run(Command::new("mkfs.xfs").args(["-q", "-m", &options]).arg(device))
}

fn mount_always(new: &NewPool, filesystem: Uuid) -> anyhow::Result<()> {
    let make_dir = |path: &Path| {
        let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
        made.with_context(|| format!("cannot make {}", path.display()))
    };
    make_dir(&new.target)?;
    new.add_to_fstab(filesystem)?;
    new.mount()?;
    make_dir(&new.path())?;
    // Its units for the entries of fstab are made when it loads them.
    if Path::new("/run/systemd/system").exists() {
        run(Command::new("systemctl").arg("daemon-reload"))?;
    }
    Ok(())
}

/// Runs a program; an error has what it printed.
fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {program}: install it"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    bail!("{program} failed ({}): {}", output.status, text.trim())
}
