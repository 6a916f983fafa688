//! Prometheus: the charts' alerting rules, promtool, and a server that scrapes programs on this host.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lab::cache;
use lab::run::repository;
use lab::ui::Ui;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::program::Running;
use crate::{PATIENCE, eventually};

/// The rule files of the charts, and the unit tests of each.
const RULES: [(&str, &str); 3] = [
    ("charts/nestor-management/files/rules.yaml", "tests/rules/management.yaml"),
    ("charts/nestor-management/files/storage-infra-rules.yaml", "tests/rules/storage-infra.yaml"),
    ("charts/nestor-guest/files/rules.yaml", "tests/rules/guest.yaml"),
];
/// Time windows in the rules' expressions. They become [`WINDOW`] for a test that cannot wait for hours.
const WINDOWS: [&str; 5] = ["10m", "15m", "30m", "1h", "6h"];
/// Several scrapes.
const WINDOW: &str = "10s";
/// Interval of scrapes and evaluations.
pub(crate) const INTERVAL: &str = "1s";

/// A file with alerting rules.
#[derive(Debug, Clone)]
pub struct RuleFile {
    /// Its path.
    pub path: PathBuf,
    /// The path of its unit tests.
    pub unit_tests: PathBuf,
    content: Value,
}

impl RuleFile {
    /// All rule files.
    pub fn all() -> Result<Vec<Self>> {
        let read = |(path, unit_tests): (&str, &str)| {
            let path = repository().join(path);
            let content = yaml(&path)?;
            Ok(Self { path, unit_tests: repository().join(unit_tests), content })
        };
        RULES.into_iter().map(read).collect()
    }

    /// The rules of all groups.
    pub fn rules(&self) -> Vec<&Value> {
        let groups = self.content["groups"].as_array().into_iter().flatten();
        groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()).collect()
    }

    /// The rules with short windows, and with pending times of one interval.
    fn shortened(&self) -> Value {
        let mut content = self.content.clone();
        let groups = content["groups"].as_array_mut().into_iter().flatten();
        for rule in groups.flat_map(|group| group["rules"].as_array_mut().into_iter().flatten()) {
            rule["for"] = json!(INTERVAL);
            rule["expr"] = json!(with_short_windows(rule["expr"].as_str().unwrap_or_default()));
        }
        content
    }
}

fn with_short_windows(expression: &str) -> String {
    WINDOWS.iter().fold(expression.to_owned(), |text, window| {
        text.replace(&format!("[{window}]"), &format!("[{WINDOW}]"))
    })
}

/// Reads a YAML file.
pub fn yaml(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("{} is not valid YAML", path.display()))
}

/// Runs promtool; fails with its output. Builds it if it is not in the cache.
pub async fn promtool(arguments: &[&str], files: &[PathBuf]) -> Result<()> {
    let mut promtool = Command::new(cache::prometheus(&Ui::default()).await?.join("promtool"));
    let output = promtool.args(arguments).args(files).kill_on_drop(true).output().await?;
    if !output.status.success() {
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        bail!("promtool {arguments:?} failed:\n{out}{err}");
    }
    Ok(())
}

/// An alert that is pending or fires.
#[derive(Debug, Clone)]
pub struct Alert {
    /// `pending` or `firing`.
    pub state: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations, with the numbers.
    pub annotations: BTreeMap<String, String>,
}

impl Alert {
    /// Whether it fires with this name and these labels.
    fn is(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        let has = |(key, value): (&str, &str)| self.labels.get(key).is_some_and(|has| has == value);
        self.state == "firing" && has(("alertname", name)) && labels.iter().all(|label| has(*label))
    }
}

/// A server with the shortened rules.
pub struct Prometheus {
    process: Running,
    _folder: TempDir,
}

impl Prometheus {
    /// Starts a server that scrapes these addresses (`HOST:PORT`), by job.
    pub async fn start(jobs: &BTreeMap<String, Vec<String>>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut rule_files = Vec::new();
        for (number, file) in RuleFile::all()?.iter().enumerate() {
            let path = folder.path().join(format!("rules-{number}.yaml"));
            // JSON is valid YAML.
            std::fs::write(&path, file.shortened().to_string())?;
            rule_files.push(path);
        }
        let scrapes = jobs
            .iter()
            .map(|(job, targets)| json!({"job_name": job, "static_configs": [{"targets": targets}]}));
        let config = json!({
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": rule_files,
            "scrape_configs": scrapes.collect::<Vec<_>>(),
        });
        let path = folder.path().join("prometheus.yaml");
        std::fs::write(&path, config.to_string())?;
        promtool(&["check", "config"], std::slice::from_ref(&path)).await?;
        let program = cache::prometheus(&Ui::default()).await?.join("prometheus");
        let config = format!("--config.file={}", path.display());
        let data = format!("--storage.tsdb.path={}", folder.path().join("data").display());
        let process = Running::listening(&program, &[&config, &data], "--web.listen-address", None).await?;
        let prometheus = Self { process, _folder: folder };
        prometheus.ready().await?;
        Ok(prometheus)
    }

    async fn ready(&self) -> Result<()> {
        eventually("Prometheus is ready", PATIENCE, || async {
            Ok(match self.process.get("/-/ready").await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}; log: {}", self.process.log())),
            })
        })
        .await
    }

    /// Its address.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.process.port())
    }

    /// `data` of an answer of its HTTP API.
    async fn api(&self, path: &str) -> Result<Value> {
        let (status, body) = self.process.get(&format!("/api/v1/{path}")).await?;
        ensure!(status == 200, "{path}: {status}: {body}");
        let mut answer: Value = serde_json::from_str(&body).with_context(|| format!("{path}: {body}"))?;
        ensure!(answer["status"] == "success", "{path}: {body}");
        Ok(answer["data"].take())
    }

    /// The targets by job and address, with `up` or the reason why not.
    pub async fn targets(&self) -> Result<BTreeMap<(String, String), String>> {
        let data = self.api("targets?state=active").await?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let targets = data["activeTargets"].as_array().context("no targets")?.iter().map(|target| {
            let health = if target["health"] == "up" { "up".to_owned() } else { text(&target["lastError"]) };
            ((text(&target["labels"]["job"]), text(&target["labels"]["instance"])), health)
        });
        Ok(targets.collect())
    }

    /// The rules with the result of their last evaluation: name, health and error.
    pub async fn rules(&self) -> Result<Vec<(String, String, String)>> {
        let data = self.api("rules").await?;
        let groups = data["groups"].as_array().context("no groups")?.iter();
        let rules = groups.flat_map(|group| group["rules"].as_array().into_iter().flatten());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(rules.map(|rule| (text(&rule["name"]), text(&rule["health"]), text(&rule["lastError"]))).collect())
    }

    /// Evaluates an expression now.
    pub async fn query(&self, expression: &str) -> Result<Value> {
        self.api(&format!("query?query={}", percent_encoded(expression))).await
    }

    /// The alerts that are pending or fire.
    pub async fn alerts(&self) -> Result<Vec<Alert>> {
        let mut data = self.api("alerts").await?;
        let alerts = data["alerts"].take();
        let alerts: Vec<Value> = serde_json::from_value(alerts)?;
        alerts
            .into_iter()
            .map(|mut alert| {
                Ok(Alert {
                    state: serde_json::from_value(alert["state"].take())?,
                    labels: serde_json::from_value(alert["labels"].take())?,
                    annotations: serde_json::from_value(alert["annotations"].take())?,
                })
            })
            .collect()
    }

    /// Waits until an alert with these labels fires.
    pub async fn fires(&self, name: &str, labels: &[(&str, &str)]) -> Result<Alert> {
        eventually(&format!("{name} fires with {labels:?}"), PATIENCE, || async {
            let alerts = self.alerts().await?;
            let found = alerts.iter().find(|alert| alert.is(name, labels)).cloned();
            Ok(found.ok_or_else(|| format!("{alerts:?}")))
        })
        .await
    }

    /// Waits until no alert with these labels fires.
    pub async fn is_silent(&self, name: &str, labels: &[(&str, &str)]) -> Result<()> {
        eventually(&format!("{name} with {labels:?} does not fire"), PATIENCE, || async {
            let alerts = self.alerts().await?;
            let found = alerts.iter().find(|alert| alert.is(name, labels));
            Ok(found.map_or(Ok(()), |alert| Err(format!("{alert:?}"))))
        })
        .await
    }

    /// Stops it.
    pub async fn stop(self) -> Result<()> {
        self.process.stop().await.map(drop)
    }
}

fn percent_encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_shortened_and_offsets_are_not() {
        let short = with_short_windows("rate(a[10m]) / increase(a[1h]) > b offset 6h");
        assert_eq!(short, "rate(a[10s]) / increase(a[10s]) > b offset 6h");
    }

    #[test]
    fn a_query_is_percent_encoded() {
        assert_eq!(percent_encoded("sum(a{b=\"ä\"}) > 0.5"), "sum%28a%7Bb%3D%22%C3%A4%22%7D%29%20%3E%200.5");
    }
}
