//! StorageBudgets, and claims of accounts that have one. A test uses an account of its own, which is the cluster ID of no
//! guest, unless it needs a guest.

use anyhow::{Context, Result};
use crds::{StorageBudget, names};
use infra_api::{Account, Budget, Usage};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{PATIENCE, Scenario, eventually, unique};

impl Scenario {
    /// StorageBudgets of the management cluster.
    pub fn budgets(&self) -> Api<StorageBudget> {
        Api::all(self.management.clone())
    }

    /// Creates a StorageBudget with these limits; it is removed when the scenario ends. Returns its name.
    pub async fn new_budget(&self, account: &str, limits: &Value) -> Result<String> {
        let name = unique(&self.name);
        self.created().budgets.push(name.clone());
        let mut spec = json!({"clusterId": account});
        json_patch::merge(&mut spec, limits);
        let object = json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "StorageBudget",
            "metadata": {"name": name}, "spec": spec,
        });
        self.budgets().create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        Ok(name)
    }

    /// Creates a StorageBudget, and waits until the storage infra enforces it.
    pub async fn budget(&self, account: &str, limits: &Value) -> Result<String> {
        let name = self.new_budget(account, limits).await?;
        self.is_applied(&name).await?;
        Ok(name)
    }

    /// Changes limits, and waits until the storage infra enforces them.
    pub async fn change_budget(&self, name: &str, limits: &Value) -> Result<()> {
        let patch = Patch::Merge(json!({"spec": limits}));
        self.budgets().patch(name, &PatchParams::default(), &patch).await?;
        self.is_applied(name).await
    }

    /// Waits until the condition `Applied` of a StorageBudget has this status at the present generation.
    pub async fn has_condition(&self, name: &str, status: &str, reason: &str) -> Result<()> {
        eventually(&format!("StorageBudget {name} has Applied={status}, {reason}"), PATIENCE, || async {
            let budget = self.budgets().get(name).await?;
            let generation = budget.metadata.generation;
            let shown = budget.status.unwrap_or_default();
            let is_met = shown.observed_generation == generation
                && shown.conditions.iter().any(|one| {
                    one.type_ == "Applied" && (one.status.as_str(), one.reason.as_str()) == (status, reason)
                });
            Ok(if is_met { Ok(()) } else { Err(format!("{shown:?}")) })
        })
        .await
    }

    async fn is_applied(&self, name: &str) -> Result<()> {
        self.has_condition(name, "True", "Applied").await
    }

    /// The budget of an account in the storage infra.
    pub async fn infra_budget(&self, account: &str) -> Result<Budget> {
        Ok(self.infra.get_budget(&Account::new(account)?).await?)
    }

    /// What an account uses, as the storage infra counts it.
    pub async fn infra_usage(&self, account: &str) -> Result<Usage> {
        Ok(self.infra_budget(account).await?.used)
    }

    /// Waits until an account uses this many bytes and volumes.
    pub async fn account_uses(&self, account: &str, bytes: u64, volumes: u64) -> Result<()> {
        eventually(&format!("{account} uses {bytes} bytes of {volumes} volumes"), PATIENCE, || async {
            let used = self.infra_usage(account).await?;
            Ok(if (used.bytes, used.volumes) == (bytes, volumes) { Ok(()) } else { Err(format!("{used:?}")) })
        })
        .await
    }

    /// Creates a claim of an account in the guest's namespace of the management cluster, and does not wait for it.
    pub async fn claim_of_account(&self, account: &str, class: &str, size: &str) -> Result<String> {
        let name = self.new_management_claim();
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: account}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": size}},
            },
        }))?;
        self.claims().create(&PostParams::default(), &claim).await?;
        Ok(name)
    }

    /// Waits until a management claim is bound; returns the name of its PersistentVolume.
    pub async fn management_bound(&self, claim: &str) -> Result<String> {
        eventually(&format!("management claim {claim} bound"), PATIENCE, || async {
            let found = self.claims().get(claim).await?;
            let phase = found.status.and_then(|status| status.phase).unwrap_or_default();
            let volume = found.spec.and_then(|spec| spec.volume_name);
            Ok(match volume.filter(|_| phase == "Bound") {
                Some(volume) => Ok(volume),
                None => Err(format!("{phase}; {:?}", self.management_events_of(CLAIM, claim).await?)),
            })
        })
        .await
    }

    /// The phase of a management PersistentVolume.
    pub async fn phase_of_volume(&self, volume: &str) -> Result<String> {
        let status = self.volumes().get(volume).await?.status;
        status.and_then(|status| status.phase).context("the volume has no phase")
    }

    /// Creates a snapshot of a management claim for an account, and does not wait for it.
    pub async fn snapshot_of_account(&self, account: &str, claim: &str) -> Result<String> {
        let labels = [(names::LABEL_CLUSTER_ID, account)];
        self.new_management_snapshot(&labels, claim).await
    }

    /// Waits until a management snapshot reports an error that contains all of `texts`.
    pub async fn management_snapshot_failure(&self, name: &str, texts: &[&str]) -> Result<()> {
        eventually(&format!("management snapshot {name} fails with {texts:?}"), PATIENCE, || async {
            let snapshot = self.snapshots().get(name).await?;
            let status = &snapshot.data["status"];
            anyhow::ensure!(status["readyToUse"] != true, "snapshot {} is ready", snapshot.name_any());
            let message = status["error"]["message"].as_str().unwrap_or_default();
            let is_met = texts.iter().all(|text| message.contains(text));
            Ok(if is_met { Ok(()) } else { Err(status.to_string()) })
        })
        .await
    }
}

const CLAIM: &str = "PersistentVolumeClaim";
