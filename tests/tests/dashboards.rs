//! Dashboards: a real server draws every panel with the data of a running lab.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lab::NodePlugin;
use lab::cache::packages;
use lab::run::repository;
use lab::ui::Ui;
use serde_json::Value;
use tests::browser::Browser;
use tests::perses::Perses;
use tests::prometheus::Prometheus;
use tests::{Scenario, run};

/// Disks that are attached while Prometheus scrapes.
const ROUNDS: usize = 10;
/// Panels that show lines: they are drawn on a canvas, also without data.
const DRAWN: &str = "document.querySelectorAll('canvas').length";
/// Messages instead of a drawing, and whether something still loads.
const PROBLEMS: &str =
    "[...document.querySelectorAll('[role=alert]')].map(one => one.textContent).join('; ')";
const LOADING: &str = "document.querySelectorAll('[role=progressbar], .MuiSkeleton-root').length";

#[tokio::test]
async fn every_panel_of_every_dashboard_is_drawn() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let plugin = s.lab.spawn_node_plugin(&node).await?;
        let outcome = with_plugin(&s, &plugin, &node.name).await;
        s.lab.remove_node_plugin(&plugin).await?;
        outcome
    })
    .await
}

async fn with_plugin(s: &Scenario, plugin: &NodePlugin, node: &str) -> Result<()> {
    let prometheus = Prometheus::start(&jobs(s, plugin)?).await?;
    let perses = Perses::start(&prometheus).await?;
    packages::ensure_browser(&Ui::default()).await?;
    let browser = Browser::start().await?;
    for round in 0..ROUNDS {
        let volume = s.bound_claim(&format!("data-{round}")).await?;
        s.driver.publish(&volume, node).await?;
        s.driver.unpublish(&volume, node).await?;
    }
    for file in files()? {
        is_drawn(&browser, &perses, &file).await.with_context(|| file.display().to_string())?;
    }
    perses.stop().await?;
    prometheus.stop().await
}

/// Opens a dashboard, and waits until all of its panels are drawn.
async fn is_drawn(browser: &Browser, perses: &Perses, file: &Path) -> Result<()> {
    let dashboard: Value = serde_json::from_slice(&std::fs::read(file)?)?;
    let panels: Vec<&Value> = dashboard["panels"].as_array().context("no panels")?.iter().collect();
    let drawn = panels.iter().filter(|panel| panel["type"] == "timeseries").count();
    let page = perses.import(file).await?;
    // All panels are on the screen, since those outside of it are not drawn.
    browser.appearance(1600, 2400, "light").await?;
    browser.open(&page).await?;
    for panel in panels {
        let title = panel["title"].as_str().context("a panel without a title")?;
        let shown = serde_json::json!(title);
        browser.waits_for(&format!("document.body.innerText.includes({shown})")).await?;
    }
    let waited = browser.waits_for(&format!("{DRAWN} >= {drawn} && {LOADING} === 0")).await;
    if waited.is_err() {
        let shown = browser.evaluate("document.body.innerText").await?;
        let found = browser.evaluate(DRAWN).await?;
        waited.with_context(|| format!("{found} of {drawn} panels are drawn, the page shows: {shown}"))?;
    }
    let problems = browser.evaluate(PROBLEMS).await?;
    ensure!(problems == "", "{problems}");
    browser.picture(&file.file_stem().unwrap_or_default().to_string_lossy()).await
}

/// The dashboards of both charts.
fn files() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for chart in ["nestor-management", "nestor-guest"] {
        for entry in std::fs::read_dir(repository().join("charts").join(chart).join("files/dashboards"))? {
            found.push(entry?.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Addresses of the programs' metrics, by the job that the dashboards expect.
fn jobs(s: &Scenario, plugin: &NodePlugin) -> Result<BTreeMap<String, Vec<String>>> {
    let components = [
        ("mgmt-csi", "mgmt-csi"),
        ("vm-operator-shim", "vm-operator-shim"),
        ("gc-csi-controller", "g1-gc-csi"),
        ("gc-csi-node", &*plugin.component),
        ("storage-infra", "storage-infra"),
    ];
    let job = |(job, component): (&str, &str)| {
        let url = s.lab.metrics_url(component)?;
        let address = url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics"));
        let address = address.with_context(|| format!("unexpected URL {url}"))?;
        Ok((job.to_owned(), vec![address.to_owned()]))
    };
    components.into_iter().map(job).collect()
}
