//! The command line.

mod client;
mod output;
mod pki;
mod recover;
mod size;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::app::{self, HypervisorFlag, HypervisorTarget};

pub use client::ClientArgs;

/// Pools, volumes, and the disks of virtual machines.
#[derive(Debug, Parser)]
#[command(name = "storage-infra", version, max_term_width = 120)]
pub struct Cli {
    /// What to log: a level, or directives as tracing knows them.
    #[arg(long, global = true, env = "NESTOR_LOG", default_value = "info")]
    log_level: String,
    /// How to log.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

/// The shape of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object per line.
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server.
    Serve(ServeArgs),
    /// Rebuild a lost or damaged catalog from what is in the pools. Says only what it would do, unless told otherwise.
    Recover(recover::RecoverArgs),
    /// Write a certificate authority, a server certificate and a client certificate.
    Pki(pki::PkiArgs),
    #[command(flatten)]
    Client(client::Verb),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Where the catalog is kept. One server per directory.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Where the API listens.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The server's certificate chain, PEM.
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// The server's private key, PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// The authority that signs the certificates of those who may connect, PEM.
    #[arg(long, value_name = "FILE")]
    client_ca: PathBuf,
    /// A hypervisor: NAME=libvirt:URI; NAME=loop:DIR where this host plays the machines; or, to measure and to try out,
    /// NAME=simulated:DIR[,delay=MILLISECONDSms] with machines that are only told of. Repeatable.
    #[arg(long = "hypervisor", value_name = "NAME=KIND:WHERE", value_parser = hypervisor)]
    hypervisors: Vec<HypervisorFlag>,
    /// Where /healthz, /readyz and /metrics are served, without TLS. Off where absent.
    #[arg(long, value_name = "ADDR:PORT")]
    http_listen: Option<SocketAddr>,
}

fn hypervisor(text: &str) -> Result<HypervisorFlag, String> {
    let form = "must be NAME=libvirt:URI, NAME=loop:DIR or NAME=simulated:DIR[,delay=50ms]";
    let (name, target) = text.split_once('=').ok_or(form)?;
    if name.is_empty() {
        return Err(form.into());
    }
    let target = match target.split_once(':') {
        Some(("libvirt", uri)) if !uri.is_empty() => HypervisorTarget::Libvirt(uri.to_owned()),
        Some(("loop", dir)) if dir.starts_with('/') => HypervisorTarget::Loop(dir.into()),
        Some(("simulated", text)) if text.starts_with('/') => simulated(text).ok_or(form)?,
        Some(("loop" | "simulated", _)) => {
            return Err("the directory of a loop or simulated hypervisor must be an absolute path".into());
        }
        _ => return Err(form.into()),
    };
    Ok(HypervisorFlag { name: name.to_owned(), target })
}

/// `DIR` or `DIR,delay=50ms`.
fn simulated(text: &str) -> Option<HypervisorTarget> {
    let (dir, delay) = match text.split_once(',') {
        Some((dir, delay)) => (dir, delay.strip_prefix("delay=")?.strip_suffix("ms")?.parse().ok()?),
        None => (text, 0),
    };
    Some(HypervisorTarget::Simulated(dir.into(), Duration::from_millis(delay)))
}

/// Does what the command line says.
pub async fn run(cli: Cli) -> anyhow::Result<()> {
    start_log(&cli)?;
    match cli.command {
        Command::Serve(args) => {
            app::serve(app::Options {
                data_dir: args.data_dir,
                listen: args.listen,
                tls_cert: args.tls_cert,
                tls_key: args.tls_key,
                client_ca: args.client_ca,
                hypervisors: args.hypervisors,
                http_listen: args.http_listen,
            })
            .await
        }
        Command::Recover(args) => recover::run(args).await,
        Command::Pki(args) => pki::write(&args),
        Command::Client(verb) => client::run(verb).await,
    }
}

fn start_log(cli: &Cli) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&cli.log_level)
        .with_context(|| format!("--log-level {:?} is not understood", cli.log_level))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    match cli.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn hypervisors_are_named_and_of_a_known_kind() {
        let flag = hypervisor("kvm=libvirt:qemu+tls://host/system").unwrap();
        assert_eq!(flag.target, HypervisorTarget::Libvirt("qemu+tls://host/system".into()));
        assert_eq!(hypervisor("l=loop:/run/x").unwrap().target, HypervisorTarget::Loop("/run/x".into()));
        let slow = HypervisorTarget::Simulated("/run/x".into(), Duration::from_millis(50));
        assert_eq!(hypervisor("s=simulated:/run/x,delay=50ms").unwrap().target, slow);
        for bad in ["kvm", "=loop:/x", "a=loop:x", "a=libvirt:", "a=xen:/x", "a=simulated:/x,delay=5"] {
            assert!(hypervisor(bad).is_err(), "{bad}");
        }
    }
}
