//! Pool commands.

use anyhow::Context;
use clap::{Args, Subcommand};
use infra_api::{Client, EngineKind, Labels, OnFull, Pool, PoolHosts, PoolName, PoolSpec};

use super::disks::{self, DiscoverArgs, InitArgs};
use super::moves::{self, DrainArgs};
use super::suspensions::SuspensionArgs;
use super::{ClientArgs, label};
use crate::cli::output;
use crate::engine::RbdLocation;

/// Pool commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum PoolCommand {
    /// Register a directory or a Ceph pool as a pool, or change a pool's labels, --hosts and --on-full.
    Add {
        /// Name of the pool.
        name: PoolName,
        /// How the pool stores volumes: `file`, one file per volume in a directory; `rbd`, one RBD image per volume in a
        /// Ceph pool.
        #[arg(long, value_name = "file|rbd", value_parser = engine, default_value = "file")]
        engine: EngineKind,
        /// Existing directory on the server, for the engine file.
        #[arg(long, value_name = "DIR")]
        path: Option<String>,
        #[command(flatten)]
        ceph: CephArgs,
        /// Label that volume placement can select on. Repeatable.
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        /// What happens when a virtual machine writes while the pool is full: `pause` it until there is free space, or
        /// `fail` the write. Default: unchanged; `pause` for a new pool.
        #[arg(long, value_name = "pause|fail", value_parser = on_full)]
        on_full: Option<OnFull>,
        /// Hosts that reach the pool: `all`, or names of the server's --hypervisor flags and labels of its
        /// --hypervisor-label flags, separated by commas. Hosts with all of these labels reach it. Default: unchanged; `all`
        /// for a new pool.
        #[arg(long, value_name = "all|HOST|KEY=VALUE,...", value_parser = hosts)]
        hosts: Option<PoolHosts>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show the disks of this host, and which of them can become pools. Writes nothing. Needs root.
    Discover(DiscoverArgs),
    /// Make pools of blank disks: format them with XFS, mount them at every start of the host, and register them. Run it as
    /// root on the host of the server. Asks before it writes. Disks with anything on them are refused.
    Init(InitArgs),
    /// List all pools.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one pool.
    Show {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// List files in pool directories that belong to no volume or snapshot. The server never changes them.
    UnknownFiles {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Cordon a pool: it accepts no new volumes.
    Cordon {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Uncordon a pool: it accepts new volumes again.
    Uncordon {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Drain a pool: cordon it, and move its volumes to other pools by their placement. Can be repeated.
    Drain(DrainArgs),
    /// Suspend a pool: it accepts no new volumes, and none of its volumes is attached, expanded or deleted until the pool is
    /// resumed.
    Suspend {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        suspension: SuspensionArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Resume a suspended pool, and the VMs that were paused for it.
    Resume {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Change labels of a pool. Placement reads them for each new volume; existing volumes stay.
    Label {
        /// Name of the pool.
        name: PoolName,
        /// KEY=VALUE sets a label, KEY- removes one. The label topology.kubernetes.io/zone is the pool's zone.
        #[arg(required = true, value_name = "KEY=VALUE|KEY-", value_parser = label_change)]
        changes: Vec<LabelChange>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Change which hosts reach a pool. Refused while the pool has volumes that are attached on another host.
    Hosts {
        /// Name of the pool.
        name: PoolName,
        /// `all`, or names and labels of hosts, separated by commas.
        #[arg(value_name = "all|HOST|KEY=VALUE,...", value_parser = hosts)]
        hosts: PoolHosts,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Unregister a pool that has no volumes and snapshots. Its directory remains.
    Remove {
        /// Name of the pool.
        name: PoolName,
        /// Unregister it although its directory has files that belong to no volume or snapshot. They remain.
        #[arg(long)]
        keep_unknown_files: bool,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Where a pool of the engine `rbd` is.
#[derive(Debug, Args)]
pub(in crate::cli) struct CephArgs {
    /// Existing Ceph pool, or namespace of one, for the engine rbd.
    #[arg(long, value_name = "POOL[/NAMESPACE]")]
    ceph_pool: Option<String>,
    /// cephx user, without `client.`.
    #[arg(long, value_name = "USER", default_value = "nestor", requires = "ceph_pool")]
    ceph_user: String,
    /// Ceph configuration file, on the server and on the hosts of VMs.
    #[arg(long, value_name = "FILE", default_value = "/etc/ceph/ceph.conf", requires = "ceph_pool")]
    ceph_conf: String,
    /// Keyring file of the cephx user, on the server only. Default: /etc/ceph/ceph.client.USER.keyring.
    #[arg(long, value_name = "FILE", requires = "ceph_pool")]
    ceph_keyring: Option<String>,
    /// How long deleted volumes stay in Ceph's trash.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, requires = "ceph_pool")]
    trash_seconds: u64,
}

/// The path of a pool in the API.
fn pool_path(engine: EngineKind, path: Option<String>, ceph: CephArgs) -> anyhow::Result<String> {
    let CephArgs { ceph_pool, ceph_user, ceph_conf, ceph_keyring, trash_seconds } = ceph;
    match (engine, path, ceph_pool) {
        (EngineKind::File, Some(path), None) => Ok(path),
        (EngineKind::Rbd, None, Some(place)) => {
            let keyring =
                ceph_keyring.unwrap_or_else(|| format!("/etc/ceph/ceph.client.{ceph_user}.keyring"));
            let text = format!(
                "rbd:{place}:id={ceph_user}:conf={ceph_conf}:keyring={keyring}:trash={trash_seconds}"
            );
            Ok(text.parse::<RbdLocation>().map_err(anyhow::Error::msg)?.to_string())
        }
        (EngineKind::File, ..) => anyhow::bail!("a pool of the engine file needs --path, and no --ceph-pool"),
        (EngineKind::Rbd, ..) => anyhow::bail!("a pool of the engine rbd needs --ceph-pool, and no --path"),
    }
}

fn engine(text: &str) -> Result<EngineKind, String> {
    [EngineKind::File, EngineKind::Rbd]
        .into_iter()
        .find(|one| one.to_string() == text)
        .ok_or_else(|| "must be file or rbd".to_owned())
}

/// `all`, or names and labels of hosts, separated by commas.
pub(super) fn hosts(text: &str) -> Result<PoolHosts, String> {
    let mut hosts = PoolHosts::default();
    for part in text.split(',').filter(|_| text != "all") {
        match part.split_once('=') {
            Some((key, value)) if !key.is_empty() => {
                hosts.labels.insert(key.to_owned(), value.to_owned());
            }
            None if !part.is_empty() && part != "all" => hosts.names.push(part.to_owned()),
            _ => return Err("must be all, or HOST and KEY=VALUE, separated by commas".to_owned()),
        }
    }
    Ok(hosts)
}

/// A label to set, or to remove.
type LabelChange = (String, Option<String>);

fn label_change(text: &str) -> Result<LabelChange, String> {
    match text.strip_suffix('-').filter(|key| !key.contains('=')) {
        Some("") => Err("must be KEY=VALUE or KEY-".to_owned()),
        Some(key) => Ok((key.to_owned(), None)),
        None => label(text)
            .map(|(key, value)| (key, Some(value)))
            .map_err(|_| "must be KEY=VALUE or KEY-".to_owned()),
    }
}

fn on_full(text: &str) -> Result<OnFull, String> {
    [OnFull::Pause, OnFull::Fail]
        .into_iter()
        .find(|one| one.to_string() == text)
        .ok_or_else(|| "must be pause or fail".to_owned())
}

async fn find_pool(client: &Client, name: &PoolName) -> anyhow::Result<Pool> {
    client.get_pool(name).await?.with_context(|| format!("pool {name} not found"))
}

/// Changes the spec of a pool.
async fn change(
    client: &ClientArgs,
    name: &PoolName,
    change: impl FnOnce(&mut PoolSpec),
) -> anyhow::Result<()> {
    let server = client.connect()?;
    let Pool { engine, path, labels, cordoned, on_full, hosts, .. } = find_pool(&server, name).await?;
    let mut spec = PoolSpec { engine, path, labels, cordoned, on_full, hosts };
    change(&mut spec);
    output::one(client.output, &server.put_pool(name, &spec).await?)
}

fn relabel(labels: &mut Labels, changes: Vec<LabelChange>) {
    for (key, value) in changes {
        match value {
            Some(value) => labels.insert(key, value),
            None => labels.remove(&key),
        };
    }
}

async fn remove(client: &ClientArgs, name: &PoolName, keep_unknown_files: bool) -> anyhow::Result<()> {
    let server = client.connect()?;
    let unknown = server.get_pool(name).await?.map(|pool| pool.unknown_files).unwrap_or_default();
    if !keep_unknown_files && let Some(first) = unknown.first() {
        anyhow::bail!(
            "the directory of pool {name} has {} files that belong to no volume or snapshot, such as {first}: \
             `storage-infra pool unknown-files` lists them; move or adopt them, or repeat the command with \
             --keep-unknown-files, which leaves them where they are",
            unknown.len()
        );
    }
    server.delete_pool(name).await?;
    output::done(client.output, &format!("pool {name} unregistered"))
}

/// Runs a pool command.
pub(super) async fn run(command: PoolCommand) -> anyhow::Result<()> {
    match command {
        PoolCommand::Add { name, engine, path, ceph, labels, on_full, hosts, client } => {
            let path = pool_path(engine, path, ceph)?;
            let server = client.connect()?;
            // `pool add` of an existing pool changes its labels and keeps whether it is cordoned.
            let before = server.get_pool(&name).await?;
            let cordoned = before.as_ref().is_some_and(|pool| pool.cordoned);
            let on_full = on_full.or(before.as_ref().map(|pool| pool.on_full)).unwrap_or_default();
            let hosts = hosts.or(before.map(|pool| pool.hosts)).unwrap_or_default();
            let labels: Labels = labels.into_iter().collect();
            let spec = PoolSpec { engine, path, labels, cordoned, on_full, hosts };
            output::one(client.output, &server.put_pool(&name, &spec).await?)
        }
        PoolCommand::Discover(args) => disks::discover(&args),
        PoolCommand::Init(args) => disks::init(args).await,
        PoolCommand::List { client } => output::many(client.output, &client.connect()?.list_pools().await?),
        PoolCommand::Show { name, client } => {
            output::one(client.output, &find_pool(&client.connect()?, &name).await?)
        }
        PoolCommand::UnknownFiles { client } => {
            let pools = client.connect()?.list_pools().await?;
            output::many(client.output, &pools.iter().flat_map(output::UnknownFile::of).collect::<Vec<_>>())
        }
        PoolCommand::Cordon { name, client } => change(&client, &name, |pool| pool.cordoned = true).await,
        PoolCommand::Uncordon { name, client } => change(&client, &name, |pool| pool.cordoned = false).await,
        PoolCommand::Label { name, changes, client } => {
            change(&client, &name, |pool| relabel(&mut pool.labels, changes)).await
        }
        PoolCommand::Hosts { name, hosts, client } => change(&client, &name, |pool| pool.hosts = hosts).await,
        PoolCommand::Drain(args) => moves::drain(args).await,
        PoolCommand::Suspend { name, suspension, client } => {
            output::one(client.output, &client.connect()?.suspend_pool(&name, &suspension.into()).await?)
        }
        PoolCommand::Resume { name, client } => {
            client.connect()?.resume_pool(&name).await?;
            output::done(client.output, &format!("pool {name} resumed"))
        }
        PoolCommand::Remove { name, keep_unknown_files, client } => {
            remove(&client, &name, keep_unknown_files).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_or_labelled_or_all() {
        assert!(hosts("all").unwrap().is_all());
        let some = hosts("kvm-1,nfs=yes,kvm-2").unwrap();
        assert_eq!(some.names, ["kvm-1", "kvm-2"]);
        assert_eq!(some.labels, Labels::from([("nfs".into(), "yes".into())]));
        assert_eq!(some.to_string(), "kvm-1,kvm-2,nfs=yes");
        for bad in ["", "a,,b", "=x", "a,all"] {
            assert!(hosts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn labels_are_set_and_removed() {
        let changes = ["tier=fast", "rack-", "note=a-"].map(|text| label_change(text).unwrap());
        let mut labels = Labels::from([("rack".into(), "1".into()), ("tier".into(), "slow".into())]);
        relabel(&mut labels, changes.into());
        assert_eq!(labels, Labels::from([("note".into(), "a-".into()), ("tier".into(), "fast".into())]));
        for bad in ["", "-", "tier", "=fast"] {
            assert!(label_change(bad).is_err(), "{bad}");
        }
    }
}
