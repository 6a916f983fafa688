//! Soak test: users of two guests run random operations, while components crash and are paused at random. Both are drawn
//! from a seed. After each operation the existing objects must match the expected state, and each volume must have all
//! acknowledged records.
//!
//! `NESTOR_SOAK_MINUTES` sets the duration (1), `NESTOR_SOAK_SEED` repeats a run (default: a random seed, which is
//! printed).

#[path = "soak/faults.rs"]
mod faults;
#[path = "soak/plan.rs"]
mod plan;
#[path = "soak/user.rs"]
mod user;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tests::run_alone;

use faults::Faults;
use user::User;

/// Number of users per guest.
const USERS: u64 = 2;

fn number(variable: &str) -> Result<Option<u64>> {
    let text = std::env::var(variable).ok();
    text.map(|text| text.parse().with_context(|| format!("{variable}={text} is not a number"))).transpose()
}

#[tokio::test(flavor = "multi_thread")]
async fn random_operations_and_faults_lose_no_data_and_leave_nothing_stuck() -> Result<()> {
    let minutes = number("NESTOR_SOAK_MINUTES")?.unwrap_or(1);
    let seed = number("NESTOR_SOAK_SEED")?.unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("soak: {minutes} minutes with seed {seed}; NESTOR_SOAK_SEED={seed} repeats the run");
    run_alone(move |s| async move {
        let until = Instant::now() + Duration::from_secs(60 * minutes);
        let mut users = Vec::new();
        for number in 0..USERS {
            for guest in ["g1", "g2"] {
                let seed = seed.wrapping_mul(1000).wrapping_add(users.len() as u64);
                users.push(User::new(&s, guest, number, seed).await?);
            }
        }
        let faults = Arc::new(Faults::new(&s, seed));
        let failing = tokio::spawn(faults.clone().until(until));
        let working: Vec<_> = users.into_iter().map(|user| tokio::spawn(user.until(until))).collect();
        let worked = futures::future::join_all(working).await;
        let failed = failing.await?.context("injecting faults")?;
        let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
        for done in worked {
            let done = done?.with_context(|| format!("seed {seed}"))?;
            done.into_iter().for_each(|(what, times)| *counts.entry(what).or_default() += times);
        }
        let total: usize = counts.values().sum();
        println!(
            "soak: seed {seed}: {total} operations {counts:?}, {failed} faults; no data lost, nothing stuck"
        );
        Ok(())
    })
    .await
}
