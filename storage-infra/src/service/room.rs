//! How much room pools have for what is new, without looking at every volume each time.
//!
//! On a filesystem that holds pools, what its files have allocated and what it can still allocate add up to the same, as
//! long as nobody else takes from it, whatever machines write or give back. So where a full look ([`Service::views`]) saw
//! `available` and `allocated`, then at any later moment `available + allocated - reserved` is what may be promised, with
//! `reserved` as it is at that moment. The catalog keeps that sum, and the decision is made in the transaction that
//! writes what comes of it: so no two are promised the same, and nothing is added up or measured for it.
//!
//! What does not follow from that sum is always taken as the worse:
//! - What others take is seen by asking the filesystem anew for each request: the lesser of both answers counts.
//! - What is removed may be in use still, by somebody who has the file open: it frees nothing until the next full look.
//! - What a look found counts for a while only: where none has ended since, there is no room.
//! - Whoever would be refused is decided on again after a full look that began after the request came.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::PoolName;
use tokio::time::Instant;

use crate::catalog::{Result, Tx};
use crate::engine::PoolFacts;
use crate::placement::{Candidate, Space, free_bytes};

/// What pools say of themselves. Those that are not well are not in here.
pub(super) type Facts = HashMap<PoolName, PoolFacts>;

/// How long what a look found counts: some times what lies between two looks, unless something hangs.
const FRESH: Duration = Duration::from_secs(60);

/// What full looks found.
#[derive(Default)]
pub(super) struct Room(Mutex<State>);

#[derive(Default)]
struct State {
    /// With when the look began.
    filesystems: HashMap<u64, (Instant, Seen)>,
    /// Where a pool was when it was last well: what it promised counts there also while it is not.
    places: HashMap<PoolName, u64>,
    /// How many looks are under way, and how many were ever begun.
    looks: (usize, u64),
    /// What was removed while some were: after how many, where, and how much was reserved for it.
    removed: Vec<(u64, Option<u64>, u64)>,
}

/// What a look found on a filesystem.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// The filesystem's size.
    pub(super) capacity: u64,
    /// What it could still allocate, at the least, while the look was under way.
    pub(super) available: u64,
    /// What is certainly allocated.
    pub(super) allocated: u64,
    /// What was reserved for what was removed since, and may be in use still.
    pub(super) removed: u64,
}

/// A full look that is under way.
pub(super) struct Look<'a> {
    room: &'a Room,
    number: u64,
    began: Instant,
}

impl Room {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a full look. Before the catalog is read for it.
    pub(super) fn look(&self) -> Look<'_> {
        let mut state = self.state();
        let (under_way, begun) = state.looks;
        state.looks = (under_way + 1, begun + 1);
        Look { room: self, number: begun + 1, began: Instant::now() }
    }

    /// Notes that bytes were removed from a pool, before the catalog ceases to reserve so many for them.
    pub(super) fn removed(&self, pool: &PoolName, bytes: u64) {
        let mut state = self.state();
        let place = state.places.get(pool).copied();
        for (filesystem, (_, seen)) in &mut state.filesystems {
            if place.is_none_or(|place| place == *filesystem) {
                seen.removed = seen.removed.saturating_add(bytes);
            }
        }
        let (under_way, begun) = state.looks;
        if under_way > 0 {
            state.removed.push((begun, place, bytes));
        }
    }

    /// The pools as a new volume of this anti-affinity group sees them, by the catalog and these facts, which were asked
    /// for after the volume was.
    pub(super) fn candidates(
        &self,
        tx: &Tx<'_>,
        facts: &Facts,
        group: Option<&str>,
    ) -> Result<Vec<Candidate>> {
        let taken = group.map(|group| tx.pools_with(group)).transpose()?.unwrap_or_default();
        let free = self.free(facts, &tx.reserved()?);
        let candidate = |row: crate::catalog::PoolRow| Candidate {
            labels: row.spec.labels,
            healthy: facts.contains_key(&row.name),
            cordoned: row.spec.cordoned,
            free_bytes: free.get(&row.name).copied().unwrap_or(0),
            groups: group.filter(|_| taken.contains(&row.name)).map(str::to_owned).into_iter().collect(),
            name: row.name,
        };
        Ok(tx.pools()?.into_iter().map(candidate).collect())
    }

    /// What can be promised in each pool that is well.
    fn free(&self, facts: &Facts, reserved: &HashMap<PoolName, u64>) -> HashMap<PoolName, u64> {
        let state = self.state();
        let place = |name: &PoolName| {
            facts.get(name).map(|facts| facts.filesystem).or_else(|| state.places.get(name).copied())
        };
        let mut sums: HashMap<u64, u64> = HashMap::new();
        for (name, bytes) in reserved {
            if let Some(place) = place(name) {
                *sums.entry(place).or_default() += bytes;
            }
        }
        let free = |now: &PoolFacts| {
            // Another of the same number is none that was looked at.
            let is_this =
                |(began, seen): &&(Instant, Seen)| began.elapsed() <= FRESH && seen.capacity == now.capacity;
            state.filesystems.get(&now.filesystem).filter(is_this).map_or(0, |(_, seen)| {
                free_bytes(Space {
                    capacity: now.capacity,
                    available: now.available.min(seen.available),
                    reserved: sums.get(&now.filesystem).copied().unwrap_or(0).saturating_add(seen.removed),
                    allocated: seen.allocated,
                })
            })
        };
        facts.iter().map(|(name, now)| (name.clone(), free(now))).collect()
    }
}

impl Look<'_> {
    /// Takes what was found into use.
    pub(super) fn found(
        self,
        filesystems: HashMap<u64, Seen>,
        places: impl Iterator<Item = (PoolName, u64)>,
    ) {
        let mut state = self.room.state();
        state.places.extend(places);
        for (filesystem, mut seen) in filesystems {
            let since = state.removed.iter().filter(|(when, place, _)| {
                *when >= self.number && place.is_none_or(|place| place == filesystem)
            });
            seen.removed = since.fold(0, |sum: u64, (_, _, bytes)| sum.saturating_add(*bytes));
            state.filesystems.insert(filesystem, (self.began, seen));
        }
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        let mut state = self.room.state();
        state.looks.0 -= 1;
        if state.looks.0 == 0 {
            state.removed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const FILESYSTEM: u64 = 7;

    fn name(text: &str) -> PoolName {
        PoolName::new(text).unwrap()
    }

    fn facts(available: u64) -> PoolFacts {
        PoolFacts { filesystem: FILESYSTEM, capacity: 10_000, available, used: 0, reflink: true }
    }

    fn seen(available: u64, allocated: u64) -> HashMap<u64, Seen> {
        HashMap::from([(FILESYSTEM, Seen { capacity: 10_000, available, allocated, removed: 0 })])
    }

    /// What is free in the pool `p` when its filesystem says so, and so much is reserved in it and in `q`.
    fn free(room: &Room, available: u64, p: u64, q: u64) -> u64 {
        let facts = Facts::from([(name("p"), facts(available))]);
        room.free(&facts, &HashMap::from([(name("p"), p), (name("q"), q)]))[&name("p")]
    }

    fn pools() -> impl Iterator<Item = (PoolName, u64)> {
        ["p", "q"].into_iter().map(|pool| (name(pool), FILESYSTEM))
    }

    #[test]
    fn nothing_is_free_where_nobody_has_looked() {
        let room = Room::default();
        assert_eq!(free(&room, 9_000, 0, 0), 0);
        room.look().found(seen(9_000, 0), pools());
        assert_eq!(free(&room, 9_000, 0, 0), 8_900);
        let other = Facts::from([(name("p"), PoolFacts { capacity: 20_000, ..facts(9_000) })]);
        assert_eq!(
            room.free(&other, &HashMap::new())[&name("p")],
            0,
            "another filesystem by the same number"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_seen_long_ago_counts_as_not_seen() {
        let room = Room::default();
        let look = room.look();
        tokio::time::advance(FRESH).await;
        look.found(seen(9_000, 0), pools());
        assert_eq!(free(&room, 9_000, 0, 0), 8_900);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(free(&room, 9_000, 0, 0), 0);
        room.look().found(seen(9_000, 0), pools());
        assert_eq!(free(&room, 9_000, 0, 0), 8_900);
    }

    #[test]
    fn what_is_promised_since_the_look_counts_also_by_a_pool_that_is_not_well_now() {
        let room = Room::default();
        room.look().found(seen(9_000, 1_000), pools());
        assert_eq!(free(&room, 9_000, 3_000, 0), 9_000 - 2_000 - 100);
        assert_eq!(free(&room, 9_000, 3_000, 4_000), 9_000 - 6_000 - 100);
    }

    #[test]
    fn neither_what_others_take_nor_what_disks_give_back_is_promised() {
        let room = Room::default();
        room.look().found(seen(9_000, 1_000), pools());
        assert_eq!(free(&room, 5_000, 1_000, 0), 4_900);
        assert_eq!(free(&room, 9_999, 1_000, 0), 8_900);
    }

    #[test]
    fn what_is_removed_frees_nothing_until_a_look_that_begins_later() {
        let room = Room::default();
        room.look().found(seen(9_000, 1_000), pools());
        let before = 9_000 - 500 - 100;
        assert_eq!(free(&room, 9_000, 1_500, 0), before);
        let (look, other) = (room.look(), room.look());
        room.removed(&name("p"), 700);
        assert_eq!(free(&room, 9_000, 800, 0), before);
        look.found(seen(9_000, 1_000), pools());
        assert_eq!(free(&room, 9_000, 800, 0), before);
        // It saw what is left, whatever else is under way.
        room.look().found(seen(9_000, 600), pools());
        assert_eq!(free(&room, 9_000, 800, 0), 9_000 - 200 - 100);
        other.found(seen(9_000, 600), pools());
        assert_eq!(free(&room, 9_000, 800, 0), 9_000 - 900 - 100);
    }

    /// Files are written to, trimmed, made and removed by chance; what was promised always finds its blocks.
    #[test]
    fn what_is_promised_always_fits() {
        let mut chance: u64 = 1;
        let mut random = |below: u64| {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) % below.max(1)
        };
        let (room, mut files) = (Room::default(), BTreeMap::<u64, (u64, u64)>::new());
        // Removed, and in use still.
        let mut zombies = 0;
        let (mut made, mut refused) = (0, 0);
        for step in 0..20_000 {
            let allocated: u64 = files.values().map(|(_, allocated)| allocated).sum();
            let reserved: u64 = files.values().map(|(size, _)| size).sum();
            let available = 10_000 - allocated - zombies;
            assert!(reserved - allocated + 100 <= available, "step {step}");
            let chosen = files.keys().min_by_key(|_| random(1_000)).copied();
            match (random(6), chosen) {
                (0, _) => {
                    room.look().found(seen(available, allocated), pools());
                }
                (1 | 2, _) => {
                    let size = random(2_000);
                    if free(&room, available, reserved, 0) >= size {
                        files.insert(step, (size, 0));
                        made += 1;
                    } else {
                        refused += 1;
                    }
                }
                (3, Some(file)) => {
                    let (size, _) = files[&file];
                    files.insert(file, (size, random(size + 1)));
                }
                (4, Some(file)) => {
                    let (size, allocated) = files.remove(&file).unwrap();
                    room.removed(&name("p"), size);
                    zombies += allocated;
                }
                _ => zombies = 0,
            }
        }
        assert!(made > 100 && refused > 100, "{made} made, {refused} refused");
    }
}
