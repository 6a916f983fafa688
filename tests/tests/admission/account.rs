//! The account of a guest, used without gc-csi, and the objects that it writes.

use anyhow::{Context, Result, ensure};
use crds::names;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams,
};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tests::own_namespace::OwnNamespace;
use tests::tenants::Tenant;
use tests::{PATIENCE, Scenario, eventually, unique};

/// Kinds that a guest can write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Claim,
    Snapshot,
    Vm,
}

impl Kind {
    fn resource(self) -> ApiResource {
        let of = |group, kind| ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        match self {
            Self::Claim => of("", "PersistentVolumeClaim"),
            Self::Snapshot => of("snapshot.storage.k8s.io", "VolumeSnapshot"),
            Self::Vm => crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0]),
        }
    }

    /// Start of the name of its policy.
    fn policy(self) -> &'static str {
        match self {
            Self::Claim => "claims",
            Self::Snapshot => "snapshots",
            Self::Vm => "vms",
        }
    }
}

/// A request. All are dry runs, so that a permitted one changes nothing.
#[derive(Debug)]
pub(super) enum Attempt<'a> {
    Create(Value),
    Patch(&'a str, Value),
    Status(&'a str),
    Delete(&'a str),
}

/// The account of a guest in a namespace of its own, used without gc-csi.
pub(super) struct Account {
    pub(super) guest: Tenant,
    pub(super) namespace: OwnNamespace,
    /// The management cluster, as its administrator.
    pub(super) platform: Client,
}

impl Account {
    pub(super) async fn create(s: &Scenario) -> Result<Self> {
        let namespace = s.own_namespace().await?;
        Ok(Self { guest: s.tenant(&namespace).await?, namespace, platform: s.management.clone() })
    }

    pub(super) fn api(&self, client: &Client, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(client.clone(), &self.namespace.name, &kind.resource())
    }

    async fn attempt(&self, kind: Kind, attempt: &Attempt<'_>) -> Result<kube::Result<()>> {
        let api = self.api(&self.guest.client, kind);
        let patching = PatchParams { dry_run: true, ..Default::default() };
        Ok(match attempt {
            Attempt::Create(object) => {
                let creating = PostParams { dry_run: true, ..Default::default() };
                api.create(&creating, &serde_json::from_value(object.clone())?).await.map(drop)
            }
            Attempt::Patch(name, patch) => api.patch(name, &patching, &Patch::Merge(patch)).await.map(drop),
            Attempt::Status(name) => {
                let patch = Patch::Merge(json!({"status": {"phase": "Lost"}}));
                api.patch_status(name, &patching, &patch).await.map(drop)
            }
            Attempt::Delete(name) => api.delete(name, &DeleteParams::default().dry_run()).await.map(drop),
        })
    }

    /// Name of one of the account's policies.
    fn policy(&self, kind: &str) -> String {
        format!("{kind}.gc-csi-{}.{}.nestor.dev", self.guest.name, self.namespace.name)
    }

    /// Waits until the policy of this kind refuses a request with this text; policies take effect some time after their
    /// creation.
    pub(super) async fn is_refused(&self, kind: Kind, attempt: Attempt<'_>, text: &str) -> Result<()> {
        self.is_refused_by(kind.policy(), kind, attempt, text).await
    }

    pub(super) async fn is_refused_by(
        &self,
        policy: &str,
        kind: Kind,
        attempt: Attempt<'_>,
        text: &str,
    ) -> Result<()> {
        let policy = format!("ValidatingAdmissionPolicy '{}'", self.policy(policy));
        eventually(&format!("{policy} refuses {attempt:?}"), PATIENCE, || async {
            Ok(match self.attempt(kind, &attempt).await? {
                Err(kube::Error::Api(status)) if status.message.contains(&policy) => {
                    let is_clear = status.code == 403 && status.message.contains(text);
                    ensure!(is_clear, "{attempt:?}: {} {}, not {text:?}", status.code, status.message);
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    pub(super) async fn is_permitted(&self, kind: Kind, attempt: Attempt<'_>) -> Result<()> {
        self.attempt(kind, &attempt).await?.with_context(|| format!("{attempt:?}"))
    }

    /// The claim that gc-csi creates.
    pub(super) fn claim(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": "attempt", "labels": {names::LABEL_CLUSTER_ID: self.guest.cluster_id},
                "annotations": {
                    names::ANNOTATION_MADE_BY: self.guest.cluster_id, names::ANNOTATION_GUEST_PVC: "data",
                    names::ANNOTATION_GUEST_NAMESPACE: "shop", names::ANNOTATION_GUEST_PV: "pv-1",
                    names::ANNOTATION_GUEST_STORAGE_CLASS: "fast", names::ANNOTATION_REQUESTED_ZONES: "a,b",
                    names::ANNOTATION_RECLAIM_POLICY: "Retain", names::ANNOTATION_TRACEPARENT: "00-1-2-01",
                    names::ANNOTATION_ANTI_AFFINITY: "preferred:shop/data",
                },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor", "volumeMode": "Block",
                "resources": {"requests": {"storage": "4Mi"}},
            },
        })
    }

    /// The VolumeSnapshot that gc-csi creates.
    pub(super) fn snapshot(&self) -> Value {
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {
                "name": "attempt", "labels": {names::LABEL_CLUSTER_ID: self.guest.cluster_id},
                "annotations": {
                    names::ANNOTATION_MADE_BY: self.guest.cluster_id, names::ANNOTATION_GUEST_SNAPSHOT: "s",
                    names::ANNOTATION_GUEST_NAMESPACE: "shop", names::ANNOTATION_TRACEPARENT: "00-1-2-01",
                },
            },
            "spec": {"volumeSnapshotClassName": "nestor", "source": {"persistentVolumeClaimName": "data"}},
        })
    }

    /// Creates an object as the platform team; its class does not exist, so that no driver changes it.
    pub(super) async fn made(&self, kind: Kind, mut object: Value, changes: Value) -> Result<String> {
        let class = match kind {
            Kind::Claim => json!({"spec": {"storageClassName": "no-such-class"}}),
            _ => json!({"spec": {"volumeSnapshotClassName": "no-such-class"}}),
        };
        json_patch::merge(&mut object, &class);
        json_patch::merge(&mut object, &changes);
        object["metadata"]["name"] = json!(unique("made"));
        let api = self.api(&self.platform, kind);
        Ok(api.create(&PostParams::default(), &serde_json::from_value(object)?).await?.name_any())
    }

    /// Key of the label that shares an object with the guest.
    pub(super) fn share(&self) -> String {
        format!("{}{}", names::LABEL_SHARE_PREFIX, self.guest.cluster_id)
    }

    /// Key of the guest's consumer record.
    pub(super) fn record(&self) -> String {
        format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, self.guest.cluster_id)
    }
}

/// An object after a merge patch.
pub(super) fn with(mut object: Value, patch: &Value) -> Value {
    json_patch::merge(&mut object, patch);
    object
}

pub(super) fn labels(labels: Value) -> Value {
    json!({"metadata": {"labels": labels}})
}

pub(super) fn annotations(annotations: Value) -> Value {
    json!({"metadata": {"annotations": annotations}})
}

pub(super) fn spec(spec: Value) -> Value {
    json!({"spec": spec})
}

pub(super) fn owners(owners: Value) -> Value {
    json!({"metadata": {"ownerReferences": owners}})
}

/// An ownerReference to an object that does not exist.
pub(super) fn stranger() -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "stranger", "uid": "1-2-3"})
}
