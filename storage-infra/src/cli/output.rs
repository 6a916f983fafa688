//! Output of the client commands: tables, or JSON for scripts.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use clap::ValueEnum;
use infra_api::{
    Attachment, Budget, BudgetSpec, Capacity, CephPool, ClassLimits, ClassUsage, Host, Labels, Move, Node,
    Pool, PoolName, Qos, Snapshot, Undrained, Volume, VolumeSource,
};
use process_kit::table;
use serde::Serialize;

use super::size::show;

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// Human-readable table.
    Table,
    /// The JSON of the API, for scripts.
    Json,
}

/// An object that can be printed as a table row.
pub(super) trait Row: Serialize {
    const HEADER: &'static [&'static str];
    fn cells(&self) -> Vec<String>;
}

fn labels(labels: &Labels) -> String {
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    dash(pairs.join(","))
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

/// Whether a pool accepts new volumes, as far as operators decide.
fn placement_state(pool: &Pool) -> &'static str {
    match (&pool.suspension, pool.cordoned) {
        (Some(_), _) => "no (suspended)",
        (None, true) => "no (cordoned)",
        (None, false) => "yes",
    }
}

/// The replicas of a Ceph pool, how many of them writes need, and the device class.
fn replicas(CephPool { replicas, min_replicas, device_class }: &CephPool) -> String {
    let class = device_class.as_ref().map(|class| format!(" on {class}")).unwrap_or_default();
    format!("{replicas} (writes: {min_replicas}){class}")
}

impl Row for Pool {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "HEALTHY",
        "ACCEPTS VOLUMES",
        "CAPACITY",
        "RESERVED",
        "FREE",
        "REFLINK",
        "REPLICAS",
        "UNKNOWN FILES",
        "LABELS",
        "HOSTS",
        "PATH",
        "MESSAGE",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.to_string(),
            self.healthy.to_string(),
            placement_state(self).to_owned(),
            show(self.capacity_bytes),
            show(self.reserved_bytes),
            show(self.free_bytes),
            self.reflink.to_string(),
            dash(self.ceph.as_ref().map(replicas).unwrap_or_default()),
            self.unknown_files.len().to_string(),
            labels(&self.labels),
            self.hosts.to_string(),
            self.path.clone(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

/// A file in a pool directory that belongs to no volume or snapshot.
#[derive(Serialize)]
pub(super) struct UnknownFile {
    pool: PoolName,
    path: String,
}

impl UnknownFile {
    /// The unknown files of a pool.
    pub(super) fn of(pool: &Pool) -> Vec<Self> {
        let path = |name: &String| Path::new(&pool.path).join(name).display().to_string();
        pool.unknown_files.iter().map(|name| Self { pool: pool.name.clone(), path: path(name) }).collect()
    }
}

impl Row for UnknownFile {
    const HEADER: &'static [&'static str] = &["POOL", "FILE"];

    fn cells(&self) -> Vec<String> {
        vec![self.pool.to_string(), self.path.clone()]
    }
}

fn limits(qos: &Qos) -> String {
    let iops = qos.iops.map(|iops| format!("{iops}/s"));
    let bytes = qos.bytes_per_second.map(|bytes| format!("{}B/s", show(bytes)));
    dash(iops.into_iter().chain(bytes).collect::<Vec<_>>().join(","))
}

/// A state, with the progress of a copy in percent.
fn state(state: impl std::fmt::Display, copied: Option<u64>, of: u64) -> String {
    match copied {
        Some(copied) => format!("{state} ({}%)", u128::from(copied) * 100 / u128::from(of.max(1))),
        None => state.to_string(),
    }
}

impl Row for Volume {
    const HEADER: &'static [&'static str] = &[
        "ID",
        "CAPACITY",
        "POOL",
        "ZONE",
        "STATE",
        "SHARED",
        "LIMITS",
        "SOURCE",
        "DISK UUID",
        "ATTACHED TO",
        "CREATED",
        "CONDITION",
    ];

    fn cells(&self) -> Vec<String> {
        let nodes: Vec<String> = self.attached_to.iter().map(ToString::to_string).collect();
        let source = self.source.as_ref().map(|source| match source {
            VolumeSource::Snapshot(id) => format!("snapshot {id}"),
            VolumeSource::Volume(id) => format!("volume {id}"),
        });
        let wrong = || self.condition.message.clone().unwrap_or_else(|| "abnormal".into());
        vec![
            self.id.to_string(),
            show(self.capacity_bytes),
            pool_of(self),
            dash(self.zone.clone().unwrap_or_default()),
            state(self.state, self.copied_bytes, self.capacity_bytes),
            self.shareable.to_string(),
            limits(&self.qos),
            dash(source.unwrap_or_default()),
            self.disk_uuid.to_string(),
            dash(nodes.join(",")),
            self.created_at.clone(),
            if self.condition.healthy { "ok".into() } else { wrong() },
        ]
    }
}

impl Row for Undrained {
    const HEADER: &'static [&'static str] = &["VOLUME", "MOVES TO", "MESSAGE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.to_string(),
            dash(self.to.as_ref().map(ToString::to_string).unwrap_or_default()),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

/// The pool of a volume, and where it is moved to.
fn pool_of(volume: &Volume) -> String {
    match &volume.moving {
        Some(Move { to, phase, copied_bytes, .. }) if *to != volume.pool => {
            format!("{} -> {to} ({})", volume.pool, state(phase, *copied_bytes, volume.capacity_bytes))
        }
        _ => volume.pool.to_string(),
    }
}

impl Row for Snapshot {
    const HEADER: &'static [&'static str] = &["ID", "VOLUME", "CAPACITY", "POOL", "STATE", "CREATED"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.volume.to_string(),
            show(self.capacity_bytes),
            self.pool.to_string(),
            state(self.state, self.copied_bytes, self.capacity_bytes),
            self.created_at.clone(),
        ]
    }
}

impl Row for Node {
    const HEADER: &'static [&'static str] =
        &["UUID", "NAME", "HYPERVISOR", "ZONE", "STATE", "PROVEN OFF", "MAX DISKS", "MESSAGE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.uuid.to_string(),
            self.name.clone(),
            self.hypervisor.clone(),
            dash(self.zone.clone().unwrap_or_default()),
            self.state.to_string(),
            self.proven_off.to_string(),
            dash(self.max_disks.map(|max| max.to_string()).unwrap_or_default()),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Host {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "KIND",
        "ZONE",
        "LABELS",
        "REACHABLE",
        "SINCE",
        "NODES",
        "POOLS",
        "FREE",
        "LOCATION",
        "MESSAGE",
    ];

    fn cells(&self) -> Vec<String> {
        let pools: Vec<&str> = self.pools.iter().map(PoolName::as_str).collect();
        vec![
            self.name.clone(),
            self.kind.clone(),
            dash(self.zone.clone().unwrap_or_default()),
            labels(&self.labels),
            self.reachable.to_string(),
            dash(self.since.clone().unwrap_or_default()),
            self.nodes.to_string(),
            dash(pools.join(",")),
            show(self.free_bytes),
            self.location.clone(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Attachment {
    const HEADER: &'static [&'static str] =
        &["ID", "VOLUME", "NODE", "STATE", "ACCESS", "READ-ONLY", "DISK UUID", "MESSAGE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.volume.to_string(),
            self.node.to_string(),
            self.state.to_string(),
            self.access.to_string(),
            self.read_only.to_string(),
            self.disk_uuid.to_string(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Budget {
    const HEADER: &'static [&'static str] =
        &["ACCOUNT", "BYTES", "VOLUMES", "SNAPSHOTS", "SNAPSHOTS PER VOLUME"];

    fn cells(&self) -> Vec<String> {
        let limits = self.limits.clone().unwrap_or_default();
        let BudgetSpec { bytes, volumes, snapshots, snapshots_per_volume, .. } = limits;
        vec![
            dash(self.account.to_string()),
            of_limit(&show(self.used.bytes), bytes.map(show)),
            of_limit(&self.used.volumes, volumes),
            of_limit(&self.used.snapshots, snapshots),
            dash(snapshots_per_volume.map(|most| format!("at most {most}")).unwrap_or_default()),
        ]
    }
}

/// What is used, of a limit if there is one.
fn of_limit(used: &impl ToString, limit: Option<impl std::fmt::Display>) -> String {
    let used = used.to_string();
    limit.map_or(used.clone(), |limit| format!("{used} of {limit}"))
}

/// Prints the budget of an account, and what it uses of each class.
pub(super) fn budget(format: Format, budget: &Budget) -> anyhow::Result<()> {
    one(format, budget)?;
    if format == Format::Json {
        return Ok(());
    }
    let limits = budget.limits.clone().unwrap_or_default();
    let class = |name: &String| {
        let ClassLimits { bytes, volumes } = limits.classes.get(name).copied().unwrap_or_default();
        let used = budget.used.classes.get(name).copied().unwrap_or_default();
        let ClassUsage { bytes: used_bytes, volumes: used_volumes, snapshots } = used;
        vec![
            dash(name.clone()),
            of_limit(&show(used_bytes), bytes.map(show)),
            of_limit(&used_volumes, volumes),
            snapshots.to_string(),
        ]
    };
    let names: BTreeSet<&String> = limits.classes.keys().chain(budget.used.classes.keys()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let head = ["CLASS", "BYTES", "VOLUMES", "SNAPSHOTS"];
    put(&format!("\n{}", table::format(&head, names.into_iter().map(class))))
}

impl Row for Capacity {
    const HEADER: &'static [&'static str] = &["FREE", "LARGEST VOLUME"];

    fn cells(&self) -> Vec<String> {
        vec![show(self.free_bytes), show(self.max_volume_bytes)]
    }
}

pub(super) fn put(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader, such as `head`, has closed the pipe.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Prints JSON for scripts.
pub(super) fn json<T: Serialize + ?Sized>(value: &T) -> anyhow::Result<()> {
    put(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// Prints a list.
pub(super) fn many<T: Row>(format: Format, items: &[T]) -> anyhow::Result<()> {
    match format {
        Format::Json => json(items),
        Format::Table => put(&table::format(T::HEADER, items.iter().map(Row::cells))),
    }
}

/// Prints one object.
pub(super) fn one<T: Row>(format: Format, item: &T) -> anyhow::Result<()> {
    match format {
        Format::Json => json(item),
        Format::Table => put(&table::format(T::HEADER, [item.cells()])),
    }
}

/// Prints a confirmation; nothing with JSON output.
pub(super) fn done(format: Format, text: &str) -> anyhow::Result<()> {
    match format {
        Format::Json => Ok(()),
        Format::Table => put(&format!("{text}\n")),
    }
}
