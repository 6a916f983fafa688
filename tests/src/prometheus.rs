//! Prometheus: the charts' alerting rules, promtool, and a server that scrapes programs on this host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

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
/// Times in the rules' expressions, with what they become for a test that cannot wait for hours. Windows of rates are
/// several scrapes long; windows in which events are counted are long enough for as many events.
const TIMES: [(&str, &str); 10] = [
    // An idle watch sends a bookmark every minute.
    ("{direction=\"received\"}[10m]", "{direction=\"received\"}[90s]"),
    ("[10m]", "[10s]"),
    ("[15m]", "[10s]"),
    ("[30m]", "[1m]"),
    ("[1h]", "[1m]"),
    ("[6h]", "[1m]"),
    ("offset 6h", "offset 15s"),
    // Of NestorCallsSlow, of NestorQueueSlow and NestorAttachmentOperationsSlow, and of NestorBackupOverdue.
    (")) > 30", ")) > 3"),
    (")) > 10", ")) > 1"),
    ("+ 600", "+ 10"),
];
/// The programs' prefixes of metrics, and the jobs that scrape them; a prefix of another one comes after it.
const JOBS: [(&str, &str); 5] = [
    ("nestor_gc_csi_node_", "gc-csi-node"),
    ("nestor_gc_csi_", "gc-csi-controller"),
    ("nestor_mgmt_csi_", "mgmt-csi"),
    ("nestor_vm_operator_shim_", "vm-operator-shim"),
    ("nestor_storage_infra_", "storage-infra"),
];
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

    /// The alerts of the rules: name, and job of a program that it is about.
    pub fn alerts(&self) -> BTreeSet<(String, &'static str)> {
        let alerts = self.rules().into_iter().flat_map(|rule| {
            let name = rule["alert"].as_str().unwrap_or_default().to_owned();
            jobs_of(rule).into_iter().map(move |job| (name.clone(), job))
        });
        alerts.collect()
    }

    /// The rules with short times, and with pending times of one interval.
    fn shortened(&self) -> Value {
        let mut content = self.content.clone();
        let groups = content["groups"].as_array_mut().into_iter().flatten();
        for rule in groups.flat_map(|group| group["rules"].as_array_mut().into_iter().flatten()) {
            rule["for"] = json!(INTERVAL);
            rule["expr"] = json!(with_short_times(rule["expr"].as_str().unwrap_or_default()));
        }
        content
    }
}

fn with_short_times(expression: &str) -> String {
    TIMES.iter().fold(expression.trim_end().to_owned(), |text, (time, short)| text.replace(time, short))
}

/// The jobs whose programs have a metric that a rule uses, or whose targets it counts.
fn jobs_of(rule: &Value) -> BTreeSet<&'static str> {
    let expression = rule["expr"].as_str().unwrap_or_default();
    let named = |job: &str| {
        // In `{job="a"}` or `{job=~"a|b"}`.
        let selectors = expression.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let mut quoted =
            selectors.filter(|one| one.starts_with("job")).filter_map(|one| one.split('"').nth(1));
        quoted.any(|jobs| jobs.split('|').any(|one| one == job))
    };
    let words = || expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    // The longest prefix counts: `nestor_gc_csi_` begins the metrics of gc-csi-node too.
    let job_of = |word: &str| JOBS.iter().find(|(prefix, _)| word.starts_with(prefix)).map(|(_, job)| *job);
    let of_metrics: BTreeSet<&str> = words().filter_map(job_of).collect();
    JOBS.iter().map(|(_, job)| *job).filter(|job| named(job) || of_metrics.contains(job)).collect()
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
    pub fn is(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        let has = |(key, value): (&str, &str)| self.labels.get(key).is_some_and(|has| has == value);
        self.state == "firing" && has(("alertname", name)) && labels.iter().all(|label| has(*label))
    }
}

/// A server with the shortened rules.
pub struct Prometheus {
    process: Running,
    folder: TempDir,
    /// The content of each job's file of targets.
    targets: Mutex<BTreeMap<String, Vec<Value>>>,
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
        let targets: BTreeMap<String, Vec<Value>> =
            jobs.iter().map(|(job, targets)| (job.clone(), vec![json!({"targets": targets})])).collect();
        for (job, content) in &targets {
            std::fs::write(targets_file(folder.path(), job), json!(content).to_string())?;
        }
        let scrapes = jobs.keys().map(|job| {
            let file = targets_file(folder.path(), job);
            json!({"job_name": job, "file_sd_configs": [{"files": [file], "refresh_interval": INTERVAL}]})
        });
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
        let prometheus = Self { process, folder, targets: Mutex::new(targets) };
        prometheus.ready().await?;
        Ok(prometheus)
    }

    /// Scrapes one more address of a job, with these labels.
    pub fn add_target(&self, job: &str, address: &str, labels: &[(&str, &str)]) -> Result<()> {
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        let content = targets.get_mut(job).with_context(|| format!("there is no job {job}"))?;
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        content.push(json!({"targets": [address], "labels": labels}));
        self.write_targets(job, content)
    }

    /// Scrapes an address of a job no more.
    pub fn remove_target(&self, job: &str, address: &str) -> Result<()> {
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        let content = targets.get_mut(job).with_context(|| format!("there is no job {job}"))?;
        content.retain(|group| group["targets"] != json!([address]));
        self.write_targets(job, content)
    }

    fn write_targets(&self, job: &str, content: &[Value]) -> Result<()> {
        let file = targets_file(self.folder.path(), job);
        // A server must not read half of it.
        let new = file.with_extension("new");
        std::fs::write(&new, json!(content).to_string())?;
        std::fs::rename(&new, &file).with_context(|| format!("cannot replace {}", file.display()))
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

    /// Waits until an expression has a result.
    pub async fn has(&self, expression: &str) -> Result<()> {
        eventually(&format!("a result of {expression}"), PATIENCE, || async {
            let result = self.query(expression).await?;
            let is_empty = result["result"].as_array().is_none_or(Vec::is_empty);
            Ok(if is_empty { Err(result.to_string()) } else { Ok(()) })
        })
        .await
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

fn targets_file(folder: &Path, job: &str) -> PathBuf {
    folder.join(format!("targets-{job}.json"))
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
    fn times_are_shortened() {
        let short = with_short_times("rate(a[10m]) / increase(a[1h]) > b offset 6h");
        assert_eq!(short, "rate(a[10s]) / increase(a[1m]) > b offset 15s");
        assert_eq!(
            with_short_times("histogram_quantile(0.9, sum(rate(a[10m]))) > 30\n"),
            "histogram_quantile(0.9, sum(rate(a[10s]))) > 3"
        );
    }

    #[test]
    fn every_time_occurs_in_a_rule() {
        let files = RuleFile::all().unwrap();
        let rules = files.iter().flat_map(RuleFile::rules);
        let all: String = rules.filter_map(|rule| rule["expr"].as_str()).collect();
        for (time, _) in TIMES {
            assert!(all.contains(time), "{time}");
        }
    }

    #[test]
    fn a_rule_is_about_the_jobs_of_its_metrics_and_of_its_targets() {
        let jobs = |expression: &str| jobs_of(&json!({"expr": expression})).into_iter().collect::<Vec<_>>();
        assert_eq!(jobs("a{code=~\"b|mgmt-csi\"} + nestor_gc_csi_leader"), ["gc-csi-controller"]);
        assert_eq!(jobs("sum(nestor_gc_csi_node_x or nestor_mgmt_csi_x)"), ["gc-csi-node", "mgmt-csi"]);
        assert_eq!(jobs("up{job=~\"mgmt-csi|vm-operator-shim\"} == 0"), ["mgmt-csi", "vm-operator-shim"]);
    }

    #[test]
    fn a_query_is_percent_encoded() {
        assert_eq!(percent_encoded("sum(a{b=\"ä\"}) > 0.5"), "sum%28a%7Bb%3D%22%C3%A4%22%7D%29%20%3E%200.5");
    }
}
