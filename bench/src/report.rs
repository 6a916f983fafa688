//! Results as a table for people and as JSON rows for programs.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::requests::Tally;
use crate::stats::Stats;

/// What a bench found.
#[derive(Debug)]
pub struct Report {
    bench: &'static str,
    rows: Vec<Row>,
    requests: Vec<Request>,
}

/// One measured quantity of one case.
#[derive(Debug, Clone, Serialize)]
struct Row {
    bench: &'static str,
    case: String,
    metric: &'static str,
    unit: &'static str,
    n: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_p50: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_p50: Option<f64>,
}

/// How often one kind of request to the management API was made per operation.
#[derive(Debug, Clone, Serialize)]
struct Request {
    bench: &'static str,
    case: String,
    component: String,
    verb: String,
    resource: String,
    per_op: f64,
}

impl Report {
    /// An empty report.
    pub fn new(bench: &'static str) -> Self {
        Self { bench, rows: Vec::new(), requests: Vec::new() }
    }

    /// Times of one case, and of the floor under it.
    pub fn times(&mut self, case: &str, times: &[Duration], floor: &[Duration]) {
        let millis = |times: &[Duration]| times.iter().map(|time| time.as_secs_f64() * 1000.0).collect();
        let floor = Stats::of(millis(floor)).map(|floor| floor.p50);
        if let Some(stats) = Stats::of(millis(times)) {
            self.row(case, "duration", "ms", stats, floor);
        }
    }

    /// One number of one case.
    pub fn number(&mut self, case: &str, metric: &'static str, unit: &'static str, number: f64) {
        if let Some(stats) = Stats::of(vec![number]) {
            self.row(case, metric, unit, stats, None);
        }
    }

    fn row(
        &mut self,
        case: &str,
        metric: &'static str,
        unit: &'static str,
        stats: Stats,
        floor: Option<f64>,
    ) {
        let Stats { n, p50, p90, p99, max } = stats;
        self.rows.push(Row {
            bench: self.bench,
            case: case.to_owned(),
            metric,
            unit,
            n,
            p50,
            p90,
            p99,
            max,
            floor_p50: floor,
            ratio_p50: floor.map(|floor| p50 / floor),
        });
    }

    /// Requests of one case, shared out over its operations.
    pub(crate) fn requests(&mut self, case: &str, tally: Tally, operations: usize) {
        for ((component, verb, resource), count) in tally {
            let (bench, case) = (self.bench, case.to_owned());
            let per_op = count as f64 / operations as f64;
            self.requests.push(Request { bench, case, component, verb, resource, per_op });
        }
    }

    /// Prints both tables.
    pub fn print(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{:<28} {:<10} {:>4} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7}",
            "case", "metric", "n", "p50", "p90", "p99", "max", "floor p50", "ratio"
        )?;
        for row in &self.rows {
            let number = |value: f64| format!("{value:.1}");
            writeln!(
                out,
                "{:<28} {:<10} {:>4} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7}",
                format!("{} ({})", row.case, row.unit),
                row.metric,
                row.n,
                number(row.p50),
                number(row.p90),
                number(row.p99),
                number(row.max),
                row.floor_p50.map(number).unwrap_or_default(),
                row.ratio_p50.map(|ratio| format!("{ratio:.2}x")).unwrap_or_default(),
            )?;
        }
        if !self.requests.is_empty() {
            writeln!(out, "\nrequests to the management API per operation")?;
        }
        for one in &self.requests {
            writeln!(
                out,
                "{:<10} {:<26} {:<8} {:<32} {:>7.2}",
                one.case, one.component, one.verb, one.resource, one.per_op
            )?;
        }
        Ok(())
    }

    /// Writes all rows to a file, as one JSON list.
    pub fn write(&self, file: &Path) -> Result<()> {
        let rows = self.rows.iter().map(serde_json::to_value);
        let rows = rows.chain(self.requests.iter().map(serde_json::to_value));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        std::fs::write(file, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| format!("cannot write {}", file.display()))
    }
}
