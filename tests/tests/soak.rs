//! Users of two guests who do this and that for a while, as a seed has it, while parts of the system die and stand still,
//! also as the seed has it. After each operation what exists must be what the operations come to, and each record that a
//! volume acknowledged must be in it.
//!
//! `NESTOR_SOAK_MINUTES` says how long (3), `NESTOR_SOAK_SEED` repeats a run (else a new seed, which is told).

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
use tests::{alone, run};

use faults::Faults;
use user::User;

/// How many users each guest has.
const USERS: u64 = 2;

fn number(variable: &str) -> Result<Option<u64>> {
    let said = std::env::var(variable).ok();
    said.map(|text| text.parse().with_context(|| format!("{variable}={text} is not a number"))).transpose()
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_users_do_and_whatever_fails_nothing_is_lost_and_nothing_is_stuck() -> Result<()> {
    let _alone = alone().await;
    let minutes = number("NESTOR_SOAK_MINUTES")?.unwrap_or(3);
    let seed = number("NESTOR_SOAK_SEED")?.unwrap_or_else(|| fastrand::u64(..1_000_000));
    println!("soak: {minutes} minutes with seed {seed}; NESTOR_SOAK_SEED={seed} does the same again");
    run(move |s| async move {
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
        let failed = failing.await?.context("making parts fail")?;
        let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
        for done in worked {
            let done = done?.with_context(|| format!("seed {seed}"))?;
            done.into_iter().for_each(|(what, times)| *counts.entry(what).or_default() += times);
        }
        let total: usize = counts.values().sum();
        println!(
            "soak: seed {seed}: {total} operations {counts:?}, {failed} faults; nothing lost, nothing stuck"
        );
        Ok(())
    })
    .await
}
