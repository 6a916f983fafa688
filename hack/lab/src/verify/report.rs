//! Results of steps, and the table of them.

use std::time::Duration;

use super::steps::Step;
use crate::ui::table;

/// Result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Whether it passed.
    pub(super) passed: bool,
    /// Numbers or an error, if there is more to say.
    pub(super) details: Option<String>,
}

impl Outcome {
    pub(super) fn of(passed: bool) -> Self {
        Self { passed, details: None }
    }

    /// The text in the table.
    pub(super) fn text(&self) -> String {
        let result = if self.passed { "ok" } else { "FAILED" };
        match &self.details {
            Some(details) => format!("{result}: {details}"),
            None => result.to_owned(),
        }
    }
}

struct Row {
    name: String,
    outcome: Outcome,
    took: Duration,
}

/// Results of the steps, and of the preparations that are no steps.
#[derive(Default)]
pub(super) struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub(super) fn record(&mut self, name: &str, outcome: Outcome, took: Duration) {
        self.rows.push(Row { name: name.to_owned(), outcome, took });
    }

    /// Whether anything has failed.
    pub(super) fn has_failure(&self) -> bool {
        self.rows.iter().any(|row| !row.outcome.passed)
    }

    fn outcome(&self, step: &Step) -> Option<&Outcome> {
        self.rows.iter().find(|row| row.name == step.name).map(|row| &row.outcome)
    }

    /// Names of the steps that have failed or did not run.
    pub(super) fn unfinished<'a>(&self, planned: &'a [Step]) -> Vec<&'a str> {
        let is_unfinished = |step: &&Step| self.outcome(step).is_none_or(|outcome| !outcome.passed);
        planned.iter().filter(is_unfinished).map(|step| step.name.as_str()).collect()
    }

    /// The results as a table, with the steps that did not run at its end.
    pub(super) fn table(&self, planned: &[Step]) -> Vec<String> {
        let ran = self
            .rows
            .iter()
            .map(|row| vec![row.name.clone(), row.outcome.text(), format!("{:.1}", row.took.as_secs_f64())]);
        let left = planned.iter().filter(|step| self.outcome(step).is_none());
        let left = left.map(|step| vec![step.name.clone(), "not run".to_owned(), "-".to_owned()]);
        table(&["STEP", "RESULT", "SECONDS"], &ran.chain(left).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::steps::{self, Choice};

    fn report() -> (Report, Vec<Step>) {
        let names = ["fmt", "clippy", "sanity-mgmt", "attach"].map(str::to_owned);
        let all = steps::all(&["attach".to_owned()]);
        let planned = steps::select(all, Choice::Only(&names)).unwrap();
        let mut report = Report::default();
        report.record("packages", Outcome::of(true), Duration::from_millis(40));
        report.record("fmt", Outcome::of(true), Duration::from_millis(1260));
        report.record("clippy", Outcome::of(false), Duration::from_secs(100));
        let counts = Outcome { passed: true, details: Some("9 passed".to_owned()) };
        report.record("sanity-mgmt", counts, Duration::from_secs(7));
        (report, planned)
    }

    #[test]
    fn the_table_has_all_steps_with_result_and_seconds() {
        let (report, planned) = report();
        let expected = [
            "STEP            RESULT        SECONDS",
            "packages        ok            0.0",
            "fmt             ok            1.3",
            "clippy          FAILED        100.0",
            "sanity-mgmt     ok: 9 passed  7.0",
            "blackbox-build  not run       -",
            "attach          not run       -",
        ];
        assert_eq!(report.table(&planned), expected);
    }

    #[test]
    fn failed_steps_and_steps_that_did_not_run_are_unfinished() {
        let (report, planned) = report();
        assert!(report.has_failure());
        assert_eq!(report.unfinished(&planned), ["clippy", "blackbox-build", "attach"]);
    }

    #[test]
    fn a_run_that_passed_leaves_nothing_unfinished() {
        let planned = steps::select(steps::all(&[]), Choice::Only(&["fmt".to_owned()])).unwrap();
        let mut report = Report::default();
        report.record("fmt", Outcome::of(true), Duration::ZERO);
        assert!(!report.has_failure());
        assert!(report.unfinished(&planned).is_empty());
    }
}
