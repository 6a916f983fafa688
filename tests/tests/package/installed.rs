//! The package on a host with a real systemd: installation, service, upgrade, removal.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::images::VERSION;
use lab::package::{self, NAME};
use lab::ui::Ui;
use tests::machine::Machine;
use tests::{PATIENCE, Scenario, eventually, run};

use super::{EXPOSURE, setting};

/// A later version, from the same program.
const LATER: &str = "99.0.0";
/// Client and server certificates before and after a renewal.
const PKI: &str = "/etc/nestor/pki";
const RENEWED: &str = "/etc/nestor/renewed";
/// Shortens the time after which systemd ends a silent server, and the time that it then has to write a core dump.
const SHORT_WATCHDOG: &str = "[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\n";

/// A machine and the service on it.
struct Host {
    machine: Machine,
}

#[tokio::test]
async fn the_service_runs_under_systemd_and_its_data_survive_upgrade_and_purge() -> Result<()> {
    run(|s| async move {
        let packages = tempfile::tempdir_in(s.lab.dir())?;
        let built = async |version| {
            package::build(&Ui::default(), &s.lab.state().binaries, version, packages.path()).await
        };
        let (first, later) = (built(VERSION).await?, built(LATER).await?);
        let root = package::host(&Ui::default()).await?;
        let socket = libvirt_socket(&s)?;
        let machine = Machine::boot(&root, s.lab.dir(), socket.parent().context("no folder")?).await?;
        let mut host = Host { machine };
        host.install(&first).await?;
        host.is_not_started_before_it_is_configured().await?;
        host.configure(&s).await?;
        host.runs_confined().await?;
        let volume = host.create_volume().await?;
        host.reloads_certificates().await?;
        host.is_restarted_when_it_is_silent().await?;
        host.machine.reboot().await.context("reboot")?;
        host.has(&volume).await.context("after a reboot")?;
        host.upgrade(&later).await?;
        host.has(&volume).await.context("after an upgrade")?;
        host.remove_and_purge().await?;
        host.machine.remove().await
    })
    .await
}

/// The socket of the lab's libvirt, from the URI.
fn libvirt_socket(s: &Scenario) -> Result<&Path> {
    let uri = &s.lab.state().infra.as_ref().context("the lab has no infra")?.libvirt_uri;
    uri.split_once("socket=").map(|(_, path)| Path::new(path)).with_context(|| format!("no socket: {uri}"))
}

impl Host {
    async fn run(&self, line: &str) -> Result<String> {
        self.machine.run(line).await
    }

    /// Runs dpkg on a package file.
    async fn install(&self, package: &Path) -> Result<String> {
        std::fs::copy(package, self.machine.path("root/package.deb"))?;
        self.run("dpkg --install /root/package.deb").await
    }

    /// A property of the service.
    async fn property(&self, name: &str) -> Result<String> {
        let line = format!("systemctl show --property={name} --value {NAME}");
        Ok(self.run(&line).await?.trim().to_owned())
    }

    async fn is(&self, name: &str, value: &str) -> Result<()> {
        let found = self.property(name).await?;
        ensure!(found == value, "{name} is {found}, not {value}; {}", self.status().await);
        Ok(())
    }

    /// Status and last log lines of the service, for errors.
    async fn status(&self) -> String {
        let line = format!("systemctl status --no-pager --full --lines=30 {NAME} || true");
        self.run(&line).await.unwrap_or_else(|error| format!("{error:#}"))
    }

    async fn has_logged(&self, text: &str) -> Result<()> {
        eventually(&format!("the journal has {text:?}"), PATIENCE, || async {
            let log = self.run(&format!("journalctl --no-pager --output=cat --unit={NAME}")).await?;
            Ok(if log.contains(text) { Ok(()) } else { Err(log) })
        })
        .await
    }

    /// Runs a client command of the program with the certificates in a folder.
    async fn client(&self, pki: &str, words: &str) -> Result<String> {
        let line = format!(
            "storage-infra {words} --infra-url https://127.0.0.1:8443 --infra-ca {pki}/ca.crt \
             --infra-cert {pki}/operator.crt --infra-key {pki}/operator.key"
        );
        self.run(&line).await
    }

    /// Installed, it is neither started nor enabled, and a start without certificates fails once.
    async fn is_not_started_before_it_is_configured(&self) -> Result<()> {
        self.is("ActiveState", "inactive").await?;
        self.is("UnitFileState", "disabled").await?;
        ensure!(
            self.run(&format!("systemctl start {NAME}")).await.is_err(),
            "it starts without configuration"
        );
        self.is("ActiveState", "failed").await?;
        self.is("ExecMainStatus", "2").await?;
        self.is("NRestarts", "0").await
    }

    /// Follows the guide: certificates, the address, the hypervisor. Enabled, it is active when it is ready.
    async fn configure(&self, s: &Scenario) -> Result<()> {
        let uri = &s.lab.state().infra.as_ref().context("the lab has no infra")?.libvirt_uri;
        self.run(&format!("storage-infra pki init --dir {PKI} --host 127.0.0.1")).await?;
        let names = "LISTEN|TLS_CERT|TLS_KEY|CLIENT_CA";
        self.run(&format!(
            "sed --in-place --regexp-extended 's/^#(NESTOR_({names})=)/\\1/' /etc/nestor/storage-infra.env; \
             echo 'NESTOR_HYPERVISOR=libvirt=libvirt:{uri}' >> /etc/nestor/storage-infra.env; \
             systemctl enable --now {NAME}"
        ))
        .await
        .context("the service does not become ready")?;
        self.is("ActiveState", "active").await?;
        self.is("UnitFileState", "enabled").await?;
        self.is("StatusText", "serving the API on 0.0.0.0:8443").await
    }

    /// What systemd has taken from the process, and what `systemd-analyze security` says about the rest.
    async fn runs_confined(&self) -> Result<()> {
        let process = self.property("MainPID").await?;
        let status = self.run(&format!("cat /proc/{process}/status")).await?;
        let has = |name: &str, value: &str| {
            status
                .lines()
                .any(|line| line.split_once(':').is_some_and(|(n, v)| n == name && v.trim() == value))
        };
        // Bits 1, 2, 3 and 19: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_SYS_PTRACE.
        ensure!(has("CapEff", "000000000008000e") && has("CapBnd", "000000000008000e"), "{status}");
        ensure!(has("NoNewPrivs", "1") && has("Seccomp", "2"), "{status}");
        let mode = self.run("stat --format=%a /var/lib/nestor").await?;
        ensure!(mode.trim() == "700", "/var/lib/nestor has mode {mode}");
        let unit =
            std::fs::read_to_string(self.machine.path(&format!("usr/lib/systemd/system/{NAME}.service")))?;
        ensure!(setting(&unit, "ProtectSystem")? == "full", "{unit}");
        let write = format!("nsenter --target {process} --mount touch /etc/nestor/written");
        ensure!(self.run(&write).await.is_err(), "it can write to /etc");
        let line = format!("systemd-analyze security --no-pager --threshold={EXPOSURE} {NAME}");
        self.run(&line).await.map(drop)
    }

    /// Creates a pool with a volume, and returns how the API shows it.
    async fn create_volume(&self) -> Result<String> {
        self.run("mkdir /srv/pool").await?;
        self.client(PKI, "pool add one --path /srv/pool").await?;
        self.client(PKI, "volume create data --size 8Mi").await?;
        let shown = self.client(PKI, "volume list -o json").await?;
        ensure!(shown.contains("\"data\""), "{shown}");
        Ok(shown)
    }

    /// Whether the service is active, and shows the volume as before.
    async fn has(&self, volume: &str) -> Result<()> {
        self.is("ActiveState", "active").await?;
        let shown = self.client(RENEWED, "volume list -o json").await?;
        ensure!(shown == volume, "{shown}, not {volume}");
        Ok(())
    }

    /// Renewed certificates are used after a reload, by the same process.
    async fn reloads_certificates(&self) -> Result<()> {
        let before = self.property("MainPID").await?;
        self.run(&format!("storage-infra pki init --dir {RENEWED} --host 127.0.0.1")).await?;
        self.run(&format!("cp {RENEWED}/ca.crt {RENEWED}/server.* {PKI}/; systemctl reload {NAME}")).await?;
        self.has_logged("reloaded the TLS certificates").await?;
        self.client(RENEWED, "pool list").await?;
        self.is("ActiveState", "active").await?;
        self.is("MainPID", &before).await
    }

    /// systemd gets pings from a server that works, and restarts one that is silent.
    async fn is_restarted_when_it_is_silent(&self) -> Result<()> {
        let folder = self.machine.path(&format!("etc/systemd/system/{NAME}.service.d"));
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("watchdog.conf"), SHORT_WATCHDOG)?;
        self.run(&format!("systemctl daemon-reload; systemctl restart {NAME}")).await?;
        let first = self.property("WatchdogTimestampMonotonic").await?;
        eventually("the server pings", PATIENCE, || async {
            let last = self.property("WatchdogTimestampMonotonic").await?;
            Ok(if last == first { Err(last) } else { Ok(()) })
        })
        .await?;
        self.is("NRestarts", "0").await?;
        let process = self.property("MainPID").await?;
        self.run(&format!("kill -STOP {process}")).await?;
        eventually("systemd restarts the server", PATIENCE, || async {
            let state =
                self.run(&format!("systemctl show --property=NRestarts,ActiveState --value {NAME}")).await?;
            let words: Vec<&str> = state.split_whitespace().collect();
            Ok(if words.contains(&"1") && words.contains(&"active") { Ok(()) } else { Err(state) })
        })
        .await?;
        self.has_logged("Watchdog timeout").await?;
        std::fs::remove_dir_all(&folder)?;
        self.run("systemctl daemon-reload").await.map(drop)
    }

    /// The later version runs, with the administrator's configuration.
    async fn upgrade(&self, package: &Path) -> Result<()> {
        let before = self.property("MainPID").await?;
        let configured = self.run("cat /etc/nestor/storage-infra.env").await?;
        self.install(package).await?;
        let version = self.run(&format!("dpkg-query --show --showformat='${{Version}}' {NAME}")).await?;
        ensure!(version == LATER, "{version}");
        ensure!(self.property("MainPID").await? != before, "the upgrade does not restart the service");
        ensure!(
            self.run("cat /etc/nestor/storage-infra.env").await? == configured,
            "the configuration changed"
        );
        Ok(())
    }

    /// A removal stops the service; a purge says what it keeps.
    async fn remove_and_purge(&self) -> Result<()> {
        self.run(&format!("systemctl stop {NAME}")).await?;
        self.is("Result", "success").await?;
        self.is("ExecMainStatus", "0").await?;
        self.run(&format!("systemctl start {NAME}; dpkg --remove {NAME}")).await?;
        self.is("LoadState", "not-found").await?;
        ensure!(
            self.run("grep --line-regexp storage-infra /proc/[0-9]*/comm").await.is_err(),
            "it still runs"
        );
        self.run("test -e /etc/nestor/storage-infra.env").await?;
        let said = self.run(&format!("dpkg --purge {NAME}")).await?;
        for kept in ["/var/lib/nestor", "/var/backups/nestor", "/etc/nestor"] {
            ensure!(said.contains(&format!("{kept} is kept")), "{kept}: {said}");
            self.run(&format!("test -n \"$(ls -A {kept})\"")).await?;
        }
        self.run("test ! -e /etc/nestor/storage-infra.env; test -n \"$(find /srv/pool -type f -size 8M)\"")
            .await?;
        Ok(())
    }
}
