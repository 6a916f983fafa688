//! The benches whose results docs/reference/speed.md shows, and its tables.

pub mod figures;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::report::Row;
use figures::FIGURES;

/// The lines between which the page has the tables.
const BEGIN: &str = "<!-- `cargo lab bench all` replaces these tables. -->";
const END: &str = "<!-- End. -->";
const HEAD: &str = "| command | case | p50 | p90 | max | baseline p50 | ratio | CPU load |
| --- | --- | --- | --- | --- | --- | --- | --- |
";
/// The VM Operator slows VMs down whose disks come and go, so the benches that attach raise its limits.
macro_rules! without_limits {
    ($command:literal) => {
        concat!($command, " --set vm-operator-shim:flapping=10000 --set vm-operator-shim:attach-burst=100000")
    };
}

const CREATE: &str = "create --count 50 --bursts 30,100 --rounds 3";
const LIFECYCLE: &str = without_limits!("lifecycle --count 10 --bursts 10 --rounds 2 --before 0,2000,10000");
const BLOCKED: &str = without_limits!("blocked --count 15");
const ATTACH: &str = without_limits!("attach --count 60 --rounds 3 --reported 100 --attached 0,30,60,120");

/// A command, and what the table shows of its results.
#[derive(Debug)]
pub struct Step {
    /// Arguments of the program.
    pub command: &'static str,
    /// Cases and their descriptions.
    cases: &'static [(&'static str, &'static str)],
    /// The metric that is shown.
    metric: &'static str,
}

const fn step(command: &'static str, cases: &'static [(&'static str, &'static str)]) -> Step {
    Step { command, cases, metric: "duration" }
}

/// All steps, in the order of the table.
pub const STEPS: &[Step] = &[
    step(CREATE, &[("one", "one at a time"), ("burst30", "30 at once"), ("burst100", "100 at once")]),
    step(
        "create --split-cpus --count 20 --bursts 100 --rounds 2",
        &[("one", "one at a time, each tier on one core"), ("burst100", "100 at once, the same")],
    ),
    step(
        "create --backend instant --count 20 --bursts 100 --rounds 2",
        &[("one", "one at a time"), ("burst100", "100 at once")],
    ),
    step(
        "delete --count 20 --bursts 100 --rounds 2",
        &[("one", "one at a time"), ("burst100", "100 at once")],
    ),
    step(
        ATTACH,
        &[
            ("one", "one at a time"),
            ("burst30", "30 at once on one VM"),
            (
                "one beside 100",
                "one at a time while 100 others are reported; the baseline is the same before",
            ),
            ("one on 0", "one at a time on a VM with 0 other disks"),
            ("one on 30", "30 other disks"),
            ("one on 60", "60 other disks"),
            ("one on 120", "120 other disks"),
        ],
    ),
    step(
        without_limits!("detach --count 30 --rounds 3"),
        &[("one", "one at a time"), ("burst30", "30 at once on one VM")],
    ),
    step("snapshot --count 15", &[("one", "one at a time")]),
    step("clone --count 15", &[("one", "one at a time")]),
    step(
        LIFECYCLE,
        &[
            ("one after 0", "one at a time"),
            ("burst10 after 0", "10 at once"),
            ("one after 2000", "one at a time, after 2,000 claims came and went"),
            ("burst10 after 2000", "10 at once, the same"),
            ("one after 10000", "one at a time, after 10,000 claims came and went"),
            ("burst10 after 10000", "10 at once, the same"),
        ],
    ),
    Step {
        metric: "all bound",
        ..step("burst --bursts 1000", &[("burst1000", "1,000 claims at once until all are Bound")])
    },
    Step {
        metric: "all gone",
        ..step("burst --bursts 1000", &[("burst1000", "the same until all are gone")])
    },
    // Attaches, detaches and creates elsewhere, while disks wait for a VM that hangs.
    Step { metric: "attach", ..step(BLOCKED, &[("blocked", "attach while 100 disks wait for another VM")]) },
    Step { metric: "detach", ..step(BLOCKED, &[("blocked", "detach, the same")]) },
    Step { metric: "create", ..step(BLOCKED, &[("blocked", "create, the same")]) },
    // Flags of Kubernetes' components at their defaults, or with other values.
    step(
        "create --count 8 --bursts 30 --set g1-provisioner:kube-api-qps=5 --set g1-provisioner:kube-api-burst=10",
        &[
            ("one", "one at a time, the guest's csi-provisioner with its default of 5 requests per second"),
            ("burst30", "30 at once, the same"),
        ],
    ),
    step(
        "create --count 8 --bursts 30 --set g1-controller-manager:kube-api-qps=20 --set g1-controller-manager:kube-api-burst=30",
        &[
            (
                "one",
                "one at a time, the guest's kube-controller-manager with its default of 20 requests per second",
            ),
            ("burst30", "30 at once, the same"),
        ],
    ),
    step(
        "create --count 8 --bursts 30,100 --set g1-provisioner:worker-threads=10 --set mgmt-provisioner:worker-threads=10",
        &[
            ("burst30", "30 at once, csi-provisioner with 10 workers in both clusters"),
            ("burst100", "100 at once, the same"),
        ],
    ),
    step(
        "attach --count 8 --bursts 30 --set g1-attacher:kube-api-qps=5 --set g1-attacher:kube-api-burst=10",
        &[
            ("one", "one at a time, csi-attacher with its default of 5 requests per second"),
            ("burst30", "30 at once, the same"),
        ],
    ),
    step(
        "retry --count 8 --seconds 45",
        &[
            ("claim", "claims that a quota refused for 45 s, after it was raised"),
            ("attach", "attaches to a VM that hung for 45 s, after that"),
        ],
    ),
    step(
        "retry --count 8 --seconds 45 --set g1-provisioner:retry-interval-start=1s --set g1-provisioner:retry-interval-max=5m \
         --set g1-attacher:retry-interval-start=1s --set g1-attacher:retry-interval-max=5m",
        &[
            ("claim", "the same claims, with the sidecars' default retry intervals of 1 s to 5 min"),
            ("attach", "the same attaches, with those intervals"),
        ],
    ),
];

/// The lines of steps with one command, which only the first of them shows.
fn lines(steps: &[Step], rows: &[Row]) -> Result<String> {
    let cells: Vec<String> = steps.iter().map(|step| step.cells(rows)).collect::<Result<Vec<_>>>()?.concat();
    let mut first = format!("| `{}` ", steps[0].command);
    Ok(cells.into_iter().map(|cells| std::mem::replace(&mut first, "| ".to_owned()) + &cells).collect())
}

impl Step {
    /// The lines of its cases, without their first cell.
    fn cells(&self, rows: &[Row]) -> Result<Vec<String>> {
        let mut cells = Vec::new();
        for (case, description) in self.cases {
            let of = |metric: &str| rows.iter().find(|row| row.case == *case && row.metric == metric);
            let row = of(self.metric).with_context(|| format!("{}: no case {case:?}", self.command))?;
            let load = of("host cpu").map_or_else(|| "–".to_owned(), |load| format!("{:.0} %", load.p50));
            let floor = row.floor_p50.map_or_else(|| "–".to_owned(), time);
            let ratio = row.ratio_p50.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
            let [p50, p90, max] = [row.p50, row.p90, row.max].map(time);
            let times = match row.n {
                1 => format!("{p50} | – | –"),
                _ => format!("{p50} | {p90} | {max}"),
            };
            cells.push(format!("| {description} | {times} | {floor} | {ratio} | {load} |\n"));
        }
        Ok(cells)
    }
}

/// A time in milliseconds, with three digits.
fn time(milliseconds: f64) -> String {
    match Duration::from_secs_f64(milliseconds / 1000.0) {
        time if time >= Duration::from_secs(10) => format!("{:.1} s", time.as_secs_f64()),
        time if time >= Duration::from_secs(1) => format!("{:.2} s", time.as_secs_f64()),
        _ if milliseconds >= 100.0 => format!("{milliseconds:.0} ms"),
        _ => format!("{milliseconds:.1} ms"),
    }
}

/// Arguments of the program for all results of the page, each once.
pub fn commands() -> Vec<&'static str> {
    let figures = FIGURES.iter().map(|figures| figures.command);
    let mut all = Vec::new();
    for command in STEPS.iter().map(|step| step.command).chain(figures) {
        if !all.contains(&command) {
            all.push(command);
        }
    }
    all
}

/// Writes the tables to the page. `rows` returns the results of a command.
pub fn write(page: &Path, rows: impl Fn(&str) -> Result<Vec<Row>>) -> Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
    let groups = STEPS.chunk_by(|one, next| one.command == next.command);
    let times: Vec<String> =
        groups.map(|steps| lines(steps, &rows(steps[0].command)?)).collect::<Result<_>>()?;
    let figures: Vec<String> =
        FIGURES.iter().map(|one| one.lines(&rows(one.command)?)).collect::<Result<_>>()?;
    let tables = format!("{HEAD}{}\n{}{}", times.concat(), figures::HEAD, figures.concat());
    let text =
        replaced(&text, &tables).with_context(|| format!("{} has no place for them", page.display()))?;
    std::fs::write(page, text).with_context(|| format!("cannot write {}", page.display()))
}

fn replaced(page: &str, table: &str) -> Result<String> {
    let (before, rest) = page.split_once(BEGIN).with_context(|| format!("no line {BEGIN:?}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("no line {END:?}"))?;
    ensure!(!after.contains(BEGIN), "two lines {BEGIN:?}");
    Ok(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, metric: &str, n: usize, p50: f64) -> Row {
        Row {
            bench: "delete".to_owned(),
            case: case.to_owned(),
            metric: metric.to_owned(),
            unit: "ms".to_owned(),
            n,
            p50,
            p90: 2.0 * p50,
            p99: 3.0 * p50,
            max: 4.0 * p50,
            floor_p50: (metric == "duration").then_some(p50 / 2.0),
            ratio_p50: (metric == "duration").then_some(2.0),
        }
    }

    #[test]
    fn a_table_replaces_the_one_before_and_nothing_else() {
        let step = STEPS.iter().find(|step| step.command.starts_with("delete")).unwrap();
        let rows = [
            row("one", "duration", 30, 50.0),
            row("one", "host cpu", 1, 85.2),
            row("burst100", "duration", 1, 2500.0),
        ];
        let lines = super::lines(std::slice::from_ref(step), &rows).unwrap();
        assert_eq!(
            lines,
            "| `delete --count 20 --bursts 100 --rounds 2` | one at a time | 50.0 ms | 100 ms | 200 ms | 25.0 ms | 2.00 | 85 % |\n\
             | | 100 at once | 2.50 s | – | – | 1.25 s | 2.00 | – |\n"
        );
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = replaced(&page, &lines).unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\n\n{lines}\n{END}\nb\n"));
        assert_eq!(replaced(&new, &lines).unwrap(), new);
        assert!(replaced("a", &lines).is_err());
        assert!(step.cells(&rows[..2]).unwrap_err().to_string().contains("burst100"));
    }
}
