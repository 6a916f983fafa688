//! A small Ceph cluster of this host's programs: a monitor, a manager and three OSDs on sparse files, on loopback.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use infra_api::{EngineKind, PoolSpec};
use uuid::Uuid;

use super::{text, wait_for};

/// The cluster, stopped on drop.
pub struct Ceph {
    // Its path is short: those of sockets are limited.
    dir: tempfile::TempDir,
    daemons: Vec<Daemon>,
}

struct Daemon {
    program: &'static str,
    id: &'static str,
    child: Child,
}

const OSDS: [&str; 3] = ["0", "1", "2"];

/// Settings for a host with little memory and one disk, and for failures that are noticed within seconds.
const SETTINGS: &str = "public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
public_network = 127.0.0.0/8
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
auth_allow_insecure_global_id_reclaim = false
log_to_stderr = false
ms_bind_ipv6 = false
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
bluestore_block_size = 4294967296
bluestore_cache_autotune = false
bluestore_cache_size = 67108864
";

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

impl Ceph {
    /// Starts a cluster with the pool `vms`, and waits until it is healthy.
    pub fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("ceph").tempdir_in("/tmp").unwrap();
        let mut ceph = Self { dir, daemons: Vec::new() };
        ceph.configure();
        ceph.start_monitor();
        ceph.spawn("ceph-mgr", "x");
        for id in OSDS {
            let uuid = Uuid::new_v4().to_string();
            ceph.admin(&["osd", "new", &uuid, id]);
            ceph.admin(&[
                "osd",
                "crush",
                "add",
                &format!("osd.{id}"),
                "1.0",
                "root=default",
                &format!("host=h{id}"),
            ]);
            let mut format = ceph.program("ceph-osd", id);
            run(format.args(["--mkfs", "--osd-uuid", &uuid]));
            ceph.spawn("ceph-osd", id);
        }
        ceph.admin(&["osd", "pool", "create", "vms", "16", "16"]);
        ceph.admin(&["osd", "pool", "application", "enable", "vms", "rbd"]);
        ceph.wait_for("active placement groups", |ceph| ceph.admin(&["pg", "stat"]).contains("active+clean"));
        ceph.rbd(&["pool", "init", "vms"]);
        ceph
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn configure(&self) {
        let (root, fsid) = (self.dir.path().display(), Uuid::new_v4());
        let monitor = format!("[v2:127.0.0.1:{},v1:127.0.0.1:{}]", free_port(), free_port());
        for folder in ["mon", "mgr", "osd0", "osd1", "osd2"] {
            fs::create_dir(self.path(folder)).unwrap();
        }
        let config = format!(
            "[global]\nfsid = {fsid}\nmon_host = {monitor}\nkeyring = {root}/keyring\nrun_dir = {root}\n\
             admin_socket = {root}/$name.asok\npid_file = {root}/$name.pid\nlog_file = {root}/$name.log\n\
             crash_dir = {root}\n{SETTINGS}[mon.a]\nmon_data = {root}/mon\nmon_cluster_log_file = {root}/cluster.log\n\
             [mgr.x]\nmgr_data = {root}/mgr\n[osd]\nosd_data = {root}/osd$id\n"
        );
        fs::write(self.path("ceph.conf"), config).unwrap();
        // What clients need: they give up instead of waiting for monitors for minutes.
        let client =
            format!("[global]\nmon_host = {monitor}\nclient_mount_timeout = 3\nrados_mon_op_timeout = 3\n");
        fs::write(self.path("client.conf"), client).unwrap();
        let all = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"];
        let users = [("mon.", &all[..3]), ("client.admin", &all), ("mgr.x", &all), ("osd.0", &all)];
        let osds = [("osd.1", &all[..]), ("osd.2", &all[..])];
        let keyring = self.path("keyring");
        for (index, (user, caps)) in users.into_iter().chain(osds).enumerate() {
            let create: &[&str] = if index == 0 { &["--create-keyring"] } else { &[] };
            let mut tool = Command::new("ceph-authtool");
            run(tool.args(create).arg(&keyring).args(["--gen-key", "-n", user]).args(caps));
        }
        let map = self.path("monmap");
        let mut tool = Command::new("monmaptool");
        tool.args(["--create", "--fsid", &fsid.to_string(), "--addv", "a", &monitor]).arg(&map);
        run(tool.args(["--set-min-mon-release", "16"]));
        let mut format = self.program("ceph-mon", "a");
        run(format.args(["--mkfs", "--monmap", text(&map), "--keyring", text(&keyring)]));
    }

    fn program(&self, program: &str, id: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--conf").arg(self.path("ceph.conf")).args(["--id", id]);
        command
    }

    fn spawn(&mut self, program: &'static str, id: &'static str) {
        let output = fs::File::create(self.path(&format!("{program}.{id}.out"))).unwrap();
        let mut command = self.program(program, id);
        command.arg("--foreground").stdin(Stdio::null());
        let child = command.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
        self.daemons.push(Daemon { program, id, child });
    }

    fn kill(&mut self, program: &str, id: &str) {
        let at = self.daemons.iter().position(|one| (one.program, one.id) == (program, id)).unwrap();
        let mut daemon = self.daemons.remove(at);
        daemon.child.kill().unwrap();
        daemon.child.wait().unwrap();
    }

    pub fn start_monitor(&mut self) {
        self.spawn("ceph-mon", "a");
        self.wait_for("the monitor", |ceph| {
            ceph.command("ceph", &["mon", "stat"]).output().unwrap().status.success()
        });
    }

    pub fn kill_monitor(&mut self) {
        self.kill("ceph-mon", "a");
    }

    pub fn kill_osd(&mut self, id: &'static str) {
        self.kill("ceph-osd", id);
    }

    pub fn start_osd(&mut self, id: &'static str) {
        self.spawn("ceph-osd", id);
    }

    /// Waits until the cluster has this state.
    pub fn wait_for(&self, what: &str, so: impl Fn(&Self) -> bool) {
        wait_for(what, || so(self));
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("--conf").arg(self.path("ceph.conf")).args(arguments);
        if program == "ceph" {
            command.args(["--connect-timeout", "5"]);
        }
        command
    }

    /// Output of `ceph` as administrator.
    pub fn admin(&self, arguments: &[&str]) -> String {
        run(&mut self.command("ceph", arguments))
    }

    /// Output of `rbd` as administrator.
    pub fn rbd(&self, arguments: &[&str]) -> String {
        run(&mut self.command("rbd", arguments))
    }

    /// Content of an image.
    pub fn export(&self, image: &str) -> Vec<u8> {
        let output = self.command("rbd", &["export", "--no-progress", image, "-"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    }

    /// A client that has an image open for writing until it is dropped.
    pub fn open_image(&self, image: &str) -> ForeignClient {
        let url = format!("rbd:{image}:id=admin:conf={}", self.path("ceph.conf").display());
        let mut command = Command::new("qemu-io");
        command.args(["--format", "raw", &url]).stdin(Stdio::piped()).stdout(Stdio::null());
        let client = ForeignClient(command.spawn().unwrap());
        self.wait_for("a watcher", |ceph| ceph.rbd(&["status", image]).contains("watcher="));
        client
    }

    /// A user with the rights in the guide for Ceph, for the pool `vms` or a namespace of it.
    pub fn user(&self, name: &str, namespace: Option<&str>) {
        let place = namespace.map(|one| format!(" namespace={one}")).unwrap_or_default();
        let profile = format!("profile rbd pool=vms{place}");
        let keyring = self.path(&format!("{name}.keyring"));
        let user = format!("client.{name}");
        let caps = ["mon", "profile rbd", "osd", &profile, "mgr", &profile];
        self.admin(&[&["auth", "get-or-create", &user], &caps[..], &["-o", text(&keyring)]].concat());
    }

    /// The pool `vms`, or a namespace of it, as this user.
    pub fn pool_spec(&self, name: &str, namespace: Option<&str>) -> PoolSpec {
        let place = namespace.map(|one| format!("/{one}")).unwrap_or_default();
        let (conf, keyring) = (self.path("client.conf"), self.path(&format!("{name}.keyring")));
        let path = format!("rbd:vms{place}:id={name}:conf={}:keyring={}", conf.display(), keyring.display());
        PoolSpec {
            engine: EngineKind::Rbd,
            path,
            labels: infra_api::Labels::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        }
    }
}

/// A qemu-io that has an image open.
pub struct ForeignClient(Child);

impl Drop for ForeignClient {
    fn drop(&mut self) {
        // At the end of its input it closes the image.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            let _ = daemon.child.kill();
            let _ = daemon.child.wait();
        }
    }
}
