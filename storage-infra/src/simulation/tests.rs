//! Many seeds. One that fails is minimised: steps are left out while it fails.

use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::mutations::{FOUND_LATE, FOUND_SOON};
use super::run::run;
use super::steps::{Step, draw};
use crate::safety::Check;

/// Steps of a seed.
const STEPS: usize = 200;
/// Seeds by default.
const SEEDS: u64 = 300;
/// Seeds within which each safety check that is switched off is missed.
const MUTATION_SEEDS: u64 = 2000;
/// Length of a violation in a list.
const LINE: usize = 250;
/// Time to minimise a list of steps.
const MINIMISE: Duration = Duration::from_secs(60);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|value| value.parse().expect("a number"))
}

/// The kind of a violation: its text without numbers and UUIDs.
fn kind(why: &str) -> String {
    let is_part = |word: &&str| !word.contains(|c: char| c.is_ascii_digit());
    why.split_whitespace().filter(is_part).take(6).collect::<Vec<_>>().join(" ")
}

/// Leaves out steps while the rest fails in the same way.
fn minimised(seed: u64, mut steps: Vec<Step>, why: &str) -> Vec<Step> {
    let (start, expected) = (Instant::now(), kind(why));
    let fails = |steps: &[Step]| {
        let violation = run(seed, steps, None, false).violation;
        violation.is_some_and(|(_, why)| kind(&why) == expected)
    };
    let mut size = steps.len().div_ceil(2);
    while size > 0 && start.elapsed() < MINIMISE {
        let before = steps.len();
        let mut at = 0;
        while at < steps.len() && start.elapsed() < MINIMISE {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + size).min(steps.len()));
            if fails(&fewer) { steps = fewer } else { at += size }
        }
        if size == 1 && steps.len() == before {
            break;
        }
        size = if size == 1 { 1 } else { size / 2 };
    }
    steps
}

/// Fails with the seed, the violation and a minimised list of steps.
fn report(seed: u64, steps: Vec<Step>, violation: &(usize, String)) -> ! {
    let (taken, why) = violation;
    let fewer = minimised(seed, steps[..*taken].to_vec(), why);
    let again = run(seed, &fewer, None, true);
    let log = again.log.join("\n");
    let list: Vec<String> = fewer.iter().map(|step| format!("{step:?}")).collect();
    panic!(
        "seed {seed}, after {taken} steps: {why}\nminimised to {}: {}\n{:?}\n{log}",
        fewer.len(),
        list.join(", "),
        again.violation
    );
}

fn steps_of(seed: u64) -> Vec<Step> {
    draw(seed, STEPS)
}

#[test]
fn whatever_happens_no_acknowledged_write_is_lost_and_everything_ends() {
    let first = number("NESTOR_SIMULATION_SEED");
    let count = number("NESTOR_SIMULATION_SEEDS").unwrap_or(if first.is_some() { 1 } else { SEEDS });
    let first = first.unwrap_or(0);
    let goes_on = std::env::var_os("NESTOR_SIMULATION_GO_ON").is_some();
    let start = Instant::now();
    let failed = failing(first..first + count, None, goes_on);
    let took = start.elapsed().as_secs_f64();
    eprintln!("{count} seeds of {STEPS} steps in {took:.1} s");
    match failed.into_iter().min() {
        Some((seed, violation)) if !goes_on => report(seed, steps_of(seed), &violation),
        failed => assert_eq!(failed, None, "seeds failed"),
    }
}

/// Takes these seeds, several at a time, with a safety check switched off or without that. Returns those that fail; without
/// `goes_on` it ends soon after the first.
fn failing(seeds: Range<u64>, off: Option<Check>, goes_on: bool) -> Vec<(u64, (usize, String))> {
    let (seeds, failed) = (Mutex::new(seeds), Mutex::new(Vec::new()));
    let ends = || !goes_on && !failed.lock().unwrap().is_empty();
    let work = || {
        while !ends() {
            let Some(seed) = seeds.lock().unwrap().next() else { return };
            let Some((taken, why)) = run(seed, &steps_of(seed), off, false).violation else { continue };
            if goes_on {
                eprintln!("seed {seed}, after {taken} steps: {}", line(&why));
            }
            failed.lock().unwrap().push((seed, (taken, why)));
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|threads| (0..workers).for_each(|_| drop(threads.spawn(work))));
    failed.into_inner().unwrap()
}

fn line(why: &str) -> String {
    why.chars().take(LINE).collect()
}

#[test]
fn all_that_happens_follows_from_the_seed() {
    for seed in 0..20 {
        let steps = steps_of(seed);
        let [one, other] = [(); 2].map(|()| run(seed, &steps, None, true).log);
        let differs = one.iter().zip(&other).find(|(one, other)| one != other);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(one.len(), other.len(), "seed {seed}");
    }
}

#[test]
fn each_safety_check_that_is_switched_off_is_missed() {
    let takes_all = std::env::var("NESTOR_SIMULATION_CHECKS").is_ok_and(|checks| checks == "all");
    let slow: &[Check] = if takes_all { &FOUND_LATE } else { &[] };
    let mut missed = Vec::new();
    for check in FOUND_SOON.iter().chain(slow).copied() {
        let start = Instant::now();
        let found = failing(0..MUTATION_SEEDS, Some(check), false).into_iter().min();
        let took = start.elapsed().as_secs_f64();
        match found {
            Some((seed, (_, why))) => {
                eprintln!("without {check:?}, seed {seed} fails ({took:.1} s): {}", line(&why));
            }
            None => missed.push(check),
        }
    }
    assert!(missed.is_empty(), "nothing fails without {missed:?}");
}
