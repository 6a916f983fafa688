//! A small Ceph cluster of this host's programs, which ends with the test.

use std::fs;
use std::process::{Child, Command, ExitStatus, Stdio};

use ceph_kit::{Cluster, Daemon, OSDS};
use infra_api::{EngineKind, PoolSpec};

use super::wait_for;

/// The cluster, stopped on drop.
pub struct Ceph {
    // Its path is short: those of sockets are limited.
    dir: tempfile::TempDir,
    cluster: Cluster,
    daemons: Vec<(Daemon, Child)>,
}

impl Ceph {
    /// Starts a cluster with the pool `vms`, and waits until it is healthy.
    pub fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("ceph").tempdir_in("/tmp").unwrap();
        let cluster = Cluster::create(dir.path(), dir.path()).unwrap();
        let mut ceph = Self { dir, cluster, daemons: Vec::new() };
        ceph.start_monitor();
        ceph.spawn(Daemon::Manager);
        for id in OSDS {
            ceph.cluster.format_osd(id).unwrap();
            ceph.start_osd(id);
        }
        ceph.wait_for("the OSDs", |ceph| ceph.cluster.osds_up().unwrap() == OSDS.len() as u64);
        ceph.cluster.create_pool("vms").unwrap();
        ceph.wait_for("active placement groups", |ceph| ceph.cluster.is_clean().unwrap());
        ceph
    }

    fn spawn(&mut self, daemon: Daemon) {
        let output = fs::File::create(self.dir.path().join(format!("{}.out", daemon.name()))).unwrap();
        let words = self.cluster.command_line(daemon);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        let child = command.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
        self.daemons.push((daemon, child));
    }

    fn kill(&mut self, daemon: Daemon) {
        let at = self.daemons.iter().position(|(one, _)| *one == daemon).unwrap();
        let (_, mut child) = self.daemons.remove(at);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn start_monitor(&mut self) {
        self.spawn(Daemon::Monitor);
        self.wait_for("the monitor", |ceph| ceph.cluster.answers());
    }

    pub fn kill_monitor(&mut self) {
        self.kill(Daemon::Monitor);
    }

    pub fn kill_osd(&mut self, id: u8) {
        self.kill(Daemon::Osd(id));
    }

    pub fn start_osd(&mut self, id: u8) {
        self.spawn(Daemon::Osd(id));
    }

    /// Waits until the cluster has this state.
    pub fn wait_for(&self, what: &str, so: impl Fn(&Self) -> bool) {
        wait_for(what, || so(self));
    }

    /// Output of `ceph` as administrator.
    pub fn admin(&self, arguments: &[&str]) -> String {
        self.cluster.ceph(arguments).unwrap()
    }

    /// Output of `rbd` as administrator.
    pub fn rbd(&self, arguments: &[&str]) -> String {
        self.cluster.rbd(arguments).unwrap()
    }

    /// Content of an image.
    pub fn export(&self, image: &str) -> Vec<u8> {
        self.cluster.export(image).unwrap()
    }

    /// The name of an image for QEMU, as administrator.
    fn url(&self, image: &str) -> String {
        format!("rbd:{image}:id=admin:conf={}", self.cluster.admin_config().display())
    }

    /// Writes 1 MiB to an image.
    pub fn write(&self, image: &str, pattern: u8, at: u64) {
        let write = format!("write -P {pattern} {at} 1M");
        let mut command = Command::new("qemu-io");
        command.args(["--format", "raw", &self.url(image), "-c", &write]).stdout(Stdio::null());
        assert!(command.status().unwrap().success());
    }

    /// A client that has an image open for writing until it is dropped.
    pub fn open_image(&self, image: &str) -> ForeignClient {
        let url = self.url(image);
        let mut command = Command::new("qemu-io");
        command.args(["--format", "raw", &url]).stdin(Stdio::piped()).stdout(Stdio::null());
        let client = ForeignClient(command.spawn().unwrap());
        self.wait_for("a watcher", |ceph| ceph.rbd(&["status", image]).contains("watcher="));
        client
    }

    /// A user with the rights in the guide for Ceph, for the pool `vms` or a namespace of it.
    pub fn user(&self, name: &str, namespace: Option<&str>) {
        self.user_of(name, "vms", namespace);
    }

    /// The same, for another pool.
    pub fn user_of(&self, name: &str, pool: &str, namespace: Option<&str>) {
        self.cluster.create_user(name, &[pool], namespace).unwrap();
    }

    /// Creates another pool.
    pub fn create_pool(&self, name: &str) {
        self.cluster.create_pool(name).unwrap();
    }

    /// Gives all OSDs a device class, and limits the pool `vms` to it.
    pub fn limit_to_class(&self, class: &str) {
        for id in OSDS {
            let id = id.to_string();
            self.admin(&["osd", "crush", "rm-device-class", &id]);
            self.admin(&["osd", "crush", "set-device-class", class, &id]);
        }
        self.admin(&["osd", "crush", "rule", "create-replicated", "fast", "default", "osd", class]);
        self.admin(&["osd", "pool", "set", "vms", "crush_rule", "fast"]);
    }

    /// Runs `rbd` as a user.
    pub fn as_user(&self, name: &str, arguments: &[&str]) -> ExitStatus {
        let file = |name: &str| self.dir.path().join(name);
        let mut command = Command::new("rbd");
        command.args(["--id", name, "--conf"]).arg(file("client.conf")).arg("--keyring");
        command.arg(file(&format!("{name}.keyring"))).args(arguments).status().unwrap()
    }

    /// The pool `vms`, or a namespace of it, as this user.
    pub fn pool_spec(&self, name: &str, namespace: Option<&str>) -> PoolSpec {
        self.pool_spec_of(name, "vms", namespace)
    }

    /// The same, for another pool.
    pub fn pool_spec_of(&self, name: &str, pool: &str, namespace: Option<&str>) -> PoolSpec {
        PoolSpec {
            engine: EngineKind::Rbd,
            path: self.cluster.pool_path(name, pool, namespace),
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
        for (_, daemon) in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
