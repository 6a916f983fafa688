//! Metrics of accounts: what each uses, and its limits. An account without a limit has no sample of it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use infra_api::{Account, Budget};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    account: String,
}

type AccountGauge = Family<Labels, Gauge>;

/// Metrics of accounts. Cheap to clone.
#[derive(Clone, Default)]
pub struct AccountMetrics {
    bytes: AccountGauge,
    bytes_limit: AccountGauge,
    volumes: AccountGauge,
    volumes_limit: AccountGauge,
    snapshots: AccountGauge,
    snapshots_limit: AccountGauge,
    known: Arc<Mutex<BTreeSet<Account>>>,
}

impl AccountMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let bytes = "Bytes of the volumes and snapshots of the account";
        registry.register_with_unit("account_used", bytes, Unit::Bytes, self.bytes.clone());
        let limit = "Bytes that the budget of the account allows";
        registry.register_with_unit("account_limit", limit, Unit::Bytes, self.bytes_limit.clone());
        for (name, help, gauge) in [
            ("account_volumes", "Volumes of the account", &self.volumes),
            ("account_volumes_limit", "Volumes that the budget of the account allows", &self.volumes_limit),
            ("account_snapshots", "Snapshots of the account", &self.snapshots),
            (
                "account_snapshots_limit",
                "Snapshots that the budget of the account allows",
                &self.snapshots_limit,
            ),
        ] {
            registry.register(name, help, gauge.clone());
        }
    }

    /// Sets the gauges of all accounts and removes those of others.
    pub fn set(&self, budgets: &[Budget]) {
        let now: BTreeSet<Account> = budgets.iter().map(|one| one.account.clone()).collect();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for gone in known.difference(&now) {
            self.samples(gone, [None; 6]);
        }
        for Budget { account, limits, used } in budgets {
            let limits = limits.clone().unwrap_or_default();
            self.samples(
                account,
                [
                    Some(used.bytes),
                    limits.bytes,
                    Some(used.volumes),
                    limits.volumes,
                    Some(used.snapshots),
                    limits.snapshots,
                ],
            );
        }
        *known = now;
    }

    fn samples(&self, account: &Account, values: [Option<u64>; 6]) {
        let labels = Labels { account: account.to_string() };
        let gauges = [
            &self.bytes,
            &self.bytes_limit,
            &self.volumes,
            &self.volumes_limit,
            &self.snapshots,
            &self.snapshots_limit,
        ];
        for (gauge, value) in gauges.into_iter().zip(values) {
            match value {
                Some(value) => {
                    gauge.get_or_create(&labels).set(i64::try_from(value).unwrap_or(i64::MAX));
                }
                None => {
                    gauge.remove(&labels);
                }
            }
        }
    }
}
