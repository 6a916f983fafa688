//! Findings of checks.

use process_kit::text::one_line;
use serde::Serialize;

use crate::clusters::Tier;
use crate::render::{Colour, paint};

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Could not be checked.
    Skipped,
    /// It works, but not as well as it could, or not for long.
    Warning,
    /// It does not work.
    Error,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The cluster.
    pub cluster: Tier,
    /// How serious it is.
    pub level: Level,
    /// What was checked.
    pub what: String,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
}

impl Finding {
    fn new(cluster: Tier, level: Level, what: impl Into<String>) -> Self {
        Self { cluster, level, what: what.into(), why: None, action: None }
    }

    /// All is well.
    pub fn ok(cluster: Tier, what: impl Into<String>) -> Self {
        Self::new(cluster, Level::Ok, what)
    }

    /// Not checked.
    pub fn skipped(cluster: Tier, what: impl Into<String>) -> Self {
        Self::new(cluster, Level::Skipped, what)
    }

    /// A warning.
    pub fn warning(cluster: Tier, what: impl Into<String>) -> Self {
        Self::new(cluster, Level::Warning, what)
    }

    /// An error.
    pub fn error(cluster: Tier, what: impl Into<String>) -> Self {
        Self::new(cluster, Level::Error, what)
    }

    /// Sets the reason.
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// Sets what to do.
    pub fn next(mut self, action: impl Into<String>) -> Self {
        self.action = Some(action.into());
        self
    }
}

/// Formats findings, one per line, and their number by level.
pub fn text(findings: &[Finding], has_colour: bool) -> String {
    let lines: String = findings.iter().map(|finding| line(finding, has_colour)).collect();
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (errors, warnings) = (count(Level::Error), count(Level::Warning));
    format!("{lines}{errors} errors, {warnings} warnings, {} checks\n", findings.len())
}

fn line(finding: &Finding, has_colour: bool) -> String {
    let (word, colour) = match finding.level {
        Level::Ok => ("ok     ", Colour::Green),
        Level::Skipped => ("skipped", Colour::Dim),
        Level::Warning => ("warning", Colour::Yellow),
        Level::Error => ("error  ", Colour::Red),
    };
    let why = finding.why.as_ref().map(|why| format!(": {}", one_line(why))).unwrap_or_default();
    let next =
        finding.action.as_ref().map(|next| format!("\n         → {}", one_line(next))).unwrap_or_default();
    let word = paint(word, colour, has_colour);
    format!("{word}  {:<10}  {}{why}{next}\n", finding.cluster.name(), one_line(&finding.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_a_line_with_reason_and_action() {
        let findings = [Finding::error(Tier::Guest, "CSIDriver").because("absent").next("install")];
        assert_eq!(
            text(&findings, false),
            "error    guest       CSIDriver: absent\n         → install\n1 errors, 0 warnings, 1 checks\n"
        );
    }
}
