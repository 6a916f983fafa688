//! A real server process with its own directory, cleaned up on drop.
#![allow(unreachable_pub, reason = "helpers of tests are tests")]

mod catalog_file;
#[cfg(feature = "ceph-tests")]
pub mod ceph;
pub use libvirt_kit as libvirtd;
mod objects;
pub mod relay;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use infra_api::{
    Client, ClientError, ClientOptions, EngineKind, Labels, NodeSpec, PoolSpec, ProblemCode, Role, VolumeId,
};
use uuid::Uuid;

pub use catalog_file::*;
pub use objects::*;

pub const BINARY: &str = env!("CARGO_BIN_EXE_storage-infra");
pub const MIB: u64 = 1 << 20;
/// More than any call that can complete at once takes, also when a slow disk must write hundreds of MiB for it.
pub const SOON: Duration = PATIENCE;

/// A directory with certificates, a catalog, a pool and the links to loop devices.
pub struct Site {
    mounts: Vec<PathBuf>,
    /// URI of the libvirtd that runs the domains; without it, the loop hypervisor is used.
    pub libvirt: Option<String>,
    /// Flags of the server in addition to those that it needs.
    pub flags: Vec<String>,
    /// Environment variables of the server.
    pub env: Vec<(&'static str, String)>,
    dir: tempfile::TempDir,
}

/// A frozen filesystem.
pub struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

/// Suffix of the images of mounted filesystems.
const IMAGE: &str = "filesystem";
/// Size of the filesystems of [`Site::mount`]. Sparse: only written blocks take space.
pub const FILESYSTEM: u64 = 8 << 30;
/// More than any background operation takes.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A server of a site.
pub struct Server {
    child: Child,
    pub api: SocketAddr,
    pub ops: SocketAddr,
    pub client: Client,
    /// Its log, by line.
    log: Arc<Mutex<Vec<serde_json::Value>>>,
}

pub fn run(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).output().unwrap()
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

impl Site {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let site = Self { mounts: Vec::new(), libvirt: None, flags: Vec::new(), env: Vec::new(), dir };
        let pki = site.path("pki");
        let output = run(&["pki", "init", "--dir", text(&pki), "--host", "127.0.0.1"]);
        assert!(output.status.success(), "{output:?}");
        fs::create_dir(site.path("pool")).unwrap();
        site
    }

    /// A site whose pool is on a filesystem with reflink.
    pub fn reflink() -> Self {
        let mut site = Self::new();
        site.mount("pool", &["mkfs.xfs", "-q", "-m", "reflink=1"]);
        site
    }

    /// A site whose pool is on a filesystem without reflink.
    pub fn no_reflink() -> Self {
        let mut site = Self::new();
        site.mount("pool", &["mkfs.ext4", "-q", "-F"]);
        site
    }

    /// Mounts a new filesystem on a directory of this site until the site is dropped.
    pub fn mount(&mut self, name: &str, make: &[&str]) {
        self.mount_of_size(name, make, FILESYSTEM);
    }

    /// The same, with this size.
    pub fn mount_of_size(&mut self, name: &str, make: &[&str], bytes: u64) {
        let (dir, file) = (self.path(name), self.path(&format!("{name}.{IMAGE}")));
        fs::create_dir_all(&dir).unwrap();
        fs::File::create(&file).unwrap().set_len(bytes).unwrap();
        assert!(Command::new(make[0]).args(&make[1..]).arg(&file).status().unwrap().success());
        self.mount_again(name);
        self.mounts.push(dir);
    }

    /// Unmounts a filesystem lazily, also while a server uses its pool there.
    pub fn unmount(&self, name: &str) {
        assert!(Command::new("umount").arg("--lazy").arg(self.path(name)).status().unwrap().success());
    }

    /// Mounts an unmounted filesystem again, as soon as no process has it open.
    pub fn mount_again(&self, name: &str) {
        let (dir, file) = (self.path(name), self.path(&format!("{name}.{IMAGE}")));
        wait_for(&format!("{} is not in use", file.display()), || self.backing_devices(&file) == 0);
        let mut mount = Command::new("mount");
        assert!(mount.args(["-o", "loop"]).arg(&file).arg(&dir).status().unwrap().success());
    }

    fn backing_devices(&self, file: &Path) -> usize {
        let output =
            Command::new("losetup").args(["--noheadings", "--associated"]).arg(file).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    }

    /// Remounts a filesystem of this site `ro` or `rw`, as soon as the server writes no record there.
    pub async fn remount(&self, name: &str, how: &str) {
        let how = format!("remount,{how}");
        until("the filesystem is remounted", async || {
            Command::new("mount").args(["-o", &how]).arg(self.path(name)).status().unwrap().success()
        })
        .await;
    }

    /// Sets the simulated power state of a node.
    pub fn set_power(&self, node: Uuid, state: &str) {
        // Atomically: the server may read it at the same time.
        let (written, file) = (self.path("state"), self.path("by-id").join(format!("{node}.state")));
        fs::write(&written, state).unwrap();
        fs::rename(written, file).unwrap();
    }

    /// Freezes the pool's filesystem until the result is dropped: writers block.
    pub fn freeze(&self) -> Frozen {
        let pool = self.path("pool");
        assert!(Command::new("fsfreeze").arg("--freeze").arg(&pool).status().unwrap().success());
        Frozen(pool)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command that serves this site on free ports.
    fn serve(&self) -> Command {
        self.serve_over("data")
    }

    /// The same, with a data directory of this name.
    fn serve_over(&self, data: &str) -> Command {
        let mut serve = Command::new(BINARY);
        serve
            .args([
                "serve",
                "--log-format",
                "json",
                "--listen",
                "127.0.0.1:0",
                "--http-listen",
                "127.0.0.1:0",
            ])
            .args(["--data-dir", text(&self.path(data)), "--hypervisor", &self.hypervisor()])
            .args([
                "--tls-cert",
                text(&self.path("pki/server.crt")),
                "--tls-key",
                text(&self.path("pki/server.key")),
            ])
            .args(["--client-ca", text(&self.path("pki/ca.crt")), "--clients-without-role", "refuse"])
            .args(&self.flags)
            .envs(self.env.iter().cloned())
            .env("NESTOR_FAIL_POINTS", self.path("points"))
            .stderr(Stdio::piped());
        serve
    }

    fn hypervisor(&self) -> String {
        match &self.libvirt {
            Some(uri) => format!("here=libvirt:{uri}"),
            None => format!("here=loop:{}", self.path("by-id").display()),
        }
    }

    /// The error of a server that must refuse to serve this site.
    pub fn refused(&self) -> String {
        let output = self.serve().output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Runs `storage-infra recover` on this site; returns its exit code and output.
    pub fn recover(&self, arguments: &[&str]) -> (i32, String) {
        let data = self.path("data");
        let hypervisor = self.hypervisor();
        let fixed = ["recover", "--data-dir", text(&data), "--hypervisor", &hypervisor];
        let output = run(&[&fixed, arguments].concat());
        let said = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8(said).unwrap())
    }

    /// Makes the server crash when it passes this fail point for the n-th time from now.
    pub fn arm(&self, point: &str, time: usize) {
        fs::create_dir_all(self.path("points")).unwrap();
        fs::write(self.path("points/armed"), format!("{point} {time}")).unwrap();
    }

    /// Withdraws [`Site::arm`]. False if the server has crashed there.
    pub fn disarm(&self) -> bool {
        fs::remove_file(self.path("points/armed")).is_ok()
    }

    /// Makes a write of the server report an error: `<write>.done` or `<write>.undone`, the n-th time from now.
    pub fn fail(&self, write: &str, time: usize) {
        fs::create_dir_all(self.path("points")).unwrap();
        fs::write(self.path("points/fail"), format!("{write} {time}")).unwrap();
    }

    /// Whether that write has not come yet.
    pub fn still_fails(&self) -> bool {
        self.path("points/fail").exists()
    }

    /// Records the fail points that the server passes from now on.
    pub fn record_fail_points(&self) {
        fs::create_dir_all(self.path("points")).unwrap();
        fs::write(self.path("points/passed"), "").unwrap();
    }

    /// Fail points passed since then by operations, in order; ends the recording.
    pub fn passed_fail_points(&self) -> Vec<String> {
        let passed = fs::read_to_string(self.path("points/passed")).unwrap();
        fs::remove_file(self.path("points/passed")).unwrap();
        // Monitors record the host of a hypervisor once, and the generation of a pool from time to time, whatever else happens.
        let monitors = ["catalog.power.note_host.", "catalog.pool_monitor.advance_generation."];
        let is_operation = |point: &&str| !monitors.iter().any(|monitor| point.starts_with(monitor));
        passed.lines().filter(is_operation).map(str::to_owned).collect()
    }

    /// Starts a server and waits until it serves.
    pub fn start(&self) -> Server {
        self.start_with_data("data")
    }

    /// Starts a server; `None` if it crashes before it serves.
    pub fn try_start(&self) -> Option<Server> {
        self.try_start_with_data("data")
    }

    /// Starts a server with a data directory of this name, beside any other.
    pub fn start_with_data(&self, data: &str) -> Server {
        self.try_start_with_data(data).expect("the server ended before it served")
    }

    fn try_start_with_data(&self, data: &str) -> Option<Server> {
        let mut child = self.serve_over(data).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
        let mut address = |message: &str| -> Option<SocketAddr> {
            for line in lines.by_ref() {
                let line = line.unwrap();
                // A fail point says that it ends the process.
                if line.starts_with("fail point ") {
                    continue;
                }
                let event: serde_json::Value =
                    serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
                log.lock().unwrap().push(event.clone());
                if event["message"] == message {
                    return Some(event["address"].as_str().unwrap().parse().unwrap());
                }
            }
            None
        };
        let addresses = address("health and metrics").zip(address("serving the API"));
        let Some((ops, api)) = addresses else {
            child.wait().unwrap();
            return None;
        };
        // Keep reading, or the server would block on a full pipe.
        let kept = log.clone();
        std::thread::spawn(move || {
            let events = lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
            events.for_each(|event| kept.lock().unwrap().push(event));
        });
        Some(Server { child, api, ops, client: self.client(api), log })
    }

    pub fn client(&self, api: SocketAddr) -> Client {
        let mut options =
            ClientOptions::from_pki_dir(format!("https://{api}"), &self.path("pki"), Role::Operator);
        (options.timeout, options.connect_timeout) = (PATIENCE, PATIENCE / 3);
        Client::new(&options).unwrap()
    }

    pub fn link(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.path("by-id").join(node.to_string()).join(format!("wwn-0x{}", &disk.simple().to_string()[..16]))
    }

    pub fn file(&self, volume: &VolumeId) -> PathBuf {
        self.path("pool").join(format!("{volume}.raw"))
    }

    /// File names in the pool's directory, without its marker.
    pub fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.path("pool")).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != ".nestor-pool" && name != "lost+found");
        names.sort();
        names
    }

    /// Opens the catalog; waits for locks of a server that uses it.
    pub fn catalog(&self) -> rusqlite::Connection {
        let catalog = rusqlite::Connection::open(self.path("data/catalog.sqlite")).unwrap();
        catalog.busy_timeout(PATIENCE).unwrap();
        catalog
    }

    /// Writes to a volume's file, as a VM would, and syncs it.
    pub fn write(&self, volume: &VolumeId, bytes: &[u8], at: u64) {
        let file = fs::File::options().write(true).open(self.file(volume)).unwrap();
        file.write_all_at(bytes, at).unwrap();
        file.sync_all().unwrap();
    }

    /// Reads from a volume's file.
    pub fn read(&self, volume: &VolumeId, length: usize, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; length];
        fs::File::open(self.file(volume)).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    /// Loop devices with files of this site.
    pub fn devices(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/sys/block").unwrap() {
            let name = entry.unwrap().file_name();
            let backing = Path::new("/sys/block").join(&name).join("loop/backing_file");
            // The filesystem images of mounted pools are not volumes.
            let ours = |file: String| {
                Path::new(&file).starts_with(self.dir.path()) && !file.trim_end().ends_with(IMAGE)
            };
            if fs::read_to_string(backing).is_ok_and(ours) {
                found.push(Path::new("/dev").join(name));
            }
        }
        found
    }

    /// A server with the pool `pool` and these nodes on a new site.
    pub async fn ready(&self, nodes: &[Uuid]) -> Server {
        let server = self.start();
        self.register(&server, nodes).await;
        server
    }

    /// Registers the pool `pool` and these nodes.
    pub async fn register(&self, server: &Server, nodes: &[Uuid]) {
        server.client.put_pool(&pool(), &self.pool_spec()).await.unwrap();
        for (index, uuid) in nodes.iter().enumerate() {
            let spec = NodeSpec {
                name: format!("node-{index}"),
                hypervisor: "here".into(),
                zone: None,
                labels: Labels::new(),
            };
            server.client.put_node(*uuid, &spec).await.unwrap();
        }
    }

    pub fn pool_spec(&self) -> PoolSpec {
        PoolSpec {
            engine: EngineKind::File,
            path: text(&self.path("pool")).to_owned(),
            labels: Labels::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for device in self.devices() {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
        for dir in &self.mounts {
            // Lazily, so that nothing stays mounted even if a failed test left a file open.
            let _ = Command::new("umount").arg("--lazy").arg(dir).status();
        }
    }
}

impl Server {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Logged events so far that match.
    pub fn logged(&self, matches: impl Fn(&serde_json::Value) -> bool) -> Vec<serde_json::Value> {
        self.log.lock().unwrap().iter().filter(|event| matches(event)).cloned().collect()
    }

    pub fn kill(self) {
        self.kill_before(|| ());
    }

    /// Kills the server while it is blocked, and unblocks it only then, so that it does nothing more.
    pub fn kill_before(mut self, unblock: impl FnOnce()) {
        self.child.kill().unwrap();
        unblock();
        self.child.wait().unwrap();
    }

    /// Waits until the server has crashed.
    pub async fn wait_for_crash(&mut self) {
        until("the server dies", async || self.has_crashed()).await;
    }

    pub fn has_crashed(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Stops the server with SIGTERM and returns its exit code.
    pub fn stop(mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }

    pub async fn ops(&self, path: &str) -> (u16, String) {
        // This port is plain HTTP on loopback; building the client requires a TLS provider nevertheless.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let response = reqwest::get(format!("http://{}{path}", self.ops)).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a file's on-disk record.
pub fn read_record(path: &Path) -> Option<serde_json::Value> {
    let mut bytes = vec![0; 1 << 16];
    let length = rustix::fs::getxattr(path, "user.nestor", bytes.as_mut_slice()).ok()?;
    Some(serde_json::from_slice(&bytes[..length]).unwrap())
}

/// Writes or removes a file's on-disk record.
pub fn write_record(path: &Path, record: Option<&serde_json::Value>) {
    match record {
        Some(record) => {
            let bytes = serde_json::to_vec(record).unwrap();
            rustix::fs::setxattr(path, "user.nestor", &bytes, rustix::fs::XattrFlags::empty()).unwrap();
        }
        None => rustix::fs::removexattr(path, "user.nestor").unwrap(),
    }
}

/// The code of the problem with which a call must have failed.
pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ProblemCode {
    let error = result.unwrap_err();
    error.code().unwrap_or_else(|| panic!("not a problem: {error}"))
}

/// The text of a response for an operation that is still running. On a busy host the call's own deadline may expire
/// first: then it is repeated.
pub async fn still_running<T: std::fmt::Debug>(
    mut call: impl AsyncFnMut() -> Result<T, ClientError>,
) -> String {
    let mut message = None;
    until("a response says that the operation is running", async || {
        match call().await.unwrap_err() {
            ClientError::Timeout { .. } => {}
            error => {
                assert!(
                    matches!(error, ClientError::InProgress { .. }) && error.may_have_taken_effect(),
                    "{error}"
                );
                message = Some(error.to_string());
            }
        }
        message.is_some()
    })
    .await;
    message.unwrap()
}

/// Waits until a condition holds.
pub fn wait_for(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The same, for a condition that waits itself.
pub async fn until<F: AsyncFnMut() -> bool>(what: &str, mut so: F) {
    let start = Instant::now();
    while !so().await {
        assert!(start.elapsed() < PATIENCE, "waited too long until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
