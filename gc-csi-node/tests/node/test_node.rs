//! Test node: a temporary directory with kubelet's directories and disk names, loop devices as disks, and the real
//! program. Everything is removed on drop.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use csi::proto;
use csi::proto::node_client::NodeClient;
use tokio::net::TcpSocket;
use tonic::Status;
use tonic::transport::Channel;

/// Time limit for the driver's start and stop.
const LIMIT: Duration = Duration::from_secs(60);

/// Held while a process is spawned: between fork and exec, it inherits the open files of other tests, which would prevent
/// unmounts.
static SPAWN_LOCK: Mutex<()> = Mutex::new(());

pub(crate) struct TestNode {
    root: tempfile::TempDir,
    driver: Option<Child>,
    loops: Vec<PathBuf>,
    /// Reserves the port of the driver's HTTP endpoint. Never listens, because the driver does.
    http: TcpSocket,
}

/// A disk and its volume.
#[derive(Clone)]
pub(crate) struct Disk {
    pub(crate) id: String,
    pub(crate) uuid: String,
    pub(crate) image: PathBuf,
    pub(crate) device: PathBuf,
    /// ID of the attestation that the disk was blank before it was attached. Permits one format.
    pub(crate) attestation: Option<String>,
    /// Format token: the volume's secret.
    pub(crate) token: Option<String>,
}

impl TestNode {
    /// A node with a running driver.
    pub(crate) async fn start() -> Self {
        let mut node = Self::new();
        node.start_driver(None).await;
        node
    }

    /// A node without a running driver.
    pub(crate) fn new() -> Self {
        let root = tempfile::Builder::new().prefix("nestor-node-").tempdir().unwrap();
        for dir in
            ["by-id", "kubelet/plugins", "kubelet/plugins_registry", "kubelet/pods", "images", "fail-points"]
        {
            std::fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let http = TcpSocket::new_v4().unwrap();
        http.set_reuseaddr(true).unwrap();
        http.bind(([127, 0, 0, 1], 0).into()).unwrap();
        Self { root, driver: None, loops: Vec::new(), http }
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("kubelet/plugins/csi.sock")
    }

    pub(crate) fn registration_socket(&self) -> PathBuf {
        self.path("kubelet/plugins_registry/nestor@guest.csi.nestor.dev-reg.sock")
    }

    /// Starts the driver and waits until it answers. Commands in `tools` precede the system's.
    pub(crate) async fn start_driver(&mut self, tools: Option<&Path>) {
        self.start_driver_with(tools, &[]).await;
    }

    /// Starts the driver with additional flags.
    pub(crate) async fn start_driver_with(&mut self, tools: Option<&Path>, flags: &[&str]) {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = tools.map_or_else(|| path.clone(), |tools| format!("{}:{path}", tools.display()));
        let mut driver = Command::new(env!("CARGO_BIN_EXE_gc-csi-node"));
        driver
            .args(["--node-name", "vm-1", "--endpoint"])
            .arg(format!("unix://{}", self.socket().display()))
            .arg("--kubelet-dir")
            .arg(self.path("kubelet"))
            .arg("--by-id-dir")
            .arg(self.path("by-id"))
            .arg(format!("--http-listen={}", self.http.local_addr().unwrap()))
            .args(flags)
            .env("PATH", path)
            .env("NESTOR_LOG_LEVEL", "debug")
            .env(fail_point::DIRECTORY_VAR, self.path("fail-points"))
            .stderr(std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap());
        self.driver = Some(spawn(&mut driver));
        for socket in [self.socket(), self.registration_socket()] {
            self.connect(&socket).await;
        }
    }

    /// Connects to one of the driver's sockets; waits until it listens.
    pub(crate) async fn connect(&self, socket: &Path) -> Channel {
        let deadline = Instant::now() + LIMIT;
        loop {
            match csi::client::connect(socket).await {
                Ok(channel) => return channel,
                Err(error) => assert!(Instant::now() < deadline, "{error}:\n{}", self.log()),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sends SIGTERM to the driver and returns its exit code.
    pub(crate) async fn stop_driver(&mut self) -> Option<i32> {
        let driver = self.driver.as_ref().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_child(driver),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        self.wait_for_driver().await
    }

    /// Waits until the driver exits.
    pub(crate) async fn wait_for_driver(&mut self) -> Option<i32> {
        let mut driver = self.driver.take().unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = driver.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the driver does not exit:\n{}", self.log());
            // Not blocking: open connections must complete the driver's shutdown.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// A client of the driver: a driver that has died is an error of the call.
    pub(crate) fn client(&self) -> NodeClient<Channel> {
        NodeClient::new(csi::client::connect_lazy(&self.socket()).unwrap())
    }

    /// Gets the status and body of an HTTP path; waits until the driver listens.
    pub(crate) fn get(&self, page: &str) -> (u16, String) {
        let deadline = Instant::now() + LIMIT;
        let mut stream = loop {
            match std::net::TcpStream::connect(self.http.local_addr().unwrap()) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "{error}:\n{}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        write!(stream, "GET {page} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    /// Creates an image file of `mib` MiB, attested blank and not attached.
    pub(crate) fn image(&self, mib: u64) -> Disk {
        let uuid = uuid::Uuid::new_v4().to_string();
        let id = format!("pvc-{}", &uuid[..8]);
        let image = self.path("images").join(&id);
        std::fs::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        let random = || Some(uuid::Uuid::new_v4().to_string());
        Disk { id, uuid, image, device: PathBuf::new(), attestation: random(), token: random() }
    }

    /// Attaches an image: creates a loop device and its name in by-id.
    pub(crate) fn attach(&mut self, mut disk: Disk, options: &[&str]) -> Disk {
        let output = output_of("losetup", &[&["--find", "--show"], options].concat(), &disk.image);
        disk.device = PathBuf::from(output.trim());
        self.loops.push(disk.device.clone());
        self.name(&disk);
        disk
    }

    /// Detaches a disk and deletes its image.
    pub(crate) fn detach(&mut self, disk: &Disk) {
        std::fs::remove_file(self.link(disk)).unwrap();
        tool("losetup", &["--detach"], &disk.device);
        self.loops.retain(|device| *device != disk.device);
        std::fs::remove_file(&disk.image).unwrap();
    }

    /// Creates the name of a device.
    pub(crate) fn name(&self, disk: &Disk) {
        symlink(&disk.device, self.link(disk)).unwrap();
    }

    pub(crate) fn link(&self, disk: &Disk) -> PathBuf {
        self.path("by-id").join(&crds::names::disk_by_id(&disk.uuid)[0])
    }

    /// Attaches an empty disk.
    pub(crate) fn disk(&mut self, mib: u64) -> Disk {
        let image = self.image(mib);
        self.attach(image, &[])
    }

    /// Resizes an attached disk, as the hypervisor does.
    pub(crate) fn resize(&self, disk: &Disk, mib: u64) {
        std::fs::File::options().write(true).open(&disk.image).unwrap().set_len(mib << 20).unwrap();
        tool("losetup", &["--set-capacity"], &disk.device);
    }

    /// Attaches a disk of `mib` MiB with a copy of `source`'s current content.
    pub(crate) fn copy(&mut self, source: &Disk, mib: u64) -> Disk {
        let image = Disk { attestation: None, ..self.image(mib) };
        let from = format!("if={}", source.image.display());
        let to = PathBuf::from(format!("of={}", image.image.display()));
        tool("dd", &["bs=1M", "conv=notrunc,sparse", "status=none", &from], &to);
        self.attach(image, &[])
    }

    /// Expands the volume at `path` to at least `mib` MiB and returns its size in bytes.
    pub(crate) async fn expand(&self, disk: &Disk, path: &Path, mib: u64) -> Result<i64, Status> {
        let request = self.expand_request(disk, path, mib);
        Ok(self.client().node_expand_volume(request).await?.into_inner().capacity_bytes)
    }

    pub(crate) fn expand_request(
        &self,
        disk: &Disk,
        path: &Path,
        mib: u64,
    ) -> proto::NodeExpandVolumeRequest {
        let required_bytes = i64::try_from(mib << 20).unwrap();
        proto::NodeExpandVolumeRequest {
            volume_id: disk.id.clone(),
            volume_path: text(path),
            staging_target_path: text(&self.staging(disk)),
            capacity_range: Some(proto::CapacityRange { required_bytes, limit_bytes: 0 }),
            ..proto::NodeExpandVolumeRequest::default()
        }
    }

    pub(crate) fn staging(&self, disk: &Disk) -> PathBuf {
        let dir = self.path("kubelet/plugins").join(&disk.id);
        std::fs::create_dir_all(&dir).unwrap();
        dir.join("globalmount")
    }

    pub(crate) fn target(&self, disk: &Disk, pod: &str) -> PathBuf {
        let dir = self.path("kubelet/pods").join(pod).join(&disk.id);
        std::fs::create_dir_all(&dir).unwrap();
        dir.join("mount")
    }

    pub(crate) async fn stage(&self, disk: &Disk, capability: proto::VolumeCapability) -> Result<(), Status> {
        let request = self.stage_request(disk, capability);
        loop {
            match self.client().node_stage_volume(request.clone()).await {
                // mkfs.btrfs opens all loop devices that are mounted, and another test removed one. The kubelet retries, too.
                Err(error) if error.message().contains("cannot check mount status") => {}
                staged => return staged.map(drop),
            }
        }
    }

    pub(crate) fn stage_request(
        &self,
        disk: &Disk,
        capability: proto::VolumeCapability,
    ) -> proto::NodeStageVolumeRequest {
        proto::NodeStageVolumeRequest {
            volume_id: disk.id.clone(),
            publish_context: context(disk),
            staging_target_path: text(&self.staging(disk)),
            volume_capability: Some(capability),
            ..proto::NodeStageVolumeRequest::default()
        }
    }

    pub(crate) async fn unstage(&self, disk: &Disk) -> Result<(), Status> {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: disk.id.clone(),
            staging_target_path: text(&self.staging(disk)),
        };
        wait_for_spawning_processes();
        self.client().node_unstage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish(
        &self,
        disk: &Disk,
        pod: &str,
        capability: proto::VolumeCapability,
        readonly: bool,
    ) -> Result<PathBuf, Status> {
        let target = self.target(disk, pod);
        let request = proto::NodePublishVolumeRequest {
            volume_id: disk.id.clone(),
            publish_context: context(disk),
            staging_target_path: text(&self.staging(disk)),
            target_path: text(&target),
            volume_capability: Some(capability),
            readonly,
            ..proto::NodePublishVolumeRequest::default()
        };
        self.client().node_publish_volume(request).await.map(|_| target)
    }

    pub(crate) async fn unpublish(&self, disk: &Disk, pod: &str) -> Result<(), Status> {
        let request = proto::NodeUnpublishVolumeRequest {
            volume_id: disk.id.clone(),
            target_path: text(&self.target(disk, pod)),
        };
        wait_for_spawning_processes();
        self.client().node_unpublish_volume(request).await.map(drop)
    }

    pub(crate) async fn stats(
        &self,
        disk: &Disk,
        path: &Path,
    ) -> Result<proto::NodeGetVolumeStatsResponse, Status> {
        let request = proto::NodeGetVolumeStatsRequest {
            volume_id: disk.id.clone(),
            volume_path: text(path),
            ..proto::NodeGetVolumeStatsRequest::default()
        };
        self.client().node_get_volume_stats(request).await.map(tonic::Response::into_inner)
    }

    /// Options of the first mount at `path`.
    pub(crate) fn mounted(&self, path: &Path) -> Option<String> {
        self.mounts_at(path).into_iter().next()
    }

    /// Options of each mount at `path`.
    pub(crate) fn mounts_at(&self, path: &Path) -> Vec<String> {
        let path = path.parent().unwrap().canonicalize().unwrap().join(path.file_name().unwrap());
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let there = fields.filter(|fields| Path::new(fields[4]) == path);
        there.map(|fields| fields[5].to_owned()).collect()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        if let Some(mut driver) = self.driver.take() {
            let _ = driver.kill();
            let _ = driver.wait();
        }
        if std::thread::panicking() {
            let mut log = String::from("the driver's log:\n");
            let _ = writeln!(log, "{}", self.log());
            let _ = std::io::stderr().write_all(log.as_bytes());
        }
        let root = self.root.path().canonicalize().unwrap_or_else(|_| self.root.path().to_owned());
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
        for point in points.filter(|point| point.starts_with(&root)).collect::<Vec<_>>().iter().rev() {
            let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
        }
        for device in &self.loops {
            let mut detach = Command::new("losetup");
            let _ = spawn(detach.arg("--detach").arg(device).stderr(Stdio::null())).wait();
        }
    }
}

fn context(disk: &Disk) -> std::collections::HashMap<String, String> {
    let known = [
        (crds::names::CONTEXT_DISK_UUID, Some(&disk.uuid)),
        (crds::names::CONTEXT_BLANK_ATTESTATION, disk.attestation.as_ref()),
        (crds::names::CONTEXT_FORMAT_TOKEN, disk.token.as_ref()),
    ];
    known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.clone()))).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// A filesystem capability.
pub(crate) fn filesystem(
    fs_type: &str,
    mode: proto::volume_capability::access_mode::Mode,
) -> proto::VolumeCapability {
    use proto::volume_capability::{AccessMode, AccessType, MountVolume};
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..MountVolume::default() };
    proto::VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

/// A block device capability.
pub(crate) fn block(mode: proto::volume_capability::access_mode::Mode) -> proto::VolumeCapability {
    use proto::volume_capability::{AccessMode, AccessType, BlockVolume};
    proto::VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

/// Spawns a process. All tests must use this function, see [`SPAWN_LOCK`].
pub(crate) fn spawn(command: &mut Command) -> Child {
    let _alone = SPAWN_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    command.spawn().unwrap()
}

/// Waits until no process that is being spawned holds files that the tests have closed.
fn wait_for_spawning_processes() {
    drop(SPAWN_LOCK.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Runs a command.
pub(crate) fn tool(program: &str, args: &[&str], device: &Path) {
    output_of(program, args, device);
}

/// Runs a command and returns its output.
fn output_of(program: &str, args: &[&str], device: &Path) -> String {
    let mut command = Command::new(program);
    command.args(args).arg(device).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = spawn(&mut command).wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
