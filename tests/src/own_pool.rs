//! Pool with its own filesystem, whose free space only one scenario changes.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use infra_api::PoolName;
use lab::process::{command, run};

use crate::{PATIENCE, eventually};

/// Size of a pool's filesystem (sparse). Much smaller than the lab's pools, so that no other volume is placed there.
const BYTES: u64 = 1 << 30;

/// A pool of one scenario on its own filesystem, so that only the scenario changes its free space.
#[derive(Debug, Clone)]
pub struct OwnPool {
    /// Its name.
    pub name: PoolName,
    /// Its directory.
    pub path: PathBuf,
    mount: PathBuf,
    image: PathBuf,
    reflink: bool,
}

impl OwnPool {
    /// A pool with its image and mount point in a folder; not created yet.
    pub(crate) fn in_folder(folder: &Path, name: PoolName, reflink: bool) -> Self {
        let mount = folder.join(name.as_str());
        let image = folder.join(format!("{name}.xfs"));
        Self { path: mount.join("pool"), name, mount, image, reflink }
    }

    /// Mount point of its filesystem.
    pub(crate) fn mount(&self) -> &Path {
        &self.mount
    }

    fn hidden_path(&self) -> PathBuf {
        self.path.with_extension("away")
    }

    /// Moves its directory away.
    pub fn hide(&self) -> Result<()> {
        std::fs::rename(&self.path, self.hidden_path())
            .with_context(|| format!("cannot rename {}", self.path.display()))
    }

    /// Moves its directory back, if it is away.
    pub fn show(&self) -> Result<()> {
        match self.hidden_path().exists() {
            true => std::fs::rename(self.hidden_path(), &self.path)
                .with_context(|| format!("cannot restore {}", self.path.display())),
            false => Ok(()),
        }
    }

    /// Fills its filesystem up to `left` bytes with a file; returns the file.
    pub async fn fill_up_to(&self, left: u64) -> Result<PathBuf> {
        let stat = rustix::fs::statvfs(&self.mount)?;
        let taken = (stat.f_bavail * stat.f_frsize).checked_sub(left).context("the pool has less")?;
        let filler = self.mount.join("filler");
        run(command("fallocate", ["--length", &taken.to_string()]).arg(&filler)).await?;
        Ok(filler)
    }

    /// Creates and mounts its filesystem.
    pub(crate) async fn create(&self) -> Result<()> {
        std::fs::create_dir_all(&self.mount)?;
        std::fs::File::create(&self.image)?.set_len(BYTES)?;
        let reflink = format!("reflink={}", u8::from(self.reflink));
        run(command("mkfs.xfs", ["-q", "-m", &reflink]).arg(&self.image)).await?;
        run(command("mount", ["-o", "loop"]).arg(&self.image).arg(&self.mount)).await?;
        std::fs::create_dir(&self.path).with_context(|| format!("cannot make {}", self.path.display()))
    }

    /// Unmounts and removes its filesystem.
    pub(crate) async fn remove(&self) -> Result<()> {
        if std::fs::read_to_string("/proc/self/mounts")?.contains(&format!(" {} ", self.mount.display())) {
            // storage-infra may be reading it.
            eventually(&format!("{} unmounted", self.mount.display()), PATIENCE, || async {
                let unmounted = run(&mut command("umount", [&self.mount])).await;
                Ok(unmounted.map(drop).map_err(|error| format!("{error:#}")))
            })
            .await?;
        }
        std::fs::remove_dir(&self.mount)
            .with_context(|| format!("cannot remove {}", self.mount.display()))?;
        std::fs::remove_file(&self.image).with_context(|| format!("cannot remove {}", self.image.display()))
    }
}

/// A frozen filesystem (fsfreeze): writes block until this is dropped.
pub struct FrozenFilesystem(PathBuf);

impl Drop for FrozenFilesystem {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

/// Freezes the filesystem of a volume's file, so that a copy in it cannot complete.
pub fn freeze_filesystem_of(file: &Path) -> Result<FrozenFilesystem> {
    let dir = file.parent().context("a volume's file is in no directory")?;
    let status = Command::new("fsfreeze").arg("--freeze").arg(dir).status()?;
    ensure!(status.success(), "cannot freeze the filesystem of {}", dir.display());
    Ok(FrozenFilesystem(dir.to_owned()))
}
