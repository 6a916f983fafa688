//! Management namespaces of one scenario, with guests that exist only there: to test the deletion of a guest or of its
//! namespace.

use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::{VirtualMachine, VolumeAttachment, names};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::{Client, ResourceExt};
use lab::cluster::{MANAGEMENT_NAMESPACE, prepare_guest_namespace};
use lab::state::Guest;
use lab::{LoopNode, infra, virtual_machines};
use serde_json::json;
use uuid::Uuid;

use crate::driver::{Driver, new_volume};
use crate::program::Controller;
use crate::scenario::{GUEST, delete, gone};
use crate::{MIB, PATIENCE, Scenario, eventually, unique};

/// A namespace of the management cluster that belongs to one scenario.
#[derive(Clone)]
pub struct OwnNamespace {
    client: Client,
    /// Its name.
    pub namespace: String,
}

/// A guest of such a namespace. It uses the first guest's API server, but none of its objects.
pub struct Tenant {
    /// Name of the guest and of its Cluster object.
    pub name: String,
    /// Its cluster ID.
    pub cluster_id: String,
    /// The kubeconfig of its account in the management cluster.
    pub kubeconfig: PathBuf,
    place: OwnNamespace,
}

impl Scenario {
    /// Creates a management namespace for the scenario; it is removed with its content when the scenario ends.
    pub async fn own_namespace(&self) -> Result<OwnNamespace> {
        let place = OwnNamespace { client: self.management.clone(), namespace: unique(&self.name) };
        self.made().places.push(place.clone());
        let namespace = serde_json::from_value(json!({"metadata": {"name": place.namespace}}))?;
        Api::<Namespace>::all(place.client.clone()).create(&PostParams::default(), &namespace).await?;
        Ok(place)
    }

    /// Creates a guest in the namespace, with the rights of any guest.
    pub async fn tenant(&self, place: &OwnNamespace) -> Result<Tenant> {
        let state = self.lab.state();
        let management = state.management.as_ref().context("the lab has no management cluster")?;
        let like = state.guests.get(GUEST).context("the lab has no such guest")?;
        let (name, cluster_id) = (unique("guest"), Uuid::new_v4().to_string());
        let mut guest =
            Guest { namespace: place.namespace.clone(), cluster_id: cluster_id.clone(), ..like.clone() };
        guest.cluster.name.clone_from(&name);
        prepare_guest_namespace(management, &guest).await?;
        let kubeconfig = management.kubeconfig_of(&guest.account());
        Ok(Tenant { name, cluster_id, kubeconfig, place: place.clone() })
    }

    /// Creates a loop node in the namespace.
    pub async fn node_in(&self, place: &OwnNamespace) -> Result<LoopNode> {
        let record = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let (name, uuid, zone) = (unique("loop"), Uuid::new_v4(), infra::ZONES[0]);
        self.made().machines.push(uuid);
        virtual_machines::create(&place.client, &place.namespace, &name, &uuid.to_string(), zone).await?;
        infra::register_node(record, &name, &uuid.to_string(), zone, infra::LOOP).await?;
        let by_id_dir = record.loop_root.join(uuid.to_string());
        Ok(LoopNode { name, uuid, guest: GUEST.to_owned(), zone: zone.to_owned(), by_id_dir })
    }

    /// Waits until the storage infra has none of these volumes.
    pub async fn infra_forgets(&self, volumes: &[VolumeId]) -> Result<()> {
        gone("volumes in the storage infra", || async {
            let list = self.infra.list_volumes(None, None).await?.items;
            let left = list.iter().filter(|volume| volumes.contains(&volume.id));
            Ok(left.map(|volume| volume.id.to_string()).collect())
        })
        .await
    }

    pub(crate) async fn clean_places(&self) -> Result<()> {
        let places = std::mem::take(&mut self.made().places);
        for place in &places {
            place.remove().await?;
            let here = |volume: &infra_api::Volume| volume.labels.get("namespace") == Some(&place.namespace);
            gone(&format!("volumes of {} in the storage infra", place.namespace), || async {
                let list = self.infra.list_volumes(None, None).await?.items;
                Ok(list.iter().filter(|volume| here(volume)).map(|volume| volume.id.to_string()).collect())
            })
            .await?;
        }
        let machines = std::mem::take(&mut self.made().machines);
        for uuid in machines {
            eventually(&format!("node {uuid} removed"), PATIENCE, || async {
                Ok(self.infra.delete_node(uuid).await.map_err(|error| error.to_string()))
            })
            .await?;
        }
        Ok(())
    }
}

impl OwnNamespace {
    /// Claims in the namespace.
    pub fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
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
    pub fn machines(&self) -> Api<VirtualMachine> {
        let resource = crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0]);
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }

    /// VolumeAttachments (nestor.dev) in the namespace.
    pub fn attachments(&self) -> Api<VolumeAttachment> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn kind(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
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
    pub async fn delete_cluster(&self, name: &str, how: &DeleteParams) -> Result<()> {
        let uid = self.clusters().get(name).await?.uid();
        let witnesses: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let witness = unique("witness");
        let owner = json!({
            "apiVersion": format!("{}/v1beta2", names::CLUSTER_GROUP), "kind": "Cluster", "name": name, "uid": uid,
        });
        let object = json!({"metadata": {"name": witness, "ownerReferences": [owner]}});
        witnesses.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        self.clusters().delete(name, how).await?;
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
        delete(&Api::<Namespace>::all(self.client.clone()), &self.namespace).await?;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        eventually(&format!("namespace {} gone", self.namespace), PATIENCE, || async {
            let left = namespaces.get_opt(&self.namespace).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await?;
        gone("management volumes of the namespace", || async {
            let list = Api::<PersistentVolume>::all(self.client.clone()).list(&ListParams::default()).await?;
            let here = list.iter().filter(|volume| {
                let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
                claim.and_then(|claim| claim.namespace.as_ref()) == Some(&self.namespace)
            });
            Ok(here.map(ResourceExt::name_any).collect())
        })
        .await?;
        // Roles of its guests outside of the namespace.
        let infix = format!(":{}:", self.namespace);
        let everywhere: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        for one in everywhere.list(&ListParams::default()).await? {
            if one.name_any().contains(&infix) {
                delete(&everywhere, &one.name_any()).await?;
            }
        }
        let beside: Api<RoleBinding> = Api::namespaced(self.client.clone(), MANAGEMENT_NAMESPACE);
        for one in beside.list(&ListParams::default()).await? {
            if one.name_any().contains(&infix) {
                delete(&beside, &one.name_any()).await?;
            }
        }
        Ok(())
    }
}

impl Tenant {
    /// Starts its gc-csi with additional flags.
    pub async fn start(&self, s: &Scenario, more: &[&str]) -> Result<Controller> {
        Controller::start_in(s, &self.place.namespace, &self.kubeconfig, &self.cluster_id, more).await
    }

    /// Starts its gc-csi with --on-guest-deletion=Delete and its Cluster object.
    pub async fn start_deleting(&self, s: &Scenario) -> Result<Controller> {
        let cluster = format!("--cluster-object={}", self.name);
        self.start(s, &["--on-guest-deletion=Delete", &cluster]).await
    }
}

/// Creates a volume of the default class with a CSI call; returns its handle.
pub async fn new_claim(driver: &Driver) -> Result<String> {
    Ok(driver.create(new_volume(&unique("volume"), 4 * MIB, "nestor")).await?.volume_id)
}
