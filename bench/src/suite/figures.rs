//! Benches of which docs/reference/speed.md shows single figures, one line per case.

use anyhow::{Result, ensure};

use super::{ATTACH, CREATE, LIFECYCLE, time};
use crate::report::Row;

pub(super) const HEAD: &str = "| command | case | figures |\n| --- | --- | --- |\n";

/// CPU time of an operation.
const OPERATION: &[&str] =
    &["g1-gc-csi cpu", "mgmt-csi cpu", "storage-infra cpu", "g1-apiserver cpu", "mgmt-apiserver cpu"];

/// A bench, and its metrics that the page shows.
#[derive(Debug)]
pub struct Figures {
    /// Arguments of the program.
    pub command: &'static str,
    metrics: &'static [&'static str],
}

/// All benches, in the order of the table.
pub const FIGURES: &[Figures] = &[
    Figures { command: CREATE, metrics: OPERATION },
    Figures { command: ATTACH, metrics: OPERATION },
    Figures { command: LIFECYCLE, metrics: &["gc-csi to management"] },
    Figures {
        command: "scale --guests 1,5",
        metrics: &[
            "everything attached",
            "moved",
            "mgmt-csi rss",
            "vm-operator-shim rss",
            "storage-infra rss",
        ],
    },
    Figures {
        command: "idle --volumes 1000 --seconds 60",
        metrics: &[
            "requests beyond leases",
            "g1-gc-csi cpu",
            "mgmt-csi cpu",
            "vm-operator-shim cpu",
            "storage-infra cpu",
        ],
    },
    Figures {
        command: "idle --storage-infra --volumes 0,10000 --seconds 60",
        metrics: &["storage-infra cpu"],
    },
    Figures { command: "idle --storage-infra --attached 1000 --seconds 60", metrics: &["storage-infra cpu"] },
    Figures {
        command: "sustain --rate 100 --seconds 60 --volumes 10000",
        metrics: &["created", "duration", "storage-infra cpu"],
    },
    Figures {
        command: "memory --volumes 125,1000",
        metrics: &[
            "g1-gc-csi rss",
            "g1-gc-csi rss after a restart",
            "mgmt-csi rss",
            "mgmt-csi rss after a restart",
            "vm-operator-shim rss",
            "storage-infra rss",
            "storage-infra rss after a restart",
            "g1-provisioner rss",
            "g1-attacher rss",
            "g1-resizer rss",
            "g1-snapshotter rss",
        ],
    },
    Figures {
        command: "recovery --volumes 1000 --count 3 --rounds 12",
        metrics: &[
            "g1-gc-csi started",
            "mgmt-csi started",
            "vm-operator-shim started",
            "storage-infra started",
            "watches are back",
        ],
    },
    Figures {
        command: "trace --volumes 10,10000 --count 20",
        metrics: &["not attached, both clusters", "attached, one cluster"],
    },
];

impl Figures {
    /// The lines of the table.
    pub(super) fn lines(&self, rows: &[Row]) -> Result<String> {
        for metric in self.metrics {
            ensure!(rows.iter().any(|row| row.metric == *metric), "{}: no metric {metric:?}", self.command);
        }
        let shown = |row: &&Row| self.metrics.contains(&row.metric.as_str());
        let rows: Vec<&Row> = rows.iter().filter(shown).collect();
        let mut cases: Vec<&str> = rows.iter().map(|row| row.case.as_str()).collect();
        cases.dedup();
        let mut command = format!("`{}`", self.command);
        let mut lines = String::new();
        for case in cases {
            let figures: Vec<String> =
                rows.iter().filter(|row| row.case == case).map(|row| figure(row)).collect();
            lines += &format!("| {command} | {case} | {} |\n", figures.join("; "));
            command.clear();
        }
        Ok(lines)
    }
}

fn figure(row: &Row) -> String {
    let Row { metric, unit, p50, p90, max, n, .. } = row;
    match (unit.as_str(), n) {
        ("ms", 1) => format!("{metric} {}", time(*p50)),
        ("ms", _) => format!("{metric} p50 {}, p90 {}, max {}", time(*p50), time(*p90), time(*max)),
        ("% of a core", _) => format!("{metric} {p50:.2} {unit}"),
        _ => format!("{metric} {p50:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, metric: &str, unit: &str, n: usize, p50: f64) -> Row {
        let (bench, case, metric, unit) =
            ("b".to_owned(), case.to_owned(), metric.to_owned(), unit.to_owned());
        let (p90, p99, max) = (2.0 * p50, 3.0 * p50, 4.0 * p50);
        Row { bench, case, metric, unit, n, p50, p90, p99, max, floor_p50: None, ratio_p50: None }
    }

    #[test]
    fn a_case_is_one_line_with_the_metrics_that_are_shown() {
        let sustain = FIGURES.iter().find(|one| one.command.starts_with("sustain")).unwrap();
        let rows = [
            row("100/s", "duration", "ms", 9, 7.0),
            row("100/s", "other", "ms", 9, 7.0),
            row("100/s", "created", "per second", 1, 100.0),
            row("100/s", "storage-infra cpu", "% of a core", 1, 12.345),
        ];
        let expected = "| `sustain --rate 100 --seconds 60 --volumes 10000` | 100/s | duration p50 7.0 ms, p90 14.0 ms, \
                        max 28.0 ms; created 100.0 per second; storage-infra cpu 12.35 % of a core |\n";
        assert_eq!(sustain.lines(&rows).unwrap(), expected);
        assert!(sustain.lines(&rows[..2]).unwrap_err().to_string().contains("created"));
    }
}
