//! Moves of volumes and drains of pools, with their progress.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use infra_api::{Client, Drain, DrainSpec, Move, MoveChoice, MoveSpec, PoolName, Volume, VolumeId};

use super::ClientArgs;
use crate::cli::{output, size};

/// Interval between two looks at a move.
const INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two requests of a drain, each of which tries every volume that is not moving.
const DRAIN_INTERVAL: Duration = Duration::from_secs(5);

/// How a move or a drain is carried out.
#[derive(Debug, Args)]
pub(in crate::cli) struct CopyArgs {
    /// Copy at most this many bytes per second, such as 50Mi. At least 1Mi. [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "cancel")]
    rate: Option<u64>,
    /// Do not wait for the end.
    #[arg(long, conflicts_with = "cancel")]
    no_wait: bool,
    /// Cancel it. What has changed its pool stays there.
    #[arg(long)]
    cancel: bool,
}

/// The move of a volume.
#[derive(Debug, Args)]
pub(in crate::cli) struct MoveArgs {
    /// ID of the volume.
    id: VolumeId,
    /// The pool that gets the volume.
    #[arg(long, value_name = "POOL", required_unless_present_any = ["cancel", "choose"], conflicts_with_all = ["cancel", "choose"])]
    to: Option<PoolName>,
    /// The pool whose file is the volume's, where the move asks for that. The other file is kept under another name.
    #[arg(long, value_name = "POOL", conflicts_with_all = ["cancel", "rate"])]
    choose: Option<PoolName>,
    #[command(flatten)]
    copy: CopyArgs,
    #[command(flatten)]
    client: ClientArgs,
}

/// The drain of a pool.
#[derive(Debug, Args)]
pub(in crate::cli) struct DrainArgs {
    /// Name of the pool.
    name: PoolName,
    #[command(flatten)]
    copy: CopyArgs,
    #[command(flatten)]
    client: ClientArgs,
}

/// Shows the last line of a running command on a terminal.
fn show(line: &str) {
    if std::io::stderr().is_terminal() {
        let _ = write!(std::io::stderr(), "\r{line}\x1b[K\r");
    }
}

/// One line about a move.
fn progress(volume: &Volume, moving: &Move) -> String {
    let Move { to, phase, copied_bytes, message, .. } = moving;
    let percent = copied_bytes
        .map(|copied| format!(", {}%", u128::from(copied) * 100 / u128::from(volume.capacity_bytes.max(1))));
    let why = message.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!("volume {} to pool {to}: {phase}{}{why}", volume.id, percent.unwrap_or_default())
}

async fn find(server: &Client, id: &VolumeId) -> anyhow::Result<Volume> {
    server.get_volume(id).await?.with_context(|| format!("volume {id} not found"))
}

/// Waits for the end of a move.
async fn end(server: &Client, id: &VolumeId) -> anyhow::Result<Volume> {
    loop {
        let volume = find(server, id).await?;
        let Some(moving) = &volume.moving else { return Ok(volume) };
        show(&progress(&volume, moving));
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Moves a volume, or cancels that.
pub(super) async fn move_volume(args: MoveArgs) -> anyhow::Result<()> {
    let MoveArgs { id, to, choose, copy, client } = args;
    let server = client.connect()?;
    if let Some(pool) = choose {
        server.choose_file(&id, &MoveChoice { pool }).await?;
        let volume = end(&server, &id).await?;
        return output::done(client.output, &format!("volume {id} is in pool {}", volume.pool));
    }
    let Some(to) = to else {
        server.cancel_move(&id).await?;
        let volume = end(&server, &id).await?;
        return output::done(client.output, &format!("volume {id} is in pool {}", volume.pool));
    };
    let spec = MoveSpec { pool: to.clone(), bytes_per_second: copy.rate };
    let started = server.move_volume(&id, &spec).await?;
    if copy.no_wait {
        return output::one(client.output, &started);
    }
    let volume = end(&server, &id).await?;
    if volume.pool != to {
        bail!("the move of volume {id} to pool {to} was cancelled; the volume is in pool {}", volume.pool);
    }
    output::one(client.output, &volume)
}

/// Drains a pool, or cancels that. Fails if some of its volumes are not moved.
pub(super) async fn drain(args: DrainArgs) -> anyhow::Result<()> {
    let DrainArgs { name, copy, client } = args;
    let server = client.connect()?;
    if copy.cancel {
        server.cancel_drain(&name).await?;
        let done = format!("the moves from pool {name} are being cancelled; it stays cordoned");
        return output::done(client.output, &done);
    }
    let spec = DrainSpec { bytes_per_second: copy.rate };
    let drain = loop {
        let drain = server.drain_pool(&name, &spec).await?;
        let moving = drain.volumes.iter().filter(|volume| volume.to.is_some()).count();
        show(&format!("pool {name}: {moving} of {} volumes are being moved", drain.volumes.len()));
        if copy.no_wait || !drain.is_moving() {
            break drain;
        }
        tokio::time::sleep(DRAIN_INTERVAL).await;
    };
    match client.output {
        output::Format::Json => output::json(&drain)?,
        output::Format::Table => output::many(client.output, &drain.volumes)?,
    }
    conclude(&name, &drain, copy.no_wait)
}

fn conclude(name: &PoolName, drain: &Drain, no_wait: bool) -> anyhow::Result<()> {
    if drain.snapshots > 0 {
        let _ = writeln!(
            std::io::stderr(),
            "pool {name} has {} snapshots, which are not moved: delete those that are not needed",
            drain.snapshots
        );
    }
    let left = drain.volumes.iter().filter(|volume| volume.to.is_none()).count();
    if left > 0 && !no_wait {
        bail!(
            "{left} volumes of pool {name} are not moved, for the reasons above; remove the reasons, and repeat the command"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_names_the_phase_the_percentage_and_the_reason() {
        let volume: Volume = serde_json::from_value(serde_json::json!({
            "id": "v", "capacityBytes": 200, "pool": "a", "diskUuid": uuid::Uuid::nil(), "state": "ready", "createdAt": "now",
            "move": {"from": "a", "to": "b", "phase": "mirroring", "copiedBytes": 50, "startedAt": "now"}
        }))
        .unwrap();
        let mut moving = volume.moving.clone().unwrap();
        assert_eq!(progress(&volume, &moving), "volume v to pool b: mirroring, 25%");
        (moving.copied_bytes, moving.message) = (None, Some("the VM is paused".into()));
        assert_eq!(progress(&volume, &moving), "volume v to pool b: mirroring: the VM is paused");
    }

    #[test]
    fn a_drain_fails_if_a_volume_stays() {
        let pool = PoolName::new("p").unwrap();
        let drain = |to: Option<&str>| Drain {
            volumes: vec![infra_api::Undrained {
                volume: VolumeId::new("v").unwrap(),
                to: to.map(|name| PoolName::new(name).unwrap()),
                message: None,
            }],
            snapshots: 0,
        };
        assert!(conclude(&pool, &drain(None), false).is_err());
        assert!(conclude(&pool, &drain(None), true).is_ok());
        assert!(conclude(&pool, &drain(Some("q")), false).is_ok());
    }
}
