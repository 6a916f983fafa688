//! Bench: volumes created at a constant rate in a storage-infra of its own, without clusters. A request that starts late
//! counts from the time at which it should have started.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use tokio::time::Instant;

use crate::report::Report;
use crate::standalone::StorageInfra;

/// Amount of work.
#[derive(Debug, Clone, Args)]
pub struct Load {
    /// Volumes created per second.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// Duration in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Numbers of volumes that exist before; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    volumes: Vec<usize>,
}

/// Runs the bench.
pub async fn run(report: &Report, load: &Load) -> Result<()> {
    for volumes in &load.volumes {
        let server = Arc::new(StorageInfra::start().await?);
        super::idle::fill(&server, *volumes).await?;
        measure(report, load, &server, *volumes).await?;
    }
    Ok(())
}

async fn measure(report: &Report, load: &Load, server: &Arc<StorageInfra>, before: usize) -> Result<()> {
    let count = load.rate * load.seconds;
    let (start, cpu) = (Instant::now(), server.cpu()?);
    let mut running = Vec::new();
    for number in 0..count {
        let due = start + Duration::from_secs(1) * number / load.rate;
        tokio::time::sleep_until(due).await;
        let server = server.clone();
        running.push(tokio::spawn(async move {
            server.create(&format!("sustained-{number}")).await?;
            anyhow::Ok(due.elapsed())
        }));
    }
    let mut times = Vec::new();
    for one in running {
        times.push(one.await?.context("a volume was not created")?);
    }
    let took = start.elapsed().as_secs_f64();
    let used = (server.cpu()? - cpu).as_secs_f64();
    let case = format!("{}/s beside {before}", load.rate);
    report.times(&case, &times, &[]);
    report.number(&case, "created", "per second", f64::from(count) / took);
    report.number(&case, "storage-infra cpu", "ms/op", 1000.0 * used / f64::from(count));
    report.number(&case, "storage-infra cpu", "% of a core", 100.0 * used / took);
    Ok(())
}
