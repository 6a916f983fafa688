//! Capacity ledger: free capacity of pools without measuring every volume for each request.
//!
//! On a filesystem with pools, allocated plus available bytes of the pools' files stay constant while only VMs write
//! to them or trim them. If a full scan ([`PoolCapacity::views`](super::PoolCapacity::views)) measured `available` and `allocated`, the capacity that
//! can be promised at any later time is `available + allocated - reserved`, with the current value of `reserved`. The
//! catalog maintains that sum, and the decision is made in the transaction that writes the reservation. So two
//! requests never get the same capacity, and no request needs a sum or a scan.
//!
//! Effects that this sum does not cover are estimated conservatively:
//! - Space taken by others: each request asks the filesystem again, and the smaller of both values counts.
//! - Removed files may still be open in a process: their space counts as free only after the next full scan.
//! - Scan results expire: without a recent scan there is no free capacity.
//! - Before a request is refused, it is decided again after a full scan that started after the request arrived.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use infra_api::PoolName;
use tokio::time::Instant;

use crate::catalog::{Result, Tx};
use crate::engine::PoolFacts;
use crate::placement::{Candidate, Hosts, Space, free_bytes};

/// Facts of the healthy pools.
pub(in crate::service) type Facts = HashMap<PoolName, PoolFacts>;

/// Validity of a scan: longer than an idle pool is not scanned (`reuse::MAX_AGE`), unless a pool is stalled.
const SCAN_VALIDITY: Duration = Duration::from_secs(120);

/// Results of full scans.
#[derive(Default)]
pub(super) struct CapacityLedger(Mutex<State>);

#[derive(Default)]
struct State {
    /// By filesystem ID: start of the scan and its result.
    filesystems: HashMap<u64, (Instant, FilesystemUsage)>,
    /// Filesystem of each pool when it was last healthy. Its reservations count there also while it is unhealthy.
    filesystem_of: HashMap<PoolName, u64>,
    /// Number of running scans, and of all scans ever started.
    scans: (usize, u64),
    /// Removals during running scans: number of scans started before, filesystem, and reserved bytes.
    removed: Vec<(u64, Option<u64>, u64)>,
}

/// Result of a scan for one filesystem.
#[derive(Debug, Clone, Default)]
pub(super) struct FilesystemUsage {
    /// Size of the filesystem, if it is fixed.
    pub(super) size: Option<u64>,
    /// Smallest available space during the scan.
    pub(super) available: u64,
    /// Lower bound of the allocated bytes.
    pub(super) allocated: u64,
    /// Bytes reserved for files that were removed since and may still be open.
    pub(super) removed: u64,
}

/// A running full scan.
pub(super) struct Scan<'a> {
    ledger: &'a CapacityLedger,
    number: u64,
    started: Instant,
}

impl CapacityLedger {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a full scan. Must be called before the catalog is read for it.
    pub(super) fn begin_scan(&self) -> Scan<'_> {
        let mut state = self.state();
        let (running, total) = state.scans;
        state.scans = (running + 1, total + 1);
        Scan { ledger: self, number: total + 1, started: Instant::now() }
    }

    /// Records a removal from a pool. Must be called before the catalog drops the reservation.
    pub(super) fn record_removal(&self, pool: &PoolName, bytes: u64) {
        let mut state = self.state();
        let location = state.filesystem_of.get(pool).copied();
        for (filesystem, (_, usage)) in &mut state.filesystems {
            if location.is_none_or(|location| location == *filesystem) {
                usage.removed = usage.removed.saturating_add(bytes);
            }
        }
        let (running, total) = state.scans;
        if running > 0 {
            state.removed.push((total, location, bytes));
        }
    }

    /// Placement candidates for a new volume of this anti-affinity group. The facts must have been probed after the
    /// request arrived.
    pub(super) fn candidates(
        &self,
        tx: &Tx<'_>,
        facts: &Facts,
        hosts: &Hosts,
        group: Option<&str>,
    ) -> Result<Vec<Candidate>> {
        let in_group = group.map(|group| tx.count_by_pool(group)).transpose()?.unwrap_or_default();
        let free = self.free(facts, &tx.reserved()?);
        let candidate = |row: crate::catalog::PoolRow| Candidate {
            engine: row.spec.engine,
            zones: hosts.zones(&row.spec),
            reached: hosts.any_reaches(&row.spec),
            labels: row.spec.labels,
            healthy: facts.contains_key(&row.name),
            cordoned: row.spec.cordoned,
            suspended: row.suspension.is_some(),
            free_bytes: free.get(&row.name).copied().unwrap_or(0),
            in_group: in_group.get(&row.name).copied().unwrap_or(0),
            name: row.name,
        };
        Ok(tx.pools()?.into_iter().map(candidate).collect())
    }

    /// Free capacity of each healthy pool.
    pub(super) fn free(&self, facts: &Facts, reserved: &HashMap<PoolName, u64>) -> HashMap<PoolName, u64> {
        let state = self.state();
        let location = |name: &PoolName| {
            facts.get(name).map(|facts| facts.filesystem).or_else(|| state.filesystem_of.get(name).copied())
        };
        let mut sums: HashMap<u64, u64> = HashMap::new();
        for (name, bytes) in reserved {
            if let Some(filesystem) = location(name) {
                *sums.entry(filesystem).or_default() += bytes;
            }
        }
        let free = |now: &PoolFacts| {
            // A filesystem with the same ID and another fixed size is not the one that was scanned.
            let is_this = |(started, usage): &&(Instant, FilesystemUsage)| {
                started.elapsed() <= SCAN_VALIDITY && usage.size == now.fixed_size
            };
            state.filesystems.get(&now.filesystem).filter(is_this).map_or(0, |(_, usage)| {
                free_bytes(Space {
                    capacity: now.capacity,
                    available: now.available.min(usage.available),
                    reserved: sums.get(&now.filesystem).copied().unwrap_or(0).saturating_add(usage.removed),
                    allocated: usage.allocated,
                })
            })
        };
        facts.iter().map(|(name, now)| (name.clone(), free(now))).collect()
    }
}

impl Scan<'_> {
    /// Publishes the result of the scan.
    pub(super) fn finish(
        self,
        filesystems: HashMap<u64, FilesystemUsage>,
        filesystem_of: impl Iterator<Item = (PoolName, u64)>,
    ) {
        let mut state = self.ledger.state();
        state.filesystem_of.extend(filesystem_of);
        for (filesystem, mut usage) in filesystems {
            let since = state.removed.iter().filter(|(when, location, _)| {
                *when >= self.number && location.is_none_or(|location| location == filesystem)
            });
            usage.removed = since.fold(0, |sum: u64, (_, _, bytes)| sum.saturating_add(*bytes));
            state.filesystems.insert(filesystem, (self.started, usage));
        }
    }
}

impl Drop for Scan<'_> {
    fn drop(&mut self) {
        let mut state = self.ledger.state();
        state.scans.0 -= 1;
        if state.scans.0 == 0 {
            state.removed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::engine::DirectoryVersion;

    const FILESYSTEM: u64 = 7;

    fn name(text: &str) -> PoolName {
        PoolName::new(text).unwrap()
    }

    fn facts(available: u64) -> PoolFacts {
        let directory = DirectoryVersion::default();
        PoolFacts {
            directory,
            filesystem: FILESYSTEM,
            capacity: 10_000,
            fixed_size: Some(10_000),
            available,
            used: 0,
            reflink: true,
            ceph: None,
        }
    }

    fn usage(available: u64, allocated: u64) -> HashMap<u64, FilesystemUsage> {
        HashMap::from([(
            FILESYSTEM,
            FilesystemUsage { size: Some(10_000), available, allocated, removed: 0 },
        )])
    }

    /// Free capacity of pool `p` with this available space and these reservations in `p` and `q`.
    fn free(ledger: &CapacityLedger, available: u64, p: u64, q: u64) -> u64 {
        let facts = Facts::from([(name("p"), facts(available))]);
        ledger.free(&facts, &HashMap::from([(name("p"), p), (name("q"), q)]))[&name("p")]
    }

    fn pools() -> impl Iterator<Item = (PoolName, u64)> {
        ["p", "q"].into_iter().map(|pool| (name(pool), FILESYSTEM))
    }

    #[test]
    fn nothing_is_free_before_the_first_scan() {
        let ledger = CapacityLedger::default();
        assert_eq!(free(&ledger, 9_000, 0, 0), 0);
        ledger.begin_scan().finish(usage(9_000, 0), pools());
        assert_eq!(free(&ledger, 9_000, 0, 0), 8_900);
        let other = Facts::from([(name("p"), PoolFacts { fixed_size: Some(20_000), ..facts(9_000) })]);
        assert_eq!(
            ledger.free(&other, &HashMap::new())[&name("p")],
            0,
            "another filesystem with the same ID"
        );
    }

    #[test]
    fn a_scan_of_a_ceph_pool_holds_while_its_size_changes_with_what_is_stored() {
        let ledger = CapacityLedger::default();
        let scanned = FilesystemUsage { available: 9_000, ..FilesystemUsage::default() };
        ledger.begin_scan().finish(HashMap::from([(FILESYSTEM, scanned)]), pools());
        let free = |capacity, available| {
            let now = PoolFacts { capacity, fixed_size: None, ..facts(available) };
            ledger.free(&Facts::from([(name("p"), now)]), &HashMap::new())[&name("p")]
        };
        assert_eq!(free(10_000, 9_000), 8_900);
        assert_eq!(free(9_900, 8_800), 8_701, "less is available");
        assert_eq!(free(11_000, 10_000), 8_890, "more than at the scan is not promised before the next one");
    }

    #[tokio::test(start_paused = true)]
    async fn scan_results_expire() {
        let ledger = CapacityLedger::default();
        let scan = ledger.begin_scan();
        tokio::time::advance(SCAN_VALIDITY).await;
        scan.finish(usage(9_000, 0), pools());
        assert_eq!(free(&ledger, 9_000, 0, 0), 8_900);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(free(&ledger, 9_000, 0, 0), 0);
        ledger.begin_scan().finish(usage(9_000, 0), pools());
        assert_eq!(free(&ledger, 9_000, 0, 0), 8_900);
    }

    #[test]
    fn reservations_since_the_scan_count_also_for_an_unhealthy_pool() {
        let ledger = CapacityLedger::default();
        ledger.begin_scan().finish(usage(9_000, 1_000), pools());
        assert_eq!(free(&ledger, 9_000, 3_000, 0), 9_000 - 2_000 - 100);
        assert_eq!(free(&ledger, 9_000, 3_000, 4_000), 9_000 - 6_000 - 100);
    }

    #[test]
    fn space_taken_by_others_or_trimmed_by_vms_is_not_promised() {
        let ledger = CapacityLedger::default();
        ledger.begin_scan().finish(usage(9_000, 1_000), pools());
        assert_eq!(free(&ledger, 5_000, 1_000, 0), 4_900);
        assert_eq!(free(&ledger, 9_999, 1_000, 0), 8_900);
    }

    #[test]
    fn removed_space_is_free_only_after_a_scan_that_started_later() {
        let ledger = CapacityLedger::default();
        ledger.begin_scan().finish(usage(9_000, 1_000), pools());
        let before = 9_000 - 500 - 100;
        assert_eq!(free(&ledger, 9_000, 1_500, 0), before);
        let (scan, other) = (ledger.begin_scan(), ledger.begin_scan());
        ledger.record_removal(&name("p"), 700);
        assert_eq!(free(&ledger, 9_000, 800, 0), before);
        scan.finish(usage(9_000, 1_000), pools());
        assert_eq!(free(&ledger, 9_000, 800, 0), before);
        // This scan started after the removal, independent of other running scans.
        ledger.begin_scan().finish(usage(9_000, 600), pools());
        assert_eq!(free(&ledger, 9_000, 800, 0), 9_000 - 200 - 100);
        other.finish(usage(9_000, 600), pools());
        assert_eq!(free(&ledger, 9_000, 800, 0), 9_000 - 900 - 100);
    }

    /// Randomly writes, trims, creates and removes files; reserved bytes can always be allocated.
    #[test]
    fn reserved_bytes_can_always_be_allocated() {
        let mut chance: u64 = 1;
        let mut random = |below: u64| {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) % below.max(1)
        };
        let (ledger, mut files) = (CapacityLedger::default(), BTreeMap::<u64, (u64, u64)>::new());
        // Removed files that are still open.
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
                    ledger.begin_scan().finish(usage(available, allocated), pools());
                }
                (1 | 2, _) => {
                    let size = random(2_000);
                    if free(&ledger, available, reserved, 0) >= size {
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
                    ledger.record_removal(&name("p"), size);
                    zombies += allocated;
                }
                _ => zombies = 0,
            }
        }
        assert!(made > 100 && refused > 100, "{made} made, {refused} refused");
    }
}
