//! A libvirtd of the test's own, in a mount namespace where every folder that libvirt uses is the test's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::{PATIENCE, text};

/// The host's folders that are hidden, and by which folder of the test.
const PRIVATE: [(&str, &str); 5] = [
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/var/cache/libvirt", "cache"),
    ("/etc/libvirt", "etc"),
];

const QEMU_CONF: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\ncgroup_controllers = []\n\
    namespaces = []\nstdio_handler = \"file\"\nremember_owner = 0\nmax_core = 0\n";

/// Which host a daemon says it runs on, for as long as a test does not say otherwise.
pub const HOST: Uuid = Uuid::from_u128(0x0ff0_0000_1111_4222_8333_4444_5555_6666);

/// The daemon, until this is dropped.
pub struct Libvirtd {
    dir: tempfile::TempDir,
    child: Child,
    domains: Vec<Uuid>,
}

impl Libvirtd {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (host, own) in PRIVATE {
            fs::create_dir_all(host).unwrap();
            fs::create_dir_all(dir.path().join(own)).unwrap();
        }
        fs::write(dir.path().join("etc/qemu.conf"), QEMU_CONF).unwrap();
        let child = run(dir.path(), HOST);
        let daemon = Self { dir, child, domains: Vec::new() };
        daemon.answers();
        daemon
    }

    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.path("libvirt-sock").display())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn answers(&self) {
        let start = Instant::now();
        while !self.try_virsh(&["version"]) {
            assert!(start.elapsed() < PATIENCE, "libvirtd does not answer");
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

    /// What virsh says, which must succeed.
    pub fn virsh(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments).output().unwrap();
        assert!(output.status.success(), "virsh {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// A domain with a place for disks and nothing to boot, which runs.
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
        self.virsh(&["define", text(&file)]);
        self.domains.push(uuid);
        self.virsh(&["start", &uuid.to_string()]);
        uuid
    }

    /// Plugs a volume's file into a running domain as the server would, behind its back.
    pub fn plug(&self, node: Uuid, file: &Path, serial: Uuid) {
        let xml = format!(
            "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='{}'/>\
             <target dev='sdz' bus='scsi'/><serial>{serial}</serial>\
             <address type='drive' controller='0' bus='0' target='200' unit='0'/></disk>",
            file.display()
        );
        let path = self.path("disk.xml");
        fs::write(&path, xml).unwrap();
        self.virsh(&["attach-device", &node.to_string(), text(&path), "--live"]);
    }

    /// Whether a domain's live state shows a disk with this serial.
    pub fn has(&self, node: Uuid, serial: Uuid) -> bool {
        let active = self.virsh(&["domstate", &node.to_string()]) != "shut off";
        active && self.virsh(&["dumpxml", &node.to_string()]).contains(&serial.to_string())
    }

    /// Ends the daemon and starts it again, as one that says that it runs on this host. Domains run on.
    pub fn restart(&mut self, host: Uuid) {
        self.end();
        self.child = run(self.dir.path(), host);
        self.answers();
    }

    /// The same, and it does not find what it knew about the domains that run.
    pub fn restart_without_status(&mut self) {
        self.end();
        for entry in fs::read_dir(self.path("run/qemu")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::remove_file(path).unwrap();
            }
        }
        self.child = run(self.dir.path(), HOST);
        self.answers();
    }

    /// Ends the daemon, until it is started again. Domains run on.
    pub fn stop(&mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The processes of a domain, which libvirt may not know any more.
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

fn run(dir: &Path, host: Uuid) -> Child {
    let config = format!(
        "unix_sock_dir = \"{}\"\nunix_sock_rw_perms = \"0700\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
         host_uuid = \"{host}\"\n",
        dir.display()
    );
    fs::write(dir.join("etc/libvirtd.conf"), config).unwrap();
    let mut script = String::from("set -e\n");
    for (host, own) in PRIVATE {
        script.push_str(&format!("mount --bind '{}' {host}\n", dir.join(own).display()));
    }
    script
        .push_str("exec libvirtd --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirt/libvirtd.pid\n");
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
