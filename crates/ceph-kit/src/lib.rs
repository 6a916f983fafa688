//! A small Ceph cluster of this host's programs: a monitor, a manager and three OSDs with BlueStore on sparse files, with
//! cephx. It listens on `[::1]` alone, on ports that do not change.
//!
//! This crate makes the files of a cluster and calls its programs. Who uses it runs the daemons. All calls block.

mod ports;

use std::fs;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use uuid::Uuid;

/// Numbers of the OSDs.
pub const OSDS: [u8; 3] = [0, 1, 2];
/// Placement groups of a pool.
const GROUPS: &str = "16";

/// Settings for a host with little memory and one disk, and for failures that are noticed within seconds.
const SETTINGS: &str = "public_addr = [::1]:0
cluster_addr = [::1]:0
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
log_to_stderr = false
ms_bind_ipv4 = false
ms_bind_ipv6 = true
ms_bind_msgr1 = false
mgr_initial_modules =
osd_pool_default_size = 3
osd_pool_default_min_size = 2
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
mon_allow_pool_delete = true
mon_data_avail_warn = 1
mon_data_avail_crit = 1
osd_heartbeat_interval = 1
osd_heartbeat_grace = 4
mon_osd_min_down_reporters = 1
mon_osd_reporter_subtree_level = osd
rbd_default_features = 61
osd_objectstore = bluestore
bluestore_block_create = true
bluestore_block_size = 8589934592
bluestore_cache_autotune = false
bluestore_cache_size = 67108864
";

/// A program of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Daemon {
    /// The monitor.
    Monitor,
    /// The manager.
    Manager,
    /// The OSD with this number.
    Osd(u8),
}

impl Daemon {
    /// All daemons, in the order of their start.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Monitor, Self::Manager].into_iter().chain(OSDS.map(Self::Osd))
    }

    /// Its name in the cluster.
    pub fn name(self) -> String {
        match self {
            Self::Monitor => "mon.a".to_owned(),
            Self::Manager => "mgr.x".to_owned(),
            Self::Osd(id) => format!("osd.{id}"),
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Monitor => "ceph-mon",
            Self::Manager => "ceph-mgr",
            Self::Osd(_) => "ceph-osd",
        }
    }

    fn id(self) -> String {
        self.name().split_off("osd.".len())
    }
}

/// The files of a cluster.
#[derive(Debug, Clone)]
pub struct Cluster {
    dir: PathBuf,
    sockets: PathBuf,
    first_port: u16,
}

impl Cluster {
    /// Makes the files of a cluster and of its monitor, in two existing folders. The path of the folder for sockets must be
    /// short.
    pub fn create(dir: &Path, sockets: &Path) -> Result<Self> {
        let cluster =
            Self { dir: dir.to_owned(), sockets: sockets.to_owned(), first_port: ports::first_free()? };
        let fsid = Uuid::new_v4().to_string();
        cluster.write_files(&fsid)?;
        cluster.write_keyring()?;
        cluster.format_monitor(&fsid)?;
        Ok(cluster)
    }

    /// A cluster that [`Self::create`] made in these folders.
    pub fn open(dir: &Path, sockets: &Path) -> Result<Self> {
        let file = dir.join("first-port");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let first_port = text.parse().with_context(|| format!("{} has no port", file.display()))?;
        Ok(Self { dir: dir.to_owned(), sockets: sockets.to_owned(), first_port })
    }

    /// The ports on which its daemons listen.
    pub fn ports(&self) -> Range<u16> {
        ports::all(self.first_port)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn monitor(&self) -> String {
        format!("[v2:[::1]:{}]", self.first_port)
    }

    fn write_files(&self, fsid: &str) -> Result<()> {
        let (root, sockets, monitor) = (self.dir.display(), self.sockets.display(), self.monitor());
        let mut config = format!(
            "[global]\nfsid = {fsid}\nmon_host = {monitor}\nkeyring = {root}/keyring\nrun_dir = {sockets}\n\
             admin_socket = {sockets}/$name.asok\npid_file = {root}/$name.pid\nlog_file = {root}/$name.log\n\
             crash_dir = {root}\n{SETTINGS}[mon]\nmon_data = {root}/mon.a\nmon_cluster_log_file = {root}/cluster.log\n\
             [mgr]\nmgr_data = {root}/mgr.x\n[osd]\nosd_data = {root}/osd.$id\n"
        );
        for daemon in Daemon::all() {
            let (name, ports) = (daemon.name(), ports::of(self.first_port, daemon));
            let (first, last) = (ports.start, ports.end - 1);
            config.push_str(&format!("[{name}]\nms_bind_port_min = {first}\nms_bind_port_max = {last}\n"));
            fs::create_dir(self.path(&name)).with_context(|| format!("cannot make {root}/{name}"))?;
        }
        // What clients need: they give up instead of waiting for monitors for minutes.
        let client =
            format!("[global]\nmon_host = {monitor}\nclient_mount_timeout = 3\nrados_mon_op_timeout = 3\n");
        let first_port = self.first_port.to_string();
        for (name, text) in [("ceph.conf", config), ("client.conf", client), ("first-port", first_port)] {
            fs::write(self.path(name), text).with_context(|| format!("cannot write {root}/{name}"))?;
        }
        Ok(())
    }

    /// Keys of the administrator and of all daemons.
    fn write_keyring(&self) -> Result<()> {
        let all = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"];
        let keyring = self.path("keyring");
        run(Command::new("ceph-authtool").arg("--create-keyring").arg(&keyring))?;
        fs::set_permissions(&keyring, fs::Permissions::from_mode(0o600))?;
        let daemons = Daemon::all().map(|daemon| match daemon {
            Daemon::Monitor => ("mon.".to_owned(), &all[..3]),
            _ => (daemon.name(), &all[..]),
        });
        for (user, caps) in daemons.chain([("client.admin".to_owned(), &all[..])]) {
            let mut tool = Command::new("ceph-authtool");
            run(tool.arg(&keyring).args(["--gen-key", "-n", &user]).args(caps))?;
        }
        Ok(())
    }

    fn format_monitor(&self, fsid: &str) -> Result<()> {
        let map = self.path("monmap");
        let mut tool = Command::new("monmaptool");
        tool.args(["--create", "--fsid", fsid, "--addv", "a", &self.monitor()]).arg(&map);
        run(tool.args(["--set-min-mon-release", "16"]))?;
        let mut format = self.program(Daemon::Monitor);
        format.arg("--mkfs").arg("--monmap").arg(&map).arg("--keyring").arg(self.path("keyring"));
        run(&mut format).map(drop)
    }

    // ---- daemons ----

    fn program(&self, daemon: Daemon) -> Command {
        let mut command = Command::new(daemon.program());
        command.arg("--conf").arg(self.path("ceph.conf")).args(["--id", &daemon.id()]);
        command
    }

    /// The command that runs a daemon in the foreground.
    pub fn command_line(&self, daemon: Daemon) -> Vec<String> {
        let program = self.program(daemon);
        let words = std::iter::once(program.get_program()).chain(program.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).chain(["--foreground".to_owned()]).collect()
    }

    /// The socket that exists while a daemon runs.
    pub fn socket(&self, daemon: Daemon) -> PathBuf {
        self.sockets.join(format!("{}.asok", daemon.name()))
    }

    /// Makes the files of an OSD. The monitor must answer.
    pub fn format_osd(&self, id: u8) -> Result<()> {
        let (uuid, number, daemon) = (Uuid::new_v4().to_string(), id.to_string(), Daemon::Osd(id));
        self.ceph(&["osd", "new", &uuid, &number])?;
        let host = format!("host=h{id}");
        self.ceph(&["osd", "crush", "add", &daemon.name(), "1.0", "root=default", &host])?;
        run(self.program(daemon).args(["--mkfs", "--osd-uuid", &uuid])).map(drop)
    }

    // ---- administration ----

    fn client(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("--conf").arg(self.path("ceph.conf")).args(arguments);
        if program == "ceph" {
            command.args(["--connect-timeout", "5"]);
        }
        command
    }

    /// Output of `ceph` as administrator.
    pub fn ceph(&self, arguments: &[&str]) -> Result<String> {
        run(&mut self.client("ceph", arguments))
    }

    /// Output of `rbd` as administrator.
    pub fn rbd(&self, arguments: &[&str]) -> Result<String> {
        run(&mut self.client("rbd", arguments))
    }

    /// Content of an image.
    pub fn export(&self, image: &str) -> Result<Vec<u8>> {
        output(&mut self.client("rbd", &["export", "--no-progress", image, "-"]))
    }

    /// Whether the monitor answers.
    pub fn answers(&self) -> bool {
        self.ceph(&["mon", "stat"]).is_ok()
    }

    /// Number of OSDs that run, as the monitor knows it.
    pub fn osds_up(&self) -> Result<u64> {
        let text = self.ceph(&["osd", "stat", "--format", "json"])?;
        let stat: serde_json::Value = serde_json::from_str(&text).context("osd stat")?;
        stat["num_up_osds"].as_u64().with_context(|| format!("no number of OSDs in {text}"))
    }

    /// Whether each placement group has all of its replicas.
    pub fn is_clean(&self) -> Result<bool> {
        let text = self.ceph(&["pg", "stat", "--format", "json"])?;
        let stat: serde_json::Value = serde_json::from_str(&text).context("pg stat")?;
        let states = stat["pg_summary"]["num_pg_by_state"].as_array().cloned().unwrap_or_default();
        let clean = |state: &serde_json::Value| {
            state["name"].as_str().is_some_and(|name| name.starts_with("active+clean"))
        };
        Ok(!states.is_empty() && states.iter().all(clean))
    }

    /// Creates a pool for RBD images. Its placement groups need OSDs that run.
    pub fn create_pool(&self, name: &str) -> Result<()> {
        self.ceph(&["osd", "pool", "create", name, GROUPS, GROUPS])?;
        self.ceph(&["osd", "pool", "application", "enable", name, "rbd"])?;
        self.rbd(&["pool", "init", name]).map(drop)
    }

    /// Creates a user with the rights in the guide for Ceph, for pools or a namespace of each, and its keyring.
    pub fn create_user(&self, name: &str, pools: &[&str], namespace: Option<&str>) -> Result<()> {
        let place = namespace.map(|one| format!(" namespace={one}")).unwrap_or_default();
        let profiles: Vec<String> =
            pools.iter().map(|pool| format!("profile rbd pool={pool}{place}")).collect();
        let (profile, user, keyring) = (profiles.join(", "), format!("client.{name}"), self.keyring_of(name));
        let caps = ["mon", "profile rbd", "osd", &profile, "mgr", &profile];
        let file = keyring.to_string_lossy();
        self.ceph(&[&["auth", "get-or-create", &user], &caps[..], &["-o", &file]].concat())?;
        fs::set_permissions(&keyring, fs::Permissions::from_mode(0o600))
            .with_context(|| format!("cannot protect {}", keyring.display()))
    }

    fn keyring_of(&self, user: &str) -> PathBuf {
        self.path(&format!("{user}.keyring"))
    }

    /// The configuration file of the administrator.
    pub fn admin_config(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// The path of a pool, or of a namespace of one, in the storage infra, with a user that [`Self::create_user`] created.
    pub fn pool_path(&self, user: &str, pool: &str, namespace: Option<&str>) -> String {
        let place = namespace.map(|one| format!("/{one}")).unwrap_or_default();
        let (conf, keyring) = (self.path("client.conf"), self.keyring_of(user));
        format!("rbd:{pool}{place}:id={user}:conf={}:keyring={}", conf.display(), keyring.display())
    }
}

fn run(command: &mut Command) -> Result<String> {
    String::from_utf8(output(command)?).with_context(|| format!("the output of {command:?}"))
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).env_remove("CEPH_ARGS").env_remove("CEPH_CONF").output();
    let output = output.with_context(|| {
        format!(
            "cannot run {:?} (Debian packages ceph-mon, ceph-mgr, ceph-osd, ceph-common)",
            command.get_program()
        )
    })?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed ({}): {}", output.status, errors.trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_has_a_name_an_id_and_a_socket() {
        let cluster = Cluster { dir: "/d".into(), sockets: "/s".into(), first_port: 20_000 };
        let names: Vec<String> = Daemon::all().map(Daemon::name).collect();
        assert_eq!(names, ["mon.a", "mgr.x", "osd.0", "osd.1", "osd.2"]);
        assert_eq!(cluster.socket(Daemon::Osd(2)), Path::new("/s/osd.2.asok"));
        let words = ["ceph-osd", "--conf", "/d/ceph.conf", "--id", "2", "--foreground"];
        assert_eq!(cluster.command_line(Daemon::Osd(2)), words);
    }

    #[test]
    fn the_path_of_a_pool_names_the_files_of_its_user() {
        let cluster = Cluster { dir: "/d".into(), sockets: "/s".into(), first_port: 20_000 };
        let path = "rbd:vms/a:id=own:conf=/d/client.conf:keyring=/d/own.keyring";
        assert_eq!(cluster.pool_path("own", "vms", Some("a")), path);
    }
}
