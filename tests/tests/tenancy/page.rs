//! The tables in docs/explanation/hostile-guests.md.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use lab::run::repository;

use super::attempt::{Attempt, Expected, Outcome};
use super::covered::COVERED;
use super::{TOPICS, image, sockets, vm};

const PAGE: &str = "docs/explanation/hostile-guests.md";
/// The line before the tables, and the one behind them.
const MARKS: [&str; 2] = ["<!-- attempts -->", "<!-- end of attempts -->"];

/// Name and outcomes of an attempt.
type Row = (&'static str, Expected);

fn rows<Act>(attempts: Vec<Attempt<Act>>) -> Vec<Row> {
    attempts.into_iter().map(|one| (one.name, one.expected)).collect()
}

/// The attempts that are not made through the management API, by heading.
fn elsewhere() -> [(&'static str, Vec<Row>); 4] {
    [
        ("At the sockets of the drivers", rows(sockets::at_drivers())),
        ("At the port of the storage infra", rows(sockets::at_the_infra())),
        ("From inside a VM", rows(vm::attempts())),
        ("Crafted filesystems", rows(image::attempts())),
    ]
}

fn with_the_credential() -> Vec<(&'static str, Vec<Row>)> {
    TOPICS.iter().map(|(heading, attempts)| (*heading, rows(attempts()))).collect()
}

/// The reason of an outcome that is no refusal.
fn reason(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Refused(_) => None,
        Outcome::Bounded(why) | Outcome::NotPrevented(why) => Some(why),
    }
}

/// Each reason with the names of its attempts, in their order.
fn reasons(rows: &[(&'static str, &[Outcome])]) -> Vec<(&'static str, Vec<&'static str>)> {
    let mut all: Vec<(&'static str, Vec<&'static str>)> = Vec::new();
    for (name, outcomes) in rows {
        for why in outcomes.iter().filter_map(|outcome| reason(*outcome)) {
            match all.iter_mut().find(|(known, _)| *known == why) {
                Some((_, names)) if names.contains(name) => {}
                Some((_, names)) => names.push(*name),
                None => all.push((why, vec![*name])),
            }
        }
    }
    all
}

fn write_reasons(text: &mut String, rows: &[(&'static str, &[Outcome])]) {
    let all = reasons(rows);
    if !all.is_empty() {
        text.push('\n');
    }
    for (why, names) in all {
        let _ = writeln!(text, "* {}: {why}.", names.join("; "));
    }
}

fn tables() -> String {
    let mut text = String::new();
    for (heading, rows) in with_the_credential() {
        let _ = write!(
            text,
            "\n### {heading}\n\n| attempt | namespaces of their own | … without policies | shared namespace | … without policies |\n\
             | --- | --- | --- | --- | --- |\n"
        );
        for (name, [a, b, c, d]) in &rows {
            let _ = writeln!(text, "| {name} | {a} | {b} | {c} | {d} |");
        }
        write_reasons(&mut text, &rows.iter().map(|(name, all)| (*name, &all[..])).collect::<Vec<_>>());
    }
    for (heading, rows) in elsewhere() {
        let _ = write!(text, "\n### {heading}\n\n| attempt | stopped by |\n| --- | --- |\n");
        for (name, [outcome, ..]) in &rows {
            let _ = writeln!(text, "| {name} | {outcome} |");
        }
        write_reasons(&mut text, &rows.iter().map(|(name, all)| (*name, &all[..1])).collect::<Vec<_>>());
    }
    text.push_str("\n### Tested elsewhere\n\n| attempt | stopped by | tested by |\n| --- | --- | --- |\n");
    for (name, outcome, module) in &COVERED {
        let _ = writeln!(text, "| {name} | {outcome} | `cargo lab test {module}` |");
    }
    let covered: Vec<_> =
        COVERED.iter().map(|(name, outcome, _)| (*name, std::slice::from_ref(outcome))).collect();
    write_reasons(&mut text, &covered);
    text.push('\n');
    text
}

#[test]
fn the_page_lists_all_attempts() -> Result<()> {
    let page = std::fs::read_to_string(repository().join(PAGE))?;
    let (_, rest) = page.split_once(&format!("{}\n", MARKS[0])).context("no start of the tables")?;
    let (listed, _) = rest.split_once(MARKS[1]).context("no end of the tables")?;
    let expected = tables();
    ensure!(listed == expected, "{PAGE}: between {} and {}, write:\n{expected}", MARKS[0], MARKS[1]);
    Ok(())
}

#[test]
fn there_are_more_than_sixty_attempts_and_no_two_have_one_name() {
    let made = with_the_credential().into_iter().chain(elsewhere());
    for (heading, rows) in made {
        let mut names: Vec<_> = rows.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len(), "{heading}");
    }
    let count: usize = with_the_credential().into_iter().map(|(_, rows)| rows.len()).sum();
    assert!(count > 60, "{count}");
}
