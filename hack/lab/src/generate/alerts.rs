//! Page of the alerts, from the charts' rules.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Generated;
use super::markdown::{cell, page as new_page, paragraph, table};
use crate::run::repository;

/// The files with rules, and what their alerts are about.
const FILES: [(&str, &str); 3] = [
    ("charts/nestor-guest/files/rules.yaml", "Guest clusters"),
    ("charts/nestor-management/files/rules.yaml", "Management cluster"),
    ("charts/nestor-management/files/storage-infra-rules.yaml", "Storage infra"),
];

pub(super) fn page() -> Result<Generated> {
    let mut text = new_page("Alerts", "the rules in the charts");
    paragraph(
        &mut text,
        "The charts contain these alerts as PrometheusRules (values `monitoring.prometheusRules.*`). Each has a runbook. Words \
         like `job` stand for the values of labels. \
         [Monitoring](../guides/monitoring.md) explains how to enable them.",
    );
    for (file, title) in FILES {
        let rules = fs::read_to_string(repository().join(file)).with_context(|| file)?;
        let rules: Value = serde_saphyr::from_str(&rules).with_context(|| file)?;
        text.push_str(&format!("\n## {title}\n"));
        table(&mut text, &["alert", "severity", "after", "meaning"], &rows(&rules));
    }
    Ok(Generated::page("alerts", text))
}

fn rows(file: &Value) -> Vec<Vec<String>> {
    let groups = file["groups"].as_array().into_iter().flatten();
    groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()).filter_map(row).collect()
}

/// A row; `None` for a rule that is no alert.
fn row(rule: &Value) -> Option<Vec<String>> {
    let name = rule["alert"].as_str()?;
    let text = |value: &Value| value.as_str().unwrap_or("–").to_owned();
    let link = format!("[{name}](../guides/runbooks/alerts.md#{})", name.to_lowercase());
    let meaning = cell(rule["annotations"]["summary"].as_str().unwrap_or_default());
    // Names of labels instead of template code.
    let meaning = meaning.replace("{{ $labels.", "`").replace(" }}", "`");
    Some(vec![link, text(&rule["labels"]["severity"]), text(&rule["for"]), meaning])
}
