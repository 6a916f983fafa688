//! This host as a node: what tells its loop devices from those of a host that plays virtual machines. See
//! [`super::loop_device`] and [`host_links`].

use std::io;
use std::path::{Path, PathBuf};

use host_links::{DeviceRecord, HostLinks};
use uuid::Uuid;

use super::{HypervisorError, Result};

/// The host on which the server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ThisHost {
    node: Uuid,
}

impl ThisHost {
    /// Reads the UUID of the host, or chooses it.
    pub(super) fn of(root: &Path) -> io::Result<Self> {
        Ok(Self { node: HostLinks::at(root).create_node()? })
    }

    pub(super) fn is(self, node: Uuid) -> bool {
        self.node == node
    }

    /// Fails for any other node. Nothing is known about another host: its disks may be in use there.
    pub(super) fn check(self, node: Uuid) -> Result<()> {
        if self.is(node) {
            return Ok(());
        }
        Err(HypervisorError::Unreachable(format!(
            "node {node} is another host than this one ({}): only a server that runs there can attach or detach its disks",
            self.node
        )))
    }

    /// Whether a link stands for the device that it points to now.
    pub(super) fn is_recorded(self, link: &Path, device: &Path) -> Result<bool> {
        let recorded = DeviceRecord::read(link).map_err(uncertain("read the record of", link))?;
        let Some(recorded) = recorded else { return Ok(false) };
        match DeviceRecord::of(&sysfs(device)) {
            Ok(now) => Ok(recorded == now),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(uncertain("identify", device)(error)),
        }
    }

    /// Records the device before its link is made.
    pub(super) fn record(self, link: &Path, device: &Path) -> Result<()> {
        DeviceRecord::of(&sysfs(device))
            .and_then(|record| record.write(link))
            .map_err(uncertain("record the device of", link))
    }

    /// Forgets the device after its link was removed.
    pub(super) fn forget(self, link: &Path) -> Result<()> {
        DeviceRecord::remove(link).map_err(uncertain("remove the record of", link))
    }
}

fn sysfs(device: &Path) -> PathBuf {
    Path::new("/sys/block").join(device.file_name().unwrap_or_default())
}

fn uncertain(action: &str, path: &Path) -> impl FnOnce(io::Error) -> HypervisorError {
    let what = format!("cannot {action} {}", path.display());
    move |error| HypervisorError::Uncertain(format!("{what}: {error}"))
}
