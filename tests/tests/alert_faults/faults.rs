//! The faults of the test, with the alerts that fire by each of them.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use futures::future::{BoxFuture, FutureExt, join_all};
use tests::prometheus::Prometheus;
use tests::{PATIENCE, eventually};

use super::{credentials, drift, leaders, links, moves, node, pools, programs, storage};
use crate::alerts::site::Site;

/// An alert about a program: name, and job of the program.
pub(super) type Alert = (&'static str, &'static str);

/// A fault.
pub(crate) struct Fault {
    name: &'static str,
    /// The alerts that fire by it.
    pub alerts: &'static [Alert],
    /// Causes it, waits until the alerts fire, and mends it.
    run: for<'a> fn(&'a Site, &'a Watch<'a>) -> BoxFuture<'a, Result<()>>,
}

const GC: &str = "gc-csi-controller";
const NODE: &str = "gc-csi-node";
const MGMT: &str = "mgmt-csi";
pub(super) const SHIM: &str = "vm-operator-shim";
const INFRA: &str = "storage-infra";

/// Faults that happen at once.
pub(crate) type Group = &'static [Fault];

/// Groups that happen one after the other.
pub(crate) const QUICK: [Group; 3] = [
    &[Fault {
        name: "all programs crash again and again",
        alerts: &[
            ("NestorProgramAbsent", GC),
            ("NestorProgramAbsent", NODE),
            ("NestorProgramAbsent", MGMT),
            ("NestorProgramAbsent", SHIM),
            ("NestorProgramAbsent", INFRA),
            ("NestorTargetDown", GC),
            ("NestorTargetDown", NODE),
            ("NestorTargetDown", MGMT),
            ("NestorTargetDown", SHIM),
            ("NestorProgramRestarting", GC),
            ("NestorProgramRestarting", NODE),
            ("NestorProgramRestarting", MGMT),
            ("NestorProgramRestarting", SHIM),
            ("NestorProgramRestarting", INFRA),
        ],
        run: |site, alerts| programs::crash(site, alerts).boxed(),
    }],
    &[
        Fault {
            name: "certificates are not renewed",
            alerts: &[("NestorCertificateExpiresSoon", MGMT), ("NestorCertificateExpiresSoon", INFRA)],
            run: |site, alerts| credentials::certificates_expire(site, alerts).boxed(),
        },
        Fault {
            name: "the token of a guest is not renewed",
            alerts: &[("NestorGuestCredentialExpiresSoon", GC)],
            run: |site, alerts| credentials::token_expires(site, alerts).boxed(),
        },
    ],
    &[
        Fault {
            name: "a pool disappears",
            alerts: &[
                ("NestorPoolUnhealthy", INFRA),
                ("NestorVolumesAbnormal", INFRA),
                ("NestorVolumesAbnormal", MGMT),
                ("NestorVolumesAbnormal", GC),
            ],
            run: |site, alerts| pools::disappears(site, alerts).boxed(),
        },
        Fault {
            name: "a pool fills up",
            alerts: &[
                ("NestorPoolFillsSoon", INFRA),
                ("NestorPoolNearlyFull", INFRA),
                ("NestorPoolFull", INFRA),
            ],
            run: |site, alerts| pools::fills_up(site, alerts).boxed(),
        },
        Fault {
            name: "volumes reserve a pool",
            alerts: &[("NestorPoolNoRoom", INFRA)],
            run: |site, alerts| pools::is_reserved(site, alerts).boxed(),
        },
        Fault {
            name: "a file is left in a pool",
            alerts: &[("NestorPoolUnknownFiles", INFRA)],
            run: |site, alerts| pools::has_an_unknown_file(site, alerts).boxed(),
        },
        Fault {
            name: "backups cannot be written",
            alerts: &[("NestorBackupOverdue", INFRA), ("NestorBackupsFailing", INFRA)],
            run: |site, alerts| storage::cannot_be_backed_up(site, alerts).boxed(),
        },
        Fault {
            name: "libvirt stops",
            alerts: &[("NestorHypervisorUnreachable", INFRA), ("NestorStorageInfraErrors", INFRA)],
            run: |site, alerts| storage::loses_a_hypervisor(site, alerts).boxed(),
        },
        Fault {
            name: "a VM ends after its move was finished by hand",
            alerts: &[("NestorMoveUndecided", INFRA), ("NestorMoveWaits", INFRA)],
            run: |site, alerts| moves::are_undecided(site, alerts).boxed(),
        },
        Fault {
            name: "a lost VM is powered off",
            alerts: &[("NestorVmFenced", INFRA)],
            run: |site, alerts| storage::fences(site, alerts).boxed(),
        },
        Fault {
            name: "a disk does not appear on its node",
            alerts: &[("NestorNodeCallsFailing", NODE)],
            run: |site, alerts| node::misses_a_disk(site, alerts).boxed(),
        },
        Fault {
            name: "a disk is cut off",
            alerts: &[("NestorDataLoss", NODE)],
            run: |site, alerts| node::loses_data(site, alerts).boxed(),
        },
        Fault {
            name: "claims of a guest without a Cluster object lose their volumes",
            alerts: &[
                ("NestorOrphanedClaims", GC),
                ("NestorOrphanedClaimsGrowing", GC),
                ("NestorObjectsOutliveGuest", GC),
            ],
            run: |site, alerts| drift::orphans(site, alerts).boxed(),
        },
        Fault {
            name: "entries of a VM are removed",
            alerts: &[("NestorRepairsRepeating", GC)],
            run: |site, alerts| drift::entries_are_removed(site, alerts).boxed(),
        },
        Fault {
            name: "attachments are removed again and again",
            alerts: &[("NestorRepairsRepeating", MGMT)],
            run: |site, alerts| drift::attachments_are_removed(site, alerts).boxed(),
        },
        Fault {
            name: "an attachment belongs to nobody",
            alerts: &[("NestorDanglingAttachments", MGMT)],
            run: |site, alerts| drift::an_attachment_dangles(site, alerts).boxed(),
        },
    ],
];

/// Groups that take longer.
pub(crate) const SLOW: [Group; 4] = [
    &[
        Fault {
            name: "VMs lose disks",
            alerts: &[("NestorRepairsRepeating", INFRA)],
            run: |site, alerts| drift::disks_are_lost(site, alerts).boxed(),
        },
        Fault {
            name: "a VM has a disk without an attachment",
            alerts: &[("NestorUnexpectedDisks", INFRA)],
            run: |site, alerts| drift::a_disk_is_unexpected(site, alerts).boxed(),
        },
        Fault {
            name: "the Leases are released again and again",
            alerts: &[
                ("NestorLeaderChanges", GC),
                ("NestorLeaderChanges", MGMT),
                ("NestorLeaderChanges", SHIM),
            ],
            run: |site, alerts| leaders::change(site, alerts).boxed(),
        },
        Fault {
            name: "replicas run without leader election",
            alerts: &[
                ("NestorSeveralLeaders", GC),
                ("NestorSeveralLeaders", MGMT),
                ("NestorSeveralLeaders", SHIM),
            ],
            run: |site, alerts| leaders::are_several(site, alerts).boxed(),
        },
    ],
    &[Fault {
        name: "the API servers are unreachable",
        alerts: &[
            ("NestorApiServerSilent", GC),
            ("NestorApiServerSilent", MGMT),
            ("NestorApiServerSilent", SHIM),
            ("NestorWatchDown", GC),
            ("NestorWatchDown", MGMT),
            ("NestorWatchDown", SHIM),
            ("NestorNoLeader", GC),
            ("NestorNoLeader", MGMT),
            ("NestorNoLeader", SHIM),
            ("NestorCallsFailing", GC),
        ],
        run: |site, alerts| links::api_servers_are_cut_off(site, alerts).boxed(),
    }],
    &[Fault {
        name: "a webhook refuses writes, then storage-infra is unreachable",
        alerts: &[
            ("NestorShimWritesFailing", SHIM),
            ("NestorReconcilesFailing", SHIM),
            ("NestorReconcilesFailing", GC),
            ("NestorReconcilesFailing", MGMT),
            ("NestorAttachmentOperationsFailing", MGMT),
            ("NestorCallsFailing", MGMT),
            ("NestorCallsSlow", GC),
            ("NestorCallsSlow", MGMT),
            ("NestorAttachmentOperationsSlow", MGMT),
        ],
        run: |site, alerts| links::servers_refuse_or_hang(site, alerts).boxed(),
    }],
    &[Fault {
        name: "the API servers are slow",
        alerts: &[("NestorQueueSlow", GC), ("NestorQueueSlow", MGMT), ("NestorQueueSlow", SHIM)],
        run: |site, alerts| links::api_servers_are_slow(site, alerts).boxed(),
    }],
];

/// The alerts that a fault must cause.
pub(super) struct Watch<'a> {
    prometheus: &'a Prometheus,
    expected: &'static [Alert],
    fired: Mutex<BTreeSet<Alert>>,
}

impl<'a> Watch<'a> {
    fn new(prometheus: &'a Prometheus, expected: &'static [Alert]) -> Self {
        Self { prometheus, expected, fired: Mutex::default() }
    }

    /// The expected alerts that fire now.
    async fn firing(&self) -> Result<Vec<Alert>> {
        let all = self.prometheus.alerts().await?;
        let fires = |(name, job): &Alert| all.iter().any(|one| one.is(name, &[("job", job)]));
        Ok(self.expected.iter().copied().filter(fires).collect())
    }

    /// Waits until none fires.
    async fn are_silent(&self) -> Result<()> {
        eventually("the alerts of the fault are silent", PATIENCE, || async {
            let firing = self.firing().await?;
            Ok(if firing.is_empty() { Ok(()) } else { Err(format!("{firing:?} fire")) })
        })
        .await
    }

    /// Records which fire now, and returns the selected ones that have not fired yet.
    async fn not_fired(&self, selects: impl Fn(&Alert) -> bool) -> Result<Vec<Alert>> {
        let firing = self.firing().await?;
        let mut fired = self.fired.lock().unwrap_or_else(PoisonError::into_inner);
        fired.extend(firing);
        let missing = self.expected.iter().filter(|alert| selects(alert) && !fired.contains(*alert));
        Ok(missing.copied().collect())
    }

    /// Waits until all have fired.
    pub(super) async fn fire(&self) -> Result<()> {
        self.fire_while(|| async { Ok(()) }).await
    }

    /// Repeats `work` until all have fired.
    pub(super) async fn fire_while<F, R>(&self, work: F) -> Result<()>
    where
        F: Fn() -> R,
        R: Future<Output = Result<()>>,
    {
        self.these_fire_while(|_| true, work).await
    }

    /// Waits until the selected alerts have fired.
    pub(super) async fn these_fire(&self, selects: impl Fn(&Alert) -> bool) -> Result<()> {
        self.these_fire_while(selects, || async { Ok(()) }).await
    }

    /// Repeats `work` until the selected alerts have fired.
    pub(super) async fn these_fire_while<F, R>(&self, selects: impl Fn(&Alert) -> bool, work: F) -> Result<()>
    where
        F: Fn() -> R,
        R: Future<Output = Result<()>>,
    {
        eventually("the alerts fire", PATIENCE, || async {
            work().await?;
            let missing = self.not_fired(&selects).await?;
            Ok(if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?} have not fired")) })
        })
        .await
    }
}

/// Causes a fault; fails unless each of its alerts is silent before and fires by it.
async fn see(site: &Site, fault: &Fault) -> Result<()> {
    let start = Instant::now();
    let watch = Watch::new(&site.prometheus, fault.alerts);
    watch.are_silent().await?;
    (fault.run)(site, &watch).await?;
    let missing = watch.not_fired(|_| true).await?;
    ensure!(missing.is_empty(), "{missing:?} have not fired");
    println!(
        "{}: {} alerts fired, mended after {:.1} s",
        fault.name,
        fault.alerts.len(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Causes the faults, and waits until no alert fires any more.
pub(crate) async fn fire_and_clear(site: &Site, groups: &[Group]) -> Result<()> {
    no_alert_fires(site).await.context("before the first fault")?;
    let mut failed: Vec<String> = Vec::new();
    for group in groups {
        let faults = group.iter().map(|fault| async move { see(site, fault).await.context(fault.name) });
        // All to their ends, so that what the others broke is mended.
        let outcomes = join_all(faults).await.into_iter();
        failed.extend(outcomes.filter_map(|seen| Some(format!("{:#}", seen.err()?))));
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    let mended = Instant::now();
    no_alert_fires(site).await.context("after all faults are mended")?;
    println!("all alerts are silent {:.1} s after the last fault", mended.elapsed().as_secs_f64());
    Ok(())
}

async fn no_alert_fires(site: &Site) -> Result<()> {
    eventually("no alert fires", PATIENCE, || async {
        let alerts = site.prometheus.alerts().await?;
        Ok(if alerts.is_empty() { Ok(()) } else { Err(format!("{alerts:?}")) })
    })
    .await
}
