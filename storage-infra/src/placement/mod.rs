//! Where a new volume goes. Pure: facts in, a decision or the reasons against out.

use std::cmp::Reverse;

use infra_api::{Capacity, CapacityQuery, Labels, Placement, PoolName, PoolRejection, Rejection, ZONE_LABEL};

/// What the decision needs to know of a pool.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The pool.
    pub name: PoolName,
    /// Its labels.
    pub labels: Labels,
    /// Its directory is there and ours.
    pub healthy: bool,
    /// Its operators want no new volumes on it.
    pub cordoned: bool,
    /// What it can still take, reservations counted.
    pub free_bytes: u64,
    /// The anti-affinity groups that have a volume here.
    pub groups: Vec<String>,
}

/// The bytes of a filesystem that holds pools, and what the pools on it have promised.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// The filesystem's size.
    pub capacity: u64,
    /// What the filesystem can still allocate.
    pub available: u64,
    /// The sum of the capacities of the volumes on it.
    pub reserved: u64,
    /// What those volumes have really allocated.
    pub allocated: u64,
}

/// What can be promised to new volumes: what the filesystem can allocate, less what was promised and is not yet
/// allocated, less the `headroom`, so that a full pool still takes every write that was promised.
pub fn free_bytes(space: Space) -> u64 {
    let promised = space.reserved.saturating_sub(space.allocated);
    space.available.saturating_sub(promised).saturating_sub(headroom(space.capacity))
}

/// What is kept back for the filesystem's own metadata: one percent, whatever the size.
///
/// A file that was written in random order in pieces of 4 KiB has one extent for each piece. XFS keeps 16 bytes for each
/// extent, in blocks that are half full at the least: 0.8 % of the data at most, and 0.5 % as measured (`cargo lab bench
/// extents`). ext4 needs less. Every snapshot and clone has such a map of its own, and is promised its bytes likewise.
fn headroom(capacity: u64) -> u64 {
    capacity / 100
}

/// Whether a filesystem can take writes: a thousandth of it is left.
pub fn has_room(capacity: u64, available: u64) -> bool {
    available >= capacity / 1000
}

/// How good a pool's zone is, 0 being the best; `None` where it cannot be reached from any zone that was asked for.
/// A pool without a zone is reached from every zone, so also from the best.
fn zone_rank(labels: &Labels, zones: &[String]) -> Option<usize> {
    match labels.get(ZONE_LABEL) {
        Some(has) if !zones.is_empty() => zones.iter().position(|zone| zone == has),
        _ => Some(0),
    }
}

fn labels_fit(labels: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn rejection(pool: &Candidate, bytes: u64, wanted: &Placement) -> Option<Rejection> {
    let rules = [
        (Rejection::NotNamed, wanted.pool.as_ref().is_none_or(|name| *name == pool.name)),
        (Rejection::Unhealthy, pool.healthy),
        (Rejection::Cordoned, !pool.cordoned),
        (Rejection::TooSmall, pool.free_bytes >= bytes),
        (Rejection::Labels, labels_fit(&pool.labels, &wanted.pool_labels)),
        (Rejection::Zone, zone_rank(&pool.labels, &wanted.zones).is_some()),
        (
            Rejection::AntiAffinity,
            wanted.anti_affinity_id.as_ref().is_none_or(|id| !pool.groups.contains(id)),
        ),
    ];
    rules.into_iter().find(|(_, fits)| !fits).map(|(reason, _)| reason)
}

/// Chooses among the pools that fit: one of `near`, which can share the blocks of the volume's source, the first of
/// these best; then one in the best zone; then the one with the most free space; then the first by name.
pub fn place(
    pools: &[Candidate],
    bytes: u64,
    wanted: &Placement,
    near: &[PoolName],
) -> Result<PoolName, Vec<PoolRejection>> {
    let mut rejections = Vec::new();
    let mut fitting: Vec<&Candidate> = Vec::new();
    for pool in pools {
        match rejection(pool, bytes, wanted) {
            Some(reason) => {
                let (name, free_bytes) = (pool.name.clone(), pool.free_bytes);
                rejections.push(PoolRejection { pool: name, reason, free_bytes });
            }
            None => fitting.push(pool),
        }
    }
    let order = |pool: &&Candidate| {
        let rank = zone_rank(&pool.labels, &wanted.zones);
        let distance = near.iter().position(|name| *name == pool.name).unwrap_or(near.len());
        (distance, rank, Reverse(pool.free_bytes), pool.name.clone())
    };
    fitting.into_iter().min_by_key(order).map(|pool| pool.name.clone()).ok_or(rejections)
}

/// What new volumes can have on the pools that match.
pub fn capacity(pools: &[Candidate], query: &CapacityQuery) -> Capacity {
    let wanted = Placement {
        pool: query.pool.clone(),
        pool_labels: query.labels.clone(),
        zones: query.zone.iter().cloned().collect(),
        anti_affinity_id: None,
    };
    let mut sum = Capacity { free_bytes: 0, max_volume_bytes: 0 };
    for pool in pools.iter().filter(|pool| rejection(pool, 0, &wanted).is_none()) {
        sum.free_bytes = sum.free_bytes.saturating_add(pool.free_bytes);
        sum.max_volume_bytes = sum.max_volume_bytes.max(pool.free_bytes);
    }
    sum
}

/// Says why each pool was rejected, with counts, for people.
pub fn explain(bytes: u64, rejections: &[PoolRejection]) -> String {
    if rejections.is_empty() {
        return format!("no pool for {bytes} bytes: there are no pools; register one");
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
        .map(|free| format!(" (the emptiest of them has {free} bytes free)"))
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
            labels: Labels::new(),
            healthy: true,
            cordoned: false,
            free_bytes: free,
            groups: Vec::new(),
        }
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn chosen(pools: &[Candidate], bytes: u64, wanted: &Placement) -> String {
        place(pools, bytes, wanted, &[]).unwrap().to_string()
    }

    #[test]
    fn the_emptiest_pool_wins_and_the_first_name_breaks_a_tie() {
        let pools = [pool("b", 5 * GIB), pool("a", 5 * GIB), pool("c", 4 * GIB)];
        assert_eq!(chosen(&pools, GIB, &Placement::default()), "a");
        assert_eq!(chosen(&[pool("c", 9 * GIB), pool("a", GIB)], GIB, &Placement::default()), "c");
    }

    #[test]
    fn each_rule_rejects_with_its_reason_and_the_explanation_counts_them() {
        let mut sick = pool("sick", 9 * GIB);
        sick.healthy = false;
        let mut cordoned = pool("cordoned", 9 * GIB);
        cordoned.cordoned = true;
        let mut far = pool("far", 9 * GIB);
        far.labels = labels(&[("tier", "fast"), (ZONE_LABEL, "z2")]);
        let mut taken = pool("taken", 9 * GIB);
        taken.labels = labels(&[("tier", "fast")]);
        taken.groups = vec!["db".into()];
        let pools = [sick, cordoned, pool("small", GIB), pool("tiny", 7), pool("slow", 9 * GIB), far, taken];
        let wanted = Placement {
            pool_labels: labels(&[("tier", "fast")]),
            zones: vec!["z1".into()],
            anti_affinity_id: Some("db".into()),
            pool: None,
        };
        let rejections = place(&pools, 2 * GIB, &wanted, &[]).unwrap_err();
        let reasons: Vec<_> = rejections.iter().map(|one| one.reason).collect();
        use Rejection::*;
        assert_eq!(reasons, [Unhealthy, Cordoned, TooSmall, TooSmall, Labels, Zone, AntiAffinity]);
        let text = explain(2 * GIB, &rejections);
        assert!(text.contains("of 7 pools") && text.contains("2 too little free space"), "{text}");
        assert!(text.contains("1073741824 bytes free"), "{text}");
    }

    #[test]
    fn a_named_pool_is_the_only_choice() {
        let wanted = Placement { pool: Some(PoolName::new("b").unwrap()), ..Placement::default() };
        assert_eq!(chosen(&[pool("a", 9 * GIB), pool("b", GIB)], GIB, &wanted), "b");
        let rejections = place(&[pool("a", 9 * GIB)], GIB, &wanted, &[]).unwrap_err();
        assert_eq!(rejections[0].reason, Rejection::NotNamed);
    }

    #[test]
    fn a_pool_without_a_zone_serves_every_zone() {
        let wanted = Placement { zones: vec!["z1".into()], ..Placement::default() };
        assert_eq!(chosen(&[pool("a", GIB)], GIB, &wanted), "a");
    }

    #[test]
    fn the_best_zone_that_fits_wins_and_a_source_nearby_wins_over_it() {
        let in_zone =
            |name: &str, free, zone| Candidate { labels: labels(&[(ZONE_LABEL, zone)]), ..pool(name, free) };
        let pools = [in_zone("a", 9 * GIB, "z2"), in_zone("b", 2 * GIB, "z1"), in_zone("c", 9 * GIB, "z3")];
        let wanted = Placement { zones: vec!["z1".into(), "z2".into()], ..Placement::default() };
        assert_eq!(chosen(&pools, GIB, &wanted), "b");
        assert_eq!(chosen(&pools, 3 * GIB, &wanted), "a");
        let near = [PoolName::new("a").unwrap(), PoolName::new("c").unwrap()];
        assert_eq!(place(&pools, GIB, &wanted, &near).unwrap().as_str(), "a");
        let rejections = place(&pools, 10 * GIB, &wanted, &near).unwrap_err();
        assert_eq!(rejections.len(), 3);
    }

    #[test]
    fn promises_not_yet_allocated_are_not_promised_again() {
        let space = Space { capacity: 100_000, available: 60_000, reserved: 30_000, allocated: 10_000 };
        assert_eq!(free_bytes(space), 60_000 - 20_000 - 1_000);
        assert_eq!(free_bytes(Space { available: 5, ..space }), 0);
    }

    #[test]
    fn a_pool_of_any_size_has_room_for_the_maps_of_files_in_pieces_of_one_block() {
        for capacity in [GIB, 125 * GIB, 1 << 40, 1 << 50] {
            let promised = free_bytes(Space { capacity, available: capacity, reserved: 0, allocated: 0 });
            // 16 bytes for each 4 KiB, in blocks that are half full.
            let maps = promised / 4096 * 16 * 2;
            assert!(promised + maps <= capacity, "{capacity}");
        }
    }

    #[test]
    fn a_pool_is_full_when_less_than_a_thousandth_is_left() {
        assert!(has_room(10_000, 10) && !has_room(10_000, 9));
    }

    #[test]
    fn capacity_sums_what_matches_and_names_the_largest() {
        let mut cordoned = pool("c", 9 * GIB);
        cordoned.cordoned = true;
        let pools = [pool("a", GIB), pool("b", 3 * GIB), cordoned];
        let all = capacity(&pools, &CapacityQuery::default());
        assert_eq!((all.free_bytes, all.max_volume_bytes), (4 * GIB, 3 * GIB));
    }
}
