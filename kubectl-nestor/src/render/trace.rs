//! Text of a trace: one line per object, indented causes and remedies, and the verdict.

use jiff::Timestamp;
use process_kit::duration;
use process_kit::text::one_line;

use super::{Colour, paint};
use crate::clusters::Tier;
use crate::diagnose::Report;
use crate::diagnose::step::{State, Step};

/// Formats a report.
pub fn text(report: &Report, now: Timestamp, is_wide: bool, has_colour: bool) -> String {
    let mut lines = Vec::new();
    let mut tier = None;
    for step in &report.steps {
        if tier.replace(step.tier) != Some(step.tier) {
            lines.push(heading(step.tier).to_owned());
        }
        lines.extend(step_lines(step, now, is_wide, has_colour));
    }
    lines.extend(report.unseen.iter().map(|text| format!("not seen: {text}")));
    lines.extend(conclusion(report, has_colour));
    lines.join("\n") + "\n"
}

fn heading(tier: Tier) -> &'static str {
    match tier {
        Tier::Guest => "guest cluster",
        Tier::Management => "management cluster",
    }
}

fn step_lines(step: &Step, now: Timestamp, is_wide: bool, has_colour: bool) -> Vec<String> {
    let (mark, colour) = mark(step.state);
    let mark = paint(mark, colour, has_colour);
    let namespace = step.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
    let name = one_line(&step.name);
    let summary = paint(&one_line(&step.summary), colour, has_colour);
    let mut lines = vec![format!("  {mark} {} {namespace}{name}: {summary}{}", step.kind, age(step, now))];
    let more = |label: &str, text: &str| format!("      {label}: {}", one_line(text));
    lines.extend(step.trace_id.iter().map(|id| more("trace", id)));
    lines.extend(step.cause.iter().map(|cause| more("why", cause)));
    lines.extend(step.action.iter().map(|action| more("next", action)));
    if is_wide && !step.details.is_empty() {
        lines.push(format!("      {}", one_line(&step.details.join(" "))));
    }
    lines
}

fn mark(state: State) -> (&'static str, Colour) {
    match state {
        State::Ok => ("✓", Colour::Green),
        State::Idle => ("-", Colour::Dim),
        State::Unknown => ("?", Colour::Dim),
        State::Warning => ("!", Colour::Yellow),
        State::Waiting => ("…", Colour::Yellow),
        State::Stuck => ("✗", Colour::Red),
    }
}

fn age(step: &Step, now: Timestamp) -> String {
    let age = step.since.and_then(|since| std::time::Duration::try_from(now.duration_since(since)).ok());
    age.map(|age| format!(" ({})", duration::show(age))).unwrap_or_default()
}

fn conclusion(report: &Report, has_colour: bool) -> Vec<String> {
    let colour = if report.healthy { Colour::Green } else { Colour::Red };
    let mut lines = vec![paint(&one_line(&report.verdict), colour, has_colour)];
    lines.extend(report.cause.iter().map(|cause| format!("  why: {}", one_line(cause))));
    lines.extend(report.action.iter().map(|action| format!("  next: {}", one_line(action))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_a_line_for_each_object_with_its_age_and_remedy() {
        let now: Timestamp = "2026-01-01T00:05:00Z".parse().unwrap();
        let step = Step::new(Tier::Guest, "PersistentVolumeClaim", "data")
            .is(State::Stuck, "Pending")
            .since("2026-01-01T00:00:00Z".parse().ok())
            .traced(Some(&format!("00-{:032x}-{:016x}-01", 0xabc, 1)))
            .because("no\nroom")
            .next("add a pool");
        let report = Report {
            healthy: false,
            verdict: "stuck".into(),
            cause: None,
            action: None,
            steps: vec![step],
            unseen: vec!["nothing".into()],
        };
        let shown = text(&report, now, false, false);
        assert_eq!(
            shown,
            "guest cluster\n  ✗ PersistentVolumeClaim data: Pending (5m)\n      \
             trace: 00000000000000000000000000000abc\n      why: no\\nroom\n      \
             next: add a pool\nnot seen: nothing\nstuck\n"
        );
        assert!(text(&report, now, false, true).contains("\u{1b}[31m"));
    }
}
