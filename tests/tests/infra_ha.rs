//! Two storage-infra servers on one database: attaches go on while the active one is killed or stopped, and while the database
//! is away. Needs `cargo lab up --infra-servers 2`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::{join_all, try_join_all};
use lab::database;
use lab::infra::server_name;
use tests::bytes::{device, noise, read, write};
use tests::{PATIENCE, Scenario, eventually, run_alone};

const BYTES: usize = 1 << 20;

/// The components of both servers.
fn servers() -> [String; 2] {
    [1, 2].map(server_name)
}

/// Waits until a server other than `not` is active, and returns it.
async fn active(s: &Scenario, not: Option<&str>) -> Result<String> {
    eventually(&format!("a server other than {not:?} is active"), PATIENCE, || async {
        for server in servers() {
            if Some(server.as_str()) != not && s.lab.is_ready(&server).await? {
                return Ok(Ok(server));
            }
        }
        Ok(Err("none is ready".to_owned()))
    })
    .await
}

/// Waits until a server leads. It is not ready while it may not use the pools.
async fn leads(s: &Scenario, server: &str) -> Result<()> {
    eventually(&format!("{server} leads"), PATIENCE, || async {
        let metrics = s.lab.metrics(server).await?;
        let is_active = metrics.lines().any(|line| line == "nestor_storage_infra_active 1");
        Ok(if is_active { Ok(()) } else { Err("it is passive".to_owned()) })
    })
    .await
}

async fn volumes(s: &Scenario, count: usize) -> Result<Vec<String>> {
    try_join_all((0..count).map(|_| s.volume())).await
}

/// Attaches a volume, as often as a sidecar would try; returns its disk and how long it took.
async fn attach(s: &Scenario, volume: &str, node: &str) -> Result<(String, Duration)> {
    let begin = Instant::now();
    let disk = eventually(&format!("{volume} is attached"), PATIENCE, || async {
        Ok(s.driver.publish(volume, node).await.map_err(|status| status.to_string()))
    })
    .await?;
    Ok((disk, begin.elapsed()))
}

async fn detach_all(s: &Scenario, volumes: &[String], node: &str) -> Result<()> {
    for volume in volumes {
        eventually(&format!("{volume} is detached"), PATIENCE, || async {
            Ok(s.driver.unpublish(volume, node).await.map_err(|status| status.to_string()))
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn attaches_go_on_when_the_active_server_is_killed() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        let kept = s.volume().await?;
        let (disk, _) = attach(&s, &kept, &node.name).await?;
        let bytes = noise(21, BYTES);
        write(&device(&node, &disk), &bytes)?;
        // Each of the servers in turn.
        for _ in 0..2 {
            let killed = active(&s, None).await?;
            let volumes = volumes(&s, 12).await?;
            let attaches = join_all(volumes.iter().map(|volume| attach(&s, volume, &node.name)));
            let (kill, attached) = tokio::join!(s.kill_component(&killed), attaches);
            kill?;
            let took: Vec<Duration> = attached.into_iter().map(|done| Ok(done?.1)).collect::<Result<_>>()?;
            println!("{killed} was killed; the slowest of 12 attaches took {:?}", took.iter().max());
            active(&s, Some(&killed)).await?;
            ensure!(s.infra.list_attachments(Some(node.uuid), None).await?.len() == 13);
            detach_all(&s, &volumes, &node.name).await?;
            s.start_component(&killed).await?;
        }
        ensure!(read(&device(&node, &disk), BYTES)? == bytes, "the disk that stayed has other bytes");
        detach_all(&s, &[kept], &node.name).await
    })
    .await
}

#[tokio::test]
async fn a_stopped_server_does_nothing_when_it_goes_on() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        let volume = s.volume().await?;
        let stopped = active(&s, None).await?;
        let pid = s.lab.pid(&stopped).context("it does not run")?;
        let paused = s.pause_component(&stopped)?;
        let [first, second] = servers();
        leads(&s, if stopped == first { &second } else { &first }).await?;
        // The stopped server still has the locks of the pools.
        let (refused, other) = (s.driver.publish(&volume, &node.name).await, s.lab.pid(&stopped));
        ensure!(refused.is_err() && other == Some(pid), "{refused:?}");
        drop(paused);
        eventually(&format!("{stopped} ends, since another server is active"), PATIENCE, || async {
            Ok(if s.lab.pid(&stopped).is_none() { Ok(()) } else { Err("it runs".to_owned()) })
        })
        .await?;
        attach(&s, &volume, &node.name).await?;
        ensure!(s.infra.list_attachments(Some(node.uuid), None).await?.len() == 1);
        // As its supervisor does.
        s.start_component(&stopped).await?;
        detach_all(&s, &[volume], &node.name).await
    })
    .await
}

#[tokio::test]
async fn nothing_is_lost_while_the_database_is_away() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        let (before, during) = (s.volume().await?, s.volume().await?);
        let (disk, _) = attach(&s, &before, &node.name).await?;
        s.kill_component(database::COMPONENT).await?;
        let refused = s.driver.publish(&during, &node.name).await;
        ensure!(refused.is_err(), "attached without a catalog: {refused:?}");
        ensure!(device(&node, &disk).exists(), "the attached disk is gone");
        s.start_component(database::COMPONENT).await?;
        // Without the database for seconds, a server ends. As its supervisor does:
        for server in servers() {
            if s.lab.pid(&server).is_none() {
                s.start_component(&server).await?;
            }
        }
        attach(&s, &during, &node.name).await?;
        ensure!(s.infra.list_attachments(Some(node.uuid), None).await?.len() == 2);
        detach_all(&s, &[before, during], &node.name).await
    })
    .await
}
