//! Metrics: what the programs serve is what docs/reference/metrics.md says, with types and labels.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tests::console::Console;
use tests::run;

const PAGE: &str = include_str!("../../docs/reference/metrics.md");
/// The programs with their processes in the lab; the node plugin's is started by the test.
const PROGRAMS: [(&str, &str); 4] = [
    ("gc_csi", "g1-gc-csi"),
    ("mgmt_csi", "mgmt-csi"),
    ("vm_operator_shim", "vm-operator-shim"),
    ("storage_infra", "storage-infra"),
];
/// What a program appends to the names of the samples of one metric.
const SAMPLES: [&str; 3] = ["_bucket", "_sum", "_count"];

/// Type and labels of a metric.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Metric {
    kind: String,
    labels: BTreeSet<String>,
}

#[tokio::test]
async fn every_metric_is_documented_with_its_type_and_labels_and_every_documented_one_exists() -> Result<()> {
    run(|s| async move {
        let documented = documented()?;
        // Now each program has done something.
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        s.driver.publish(&handle, &node.name).await?;
        s.budget(&s.cluster_id, &json!({"bytes": "1Ti", "volumes": 1000, "snapshots": 1000})).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        let plugin = s.lab.spawn_node_plugin(&node).await?;
        let plugins = ("gc_csi_node", plugin.component.clone());
        let console = Console::start(&s).await?;

        let components = PROGRAMS.map(|(program, component)| (program, component.to_owned()));
        let mut texts = vec![("console", console.process.get("/metrics").await?.1)];
        for (program, component) in components.into_iter().chain([plugins]) {
            texts.push((program, s.lab.metrics(&component).await?));
        }
        let mut seen = BTreeSet::new();
        for (program, text) in texts {
            let served = served(&text)?;
            ensure!(!served.is_empty(), "{program} serves no metrics");
            for (name, metric) in served {
                let known =
                    documented.get(&name).or_else(|| documented.get(&name.replace(program, "PROGRAM")));
                let known =
                    known.with_context(|| format!("{program} serves {name}, which is not documented"))?;
                assert_eq!(known.kind, metric.kind, "{name}");
                // A metric without samples yet shows no labels.
                assert!(metric.labels.is_empty() || metric.labels == known.labels, "{name}: {metric:?}");
                seen.extend([name.clone(), name.replace(program, "PROGRAM")]);
            }
        }
        s.lab.remove_node_plugin(&plugin).await?;
        let missing: Vec<&String> = documented.keys().filter(|name| !seen.contains(*name)).collect();
        assert!(missing.is_empty(), "documented, but not served: {missing:?}");
        Ok(())
    })
    .await
}

/// The rows of the page.
fn documented() -> Result<BTreeMap<String, Metric>> {
    let rows = PAGE.lines().filter(|line| line.starts_with("| `nestor_"));
    let rows = rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, _] = cells[..] else { anyhow::bail!("not four cells: {row}") };
        let labels =
            labels.split(", ").filter(|label| *label != "–").map(|label| label.trim_matches('`').to_owned());
        Ok((name.trim_matches('`').to_owned(), Metric { kind: kind.to_owned(), labels: labels.collect() }))
    });
    rows.collect()
}

/// The metrics in OpenMetrics text; counters by the names of their samples.
fn served(text: &str) -> Result<BTreeMap<String, Metric>> {
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            let total = if kind == "counter" { "_total" } else { "" };
            let info = if kind == "info" { "_info" } else { "" };
            current = format!("{name}{total}{info}");
            metrics.insert(current.clone(), Metric { kind: kind.to_owned(), labels: BTreeSet::new() });
        } else if !line.starts_with('#') && !line.is_empty() {
            let name = line.split(['{', ' ']).next().unwrap_or_default();
            let base = SAMPLES.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            ensure!(base == current || name == current, "sample {name} after the metric {current}");
            let labels = line.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
            let names = labels.iter().flat_map(|(labels, _)| label_names(labels)).filter(|name| name != "le");
            metrics.entry(current.clone()).or_default().labels.extend(names);
        }
    }
    Ok(metrics)
}

/// The names in `a="x",b="y"`; no value of ours holds a quote.
fn label_names(labels: &str) -> Vec<String> {
    let components = labels.split('"').step_by(2);
    components
        .filter_map(|component| component.trim_start_matches(',').strip_suffix('='))
        .map(str::to_owned)
        .collect()
}
