//! Budgets: applies `StorageBudget`s in the storage infra, reports what guests use in their status, and keeps the account of
//! each volume in the storage infra equal to the guest that its PersistentVolume records.

mod decide;
mod owners;
mod status;

use std::sync::Arc;
use std::time::Duration;

use crds::{StorageBudget, StorageBudgetStatus};
use infra_api::{Account, Budget, EventKind};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer};
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::infra::{InfraEvent, StorageInfra};
use decide::{Verdict, removed, verdicts};
use status::Outcome;

pub use owners::VolumeOwners;

/// Delay during which changes of the usage are collected: the time between two status writes of one object, and the
/// maximum age of a status.
const COLLECT_DELAY: Duration = Duration::from_secs(5);
/// Delay before a retry.
const RETRY_DELAY: Duration = Duration::from_secs(10);
/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The account of a guest in the storage infra.
pub(crate) fn account(guest: Option<&str>) -> Result<Account, Status> {
    Account::new(guest.unwrap_or_default()).map_err(|invalid| Status::invalid_argument(invalid.to_string()))
}

/// The reconciler, not started yet.
#[derive(Debug, Default)]
pub struct Budgets {
    /// A StorageBudget changed.
    changed: Arc<Notify>,
    /// The usage may have changed.
    used: Arc<Notify>,
}

/// The reconciler, with its watch started.
pub struct RunningBudgets {
    changed: Arc<Notify>,
    used: Arc<Notify>,
    objects: Informer<StorageBudget>,
    api: Api<StorageBudget>,
    infra: Arc<dyn StorageInfra>,
    stop: CancellationToken,
}

impl std::fmt::Debug for RunningBudgets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningBudgets").finish_non_exhaustive()
    }
}

impl Budgets {
    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let (changed, used) = (self.changed.clone(), self.used.clone());
        move |event| match event {
            // The storage infra may have lost the budgets, for instance with its catalog.
            InfraEvent::Resync => changed.notify_one(),
            InfraEvent::Object(event) if matches!(event.kind, EventKind::Volume | EventKind::Snapshot) => {
                used.notify_one();
            }
            InfraEvent::Object(_) => {}
        }
    }

    /// Starts the watch, which runs until `stop`, and adds its check to `ready`.
    pub fn start(
        self,
        client: Client,
        infra: Arc<dyn StorageInfra>,
        ready: &Health,
        stop: CancellationToken,
    ) -> RunningBudgets {
        let Self { changed, used } = self;
        let notify = changed.clone();
        let api = Api::<StorageBudget>::all(client);
        let objects = Informer::builder("StorageBudgets", api.clone())
            .on_change(move |change: &Change<'_, StorageBudget>| {
                let generation = |object: &Arc<StorageBudget>| object.metadata.generation;
                if change.old.map(generation) != change.new.map(generation) {
                    notify.notify_one();
                }
            })
            .start(ready.check("storage-budgets", "not started yet"), stop.clone());
        RunningBudgets { changed, used, objects, api, infra, stop }
    }
}

impl RunningBudgets {
    /// Reconciles until the process is stopped. Only the leader runs this.
    pub async fn run(&self) {
        tokio::select! {
            () = self.stop.cancelled() => return,
            () = self.objects.synced() => {}
        }
        // The previous leader may have missed changes.
        self.changed.notify_one();
        while self.await_change().await {
            let Err(reason) = self.reconcile().await else { continue };
            tracing::warn!("failed to reconcile the StorageBudgets: {reason}; retrying in {RETRY_DELAY:?}");
            self.changed.notify_one();
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(RETRY_DELAY) => {}
            }
        }
    }

    /// Waits for a changed object, or for the end of a period with changes of the usage. False if the process is stopped.
    async fn await_change(&self) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => return false,
            () = self.changed.notified() => return true,
            () = self.used.notified() => {}
        }
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = self.changed.notified() => true,
            () = tokio::time::sleep(COLLECT_DELAY) => true,
        }
    }

    /// Applies all budgets, and then writes the statuses. Continues after a failure, and returns the last one.
    async fn reconcile(&self) -> Result<(), String> {
        let objects = self.objects.list();
        let deadline = Instant::now() + TIMEOUT;
        let infra_budgets = self.infra.list_budgets(deadline).await.map_err(|error| error.to_string())?;
        let mut result = Ok(());
        for account in removed(&objects, &infra_budgets) {
            match self.infra.delete_budget(account, deadline).await {
                Ok(()) => tracing::info!(%account, "removed the budget"),
                Err(error) => result = Err(error.to_string()),
            }
        }
        for (object, verdict) in verdicts(&objects) {
            let outcome = self.apply(verdict, &infra_budgets, deadline).await;
            if let Outcome::Failed(reason) = &outcome {
                result = Err(reason.clone());
            }
            if let Err(reason) = self.report(object, &outcome).await {
                result = Err(reason);
            }
        }
        result
    }

    async fn apply(&self, verdict: Verdict, infra_budgets: &[Budget], deadline: Instant) -> Outcome {
        let (account, limits) = match verdict {
            Verdict::Apply(account, limits) => (account, limits),
            Verdict::Superseded(by) => return Outcome::Superseded(by),
            Verdict::Invalid(why) => return Outcome::Invalid(why),
        };
        let found = infra_budgets.iter().find(|budget| budget.account == account);
        let used = found.map(|budget| budget.used.clone()).unwrap_or_default();
        if found.is_some_and(|budget| budget.limits.as_ref() == Some(&limits)) {
            return Outcome::Applied(used);
        }
        match self.infra.set_budget(&account, &limits, deadline).await {
            Ok(()) => {
                tracing::info!(%account, "applied the budget");
                Outcome::Applied(used)
            }
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }

    /// Writes the status of an object if it differs.
    async fn report(&self, object: &StorageBudget, outcome: &Outcome) -> Result<(), String> {
        let before = object.status.clone().unwrap_or_default();
        let generation = object.metadata.generation.unwrap_or_default();
        let status = status::next(&before, outcome, generation, &Time(Timestamp::now()));
        if status == before {
            return Ok(());
        }
        let StorageBudgetStatus { used, observed_generation, conditions } = status;
        // Null removes the usage of a superseded object.
        let patch = Patch::Merge(json!({"status": {
            "used": used, "observedGeneration": observed_generation, "conditions": conditions,
        }}));
        let name = object.name_any();
        match self.api.patch_status(&name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            // It is gone, and the watch shows that.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => {
                Err(format!("failed to write the status of StorageBudget {name}: {}", chain(&error)))
            }
        }
    }
}
