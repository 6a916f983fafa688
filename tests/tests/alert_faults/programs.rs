//! Programs that stop and restart.

use std::collections::BTreeMap;

use anyhow::Result;
use futures::future::try_join_all;
use serde_json::Value;
use tests::{PATIENCE, eventually};

use super::faults::Watch;
use crate::alerts::site::Site;

const START_TIMES: &str = "{__name__=~\"nestor_.*_start_time_seconds\"}";

/// All programs are killed, then start and are killed again and again.
pub(super) async fn crash(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    kill_all(site).await?;
    alerts.these_fire(|(name, _)| *name != "NestorProgramRestarting").await?;
    alerts
        .fire_while(|| async {
            let before = start_times(site).await?;
            let starts = site.components().into_iter().map(|(_, one)| site.s.lab.start_alone(one));
            try_join_all(starts).await?;
            all_are_scraped(site, &before).await?;
            kill_all(site).await
        })
        .await?;
    // With the sidecars, which have exited.
    try_join_all(site.components().into_iter().map(|(_, one)| site.s.start_component(one))).await.map(drop)
}

async fn kill_all(site: &Site) -> Result<()> {
    let kills = site.components().into_iter().map(|(job, component)| async move {
        match job {
            // Not a component that a scenario starts again.
            "gc-csi-node" => site.s.lab.kill(component).await,
            _ => site.s.kill_component(component).await,
        }
    });
    try_join_all(kills).await.map(drop)
}

/// When the programs that are scraped started, by address.
async fn start_times(site: &Site) -> Result<BTreeMap<String, String>> {
    let result = site.prometheus.query(START_TIMES).await?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = result["result"].as_array().into_iter().flatten();
    Ok(all.map(|one| (text(&one["metric"]["instance"]), text(&one["value"][1]))).collect())
}

/// Waits until each program was scraped after its last start.
async fn all_are_scraped(site: &Site, before: &BTreeMap<String, String>) -> Result<()> {
    let count = site.components().len();
    eventually("all programs are scraped since their start", PATIENCE, || async {
        let now = start_times(site).await?;
        let new = now.iter().filter(|(address, time)| before.get(*address) != Some(time)).count();
        Ok(if new == count { Ok(()) } else { Err(format!("before {before:?}, now {now:?}")) })
    })
    .await
}
