//! Alerts and dashboards: promtool accepts the rules, they use existing metrics, and a Prometheus that scrapes the lab
//! evaluates them. `alert_faults` causes the faults.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use futures::future::FutureExt;
use lab::run::repository;
use serde_json::Value;
use tests::prometheus::{Prometheus, RuleFile, promtool, yaml};
use tests::{PATIENCE, eventually};

pub(crate) mod site;

use site::in_lab;

use crate::alert_faults::faults::{QUICK, SLOW};

const METRICS: &str = include_str!("../../docs/reference/metrics.md");
const RUNBOOK: &str = include_str!("../../docs/guides/runbooks/alerts.md");
const GUIDE: &str = include_str!("../../docs/guides/monitoring.md");
/// The page of the alerts, as in their annotation `runbook_url`.
const RUNBOOK_PATH: &str = "docs/guides/runbooks/alerts.md";
/// The programs of a page's heading "All programs".
const PROGRAMS: [&str; 5] = ["gc-csi", "gc-csi-node", "mgmt-csi", "vm-operator-shim", "storage-infra"];
/// What a program appends to the name of a histogram.
const SAMPLES: [&str; 3] = ["_bucket", "_sum", "_count"];

#[tokio::test]
async fn rules_pass_promtool_and_their_unit_tests() -> Result<()> {
    let files = RuleFile::all()?;
    let rules: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
    promtool(&["check", "rules", "--lint=all", "--lint-fatal"], &rules).await?;
    let tests: Vec<PathBuf> = files.into_iter().map(|file| file.unit_tests).collect();
    promtool(&["test", "rules"], &tests).await
}

fn text<'a>(value: &'a Value, what: &str) -> Result<&'a str> {
    value.as_str().filter(|text| !text.is_empty()).with_context(|| format!("no {what}"))
}

#[test]
fn every_alert_has_a_severity_numbers_a_runbook_and_unit_tests() -> Result<()> {
    let mut alerts = BTreeSet::new();
    for file in RuleFile::all()? {
        let unit_tests = unit_tests(&file)?;
        for rule in file.rules() {
            let name = text(&rule["alert"], "name")?;
            let severity = text(&rule["labels"]["severity"], "severity")?;
            ensure!(["critical", "warning"].contains(&severity), "{name}: {severity}");
            for annotation in ["summary", "description"] {
                text(&rule["annotations"][annotation], annotation).with_context(|| name.to_owned())?;
            }
            let url = text(&rule["annotations"]["runbook_url"], "runbook_url")?;
            assert_eq!(url, format!("{RUNBOOK_PATH}#{}", name.to_lowercase()));
            let (fires, silent) = unit_tests.get(name).copied().unwrap_or_default();
            ensure!(
                fires > 0 && silent > 1,
                "{name}: no unit test that it fires, is silent before, and clears"
            );
            alerts.insert(name.to_owned());
        }
    }
    let sections: BTreeSet<String> = RUNBOOK
        .lines()
        .filter_map(|line| line.strip_prefix("## Nestor"))
        .map(|rest| format!("Nestor{rest}"))
        .collect();
    assert_eq!(alerts, sections, "alerts and sections of the runbook");
    for alert in &alerts {
        let link = format!("[{alert}](runbooks/alerts.md#{})", alert.to_lowercase());
        ensure!(GUIDE.contains(&link), "the guide has no link {link}");
    }
    Ok(())
}

/// How often the unit tests of a file expect each alert, and its silence.
fn unit_tests(file: &RuleFile) -> Result<BTreeMap<String, (usize, usize)>> {
    let content = yaml(&file.unit_tests)?;
    let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    let tests = content["tests"].as_array().context("no tests")?.iter();
    for test in tests.flat_map(|test| test["alert_rule_test"].as_array().into_iter().flatten()) {
        let count = counts.entry(text(&test["alertname"], "alertname")?.to_owned()).or_default();
        match test["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty()) {
            true => count.0 += 1,
            false => count.1 += 1,
        }
    }
    Ok(counts)
}

/// The names of all metrics on the page; those of several programs once for each.
fn documented() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut programs: Vec<String> = Vec::new();
    for line in METRICS.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let listed: Vec<&str> =
                if heading == "All programs" { PROGRAMS.to_vec() } else { heading.split(", ").collect() };
            programs = listed.iter().map(|program| program.replace('-', "_")).collect();
        } else if let Some(name) = line.strip_prefix("| `nestor_").and_then(|row| row.split('`').next()) {
            names.extend(
                programs.iter().map(|program| format!("nestor_{}", name.replace("PROGRAM", program))),
            );
        }
    }
    names
}

/// The names of metrics in an expression.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("nestor_")).map(str::to_owned).collect()
}

/// The dashboards of both charts: file name and content.
fn dashboards() -> Result<Vec<(String, Value)>> {
    let mut found = Vec::new();
    for chart in ["nestor-management", "nestor-guest"] {
        for entry in std::fs::read_dir(repository().join("charts").join(chart).join("files/dashboards"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push((name, serde_json::from_slice(&std::fs::read(&path)?)?));
        }
    }
    Ok(found)
}

/// The expressions of a dashboard's panels.
fn expressions(dashboard: &Value) -> Vec<&str> {
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    targets.filter_map(|target| target["expr"].as_str()).collect()
}

#[test]
fn rules_and_dashboards_use_documented_metrics() -> Result<()> {
    let documented = documented();
    let is_documented = |name: &String| {
        let base = SAMPLES.iter().find_map(|end| name.strip_suffix(end));
        documented.contains(name) || base.is_some_and(|base| documented.contains(base))
    };
    let (rules, dashboards) = (RuleFile::all()?, dashboards()?);
    assert_eq!(dashboards.len(), 3);
    let mut all: Vec<(String, &str)> = Vec::new();
    for file in &rules {
        let rules = file.rules().into_iter();
        all.extend(rules.filter_map(|rule| Some((rule["alert"].to_string(), rule["expr"].as_str()?))));
    }
    for (name, dashboard) in &dashboards {
        let expressions = expressions(dashboard);
        ensure!(!expressions.is_empty(), "{name} has no expressions");
        all.extend(expressions.into_iter().map(|expression| (name.clone(), expression)));
    }
    for (place, expression) in all {
        let names = metrics_in(expression);
        ensure!(!names.is_empty() || expression.contains("up{"), "{place}: no metric in {expression}");
        let unknown: Vec<&String> = names.iter().filter(|name| !is_documented(name)).collect();
        ensure!(
            unknown.is_empty(),
            "{place} uses {unknown:?}, which docs/reference/metrics.md does not list"
        );
    }
    Ok(())
}

#[test]
fn the_faults_cause_every_alert_of_every_program() -> Result<()> {
    let rules: BTreeSet<(String, &str)> = RuleFile::all()?.iter().flat_map(RuleFile::alerts).collect();
    let faults = QUICK.iter().chain(&SLOW).flat_map(|group| group.iter());
    let caused = faults.flat_map(|fault| fault.alerts);
    let caused: Vec<(String, &str)> = caused.map(|(name, job)| ((*name).to_owned(), *job)).collect();
    let once: BTreeSet<(String, &str)> = caused.iter().cloned().collect();
    assert_eq!(once, rules, "alerts that faults cause, and alerts of the rules");
    assert_eq!(caused.len(), once.len(), "an alert is caused by two faults");
    Ok(())
}

#[tokio::test]
async fn prometheus_scrapes_every_program_and_evaluates_every_rule_and_dashboard() -> Result<()> {
    in_lab(|site| {
        async {
            every_rule_is_evaluated(&site.prometheus).await?;
            every_dashboard_can_be_queried(&site.prometheus).await
        }
        .boxed()
    })
    .await
}

async fn every_rule_is_evaluated(prometheus: &Prometheus) -> Result<()> {
    let count: usize = RuleFile::all()?.iter().map(|file| file.rules().len()).sum();
    eventually("every rule is evaluated", PATIENCE, || async {
        let rules = prometheus.rules().await?;
        let failed: Vec<_> = rules.iter().filter(|(_, health, _)| health != "ok").collect();
        Ok(if failed.is_empty() && rules.len() == count { Ok(()) } else { Err(format!("{failed:?}")) })
    })
    .await
}

async fn every_dashboard_can_be_queried(prometheus: &Prometheus) -> Result<()> {
    for (name, dashboard) in dashboards()? {
        for expression in expressions(&dashboard) {
            let expression = expression.replace("$__rate_interval", "1m");
            // Gauges exist from the start; counters with labels appear with their first event.
            let is_gauge = !expression.contains("rate(") && !expression.contains("increase(");
            let queried = match is_gauge {
                true => prometheus.has(&expression).await,
                false => prometheus.query(&expression).await.map(drop),
            };
            queried.with_context(|| format!("a panel of {name}"))?;
        }
    }
    Ok(())
}
