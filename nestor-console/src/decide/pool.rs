//! A pool of the storage infra.

use infra_api::Pool;

use super::{State, Verdict};

/// Fill in percent from which a pool needs attention, as the alert on pools has it.
const NEARLY_FULL: u64 = 90;

/// State of a pool.
pub fn decide(pool: &Pool) -> Verdict {
    if !pool.healthy {
        let why = pool.message.as_deref().unwrap_or("no message");
        return Verdict::new(State::Failed, "unhealthy")
            .because(why)
            .next("see docs/guides/recover-the-infra.md");
    }
    if pool.full {
        return Verdict::new(State::Failed, "full")
            .because(format!("writes {}", if is_pausing(pool) { "pause their VMs" } else { "fail" }))
            .next("free space, or grow the pool's filesystem");
    }
    if percent(pool.used_bytes, pool.capacity_bytes) >= NEARLY_FULL {
        return Verdict::new(State::Warning, "nearly full").next("free space, or grow the pool's filesystem");
    }
    match (pool.cordoned, pool.unknown_files.len()) {
        (true, _) => Verdict::new(State::Idle, "cordoned").because("it accepts no new volumes"),
        (false, 0) => Verdict::new(State::Ok, "healthy"),
        (false, files) => Verdict::new(State::Warning, "unknown files")
            .because(format!("{files} files belong to no volume or snapshot"))
            .next("`storage-infra pool unknown-files` lists them"),
    }
}

fn is_pausing(pool: &Pool) -> bool {
    pool.on_full == infra_api::OnFull::Pause
}

/// `part` of `whole` in percent, rounded down; 0 of nothing.
pub fn percent(part: u64, whole: u64) -> u64 {
    let percent = u128::from(part) * 100 / u128::from(whole).max(1);
    u64::try_from(percent).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod testing {
    use infra_api::Pool;
    use serde_json::json;

    /// A healthy pool of 100 bytes, of which `used` are used.
    pub(crate) fn pool(name: &str, used: u64) -> Pool {
        serde_json::from_value(json!({
            "name": name, "engine": "file", "path": "/pools/a", "cordoned": false, "healthy": true,
            "capacityBytes": 100, "reservedBytes": 20, "usedBytes": used, "freeBytes": 100 - used, "reflink": true,
        }))
        .unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::pool;
    use super::*;

    fn state(change: impl FnOnce(&mut Pool)) -> (State, String) {
        let mut pool = pool("a", 10);
        change(&mut pool);
        let verdict = decide(&pool);
        (verdict.state, verdict.summary)
    }

    #[test]
    fn the_worst_of_a_pool_is_shown() {
        assert_eq!(state(|_| {}), (State::Ok, "healthy".to_owned()));
        assert_eq!(state(|pool| pool.cordoned = true), (State::Idle, "cordoned".to_owned()));
        assert_eq!(state(|pool| pool.used_bytes = 90), (State::Warning, "nearly full".to_owned()));
        assert_eq!(state(|pool| pool.full = true), (State::Failed, "full".to_owned()));
        let gone = |pool: &mut Pool| (pool.healthy, pool.full) = (false, true);
        assert_eq!(state(gone), (State::Failed, "unhealthy".to_owned()));
        let files = |pool: &mut Pool| pool.unknown_files = vec!["x".to_owned()];
        assert_eq!(state(files), (State::Warning, "unknown files".to_owned()));
    }

    #[test]
    fn a_fill_is_between_0_and_100_percent() {
        assert_eq!((percent(0, 0), percent(1, 3), percent(5, 5)), (0, 33, 100));
        assert_eq!(percent(u64::MAX, u64::MAX), 100);
    }
}
