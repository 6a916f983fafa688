//! A private libvirtd in a mount namespace where libvirt's directories belong to the test. All of it panics where something
//! fails.

#![expect(clippy::unwrap_used, reason = "tests end where something fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use uuid::Uuid;

/// Time for the daemon to answer.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Host directories that are hidden, and the test's directories in their place.
const PRIVATE: [(&str, &str); 5] = [
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/var/cache/libvirt", "cache"),
    ("/etc/libvirt", "etc"),
];

const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\ncgroup_controllers = []\n\
    namespaces = []\nstdio_handler = \"file\"\nremember_owner = 0\nmax_core = 0\n";

/// Default host UUID that the daemon reports.
pub const HOST: Uuid = Uuid::from_u128(0x0ff0_0000_1111_4222_8333_4444_5555_6666);

/// The daemon, stopped on drop.
pub struct Libvirtd {
    dir: tempfile::TempDir,
    /// Arguments and lines of its configuration by which it also serves TLS.
    tls: Option<Tls>,
    child: Child,
    domains: Vec<Uuid>,
}

impl Libvirtd {
    /// Starts a daemon.
    pub fn start() -> Self {
        Self::start_on(HOST, None)
    }

    /// Starts a daemon that reports this host, and also serves TLS.
    pub fn start_on(host: Uuid, tls: Option<Tls>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (host, own) in PRIVATE {
            fs::create_dir_all(host).unwrap();
            fs::create_dir_all(dir.path().join(own)).unwrap();
        }
        fs::write(dir.path().join("etc/qemu.conf"), QEMU_CONF).unwrap();
        let child = run(dir.path(), host, tls.as_ref());
        let daemon = Self { dir, tls, child, domains: Vec::new() };
        daemon.answers();
        daemon
    }

    /// URI of its socket.
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.path("libvirt-sock").display())
    }

    /// URI of the TLS port, for a client with the certificates in this directory.
    pub fn tls_uri(&self, certificates: &Path) -> String {
        let port = self.tls.as_ref().unwrap().port;
        format!("qemu+tls://127.0.0.1:{port}/system?pkipath={}", certificates.display())
    }

    /// A path in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn answers(&self) {
        let start = Instant::now();
        while !self.try_virsh(&["version"]) {
            assert!(start.elapsed() < START_TIMEOUT, "libvirtd does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", &self.uri()]).args(arguments).stdin(Stdio::null());
        command
    }

    fn try_virsh(&self, arguments: &[&str]) -> bool {
        self.command(arguments).output().unwrap().status.success()
    }

    /// Output of a virsh command, which must succeed.
    pub fn virsh(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(output.status.success(), "virsh {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// A virsh command that may wait.
    pub fn virsh_child(&self, arguments: &[&str]) -> Child {
        self.command(arguments).spawn().unwrap()
    }

    /// Starts a domain with PCI slots for disks and no boot disk.
    pub fn domain(&mut self) -> Uuid {
        let uuid = Uuid::new_v4();
        let xml = format!(
            "<domain type='qemu'><name>{uuid}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
            <os><type arch='x86_64' machine='q35'>hvm</type></os>
            <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/>
            <controller type='scsi' index='0' model='virtio-scsi'/></devices></domain>"
        );
        let file = self.path("domain.xml");
        fs::write(&file, xml).unwrap();
        self.virsh(&["define", file.to_str().unwrap()]);
        self.domains.push(uuid);
        self.virsh(&["start", &uuid.to_string()]);
        uuid
    }

    /// Attaches a volume's file to a running domain behind the server's back, in the same way as the server.
    pub fn plug(&self, node: Uuid, file: &Path, serial: Uuid) {
        let xml = format!(
            "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='{}'/>\
             <target dev='sdz' bus='scsi'/><serial>{serial}</serial>\
             <address type='drive' controller='0' bus='0' target='200' unit='0'/></disk>",
            file.display()
        );
        let path = self.path("disk.xml");
        fs::write(&path, xml).unwrap();
        self.virsh(&["attach-device", &node.to_string(), path.to_str().unwrap(), "--live"]);
    }

    /// Migrates a running domain to another daemon, which looks after it from then on.
    pub fn migrate(&mut self, domain: Uuid, to: &mut Self, arguments: &[&str]) {
        // The hosts of the test are one machine: libvirt cannot know that their directories are shared.
        let fixed = ["migrate", "--live", "--persistent", "--unsafe", "--migrateuri", "tcp://127.0.0.1"];
        let (name, uri) = (domain.to_string(), to.uri());
        self.virsh(&[&fixed, arguments, &[name.as_str(), uri.as_str()]].concat());
        self.domains.retain(|one| *one != domain);
        to.domains.push(domain);
    }

    /// Writes to the disk of a domain with this serial through its QEMU, as the VM would.
    pub fn write(&self, domain: Uuid, serial: Uuid, pattern: u8, at: u64) {
        let name = domain.to_string();
        let xml = self.virsh(&["dumpxml", &name]);
        let disk = xml.split("<disk ").find(|disk| disk.contains(&serial.to_string())).unwrap();
        let alias = disk.split("<alias name='").nth(1).unwrap().split('\'').next().unwrap();
        let command = format!("qemu-io -d {alias} \"write -P {pattern} {at} 4096\"");
        let output = self.virsh(&["qemu-monitor-command", "--hmp", &name, &command]);
        assert!(output.is_empty() || output.contains("wrote 4096/4096"), "{output}");
    }

    /// Whether a domain's live state has a disk with this serial.
    pub fn has(&self, node: Uuid, serial: Uuid) -> bool {
        let active = self.virsh(&["domstate", &node.to_string()]) != "shut off";
        active && self.virsh(&["dumpxml", &node.to_string()]).contains(&serial.to_string())
    }

    /// Restarts the daemon with this host UUID. Domains keep running.
    pub fn restart(&mut self, host: Uuid) {
        self.end();
        self.child = run(self.dir.path(), host, self.tls.as_ref());
        self.answers();
    }

    /// The same, but the daemon loses its state about running domains.
    pub fn restart_without_status(&mut self) {
        self.end();
        for entry in fs::read_dir(self.path("run/qemu")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::remove_file(path).unwrap();
            }
        }
        self.child = run(self.dir.path(), HOST, self.tls.as_ref());
        self.answers();
    }

    /// Stops the daemon until it is started again. Domains keep running.
    pub fn stop(&mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Processes of a domain, which libvirt may have lost.
pub fn processes(domain: Uuid) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let path = entry.unwrap().path();
        let words = fs::read(path.join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).into_owned();
        if words.starts_with("/usr/bin/qemu-system") && words.contains(&domain.to_string()) {
            found.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    found
}

/// The TLS port of a daemon.
pub struct Tls {
    /// Number of the port.
    pub port: u16,
    /// Directory with `ca.crt`, `server.crt` and `server.key`.
    pub certificates: PathBuf,
}

impl Tls {
    fn config(&self) -> String {
        let dir = self.certificates.display();
        format!(
            "listen_tls = 1\nlisten_tcp = 0\nlisten_addr = \"127.0.0.1\"\ntls_port = \"{}\"\nca_file = \"{dir}/ca.crt\"\n\
             cert_file = \"{dir}/server.crt\"\nkey_file = \"{dir}/server.key\"\n",
            self.port
        )
    }
}

fn run(dir: &Path, host: Uuid, tls: Option<&Tls>) -> Child {
    let mut config = format!(
        "unix_sock_dir = \"{}\"\nunix_sock_rw_perms = \"0700\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
         host_uuid = \"{host}\"\n",
        dir.display()
    );
    config.extend(tls.map(Tls::config));
    fs::write(dir.join("etc/libvirtd.conf"), config).unwrap();
    let mut script = String::from("set -e\n");
    for (host, own) in PRIVATE {
        script.push_str(&format!("mount --bind '{}' {host}\n", dir.join(own).display()));
    }
    let listen = tls.map_or("", |_| "--listen");
    script.push_str(&format!(
        "exec libvirtd {listen} --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirt/libvirtd.pid\n"
    ));
    let log = fs::File::options().create(true).append(true).open(dir.join("libvirtd.log")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "slave", "/bin/sh", "-c", &script]);
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in self.domains.iter().flat_map(|domain| processes(*domain)) {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
        }
    }
}
