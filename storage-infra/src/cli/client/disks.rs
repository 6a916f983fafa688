//! Disks of this host: `pool discover` and `pool init`.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::Args;
use infra_api::{Client, EngineKind, Labels, OnFull, PoolHosts, PoolName, PoolSpec, ZONE_LABEL};

use super::pools::hosts;
use super::{ClientArgs, label};
use crate::cli::output::{self, Format, Row};
use crate::cli::size::show;
use crate::host_disks::{self, Candidate, Disk, NewPool};

/// The word that confirms the loss of what is on a disk.
const CONFIRMATION: &str = "format";

/// Which disks to show.
#[derive(Debug, Args)]
pub(in crate::cli) struct DiscoverArgs {
    /// Show these disks, which may be loop devices. Without them: all disks of this host but loop devices.
    #[arg(value_name = "DEVICE")]
    devices: Vec<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

impl Row for Candidate {
    const HEADER: &'static [&'static str] = &["DEVICE", "SIZE", "MODEL", "SERIAL", "ID", "USABLE", "WHY NOT"];

    fn cells(&self) -> Vec<String> {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        vec![
            self.device.clone(),
            show(self.bytes),
            or_dash(self.model.clone()),
            or_dash(self.serial.clone()),
            self.id.clone(),
            self.usable.to_string(),
            or_dash((!self.usable).then(|| self.reasons.join("; "))),
        ]
    }
}

/// Shows the disks of this host.
pub(super) fn discover(args: &DiscoverArgs) -> anyhow::Result<()> {
    let disks = match args.devices.as_slice() {
        [] => host_disks::discover()?,
        named => named.iter().map(|device| host_disks::find(device)).collect::<anyhow::Result<_>>()?,
    };
    output::many(args.output, &disks.iter().map(Disk::candidate).collect::<Vec<_>>())
}

/// A device, and the ID of the disk that is expected there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) struct Target {
    device: PathBuf,
    id: Option<String>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, id) = match text.split_once('=') {
            Some((device, id)) if !id.is_empty() => (device, Some(id.to_owned())),
            Some(_) => return Err("must be DEVICE or DEVICE=ID".to_owned()),
            None => (text, None),
        };
        if !device.starts_with('/') {
            return Err("the device must be an absolute path, such as /dev/sdb".to_owned());
        }
        Ok(Self { device: device.into(), id })
    }
}

/// The pools to create.
#[derive(Debug, Args)]
pub(in crate::cli) struct InitArgs {
    /// Blank disks of this host, which is the server's. `pool discover` shows them and their IDs. With an ID, another disk on
    /// the device is refused.
    #[arg(required = true, value_name = "DEVICE[=ID]")]
    devices: Vec<Target>,
    /// Name of the pool. Several disks become the pools NAME-1, NAME-2 and so on.
    #[arg(long)]
    name: String,
    /// Hosts that reach the pools, as for `pool add`. Default: all.
    #[arg(long, value_name = "all|HOST|KEY=VALUE,...", value_parser = hosts, default_value = "all")]
    hosts: PoolHosts,
    /// Zone that can reach the pool: its label topology.kubernetes.io/zone.
    #[arg(long)]
    zone: Option<String>,
    /// Label that volume placement can select on. Repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Directory in which each filesystem is mounted, in a directory with the name of its pool.
    #[arg(long, value_name = "DIR", default_value = "/srv/nestor")]
    mount_dir: PathBuf,
    /// File that gets an entry for each filesystem, by its UUID, so that it is mounted at every start of the host.
    #[arg(long, value_name = "FILE", default_value = "/etc/fstab")]
    fstab: PathBuf,
    /// Do not ask. Each device needs the ID of its disk.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    client: ClientArgs,
}

impl InitArgs {
    /// The pools, with the disks that are there now.
    fn pools(&self) -> anyhow::Result<Vec<NewPool>> {
        ensure!(self.mount_dir.is_absolute(), "--mount-dir must be an absolute path");
        let names = names(&self.name, self.devices.len())?;
        let pool = |(name, target): (PoolName, &Target)| {
            let disk = host_disks::find(&target.device)?;
            target.refuse_another(&disk, self.yes)?;
            let mounted = self.mount_dir.join(name.as_str());
            Ok(NewPool { name, disk, target: mounted, fstab: self.fstab.clone() })
        };
        names.into_iter().zip(&self.devices).map(pool).collect()
    }

    fn spec(&self, pool: &NewPool) -> PoolSpec {
        let zone = self.zone.iter().map(|zone| (ZONE_LABEL.to_owned(), zone.clone()));
        let labels: Labels = self.labels.iter().cloned().chain(zone).collect();
        let path = pool.path().display().to_string();
        PoolSpec {
            engine: EngineKind::File,
            path,
            labels,
            cordoned: false,
            on_full: OnFull::default(),
            hosts: self.hosts.clone(),
        }
    }

    async fn register(&self, server: &Client, pool: &NewPool) -> anyhow::Result<()> {
        let spec = self.spec(pool);
        let registered = server.put_pool(&pool.name, &spec).await.with_context(|| {
            let labels: String = spec.labels.iter().map(|(key, value)| format!(" --label {key}={value}")).collect();
            format!(
                "the filesystem of pool {} is mounted, but the pool is not registered yet: run `storage-infra pool add {} --path \
                 {}{labels}` on this host",
                pool.name, pool.name, spec.path
            )
        })?;
        output::one(self.client.output, &registered)
    }
}

impl Target {
    /// Fails if the device has another disk than the expected one.
    fn refuse_another(&self, disk: &Disk, needs_id: bool) -> anyhow::Result<()> {
        match &self.id {
            Some(id) => ensure!(
                *id == disk.id,
                "{} is another disk than {id}: its ID is {}; nothing was changed. Run `storage-infra pool discover` again",
                self.device.display(),
                disk.id
            ),
            None => ensure!(
                !needs_id,
                "--yes needs the ID of each disk, as `storage-infra pool discover` prints it: {}=ID",
                self.device.display()
            ),
        }
        Ok(())
    }
}

fn names(name: &str, disks: usize) -> anyhow::Result<Vec<PoolName>> {
    let names = match disks {
        1 => vec![name.to_owned()],
        _ => (1..=disks).map(|number| format!("{name}-{number}")).collect(),
    };
    names.into_iter().map(|name| Ok(PoolName::new(name)?)).collect()
}

/// Creates pools on blank disks.
pub(super) async fn init(args: InitArgs) -> anyhow::Result<()> {
    let pools = args.pools()?;
    refuse_repeated(&pools)?;
    pools.iter().try_for_each(NewPool::check)?;
    let server = args.client.connect()?;
    for pool in &pools {
        let exists = server.get_pool(&pool.name).await?.is_some();
        ensure!(!exists, "pool {} exists already: choose another --name; nothing was changed", pool.name);
    }
    if !args.yes {
        ask(&pools)?;
    }
    for pool in &pools {
        host_disks::prepare(pool)?;
        args.register(&server, pool).await?;
    }
    Ok(())
}

fn refuse_repeated(pools: &[NewPool]) -> anyhow::Result<()> {
    for (at, pool) in pools.iter().enumerate() {
        let is_repeated = pools[..at].iter().any(|other| other.disk.device == pool.disk.device);
        ensure!(!is_repeated, "{} is named twice; nothing was changed", pool.disk.device.display());
    }
    Ok(())
}

fn ask(pools: &[NewPool]) -> anyhow::Result<()> {
    if !io::stdin().is_terminal() {
        bail!(
            "the input is not a terminal, so nobody can confirm: use --yes with the IDs of the disks; nothing was changed"
        );
    }
    confirm(pools, &mut io::stdin().lock(), &mut io::stderr())
}

/// Shows what is going to happen, and fails unless the answer is the word.
fn confirm(pools: &[NewPool], input: &mut impl BufRead, output: &mut impl Write) -> anyhow::Result<()> {
    for NewPool { name, disk, target, fstab } in pools {
        let named = [&disk.model, &disk.serial].into_iter().flatten().cloned().collect::<Vec<_>>().join(" ");
        writeln!(
            output,
            "{} ({}{}{named}, ID {}): format with XFS, mount at {} by an entry in {}, register as pool {name}",
            disk.device.display(),
            show(disk.facts.bytes),
            if named.is_empty() { "" } else { ", " },
            disk.id,
            target.display(),
            fstab.display()
        )?;
    }
    write!(output, "Type {CONFIRMATION:?} to continue: ")?;
    output.flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    ensure!(answer.trim() == CONFIRMATION, "not confirmed; nothing was changed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_disks::Facts;

    fn disk() -> Disk {
        Disk {
            device: "/dev/sdx".into(),
            id: "0123".into(),
            model: Some("Fast 9".into()),
            serial: None,
            facts: Facts { bytes: 1 << 30, ..Facts::default() },
        }
    }

    #[test]
    fn only_the_word_confirms() {
        let pool = NewPool {
            name: PoolName::new("fast").unwrap(),
            disk: disk(),
            target: "/srv/nestor/fast".into(),
            fstab: "/etc/fstab".into(),
        };
        let answered = |answer: &str| {
            let mut shown = Vec::new();
            let result = confirm(std::slice::from_ref(&pool), &mut answer.as_bytes(), &mut shown);
            (result.is_ok(), String::from_utf8(shown).unwrap())
        };
        let (confirmed, shown) = answered("format\n");
        assert!(confirmed);
        assert!(
            ["/dev/sdx", "1Gi", "Fast 9", "0123", "/srv/nestor/fast"].iter().all(|text| shown.contains(text)),
            "{shown}"
        );
        for answer in ["", "y\n", "yes\n", "Format\n", "format it\n"] {
            assert!(!answered(answer).0, "{answer}");
        }
    }

    #[test]
    fn an_expected_id_is_compared_and_yes_needs_one() {
        let named = |text: &str, yes| text.parse::<Target>().unwrap().refuse_another(&disk(), yes);
        named("/dev/sdx=0123", true).unwrap();
        named("/dev/sdx", false).unwrap();
        assert!(named("/dev/sdx=0124", false).unwrap_err().to_string().contains("another disk"));
        assert!(named("/dev/sdx", true).unwrap_err().to_string().contains("--yes needs the ID"));
        for bad in ["sdx", "/dev/sdx=", "=0123"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }

    #[test]
    fn several_disks_are_numbered() {
        assert_eq!(names("fast", 1).unwrap(), [PoolName::new("fast").unwrap()]);
        assert_eq!(names("fast", 2).unwrap()[1].as_str(), "fast-2");
        assert!(names("a/b", 1).is_err());
    }
}
