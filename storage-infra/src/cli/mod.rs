//! Command line: the server, `backup`, `restore`, `recover`, `pki` and the client commands.

mod backup;
mod catalog;
mod client;
mod output;
mod pki;
mod recover;
pub(crate) mod size;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use infra_api::MAX_ZONE;
use process_kit::duration;
use process_kit::flags::{self, HttpArgs};
use process_kit::telemetry::{self, LogArgs, SpanExport};
use trace_export::TraceArgs;

use crate::api::{MetricsAuth, WithoutRole};
use crate::app::{self, CatalogPlace, HypervisorFlag, HypervisorTarget};
use crate::backup::Schedule;

pub use client::ClientArgs;

/// Storage server that manages pools and volumes and attaches them to virtual machines.
#[derive(Debug, Parser)]
#[command(name = "storage-infra", version, max_term_width = 120)]
pub struct Cli {
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// Parses the command line and the environment. Exits on errors, and for `--help` and `--version`.
    pub fn read() -> Self {
        let mut command = Self::with_env();
        let matches = command.get_matches_mut();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
    }

    /// The command line, with environment variables for the flags of the server.
    fn with_env() -> clap::Command {
        flags::with_env(Self::command()).mut_subcommand("serve", flags::with_env)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server.
    Serve(ServeArgs),
    /// Back up the catalog, also while a server runs with it. Prints what was written.
    Backup(backup::BackupArgs),
    /// Restore the catalog from a backup. Prints what changed in the pools since, and what to do next.
    Restore(backup::RestoreArgs),
    /// Rebuild a lost or damaged catalog from the contents of the pools. By default only prints what it would do.
    Recover(recover::RecoverArgs),
    /// Bring a catalog from SQLite into PostgreSQL.
    Catalog {
        #[command(subcommand)]
        command: catalog::CatalogCommand,
    },
    /// Create and renew certificates of the server and its clients.
    Pki {
        #[command(subcommand)]
        command: pki::PkiCommand,
    },
    #[command(flatten)]
    Client(client::ClientCommand),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Directory of the catalog. Only one server can use it at a time.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Address on which to serve the API.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Certificate chain of the server, PEM.
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// Private key of the server, PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// CA certificate, PEM. Clients must present a certificate signed by this CA.
    #[arg(long, value_name = "FILE")]
    client_ca: PathBuf,
    /// What clients may do whose certificates have no role, as those of earlier versions: everything, or nothing.
    #[arg(long, value_name = "ACCESS", value_enum, default_value_t = WithoutRole::Operator)]
    clients_without_role: WithoutRole,
    /// A hypervisor, repeatable. NAME=libvirt:URI is a libvirt daemon. NAME=host:DIR attaches volumes to this host, for pods
    /// of the management cluster: as loop devices, with links below DIR. For benchmarks and tests, NAME=loop:DIR attaches
    /// volumes as loop devices of this host, which stands in for VMs, and NAME=simulated:DIR[,delay=50ms] only keeps
    /// records below DIR.
    #[arg(long = "hypervisor", value_name = "NAME=KIND:WHERE", value_parser = hypervisor)]
    hypervisors: Vec<HypervisorFlag>,
    /// Zone of a hypervisor, repeatable: nodes on it have this zone unless they are registered with another one.
    #[arg(long = "hypervisor-zone", value_name = "NAME=ZONE", value_parser = hypervisor_zone)]
    hypervisor_zones: Vec<(String, String)>,
    /// Label of a hypervisor, repeatable: pools can be reachable from the hypervisors with a label.
    #[arg(long = "hypervisor-label", value_name = "NAME=KEY=VALUE", value_parser = hypervisor_label)]
    hypervisor_labels: Vec<(String, String, String)>,
    /// Directory whose files may be adopted as volumes, and to which volumes may be released, besides the directories of the
    /// pools. Repeatable.
    #[arg(long = "file-dir", value_name = "DIR")]
    file_dirs: Vec<PathBuf>,
    #[command(flatten)]
    database: catalog::DatabaseFlags,
    #[command(flatten)]
    backups: BackupFlags,
    #[command(flatten)]
    http: HttpArgs,
    /// Who may read /metrics.
    #[arg(long, value_enum, default_value_t = MetricsAuth::None)]
    metrics_auth: MetricsAuth,
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

#[derive(Debug, Args)]
struct BackupFlags {
    /// Directory for backups of the catalog, on another disk than the catalog. [default: no backups]
    #[arg(long, value_name = "DIR")]
    backup_dir: Option<PathBuf>,
    /// Time between two backups, such as 15m or 1d.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = interval)]
    backup_interval: Duration,
    /// Number of backups to keep. Older ones are removed once a new one is verified.
    #[arg(long, value_name = "NUMBER", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..))]
    backup_keep: u32,
}

impl BackupFlags {
    fn schedule(self) -> Option<Schedule> {
        let keep = usize::try_from(self.backup_keep).unwrap_or(usize::MAX);
        self.backup_dir.map(|dir| Schedule { dir, interval: self.backup_interval, keep })
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text)?;
    if interval < Duration::from_secs(1) { Err("must be at least 1s".into()) } else { Ok(interval) }
}

fn hypervisor(text: &str) -> Result<HypervisorFlag, String> {
    let usage = "must be NAME=libvirt:URI, NAME=host:DIR, NAME=loop:DIR or NAME=simulated:DIR[,delay=50ms]";
    let (name, target) = text.split_once('=').ok_or(usage)?;
    if name.is_empty() {
        return Err(usage.into());
    }
    let target = match target.split_once(':') {
        Some(("libvirt", uri)) if !uri.is_empty() => HypervisorTarget::Libvirt(uri.to_owned()),
        Some(("host", dir)) if dir.starts_with('/') => HypervisorTarget::Host(dir.into()),
        Some(("loop", dir)) if dir.starts_with('/') => HypervisorTarget::Loop(dir.into()),
        Some(("simulated", text)) if text.starts_with('/') => simulated(text).ok_or(usage)?,
        Some(("host" | "loop" | "simulated", _)) => {
            return Err(
                "the directory of a host, loop or simulated hypervisor must be an absolute path".into()
            );
        }
        _ => return Err(usage.into()),
    };
    Ok(HypervisorFlag { name: name.to_owned(), target })
}

fn hypervisor_zone(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, zone)) if !name.is_empty() && (1..=MAX_ZONE).contains(&zone.len()) => {
            Ok((name.to_owned(), zone.to_owned()))
        }
        _ => Err(format!("must be NAME=ZONE with a zone of at most {MAX_ZONE} bytes")),
    }
}

fn hypervisor_label(text: &str) -> Result<(String, String, String), String> {
    let (name, label) = text.split_once('=').unwrap_or_default();
    match label.split_once('=') {
        Some((key, value)) if !name.is_empty() && !key.is_empty() => {
            Ok((name.to_owned(), key.to_owned(), value.to_owned()))
        }
        _ => Err("must be NAME=KEY=VALUE".to_owned()),
    }
}

/// `DIR` or `DIR,delay=50ms`.
fn simulated(text: &str) -> Option<HypervisorTarget> {
    let (dir, delay) = match text.split_once(',') {
        Some((dir, delay)) => (dir, delay.strip_prefix("delay=")?.strip_suffix("ms")?.parse().ok()?),
        None => (text, 0),
    };
    Some(HypervisorTarget::Simulated(dir.into(), Duration::from_millis(delay)))
}

/// Runs the command.
pub async fn run(cli: Cli) -> anyhow::Result<()> {
    let spans = match &cli.command {
        Command::Serve(args) => args.traces.start("storage-infra").map_err(anyhow::Error::msg)?,
        _ => None,
    };
    let (layer, flush) = spans.map(|SpanExport { layer, flush }| (layer, flush)).unzip();
    telemetry::init(&cli.logs, layer).map_err(anyhow::Error::msg)?;
    match cli.command {
        Command::Serve(args) => {
            let catalog = args.database.place()?;
            anyhow::ensure!(
                matches!(catalog, CatalogPlace::DataDir) || args.backups.backup_dir.is_none(),
                "--backup-dir: a catalog in PostgreSQL is backed up with pg_dump or by the database's own backups, not by the \
                 server"
            );
            let served = app::serve(app::Options {
                data_dir: args.data_dir,
                catalog,
                listen: args.listen,
                tls_cert: args.tls_cert,
                tls_key: args.tls_key,
                client_ca: args.client_ca,
                without_role: args.clients_without_role,
                hypervisors: args.hypervisors,
                zones: args.hypervisor_zones,
                labels: args.hypervisor_labels,
                file_dirs: args.file_dirs,
                backups: args.backups.schedule(),
                http_listen: args.http.http_listen,
                metrics_auth: args.metrics_auth,
            })
            .await;
            if let Some(flush) = flush {
                flush.await;
            }
            served
        }
        Command::Backup(args) => backup::back_up(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::Recover(args) => recover::run(args).await,
        Command::Catalog { command } => catalog::run(command).await,
        Command::Pki { command } => pki::run(&command),
        Command::Client(command) => client::run(command).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_help_texts_and_those_of_the_server_environment_variables() {
        let command = Cli::with_env();
        command.clone().debug_assert();
        assert_eq!(flags::faults(&command), [""; 0]);
        assert_eq!(flags::faults(command.find_subcommand("serve").unwrap()), [""; 0]);
    }

    #[test]
    fn a_zone_flag_needs_a_name_and_a_zone() {
        assert_eq!(hypervisor_zone("kvm=z=1"), Ok(("kvm".into(), "z=1".into())));
        for bad in ["kvm", "kvm=", "=z", &format!("kvm={}", "z".repeat(MAX_ZONE + 1))] {
            assert!(hypervisor_zone(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_label_flag_needs_a_name_and_a_label() {
        let label = hypervisor_label("kvm=rack=r=1").unwrap();
        assert_eq!(label, ("kvm".into(), "rack".into(), "r=1".into()));
        for bad in ["kvm", "kvm=rack", "=rack=1", "kvm==1"] {
            assert!(hypervisor_label(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hypervisor_flag_needs_a_name_and_a_known_kind() {
        let flag = hypervisor("kvm=libvirt:qemu+tls://host/system").unwrap();
        assert_eq!(flag.target, HypervisorTarget::Libvirt("qemu+tls://host/system".into()));
        assert_eq!(hypervisor("l=loop:/run/x").unwrap().target, HypervisorTarget::Loop("/run/x".into()));
        assert_eq!(hypervisor("h=host:/run/x").unwrap().target, HypervisorTarget::Host("/run/x".into()));
        let slow = HypervisorTarget::Simulated("/run/x".into(), Duration::from_millis(50));
        assert_eq!(hypervisor("s=simulated:/run/x,delay=50ms").unwrap().target, slow);
        for bad in ["kvm", "=loop:/x", "a=loop:x", "a=libvirt:", "a=xen:/x", "a=simulated:/x,delay=5"] {
            assert!(hypervisor(bad).is_err(), "{bad}");
        }
    }
}
