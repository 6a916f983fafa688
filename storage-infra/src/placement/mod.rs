//! Placement of new volumes: pure selection of a pool, or the reasons why each pool was rejected.

mod reach;

use std::cmp::Reverse;
use std::collections::BTreeSet;

use infra_api::{
    AntiAffinity, Capacity, CapacityQuery, EngineKind, Labels, Placement, PoolName, PoolRejection, Rejection,
};

pub use reach::{Host, Hosts};

/// A pool as input of placement.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The pool.
    pub name: PoolName,
    /// Its engine.
    pub engine: EngineKind,
    /// Its labels.
    pub labels: Labels,
    /// The zones that can reach it; `None` if every zone can.
    pub zones: Option<BTreeSet<String>>,
    /// Whether a configured host reaches it.
    pub reached: bool,
    /// Whether its directory is reachable and has the pool's marker.
    pub healthy: bool,
    /// Whether it takes no new volumes.
    pub cordoned: bool,
    /// Whether it is suspended.
    pub suspended: bool,
    /// Free capacity after reservations.
    pub free_bytes: u64,
    /// Volumes of the requested anti-affinity group in this pool.
    pub in_group: u64,
}

/// Space of a filesystem with pools, and their reservations.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Size of the filesystem.
    pub capacity: u64,
    /// Bytes that can still be allocated.
    pub available: u64,
    /// Sum of all reservations on it.
    pub reserved: u64,
    /// Bytes that the reserved objects have allocated.
    pub allocated: u64,
}

/// Free capacity for new volumes: available space minus reserved but unallocated bytes minus the `headroom`, so that
/// a full pool can still take all reserved writes.
pub fn free_bytes(space: Space) -> u64 {
    let promised = space.reserved.saturating_sub(space.allocated);
    space.available.saturating_sub(promised).saturating_sub(headroom(space.capacity))
}

/// Space kept back for the filesystem's metadata: one percent.
///
/// A file written in random order in 4 KiB blocks has one extent per block. XFS stores 16 bytes per extent in blocks
/// that are at least half full: at most 0.8 % of the data, and 0.5 % as measured (`cargo lab bench extents`). ext4
/// needs less. Every snapshot and clone has an extent map of its own and reserves its own bytes.
fn headroom(capacity: u64) -> u64 {
    capacity / 100
}

/// Whether a filesystem can take writes: at least a thousandth of it is available.
pub fn has_space(capacity: u64, available: u64) -> bool {
    available >= capacity / 1000
}

/// Rank of a pool among the requested zones, 0 being the best; `None` if none of them can reach the pool.
fn zone_rank(pool: &Candidate, zones: &[String]) -> Option<usize> {
    match &pool.zones {
        Some(has) if !zones.is_empty() => zones.iter().position(|zone| has.contains(zone)),
        _ => Some(0),
    }
}

fn labels_fit(labels: &Labels, requested: &Labels) -> bool {
    requested.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn rejection(pool: &Candidate, bytes: u64, requested: &Placement) -> Option<Rejection> {
    let rules = [
        (Rejection::NotNamed, requested.pool.as_ref().is_none_or(|name| *name == pool.name)),
        (Rejection::Unhealthy, pool.healthy),
        (Rejection::Cordoned, !pool.cordoned),
        (Rejection::Suspended, !pool.suspended),
        (Rejection::TooSmall, pool.free_bytes >= bytes),
        (Rejection::Labels, labels_fit(&pool.labels, &requested.pool_labels)),
        (Rejection::NoHost, pool.reached),
        (Rejection::Zone, zone_rank(pool, &requested.zones).is_some()),
        (Rejection::AntiAffinity, pool.in_group == 0 || requested.anti_affinity == AntiAffinity::Preferred),
    ];
    rules.into_iter().find(|(_, fits)| !fits).map(|(reason, _)| reason)
}

/// Selects a pool: first those in `near`, in their order, which can share blocks with the volume's source; then by
/// rank of the zone; then by the number of volumes of the anti-affinity group; then by free space; then by name.
pub fn place(
    pools: &[Candidate],
    bytes: u64,
    requested: &Placement,
    near: &[PoolName],
) -> Result<PoolName, Vec<PoolRejection>> {
    let mut rejections = Vec::new();
    let mut fitting: Vec<&Candidate> = Vec::new();
    for pool in pools {
        match rejection(pool, bytes, requested) {
            Some(reason) => {
                let (name, free_bytes) = (pool.name.clone(), pool.free_bytes);
                rejections.push(PoolRejection { pool: name, reason, free_bytes });
            }
            None => fitting.push(pool),
        }
    }
    let order = |pool: &&Candidate| {
        let rank = zone_rank(pool, &requested.zones);
        let distance = near.iter().position(|name| *name == pool.name).unwrap_or(near.len());
        (distance, rank, pool.in_group, Reverse(pool.free_bytes), pool.name.clone())
    };
    fitting.into_iter().min_by_key(order).map(|pool| pool.name.clone()).ok_or(rejections)
}

/// Capacity for new volumes on the matching pools.
pub fn capacity(pools: &[Candidate], query: &CapacityQuery) -> Capacity {
    let requested = Placement {
        pool: query.pool.clone(),
        pool_labels: query.labels.clone(),
        zones: query.zone.iter().cloned().collect(),
        ..Placement::default()
    };
    let mut sum = Capacity { free_bytes: 0, max_volume_bytes: 0 };
    for pool in pools.iter().filter(|pool| rejection(pool, 0, &requested).is_none()) {
        sum.free_bytes = sum.free_bytes.saturating_add(pool.free_bytes);
        sum.max_volume_bytes = sum.max_volume_bytes.max(pool.free_bytes);
    }
    sum
}

/// Human-readable summary of the rejections, with counts.
pub fn explain(bytes: u64, rejections: &[PoolRejection]) -> String {
    if rejections.is_empty() {
        return format!("no pool for {bytes} bytes: no pools are registered");
    }
    let mut counts: Vec<(Rejection, usize)> = Vec::new();
    for one in rejections {
        match counts.iter_mut().find(|(reason, _)| *reason == one.reason) {
            Some((_, count)) => *count += 1,
            None => counts.push((one.reason, 1)),
        }
    }
    counts.sort();
    let reasons: Vec<String> = counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let most = rejections
        .iter()
        .filter(|one| one.reason == Rejection::TooSmall)
        .map(|one| one.free_bytes)
        .max()
        .map(|free| format!(" (the largest of them has {free} bytes free)"))
        .unwrap_or_default();
    format!("no pool for {bytes} bytes: of {} pools, {}{most}", rejections.len(), reasons.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn pool(name: &str, free: u64) -> Candidate {
        Candidate {
            name: PoolName::new(name).unwrap(),
            engine: EngineKind::File,
            labels: Labels::new(),
            zones: None,
            reached: true,
            healthy: true,
            cordoned: false,
            suspended: false,
            free_bytes: free,
            in_group: 0,
        }
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn zones(names: &[&str]) -> Option<BTreeSet<String>> {
        Some(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn chosen(pools: &[Candidate], bytes: u64, requested: &Placement) -> String {
        place(pools, bytes, requested, &[]).unwrap().to_string()
    }

    #[test]
    fn the_pool_with_most_free_space_wins_and_the_name_breaks_a_tie() {
        let pools = [pool("b", 5 * GIB), pool("a", 5 * GIB), pool("c", 4 * GIB)];
        assert_eq!(chosen(&pools, GIB, &Placement::default()), "a");
        assert_eq!(chosen(&[pool("c", 9 * GIB), pool("a", GIB)], GIB, &Placement::default()), "c");
    }

    #[test]
    fn each_rule_rejects_with_its_reason_and_the_summary_counts_them() {
        let mut unhealthy = pool("unhealthy", 9 * GIB);
        unhealthy.healthy = false;
        let mut cordoned = pool("cordoned", 9 * GIB);
        cordoned.cordoned = true;
        let mut far = pool("far", 9 * GIB);
        far.labels = labels(&[("tier", "fast")]);
        far.zones = zones(&["z2"]);
        let mut lost = pool("lost", 9 * GIB);
        lost.labels = labels(&[("tier", "fast")]);
        lost.reached = false;
        let mut taken = pool("taken", 9 * GIB);
        taken.labels = labels(&[("tier", "fast")]);
        taken.in_group = 1;
        let pools = [
            unhealthy,
            cordoned,
            pool("small", GIB),
            pool("tiny", 7),
            pool("slow", 9 * GIB),
            far,
            lost,
            taken,
        ];
        let requested = Placement {
            pool_labels: labels(&[("tier", "fast")]),
            zones: vec!["z1".into()],
            anti_affinity_id: Some("db".into()),
            ..Placement::default()
        };
        let rejections = place(&pools, 2 * GIB, &requested, &[]).unwrap_err();
        let reasons: Vec<_> = rejections.iter().map(|one| one.reason).collect();
        use Rejection::*;
        assert_eq!(reasons, [Unhealthy, Cordoned, TooSmall, TooSmall, Labels, Zone, NoHost, AntiAffinity]);
        let text = explain(2 * GIB, &rejections);
        assert!(text.contains("of 8 pools") && text.contains("2 too little free space"), "{text}");
        assert!(text.contains("1073741824 bytes free"), "{text}");
    }

    #[test]
    fn preferred_anti_affinity_spreads_a_group_evenly_before_free_space_counts() {
        let holding = |name: &str, free, in_group| Candidate { in_group, ..pool(name, free) };
        let requested = Placement {
            anti_affinity_id: Some("db".into()),
            anti_affinity: AntiAffinity::Preferred,
            ..Placement::default()
        };
        let pools = [holding("a", 9 * GIB, 2), holding("b", 2 * GIB, 1), pool("c", GIB)];
        assert_eq!(chosen(&pools, GIB, &requested), "c");
        assert_eq!(chosen(&pools, 2 * GIB, &requested), "b");
        assert_eq!(chosen(&pools, 3 * GIB, &requested), "a");
        let required = Placement { anti_affinity: AntiAffinity::Required, ..requested };
        let rejections = place(&pools, 2 * GIB, &required, &[]).unwrap_err();
        let text = explain(2 * GIB, &rejections);
        assert!(text.contains("2 holds a volume of the same anti-affinity group"), "{text}");
    }

    #[test]
    fn a_named_pool_is_the_only_choice() {
        let requested = Placement { pool: Some(PoolName::new("b").unwrap()), ..Placement::default() };
        assert_eq!(chosen(&[pool("a", 9 * GIB), pool("b", GIB)], GIB, &requested), "b");
        let rejections = place(&[pool("a", 9 * GIB)], GIB, &requested, &[]).unwrap_err();
        assert_eq!(rejections[0].reason, Rejection::NotNamed);
    }

    #[test]
    fn a_pool_without_a_zone_serves_every_zone() {
        let requested = Placement { zones: vec!["z1".into()], ..Placement::default() };
        assert_eq!(chosen(&[pool("a", GIB)], GIB, &requested), "a");
    }

    #[test]
    fn the_best_zone_wins_unless_a_pool_shares_blocks_with_the_source() {
        let in_zone = |name: &str, free, zone| Candidate { zones: zones(&[zone]), ..pool(name, free) };
        let pools = [in_zone("a", 9 * GIB, "z2"), in_zone("b", 2 * GIB, "z1"), in_zone("c", 9 * GIB, "z3")];
        let requested = Placement { zones: vec!["z1".into(), "z2".into()], ..Placement::default() };
        assert_eq!(chosen(&pools, GIB, &requested), "b");
        assert_eq!(chosen(&pools, 3 * GIB, &requested), "a");
        let near = [PoolName::new("a").unwrap(), PoolName::new("c").unwrap()];
        assert_eq!(place(&pools, GIB, &requested, &near).unwrap().as_str(), "a");
        let rejections = place(&pools, 10 * GIB, &requested, &near).unwrap_err();
        assert_eq!(rejections.len(), 3);
    }

    #[test]
    fn reserved_but_unallocated_bytes_are_not_free() {
        let space = Space { capacity: 100_000, available: 60_000, reserved: 30_000, allocated: 10_000 };
        assert_eq!(free_bytes(space), 60_000 - 20_000 - 1_000);
        assert_eq!(free_bytes(Space { available: 5, ..space }), 0);
    }

    #[test]
    fn the_headroom_covers_extent_maps_of_fully_fragmented_files() {
        for capacity in [GIB, 125 * GIB, 1 << 40, 1 << 50] {
            let promised = free_bytes(Space { capacity, available: capacity, reserved: 0, allocated: 0 });
            // 16 bytes for each 4 KiB, in blocks that are half full.
            let maps = promised / 4096 * 16 * 2;
            assert!(promised + maps <= capacity, "{capacity}");
        }
    }

    #[test]
    fn a_pool_is_full_below_a_thousandth_of_available_space() {
        assert!(has_space(10_000, 10) && !has_space(10_000, 9));
    }

    #[test]
    fn a_pool_of_several_zones_serves_each_of_them_and_counts_in_each() {
        let shared = Candidate { zones: zones(&["z1", "z2"]), ..pool("shared", 2 * GIB) };
        let local = Candidate { zones: zones(&["z2"]), ..pool("local", GIB) };
        // The zone of its host is unknown.
        let nowhere = Candidate { zones: zones(&[]), ..pool("nowhere", 9 * GIB) };
        let pools = [shared, local, nowhere];
        let of = |zone: &str| {
            let query = CapacityQuery { zone: Some(zone.to_owned()), ..CapacityQuery::default() };
            capacity(&pools, &query).free_bytes
        };
        assert_eq!(["z1", "z2", "z3"].map(of), [2 * GIB, 3 * GIB, 0]);
        let requested = Placement { zones: vec!["z1".into()], ..Placement::default() };
        assert_eq!(chosen(&pools, GIB, &requested), "shared");
        assert_eq!(chosen(&pools, GIB, &Placement::default()), "nowhere");
    }

    #[test]
    fn capacity_sums_matching_pools_and_reports_the_largest() {
        let mut cordoned = pool("c", 9 * GIB);
        cordoned.cordoned = true;
        let pools = [pool("a", GIB), pool("b", 3 * GIB), cordoned];
        let all = capacity(&pools, &CapacityQuery::default());
        assert_eq!((all.free_bytes, all.max_volume_bytes), (4 * GIB, 3 * GIB));
    }
}
