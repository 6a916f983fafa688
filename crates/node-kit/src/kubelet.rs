//! kubelet's directory layout: its root directory and the staging paths of each driver.

use std::path::{Component, Path, PathBuf};

/// Directory of staged CSI volumes below kubelet's root directory: `DRIVER/HASH/globalmount` (Kubernetes,
/// `pkg/volume/csi`, `makeDeviceMountPath`).
const STAGING: &str = "plugins/kubernetes.io/csi";

/// kubelet's root directory and the driver names that this program serves.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// Root directory, symlinks resolved.
    pub dir: PathBuf,
    /// The driver's own name and the legacy name, if configured.
    pub drivers: Vec<String>,
}

impl Kubelet {
    /// Returns the driver name whose volumes kubelet stages at this path, or None if it is not a staging path of the driver.
    pub fn staged_under(&self, path: &Path) -> Option<&str> {
        let below = path.strip_prefix(self.dir.join(STAGING)).ok()?;
        let parts: Vec<_> = below.components().map(Component::as_os_str).collect();
        let [driver, _, last] = parts.as_slice() else { return None };
        let known = self.drivers.iter().find(|known| *driver == known.as_str())?;
        (*last == "globalmount").then_some(known)
    }

    /// UID of the pod to which a volume is published at this path: kubelet has a directory per pod, and for block volumes one per
    /// volume (Kubernetes, `pkg/kubelet/config`, and `pkg/volume/csi`, `getPublishPath`).
    pub(crate) fn pod_of<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let below = path.strip_prefix(&self.dir).ok()?;
        let parts: Vec<&str> =
            below.components().map(|part| part.as_os_str().to_str()).collect::<Option<_>>()?;
        match parts.as_slice() {
            ["pods", uid, ..] => Some(uid),
            ["plugins", "kubernetes.io", "csi", "volumeDevices", "publish", _, uid] => Some(uid),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_of_a_published_volume_is_in_its_path() {
        let kubelet = Kubelet { dir: PathBuf::from("/k"), drivers: Vec::new() };
        for (path, pod) in [
            ("/k/pods/u1/volumes/kubernetes.io~csi/pvc-1/mount", Some("u1")),
            ("/k/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/u2", Some("u2")),
            ("/k/plugins/kubernetes.io/csi/own/5f0a/globalmount", None),
            ("/elsewhere/pods/u1/mount", None),
        ] {
            assert_eq!(kubelet.pod_of(Path::new(path)), pod, "{path}");
        }
    }

    #[test]
    fn only_staging_paths_of_served_drivers_have_a_driver_name() {
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
