//! Crash tests: the server crashes at every fail point of every operation, is restarted, and the request is repeated.
//! Afterwards the requested objects exist exactly once and no data is lost. The fail points are recorded from a run
//! of the operation, so that new ones are tested automatically. Runs as root.
//!
//! Beyond these, it crashes again while it recovers, and each effect and each commit reports an error, done or not. Of the cases
//! that take long, `NESTOR_CRASH_CASES` of each operation and each kind run: a number, or `all`. They are chosen by
//! `NESTOR_CRASH_SEED`.

mod drive;
mod moves;
mod operations;

use std::time::Instant;

use drive::{Driver, Step, sample};
use operations::Operation::{self, *};

/// Cases of each operation and each kind in a usual run.
const CASES: usize = 3;
/// Operations for which also the cases of one crash or of one failed write take long: they wait for a VM or for a repair.
const SLOW: [Operation; 6] = [Grow, Limit, Detach, Fence, Move, PowerOff];

/// How many cases of each operation and kind run.
fn cases() -> usize {
    match std::env::var("NESTOR_CRASH_CASES") {
        Ok(text) if text == "all" => usize::MAX,
        Ok(text) => text.parse().expect("NESTOR_CRASH_CASES is a number or `all`"),
        Err(_) => CASES,
    }
}

fn seed() -> u64 {
    std::env::var("NESTOR_CRASH_SEED").map_or(37, |text| text.parse().expect("NESTOR_CRASH_SEED is a number"))
}

/// Crashes the server at each fail point of these operations, at some of them twice, and lets some writes fail. Prints what it did.
async fn crash_at_every_step(driver: &mut Driver, operations: &[Operation]) {
    for operation in operations {
        let begin = Instant::now();
        let steps = driver.record(*operation).await;
        let mut again = Vec::new();
        let first =
            if *operation == PowerOff { sample(steps.clone(), cases(), seed()) } else { steps.clone() };
        for step in &first {
            let passed = driver.crash(*operation, step).await;
            again.extend((1..=passed.len()).map(|number| (step.clone(), number)));
        }
        let once = begin.elapsed();
        let chosen = sample(again.clone(), cases(), seed());
        for (step, number) in &chosen {
            driver.crash_twice(*operation, step, *number).await;
        }
        let twice = begin.elapsed() - once;
        let failed = if SLOW.contains(operation) { cases() } else { usize::MAX };
        let writes = sample(failures(&steps), failed, seed());
        for (write, how) in &writes {
            driver.fail(*operation, write, how).await;
        }
        println!(
            "{operation:?}: {} crashes in {once:?}; {} of {} second crashes in {twice:?}; {} failed writes in {:?}",
            first.len(),
            chosen.len(),
            again.len(),
            writes.len(),
            begin.elapsed() - once - twice
        );
    }
    println!("{} operations, {} crashes", operations.len(), driver.crashes);
}

/// The writes among these steps, each with the ways in which it can fail.
fn failures(steps: &[Step]) -> Vec<(Step, &'static str)> {
    let write = |step: &Step| {
        let point = step.point.strip_suffix(".before")?.to_owned();
        Some(Step { point, ..step.clone() })
    };
    let writes = steps.iter().filter_map(write);
    writes.flat_map(|write| [(write.clone(), "undone"), (write, "done")]).collect()
}

#[tokio::test]
async fn volume_operations_are_consistent_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[Create, Grow, Limit, Delete]).await;
}

#[tokio::test]
async fn attach_detach_and_fence_are_consistent_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[Attach, Detach, Fence]).await;
}

#[tokio::test]
async fn a_vm_that_is_fenced_is_off_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[PowerOff]).await;
}

#[tokio::test]
async fn copies_are_complete_or_absent_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[Snapshot, Restore, CloneOf, Elsewhere, DeleteSnapshot])
        .await;
}

#[tokio::test]
async fn imports_adoptions_and_releases_are_complete_or_absent_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[Import, Adopt, AdoptImage, Release]).await;
}

#[tokio::test]
async fn a_detached_volume_has_one_file_after_a_crash_at_every_step_of_its_move() {
    crash_at_every_step(&mut Driver::new().await, &[Move]).await;
}

#[tokio::test]
async fn pool_registration_is_consistent_after_a_crash_at_every_step() {
    crash_at_every_step(&mut Driver::new().await, &[AddPool, RemovePool]).await;
}

/// Operations during which the active one of several servers crashes, and again the one that takes over.
const FAILED_OVER: [Operation; 8] = [Create, Grow, Attach, Detach, Snapshot, Elsewhere, Import, Move];

#[tokio::test]
async fn operations_are_complete_or_absent_after_two_servers_crashed() {
    let mut driver = Driver::with_standby().await;
    let mut chosen = 0;
    for operation in sample(FAILED_OVER.to_vec(), cases(), seed()) {
        let steps = driver.record(operation).await;
        for step in sample(steps, cases().div_ceil(4), seed()) {
            let passed = driver.crash(operation, &step).await.len();
            let numbers = sample((1..=passed).collect(), cases().div_ceil(8), seed());
            for number in &numbers {
                driver.crash_twice(operation, &step, *number).await;
            }
            chosen += numbers.len();
        }
    }
    println!("{chosen} cases, {} crashes", driver.crashes);
}
