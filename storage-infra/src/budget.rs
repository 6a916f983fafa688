//! The decision whether a budget allows a request. No I/O.

use infra_api::{BudgetExcess, BudgetLimit, BudgetSpec, ClassLimits, Owner, Usage};

/// What a request adds to the usage of an account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Bytes.
    pub bytes: u64,
    /// Volumes.
    pub volumes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// With a snapshot: how many the account has of its volume.
    pub snapshots_of_volume: u64,
}

/// Fails with the first limit that the request exceeds. An account that is beyond a limit already, because the limit was
/// lowered or a volume was assigned to it, may do what adds nothing to that limit.
pub fn check(limits: &BudgetSpec, used: &Usage, owner: &Owner, demand: &Demand) -> Result<(), BudgetExcess> {
    let of_class = used.classes.get(&owner.class).copied().unwrap_or_default();
    let class = limits.classes.get(&owner.class).copied().unwrap_or_default();
    let ClassLimits { bytes: class_bytes, volumes: class_volumes } = class;
    let all = [
        (BudgetLimit::Volumes, limits.volumes, used.volumes, demand.volumes),
        (
            BudgetLimit::SnapshotsPerVolume,
            limits.snapshots_per_volume,
            demand.snapshots_of_volume,
            demand.snapshots,
        ),
        (BudgetLimit::Snapshots, limits.snapshots, used.snapshots, demand.snapshots),
        (BudgetLimit::Bytes, limits.bytes, used.bytes, demand.bytes),
        (BudgetLimit::ClassVolumes, class_volumes, of_class.volumes, demand.volumes),
        (BudgetLimit::ClassBytes, class_bytes, of_class.bytes, demand.bytes),
    ];
    let exceeded = all.into_iter().find_map(|(limit, allowed, used, requested)| {
        let allowed = allowed.filter(|allowed| requested > 0 && used.saturating_add(requested) > *allowed)?;
        Some(BudgetExcess { owner: owner.clone(), limit, used, requested, allowed })
    });
    exceeded.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use infra_api::{Account, ClassUsage};

    use super::*;

    fn owner(class: &str) -> Owner {
        Owner { account: Account::new("g").unwrap(), class: class.into() }
    }

    fn limits() -> BudgetSpec {
        BudgetSpec {
            bytes: Some(100),
            volumes: Some(3),
            snapshots: Some(4),
            snapshots_per_volume: Some(2),
            classes: BTreeMap::from([("gold".into(), ClassLimits { bytes: Some(50), volumes: Some(1) })]),
        }
    }

    fn used() -> Usage {
        let mut used = Usage::default();
        used.add("gold".into(), ClassUsage { bytes: 40, volumes: 1, snapshots: 1 });
        used.add("iron".into(), ClassUsage { bytes: 20, volumes: 1, snapshots: 2 });
        used
    }

    fn exceeded(class: &str, demand: Demand) -> Option<(BudgetLimit, u64, u64, u64)> {
        let excess = check(&limits(), &used(), &owner(class), &demand).err()?;
        Some((excess.limit, excess.used, excess.requested, excess.allowed))
    }

    #[test]
    fn the_first_exceeded_limit_is_reported_with_its_numbers() {
        let volume = |bytes| Demand { bytes, volumes: 1, ..Demand::default() };
        let snapshot =
            |bytes, of_volume| Demand { bytes, snapshots: 1, snapshots_of_volume: of_volume, volumes: 0 };
        assert_eq!(exceeded("iron", volume(40)), None);
        assert_eq!(exceeded("iron", volume(41)), Some((BudgetLimit::Bytes, 60, 41, 100)));
        assert_eq!(exceeded("gold", volume(1)), Some((BudgetLimit::ClassVolumes, 1, 1, 1)));
        assert_eq!(exceeded("gold", snapshot(11, 1)), Some((BudgetLimit::ClassBytes, 40, 11, 50)));
        assert_eq!(exceeded("gold", snapshot(10, 1)), None);
        assert_eq!(exceeded("iron", snapshot(0, 2)), Some((BudgetLimit::SnapshotsPerVolume, 2, 1, 2)));
        assert_eq!(exceeded("other", volume(u64::MAX)), Some((BudgetLimit::Bytes, 60, u64::MAX, 100)));
    }

    #[test]
    fn an_account_beyond_its_limits_may_do_what_adds_nothing_to_them() {
        let lowered = BudgetSpec { volumes: Some(0), ..BudgetSpec::default() };
        let expansion = Demand { bytes: 10, ..Demand::default() };
        check(&lowered, &used(), &owner("gold"), &expansion).unwrap();
        check(&BudgetSpec::default(), &used(), &owner("gold"), &Demand { volumes: 1, ..expansion }).unwrap();
    }
}
