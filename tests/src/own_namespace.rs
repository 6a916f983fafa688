//! Management namespace of one scenario, to test the deletion of a guest or of its namespace.

use anyhow::{Context, Result, ensure};
use crds::{VirtualMachine, VolumeAttachment, names};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::{Client, Resource, ResourceExt};
use lab::cluster::MANAGEMENT_NAMESPACE;
use serde_json::json;

use crate::objects::{delete, gone};
use crate::{PATIENCE, eventually, unique};

/// A namespace of the management cluster that belongs to one scenario.
#[derive(Clone)]
pub struct OwnNamespace {
    client: Client,
    /// Its name.
    pub name: String,
}

impl OwnNamespace {
    /// A namespace with a unique name; not created yet.
    pub(crate) fn named(client: &Client, name: String) -> Self {
        Self { client: client.clone(), name }
    }

    /// Creates it.
    pub(crate) async fn create(&self) -> Result<()> {
        let namespace = serde_json::from_value(json!({"metadata": {"name": self.name}}))?;
        Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await?;
        Ok(())
    }

    /// Its API server, as the administrator.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Claims in the namespace.
    pub fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// VolumeSnapshots in the namespace.
    pub fn snapshots(&self) -> Api<DynamicObject> {
        self.kind("snapshot.storage.k8s.io", "v1", "VolumeSnapshot")
    }

    /// Cluster objects in the namespace, in the newest served version.
    pub fn clusters(&self) -> Api<DynamicObject> {
        self.kind(names::CLUSTER_GROUP, "v1beta2", "Cluster")
    }

    /// VirtualMachines in the namespace.
    pub fn vms(&self) -> Api<VirtualMachine> {
        let resource = crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0]);
        Api::namespaced_with(self.client.clone(), &self.name, &resource)
    }

    /// VolumeAttachments (nestor.dev) in the namespace.
    pub fn attachments(&self) -> Api<VolumeAttachment> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    fn kind(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Api::namespaced_with(self.client.clone(), &self.name, &resource)
    }

    /// Creates a Cluster object.
    pub async fn cluster(&self, name: &str, labels: &[(&str, &str)]) -> Result<DynamicObject> {
        let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
        let cluster = json!({
            "apiVersion": format!("{}/v1beta2", names::CLUSTER_GROUP), "kind": "Cluster",
            "metadata": {"name": name, "labels": labels},
        });
        Ok(self.clusters().create(&PostParams::default(), &serde_json::from_value(cluster)?).await?)
    }

    /// Deletes a Cluster object and waits until garbage collection has processed its dependents: a witness object that it
    /// owns is deleted.
    pub async fn delete_cluster(&self, name: &str, params: &DeleteParams) -> Result<()> {
        let uid = self.clusters().get(name).await?.uid();
        let witnesses: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.name);
        let witness = unique("witness");
        let owner = json!({
            "apiVersion": format!("{}/v1beta2", names::CLUSTER_GROUP), "kind": "Cluster", "name": name, "uid": uid,
        });
        let object = json!({"metadata": {"name": witness, "ownerReferences": [owner]}});
        witnesses.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        self.clusters().delete(name, params).await?;
        gone("dependents of the Cluster object", || async {
            Ok(witnesses.get_opt(&witness).await?.map(|_| witness.clone()).into_iter().collect())
        })
        .await
    }

    /// Waits until these claims are gone.
    pub async fn claims_gone(&self, claims: &[&str]) -> Result<()> {
        gone("claims of the guest", || async {
            let list = self.claims().list(&ListParams::default()).await?;
            Ok(list.iter().map(ResourceExt::name_any).filter(|name| claims.contains(&&**name)).collect())
        })
        .await
    }

    /// Waits until an event reports that a claim, which is being deleted, waits for the detach of its disk.
    pub async fn waits_for_detach(&self, claim: &str) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.name);
        let about = format!("involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}");
        let about = ListParams::default().fields(&about);
        eventually(&format!("claim {claim} waits for the detach"), PATIENCE, || async {
            let reasons: Vec<_> =
                events.list(&about).await?.into_iter().filter_map(|one| one.reason).collect();
            Ok(if reasons.iter().any(|one| one == "WaitForDetach") {
                Ok(())
            } else {
                Err(format!("{reasons:?}"))
            })
        })
        .await?;
        let metadata = self.claims().get(claim).await?.metadata;
        ensure!(metadata.deletion_timestamp.is_some(), "{metadata:?}");
        Ok(())
    }

    /// Waits until a claim has, or does not have, an owner with this UID.
    pub async fn owned(&self, claim: &str, uid: &str, expected: bool) -> Result<()> {
        eventually(&format!("claim {claim} owned by {uid}: {expected}"), PATIENCE, || async {
            let claim = self.claims().get(claim).await?;
            let is_owned = claim.owner_references().iter().any(|owner| owner.uid == uid);
            Ok(if is_owned == expected { Ok(()) } else { Err(format!("{:?}", claim.metadata)) })
        })
        .await
    }

    /// The storage infra's ID of a claim's volume.
    pub async fn volume_of(&self, claim: &str) -> Result<VolumeId> {
        let uid = self.claims().get(claim).await?.uid().context("no UID")?;
        Ok(VolumeId::new(format!("pvc-{uid}"))?)
    }

    /// Deletes the namespace and waits until nothing of it is left, without any manual step.
    pub async fn remove(&self) -> Result<()> {
        delete(&Api::<Namespace>::all(self.client.clone()), &self.name).await?;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        eventually(&format!("namespace {} gone", self.name), PATIENCE, || async {
            let left = namespaces.get_opt(&self.name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await?;
        self.remove_siblings().await?;
        gone("management volumes of the namespace", || async {
            Ok(self.volumes().await?.iter().map(ResourceExt::name_any).collect())
        })
        .await?;
        self.remove_bindings(&Api::<ClusterRoleBinding>::all(self.client.clone())).await?;
        self.remove_bindings(&Api::<RoleBinding>::namespaced(self.client.clone(), MANAGEMENT_NAMESPACE)).await
    }

    /// PersistentVolumes of the namespace's claims.
    async fn volumes(&self) -> Result<Vec<PersistentVolume>> {
        let all = Api::<PersistentVolume>::all(self.client.clone()).list(&ListParams::default()).await?;
        let is_own = |volume: &PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            claim.and_then(|claim| claim.namespace.as_ref()) == Some(&self.name)
        };
        Ok(all.into_iter().filter(is_own).collect())
    }

    /// Deletes the PersistentVolumes through which guests of the namespace shared volumes.
    async fn remove_siblings(&self) -> Result<()> {
        let is_sibling = |volume: &PersistentVolume| {
            let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            let attributes = csi.and_then(|csi| csi.volume_attributes.as_ref());
            attributes.is_some_and(|attributes| attributes.contains_key(names::ATTRIBUTE_SIBLING_OF))
        };
        for volume in self.volumes().await?.iter().filter(|volume| is_sibling(volume)) {
            delete(&Api::<PersistentVolume>::all(self.client.clone()), &volume.name_any()).await?;
        }
        Ok(())
    }

    /// Deletes the bindings outside of the namespace that its guests have.
    async fn remove_bindings<K>(&self, bindings: &Api<K>) -> Result<()>
    where
        K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let infix = format!(":{}:", self.name);
        for binding in bindings.list(&ListParams::default()).await? {
            if binding.name_any().contains(&infix) {
                delete(bindings, &binding.name_any()).await?;
            }
        }
        Ok(())
    }
}
