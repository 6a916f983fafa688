//! The libvirtd of each host of a run, isolated from others on this machine.
//!
//! It runs in a mount namespace in which the run's folders hide every folder that libvirt uses, so that labs run side by
//! side and beside the system's libvirt, and in the [network namespace](super::network) of its VMs. QEMU runs with the
//! account of Debian's libvirt, which has no other access to the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use uuid::Uuid;

use super::account::{self, ACCOUNT};
use super::network;
use crate::cache;
use crate::host::Host;
use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;
use crate::ui::Ui;

/// Folders of the host, and the folders of the run that hide them.
const PRIVATE: [(&str, &str); 4] = [
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/etc/libvirt", "etc"),
];

const QEMU_CONF: &str = r#"security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
remember_owner = 0
max_core = 0
"#;

/// The URI of a host's libvirt.
pub fn uri(run: &Run, host: Host) -> String {
    format!("qemu+unix:///system?socket={}", socket(run, host).display())
}

fn socket(run: &Run, host: Host) -> PathBuf {
    host.socket_dir(run).join("libvirt-sock")
}

/// Folder of a host's libvirt; `run/qemu/NAME.pid` holds the PID of a domain.
pub(crate) fn folder(run: &Run, host: Host) -> PathBuf {
    run.path(host.own("libvirt"))
}

/// Starts the libvirtd of a host, which does not have these mounts, and returns when it responds.
pub async fn start(ui: &Ui, run: &Run, host: Host, hidden: &[PathBuf]) -> Result<()> {
    let group = account::ensure(ui).await?;
    let own = folder(run, host);
    let mut binds: Vec<(&str, PathBuf)> = PRIVATE.map(|(host, name)| (host, own.join(name))).to_vec();
    // QEMU's capabilities are the same for every run, and take seconds to probe.
    binds.push(("/var/cache/libvirt", cache::root()?.join("libvirt")));
    let mut script = String::from("set -e\n");
    for (host, private) in &binds {
        for folder in [Path::new(host), private] {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        script.push_str(&format!("mount --bind '{}' {host}\n", private.display()));
    }
    for mount in hidden {
        script.push_str(&format!("umount '{}'\n", mount.display()));
    }
    for (closed, open) in open_folders([run.dir(), &cache::root()?]) {
        script.push_str(&show_only(&own.join("open"), &closed, &open)?);
    }
    let config = own.join("etc/libvirtd.conf");
    // Without this, libvirt makes up another host UUID at each start if the host has none.
    let (uuid, sockets) = (Uuid::new_v4(), host.socket_dir(run));
    fs::create_dir_all(&sockets).with_context(|| format!("cannot make {}", sockets.display()))?;
    let text = format!(
        "host_uuid = \"{uuid}\"\nunix_sock_dir = \"{}\"\nunix_sock_rw_perms = \"0700\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n",
        sockets.display()
    );
    fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let account = format!("user = \"{ACCOUNT}\"\ngroup = \"{group}\"\n");
    fs::write(own.join("etc/qemu.conf"), account + QEMU_CONF)?;
    script
        .push_str("exec libvirtd --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirt/libvirtd.pid\n");
    // Pools that are mounted later must appear inside; mounts inside must not appear outside.
    let network = format!("--net={}", network::namespace(run, host).display());
    let argv =
        ["nsenter", &network, "unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", &script];
    let component = Component {
        argv: argv.map(ToOwned::to_owned).to_vec(),
        env: Default::default(),
        ready: Ready::Socket(socket(run, host)),
        http: None,
        grace: 10,
        driver: None,
    };
    let name = host.libvirtd();
    run.launch(&name, component).await?;
    // The socket exists before the drivers are loaded; a connection waits for them.
    run_helper(&mut command("virsh", ["--connect", &uri(run, host), "version"]))
        .await
        .with_context(|| run.explain(&name, "it does not respond"))
        .map(drop)
}

/// Folders that other accounts cannot enter, with the folders of `needed` inside.
fn open_folders<'a>(needed: impl IntoIterator<Item = &'a Path>) -> BTreeMap<PathBuf, BTreeSet<&'a Path>> {
    let mut folders: BTreeMap<PathBuf, BTreeSet<&Path>> = BTreeMap::new();
    for path in needed {
        // The outermost one: what is inside is hidden with it.
        let closed = path.ancestors().filter(|folder| is_closed(folder)).last();
        if let Some(closed) = closed {
            folders.entry(closed.to_owned()).or_default().insert(path);
        }
    }
    folders
}

fn is_closed(folder: &Path) -> bool {
    fs::metadata(folder).is_ok_and(|folder| folder.permissions().mode() & 0o001 == 0)
}

/// Script that replaces a folder in the mount namespace by one that anybody can enter and that has only `shown` inside.
fn show_only(stage: &Path, closed: &Path, shown: &BTreeSet<&Path>) -> Result<String> {
    fs::create_dir_all(stage).with_context(|| format!("cannot make {}", stage.display()))?;
    let stage = stage.display();
    let mut script = format!("mount -t tmpfs -o mode=755 none '{stage}'\n");
    for path in shown {
        let inside = path.strip_prefix(closed).unwrap_or(path).display();
        script.push_str(&format!(
            "mkdir -p '{stage}/{inside}'\nmount --rbind '{}' '{stage}/{inside}'\n",
            path.display()
        ));
    }
    script.push_str(&format!("mount --rbind '{stage}' '{}'\n", closed.display()));
    Ok(script)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_needed_folders_of_a_closed_one_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        let [home, open] = ["home", "open"].map(|name| dir.path().join(name));
        let [cache, run, other] = [home.join("private/cache"), home.join("run"), open.join("x")];
        for folder in [&cache, &run, &other] {
            fs::create_dir_all(folder).unwrap();
        }
        for (folder, mode) in [(dir.path(), 0o755), (&home, 0o700), (&home.join("private"), 0o750)] {
            fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
        }
        let folders = super::open_folders([cache.as_path(), &run, &other]);
        assert_eq!(folders.len(), 1);
        assert_eq!(folders[&home].iter().copied().collect::<Vec<_>>(), [cache.as_path(), &run]);
    }
}
