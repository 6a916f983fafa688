//! Reports: results as a table and as JSON rows.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::cost::Cost;
use crate::stats::Stats;

/// Components whose resource usage is reported: our own, and those they use.
const REPORTED: [&str; 6] = ["gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra", "apiserver", "etcd"];

/// Results of a bench. Clones share them.
#[derive(Debug, Clone)]
pub struct Report {
    bench: Arc<str>,
    rows: Arc<Mutex<Rows>>,
}

#[derive(Debug, Default)]
struct Rows {
    measured: Vec<Row>,
    requests: Vec<Request>,
}

/// A measured quantity of a case.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub(crate) bench: String,
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: String,
    pub(crate) n: usize,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p50: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_p50: Option<f64>,
}

/// The number of requests of one kind per operation.
#[derive(Debug, Clone, Serialize)]
struct Request {
    bench: String,
    case: String,
    cluster: &'static str,
    component: String,
    verb: String,
    resource: String,
    per_op: f64,
}

impl Report {
    /// An empty report.
    pub fn new(bench: &str) -> Self {
        Self { bench: bench.into(), rows: Arc::default() }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the durations of a case, and of its floor.
    pub(crate) fn times(&self, case: &str, times: &[Duration], floor: &[Duration]) {
        self.times_of(case, "duration", times, floor);
    }

    /// Adds the durations of one metric of a case, and of its floor.
    pub(crate) fn times_of(&self, case: &str, metric: &str, times: &[Duration], floor: &[Duration]) {
        let floor = Stats::of_times(floor).map(|floor| floor.p50);
        if let Some(stats) = Stats::of_times(times) {
            self.row(case, metric, "ms", stats, floor);
        }
    }

    /// Adds the durations of one metric under load, those without load as a case of their own, and the ratios of their
    /// percentiles.
    pub(crate) fn with_load(
        &self,
        case: &str,
        floor_case: &str,
        metric: &str,
        times: &[Duration],
        floor: &[Duration],
    ) {
        self.times_of(floor_case, metric, floor, &[]);
        self.times_of(case, metric, times, floor);
        if let (Some(times), Some(floor)) = (Stats::of_times(times), Stats::of_times(floor)) {
            self.number(case, &format!("{metric} p90"), "times the floor", times.p90 / floor.p90);
            self.number(case, &format!("{metric} p99"), "times the floor", times.p99 / floor.p99);
        }
    }

    /// Adds a single number of a case.
    pub(crate) fn number(&self, case: &str, metric: &str, unit: &str, number: f64) {
        self.numbers(case, metric, unit, vec![number]);
    }

    /// Adds the numbers of one metric of a case.
    pub(crate) fn numbers(&self, case: &str, metric: &str, unit: &str, numbers: Vec<f64>) {
        if let Some(stats) = Stats::of(numbers) {
            self.row(case, metric, unit, stats, None);
        }
    }

    fn row(&self, case: &str, metric: &str, unit: &str, stats: Stats, floor: Option<f64>) {
        let Stats { n, p50, p90, p99, max } = stats;
        let row = Row {
            bench: self.bench.to_string(),
            case: case.to_owned(),
            metric: metric.to_owned(),
            unit: unit.to_owned(),
            n,
            p50,
            p90,
            p99,
            max,
            floor_p50: floor,
            ratio_p50: floor.map(|floor| p50 / floor),
        };
        self.rows().measured.push(row);
    }

    /// Adds the cost of a case, per operation.
    pub(crate) fn cost(&self, case: &str, cost: &Cost) {
        let per_op = |count: f64| count / cost.operations.max(1) as f64;
        for (kind, count) in &cost.requests {
            let request = Request {
                bench: self.bench.to_string(),
                case: case.to_owned(),
                cluster: kind.cluster,
                component: kind.component.to_owned(),
                verb: kind.verb.clone(),
                resource: kind.resource.clone(),
                per_op: per_op(*count as f64),
            };
            self.rows().requests.push(request);
        }
        for (component, count) in &cost.refused {
            self.number(case, &format!("{component} refused"), "total", *count as f64);
        }
        for (component, used) in &cost.used {
            if !REPORTED.iter().any(|name| component.ends_with(name)) {
                continue;
            }
            let name = |what: &str| format!("{component} {what}");
            if used.received > 0 {
                self.number(case, &name("received"), "B/op", per_op(used.received as f64));
                self.number(case, &name("sent"), "B/op", per_op(used.sent as f64));
            }
            self.number(case, &name("cpu"), "ms/op", per_op(used.cpu.as_secs_f64() * 1000.0));
        }
        self.number(case, "host cpu", "% of all cores", 100.0 * cost.busy);
    }

    /// Prints both tables.
    pub fn print(&self) -> Result<()> {
        let rows = self.rows();
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{:<12} {:<30} {:<14} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7}",
            "case", "metric", "unit", "n", "p50", "p90", "p99", "max", "floor p50", "ratio"
        )?;
        for row in &rows.measured {
            let number = |value: f64| format!("{value:.1}");
            writeln!(
                out,
                "{:<12} {:<30} {:<14} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7}",
                row.case,
                row.metric,
                row.unit,
                row.n,
                number(row.p50),
                number(row.p90),
                number(row.p99),
                number(row.max),
                row.floor_p50.map(number).unwrap_or_default(),
                row.ratio_p50.map(|ratio| format!("{ratio:.2}x")).unwrap_or_default(),
            )?;
        }
        if !rows.requests.is_empty() {
            writeln!(out, "\nrequests per operation")?;
        }
        for one in &rows.requests {
            writeln!(
                out,
                "{:<10} {:<11} {:<26} {:<8} {:<36} {:>7.2}",
                one.case, one.cluster, one.component, one.verb, one.resource, one.per_op
            )?;
        }
        Ok(())
    }

    /// Writes all rows to a file, as one JSON list.
    pub fn write(&self, file: &Path) -> Result<()> {
        let all = self.rows();
        let rows = all.measured.iter().map(serde_json::to_value);
        let rows = rows.chain(all.requests.iter().map(serde_json::to_value));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        std::fs::write(file, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", file.display()))
    }
}

/// Reads the measured rows of a file.
pub fn read(file: &Path) -> Result<Vec<Row>> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let all: Vec<serde_json::Value> =
        serde_json::from_slice(&text).with_context(|| format!("{} is not a list of rows", file.display()))?;
    // Rows of requests have another structure.
    Ok(all.into_iter().filter_map(|row| serde_json::from_value(row).ok()).collect())
}
