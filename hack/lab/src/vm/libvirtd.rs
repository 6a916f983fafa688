//! The run's own libvirtd, isolated from others on the host.
//!
//! It runs in a mount namespace in which the run's folders hide every folder that libvirt uses, so that labs run side by
//! side and beside the system's libvirt.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use uuid::Uuid;

use crate::cache;
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

/// Debian's libvirtd does not start unless this account exists, even if QEMU runs as root.
const ACCOUNT: &str = "libvirt-qemu";

const QEMU_CONF: &str = r#"user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
remember_owner = 0
max_core = 0
"#;

/// The URI of a run's libvirt.
pub fn uri(run: &Run) -> String {
    format!("qemu+unix:///system?socket={}", socket(run).display())
}

fn socket(run: &Run) -> PathBuf {
    run.socket_dir().join("libvirt-sock")
}

/// Folder of the run's libvirt; `run/qemu/NAME.pid` holds the PID of a domain.
pub(crate) fn folder(run: &Run) -> PathBuf {
    run.path("libvirt")
}

/// Starts libvirtd and returns when it responds.
pub async fn start(ui: &Ui, run: &Run) -> Result<()> {
    ensure_account(ui).await?;
    let own = folder(run);
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
    let config = own.join("etc/libvirtd.conf");
    // Without this, libvirt makes up another host UUID at each start if the host has none.
    let host = Uuid::new_v4();
    let text = format!(
        "host_uuid = \"{host}\"\nunix_sock_dir = \"{}\"\nunix_sock_rw_perms = \"0700\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n",
        run.socket_dir().display()
    );
    fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    fs::write(own.join("etc/qemu.conf"), QEMU_CONF)?;
    script
        .push_str("exec libvirtd --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirt/libvirtd.pid\n");
    // Pools that are mounted later must appear inside; mounts inside must not appear outside.
    let argv = ["unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", &script];
    let component = Component {
        argv: argv.map(ToOwned::to_owned).to_vec(),
        env: Default::default(),
        ready: Ready::Socket(socket(run)),
        http: None,
        grace: 10,
        driver: None,
    };
    run.launch("libvirtd", component).await?;
    // The socket exists before the drivers are loaded; a connection waits for them.
    run_helper(&mut command("virsh", ["--connect", &uri(run), "version"]))
        .await
        .with_context(|| run.explain("libvirtd", "it does not respond"))
        .map(drop)
}

async fn ensure_account(ui: &Ui) -> Result<()> {
    let missing =
        async |database: &str| run_helper(&mut command("getent", [database, ACCOUNT])).await.is_err();
    let mut commands: Vec<Vec<&str>> = Vec::new();
    if missing("group").await {
        commands.push(vec!["groupadd", "--system", ACCOUNT]);
    }
    if missing("passwd").await {
        let shell = "/usr/sbin/nologin";
        commands.push(vec![
            "useradd",
            "--system",
            "--no-create-home",
            "--gid",
            ACCOUNT,
            "--shell",
            shell,
            ACCOUNT,
        ]);
    }
    for words in commands {
        ui.line(format!("libvirt needs the account {ACCOUNT}; running: {}", words.join(" ")));
        run_helper(&mut command(words[0], &words[1..])).await?;
    }
    Ok(())
}
