//! Where kubelet keeps volumes: its folder, and in it the staging paths of each driver.

use std::path::{Component, Path, PathBuf};

/// Where kubelet stages volumes of CSI drivers, below its folder: `DRIVER/HASH/globalmount` (Kubernetes,
/// `pkg/volume/csi`, `makeDeviceMountPath`).
const STAGING: &str = "plugins/kubernetes.io/csi";

/// kubelet's folder, and the names under which the driver serves it.
#[derive(Debug, Clone)]
pub(crate) struct Kubelet {
    /// The folder, symlinks followed.
    pub(crate) dir: PathBuf,
    /// The driver's own name, and the older one, where there is one.
    pub(crate) drivers: Vec<String>,
}

impl Kubelet {
    /// Under which of the driver's names a volume is staged at this path; None where it is no staging path of ours.
    pub(crate) fn staged_under(&self, path: &Path) -> Option<&str> {
        let below = path.strip_prefix(self.dir.join(STAGING)).ok()?;
        let parts: Vec<_> = below.components().map(Component::as_os_str).collect();
        let [driver, _, last] = parts.as_slice() else { return None };
        let known = self.drivers.iter().find(|known| *driver == known.as_str())?;
        (*last == "globalmount").then_some(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_staging_path_tells_the_drivers_name_and_nothing_else_does() {
        let drivers = vec!["own".to_owned(), "old".to_owned()];
        let kubelet = Kubelet { dir: PathBuf::from("/k"), drivers };
        let under = |path: &str| kubelet.staged_under(Path::new(path)).map(str::to_owned);
        assert_eq!(under("/k/plugins/kubernetes.io/csi/own/5f0a/globalmount").as_deref(), Some("own"));
        assert_eq!(under("/k/plugins/kubernetes.io/csi/old/5f0a/globalmount").as_deref(), Some("old"));
        for path in [
            "/k/plugins/kubernetes.io/csi/another/5f0a/globalmount",
            "/k/plugins/kubernetes.io/csi/own/5f0a/globalmount/below",
            "/k/plugins/kubernetes.io/csi/own/5f0a",
            "/k/pods/1/volumes/kubernetes.io~csi/own/mount",
            "/elsewhere/plugins/kubernetes.io/csi/own/5f0a/globalmount",
        ] {
            assert_eq!(under(path), None, "{path}");
        }
    }
}
