//! Which requests need a full scan of the pools' files, and which the last one still answers: it found the allocated
//! bytes of every file, and the names of unknown files.

use std::collections::HashMap;
use std::time::Duration;

use infra_api::PoolName;

use super::ledger::{CapacityLedger, Facts};
use super::measure::PoolView;
use crate::catalog::PoolRow;
use crate::engine::{Contents, DirectoryVersion, PoolFacts};
use crate::service::pools::LastPass;

/// Maximum age of a scan that answers further requests. Less than the validity of scans in the ledger by more than the
/// interval of the periodic measurement, so that the ledger always has a valid scan.
pub(super) const MAX_AGE: Duration = Duration::from_secs(90);

/// How exact a measurement has to be, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::service) enum Precision {
    /// Free space may be too low by what VMs wrote since the last scan.
    Recent,
    /// What a full scan would find now.
    Exact,
    /// A full scan.
    Scan,
}

/// What a scan depends on: the number of catalog changes, and the directory and fixed size of each pool that
/// answers.
pub(super) type Version = (u64, Vec<Option<(DirectoryVersion, Option<u64>)>>);

/// The last full scan.
#[derive(Default)]
pub(super) struct LastScan {
    pub(super) pass: LastPass<Version>,
    /// Its result by pool: the available bytes and the names of unknown files.
    pub(super) pools: HashMap<PoolName, (u64, Vec<String>)>,
}

/// A pool with its state now, or why it is not healthy.
pub(super) type Probed = (PoolRow, Result<PoolFacts, String>);

/// The version of the pools' contents.
pub(super) fn version(changes: u64, pools: &[Probed]) -> Version {
    let of = |facts: &PoolFacts| (facts.directory, facts.fixed_size);
    (changes, pools.iter().map(|(_, facts)| facts.as_ref().ok().map(of)).collect())
}

impl LastScan {
    /// The precision of this scan's result for the state of the pools now, if nothing was created or removed since.
    pub(super) fn precision(&self, pools: &[Probed]) -> Precision {
        let is_same = |(row, facts): &Probed| match facts {
            Ok(facts) => {
                self.pools.get(&row.name).is_some_and(|(available, _)| *available == facts.available)
            }
            Err(_) => true,
        };
        if pools.iter().all(is_same) { Precision::Exact } else { Precision::Recent }
    }

    /// The pools by this scan's result and their state now.
    pub(super) fn views(
        &self,
        pools: Vec<Probed>,
        reserved: &HashMap<PoolName, u64>,
        ledger: &CapacityLedger,
    ) -> Vec<PoolView> {
        let healthy = pools.iter().filter_map(|(row, facts)| Some((row.name.clone(), facts.clone().ok()?)));
        let free = ledger.free(&healthy.collect::<Facts>(), reserved);
        let view = |(row, facts): Probed| {
            let unknown = self.pools.get(&row.name).map(|(_, unknown)| unknown.clone()).unwrap_or_default();
            let [reserved, free] = [reserved, &free].map(|sums| sums.get(&row.name).copied().unwrap_or(0));
            let facts = facts.map(|facts| (facts, Contents { unknown, ..Contents::default() }));
            PoolView::new(row, facts, reserved, free)
        };
        pools.into_iter().map(view).collect()
    }
}
