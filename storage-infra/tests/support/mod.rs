//! A real server process over a folder of its own, and what it leaves behind taken away.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use infra_api::{
    Access, AttachmentId, AttachmentSpec, Client, ClientError, ClientOptions, EngineKind, Labels, NodeSpec,
    Placement, PoolName, PoolSpec, ProblemCode, VolumeId, VolumeSpec,
};
use uuid::Uuid;

pub const BINARY: &str = env!("CARGO_BIN_EXE_storage-infra");
pub const MIB: u64 = 1 << 20;
/// More than any attach or detach of a loop device takes.
pub const SOON: Duration = Duration::from_secs(20);

/// A folder with certificates, a catalog, a pool's directory and the links to loop devices.
pub struct Site {
    dir: tempfile::TempDir,
}

/// A server that runs over a site.
pub struct Server {
    child: Child,
    pub api: SocketAddr,
    pub ops: SocketAddr,
    pub client: Client,
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
        let site = Self { dir };
        let pki = site.path("pki");
        let output = run(&["pki", "--dir", text(&pki), "--host", "127.0.0.1"]);
        assert!(output.status.success(), "{output:?}");
        fs::create_dir(site.path("pool")).unwrap();
        site
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a server on free ports and waits until it says that it serves.
    pub fn start(&self) -> Server {
        let hypervisor = format!("here=loop:{}", self.path("by-id").display());
        let mut child = Command::new(BINARY)
            .args([
                "serve",
                "--log-format",
                "json",
                "--listen",
                "127.0.0.1:0",
                "--http-listen",
                "127.0.0.1:0",
            ])
            .args(["--data-dir", text(&self.path("data")), "--hypervisor", &hypervisor])
            .args([
                "--tls-cert",
                text(&self.path("pki/server.crt")),
                "--tls-key",
                text(&self.path("pki/server.key")),
            ])
            .args(["--client-ca", text(&self.path("pki/ca.crt"))])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut address = |message: &str| -> SocketAddr {
            for line in lines.by_ref() {
                let line = line.unwrap();
                let event: serde_json::Value =
                    serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
                if event["message"] == message {
                    return event["address"].as_str().unwrap().parse().unwrap();
                }
            }
            panic!("the server ended before it said {message:?}");
        };
        let ops = address("health and metrics");
        let api = address("serving the API");
        // Somebody must read on, or the server would stop at a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Server { child, api, ops, client: self.client(api) }
    }

    pub fn client(&self, api: SocketAddr) -> Client {
        let options = ClientOptions::from_pki_dir(format!("https://{api}"), &self.path("pki")).unwrap();
        Client::new(&options).unwrap()
    }

    pub fn link(&self, node: Uuid, disk: Uuid) -> PathBuf {
        self.path("by-id").join(node.to_string()).join(format!("wwn-0x{}", &disk.simple().to_string()[..16]))
    }

    pub fn file(&self, volume: &VolumeId) -> PathBuf {
        self.path("pool").join(format!("{volume}.raw"))
    }

    /// The loop devices over files of this site.
    pub fn devices(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/sys/block").unwrap() {
            let name = entry.unwrap().file_name();
            let backing = Path::new("/sys/block").join(&name).join("loop/backing_file");
            if fs::read_to_string(backing).is_ok_and(|file| Path::new(&file).starts_with(self.dir.path())) {
                found.push(Path::new("/dev").join(name));
            }
        }
        found
    }

    /// A server with the pool `pool` and the nodes given, on a fresh site.
    pub async fn ready(&self, nodes: &[Uuid]) -> Server {
        let server = self.start();
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
        server
    }

    pub fn pool_spec(&self) -> PoolSpec {
        PoolSpec {
            engine: EngineKind::File,
            path: text(&self.path("pool")).to_owned(),
            labels: Labels::new(),
            cordoned: false,
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for device in self.devices() {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

impl Server {
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks the server to end as a supervisor does, and gives its exit code.
    pub fn stop(mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }

    pub async fn ops(&self, path: &str) -> (u16, String) {
        // This port is plain HTTP on loopback; the client needs a TLS set-up all the same to be built.
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

pub fn pool() -> PoolName {
    PoolName::new("pool").unwrap()
}

pub fn volume(id: &str) -> VolumeId {
    VolumeId::new(id).unwrap()
}

pub fn attachment(id: &str) -> AttachmentId {
    AttachmentId::new(id).unwrap()
}

pub fn size(bytes: u64) -> VolumeSpec {
    VolumeSpec {
        capacity_bytes: bytes,
        limit_bytes: None,
        placement: Placement::default(),
        labels: Labels::new(),
    }
}

pub fn writer(id: &VolumeId, node: Uuid) -> AttachmentSpec {
    AttachmentSpec { volume: id.clone(), node, read_only: false, access: Access::SingleNode }
}

pub fn reader(id: &VolumeId, node: Uuid) -> AttachmentSpec {
    AttachmentSpec { volume: id.clone(), node, read_only: true, access: Access::MultiNodeReadOnly }
}

/// The code of the problem that a call must have ended with.
pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ProblemCode {
    let error = result.unwrap_err();
    error.code().unwrap_or_else(|| panic!("not a problem: {error}"))
}

/// Waits until something is so.
pub async fn until<F: AsyncFnMut() -> bool>(what: &str, mut so: F) {
    let start = Instant::now();
    while !so().await {
        assert!(start.elapsed() < Duration::from_secs(40), "waited too long until {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
