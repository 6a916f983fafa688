//! A machine for the driver: a folder with kubelet's folders and by-id names in it, loop devices as
//! disks, and the real binary. Everything is taken away again when it is dropped.

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

/// How long a driver may take to start or to stop.
const LIMIT: Duration = Duration::from_secs(60);

/// Held while a process begins: until it is a program of its own, it has open whatever any test has open just then, and
/// keeps the mount of that from being taken away.
static BEGINNING: Mutex<()> = Mutex::new(());

pub(crate) struct Machine {
    root: tempfile::TempDir,
    driver: Option<Child>,
    loops: Vec<PathBuf>,
    /// Has the port of the driver's pages, so that nobody else is given it. It never listens: that is the driver's to do.
    http: TcpSocket,
}

/// A disk of the machine, and the volume on it.
#[derive(Clone)]
pub(crate) struct Disk {
    pub(crate) id: String,
    pub(crate) uuid: String,
    pub(crate) image: PathBuf,
    pub(crate) device: PathBuf,
    /// The proof that it was blank before it was plugged. It permits one formatting.
    pub(crate) attestation: Option<String>,
    /// The volume's secret.
    pub(crate) token: Option<String>,
}

impl Machine {
    /// A machine whose driver runs.
    pub(crate) async fn start() -> Self {
        let mut machine = Self::new();
        machine.start_driver(None).await;
        machine
    }

    /// A machine without a driver yet.
    pub(crate) fn new() -> Self {
        let root = tempfile::Builder::new().prefix("nestor-node-").tempdir().unwrap();
        for folder in
            ["by-id", "kubelet/plugins", "kubelet/plugins_registry", "kubelet/pods", "images", "fail-points"]
        {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
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

    /// Starts the driver; tools in `tools` come before the system's. Returns once it answers.
    pub(crate) async fn start_driver(&mut self, tools: Option<&Path>) {
        self.start_driver_with(tools, &[]).await;
    }

    /// Starts the driver with more flags.
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
            .env("NESTOR_LOG", "debug")
            .env(fail_point::FOLDER, self.path("fail-points"))
            .stderr(std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap());
        self.driver = Some(begin(&mut driver));
        for socket in [self.socket(), self.registration_socket()] {
            self.connect(&socket).await;
        }
    }

    /// A connection to one of the driver's sockets, as soon as it serves it.
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

    /// Asks the driver to stop, and returns its exit code.
    pub(crate) async fn stop_driver(&mut self) -> Option<i32> {
        let driver = self.driver.as_ref().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_child(driver),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        self.wait_for_driver().await
    }

    /// Waits for the driver's end.
    pub(crate) async fn wait_for_driver(&mut self) -> Option<i32> {
        let mut driver = self.driver.take().unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = driver.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the driver does not end:\n{}", self.log());
            // Not blocking: the connections of this side must answer the driver's good-bye.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub(crate) async fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(csi::client::connect(&self.socket()).await.unwrap())
    }

    /// Status and body of a page of the driver's HTTP port, as soon as it serves it.
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

    /// An image file of `mib` MiB that is not a disk yet, and is attested blank.
    pub(crate) fn image(&self, mib: u64) -> Disk {
        let uuid = uuid::Uuid::new_v4().to_string();
        let id = format!("pvc-{}", &uuid[..8]);
        let image = self.path("images").join(&id);
        std::fs::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        let random = || Some(uuid::Uuid::new_v4().to_string());
        Disk { id, uuid, image, device: PathBuf::new(), attestation: random(), token: random() }
    }

    /// Plugs an image: a loop device, and its name under by-id.
    pub(crate) fn plug(&mut self, mut disk: Disk, options: &[&str]) -> Disk {
        let said = said_by("losetup", &[&["--find", "--show"], options].concat(), &disk.image);
        disk.device = PathBuf::from(said.trim());
        self.loops.push(disk.device.clone());
        self.name(&disk);
        disk
    }

    /// Takes a disk out again, and its bytes.
    pub(crate) fn remove(&mut self, disk: &Disk) {
        std::fs::remove_file(self.link(disk)).unwrap();
        tool("losetup", &["--detach"], &disk.device);
        self.loops.retain(|device| *device != disk.device);
        std::fs::remove_file(&disk.image).unwrap();
    }

    /// Gives a device its name.
    pub(crate) fn name(&self, disk: &Disk) {
        symlink(&disk.device, self.link(disk)).unwrap();
    }

    pub(crate) fn link(&self, disk: &Disk) -> PathBuf {
        self.path("by-id").join(&crds::names::disk_by_id(&disk.uuid)[0])
    }

    /// An empty disk.
    pub(crate) fn disk(&mut self, mib: u64) -> Disk {
        let image = self.image(mib);
        self.plug(image, &[])
    }

    /// Makes a disk larger under its device, as the hypervisor does.
    pub(crate) fn enlarge(&self, disk: &Disk, mib: u64) {
        std::fs::File::options().write(true).open(&disk.image).unwrap().set_len(mib << 20).unwrap();
        tool("losetup", &["--set-capacity"], &disk.device);
    }

    /// A disk of `mib` MiB with what is on `source` by now.
    pub(crate) fn copy(&mut self, source: &Disk, mib: u64) -> Disk {
        let image = Disk { attestation: None, ..self.image(mib) };
        let from = format!("if={}", source.image.display());
        let to = PathBuf::from(format!("of={}", image.image.display()));
        tool("dd", &["bs=1M", "conv=notrunc,sparse", "status=none", &from], &to);
        self.plug(image, &[])
    }

    /// Expands the volume at `path` to at least `mib` MiB, and returns its bytes.
    pub(crate) async fn expand(&self, disk: &Disk, path: &Path, mib: u64) -> Result<i64, Status> {
        let request = self.expand_request(disk, path, mib);
        Ok(self.node().await.node_expand_volume(request).await?.into_inner().capacity_bytes)
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
        let folder = self.path("kubelet/plugins").join(&disk.id);
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("globalmount")
    }

    pub(crate) fn target(&self, disk: &Disk, pod: &str) -> PathBuf {
        let folder = self.path("kubelet/pods").join(pod).join(&disk.id);
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("mount")
    }

    pub(crate) async fn stage(&self, disk: &Disk, wanted: proto::VolumeCapability) -> Result<(), Status> {
        let request = self.stage_request(disk, wanted);
        self.node().await.node_stage_volume(request).await.map(drop)
    }

    pub(crate) fn stage_request(
        &self,
        disk: &Disk,
        wanted: proto::VolumeCapability,
    ) -> proto::NodeStageVolumeRequest {
        proto::NodeStageVolumeRequest {
            volume_id: disk.id.clone(),
            publish_context: context(disk),
            staging_target_path: text(&self.staging(disk)),
            volume_capability: Some(wanted),
            ..proto::NodeStageVolumeRequest::default()
        }
    }

    pub(crate) async fn unstage(&self, disk: &Disk) -> Result<(), Status> {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: disk.id.clone(),
            staging_target_path: text(&self.staging(disk)),
        };
        wait_for_beginners();
        self.node().await.node_unstage_volume(request).await.map(drop)
    }

    pub(crate) async fn publish(
        &self,
        disk: &Disk,
        pod: &str,
        wanted: proto::VolumeCapability,
        readonly: bool,
    ) -> Result<PathBuf, Status> {
        let target = self.target(disk, pod);
        let request = proto::NodePublishVolumeRequest {
            volume_id: disk.id.clone(),
            publish_context: context(disk),
            staging_target_path: text(&self.staging(disk)),
            target_path: text(&target),
            volume_capability: Some(wanted),
            readonly,
            ..proto::NodePublishVolumeRequest::default()
        };
        self.node().await.node_publish_volume(request).await.map(|_| target)
    }

    pub(crate) async fn unpublish(&self, disk: &Disk, pod: &str) -> Result<(), Status> {
        let request = proto::NodeUnpublishVolumeRequest {
            volume_id: disk.id.clone(),
            target_path: text(&self.target(disk, pod)),
        };
        wait_for_beginners();
        self.node().await.node_unpublish_volume(request).await.map(drop)
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
        self.node().await.node_get_volume_stats(request).await.map(tonic::Response::into_inner)
    }

    /// The options of what is mounted at `path`.
    pub(crate) fn mounted(&self, path: &Path) -> Option<String> {
        self.mounts_at(path).into_iter().next()
    }

    /// The options of each mount at `path`.
    pub(crate) fn mounts_at(&self, path: &Path) -> Vec<String> {
        let path = path.parent().unwrap().canonicalize().unwrap().join(path.file_name().unwrap());
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let there = fields.filter(|fields| Path::new(fields[4]) == path);
        there.map(|fields| fields[5].to_owned()).collect()
    }
}

impl Drop for Machine {
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
            let _ = begin(detach.arg("--detach").arg(device).stderr(Stdio::null())).wait();
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

/// A capability for a filesystem.
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

/// A capability for a block device.
pub(crate) fn block(mode: proto::volume_capability::access_mode::Mode) -> proto::VolumeCapability {
    use proto::volume_capability::{AccessMode, AccessType, BlockVolume};
    proto::VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

/// Starts a process. Nothing else may: see [`BEGINNING`].
pub(crate) fn begin(command: &mut Command) -> Child {
    let _alone = BEGINNING.lock().unwrap_or_else(PoisonError::into_inner);
    command.spawn().unwrap()
}

/// Waits until no process has anything open of what the tests have closed by now.
fn wait_for_beginners() {
    drop(BEGINNING.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Runs a tool of the system.
pub(crate) fn tool(program: &str, args: &[&str], device: &Path) {
    said_by(program, args, device);
}

/// Runs a tool of the system, and returns what it says.
fn said_by(program: &str, args: &[&str], device: &Path) -> String {
    let mut command = Command::new(program);
    command.args(args).arg(device).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = begin(&mut command).wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
