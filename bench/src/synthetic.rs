//! Synthetic volumes: only objects in both API servers, as they look while everything works: guest claims and PersistentVolumes,
//! management claims and PersistentVolumes, and for each second volume its VolumeAttachment and the entry of a VirtualMachine.

use anyhow::{Context, Result};
use crds::{VolumeAttachment, names};
use futures::{StreamExt, TryStreamExt, future, stream};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::Config;
use serde_json::{Value, json};
use tests::{Scenario, eventually};
use uuid::Uuid;

use crate::fleet::{AT_ONCE, ZONE};
use crate::observed::{LONGEST, Observed};

/// Attached volumes per VM.
const PER_VM: usize = 20;

/// The volumes of one scenario.
pub(crate) struct SyntheticVolumes<'a> {
    s: &'a Scenario,
    /// Namespace of the management claims.
    pub(crate) namespace: String,
    label: String,
    count: usize,
    bound: [Observed; 2],
}

/// A cluster with the claim and PersistentVolume of a volume.
struct Tier<'a> {
    client: &'a Client,
    namespace: &'a str,
    claim: String,
    driver: &'a str,
    handle: String,
    labels: Value,
}

impl<'a> SyntheticVolumes<'a> {
    /// No volumes yet.
    pub(crate) async fn begin(s: &'a Scenario) -> Result<Self> {
        let namespace = s.own_namespace().await?.name;
        let label = s.name.clone();
        let bound = [(&s.guest, s.name.as_str()), (&s.management, namespace.as_str())];
        let bound = bound.map(|(client, namespace)| {
            let config = Config::default().labels(&format!("bench={label}"));
            Observed::watch(Api::namespaced(client.clone(), namespace), config, is_bound)
        });
        Ok(Self { s, namespace, label, count: 0, bound })
    }

    /// Name of a claim in the guest.
    pub(crate) fn guest_claim(&self, number: usize) -> String {
        format!("data-{number}")
    }

    /// Name of a claim in the management cluster.
    pub(crate) fn claim(&self, number: usize) -> String {
        format!("{}-{number}", self.label)
    }

    /// Creates volumes until there are `count`, and waits until all of them are bound.
    pub(crate) async fn fill(&mut self, count: usize) -> Result<()> {
        let new: Vec<usize> = (self.count..count).collect();
        let attached: Vec<usize> = new.iter().copied().filter(|number| number % 2 == 0).collect();
        concurrently(new.clone(), |number| self.create(number)).await?;
        let vms: Vec<Vec<usize>> = attached.chunks(PER_VM).map(<[usize]>::to_vec).collect();
        concurrently(vms, |numbers| self.attach(numbers)).await?;
        let names = |name: &dyn Fn(usize) -> String| -> Vec<String> {
            new.iter().map(|number| name(*number)).collect()
        };
        let (guest, management) =
            (names(&|number| self.guest_claim(number)), names(&|number| self.claim(number)));
        future::try_join(self.bound[0].reached(&guest), self.bound[1].reached(&management)).await?;
        eprintln!("{count} volumes");
        self.count = count;
        Ok(())
    }

    /// Creates the claims and PersistentVolumes of a volume.
    async fn create(&self, number: usize) -> Result<()> {
        let (s, below) = (self.s, self.claim(number));
        let guest = Tier {
            client: &s.guest,
            namespace: &s.name,
            claim: self.guest_claim(number),
            driver: names::GUEST_DRIVER,
            handle: below.clone(),
            labels: json!({"bench": self.label}),
        };
        let management = Tier {
            client: &s.management,
            namespace: &self.namespace,
            handle: format!("bench-{below}"),
            claim: below,
            driver: names::MANAGEMENT_DRIVER,
            labels: json!({"bench": self.label, names::LABEL_CLUSTER_ID: s.cluster_id}),
        };
        future::try_join(guest.create(), management.create()).await.map(drop)
    }

    /// Creates a VM with the entries and VolumeAttachments of these volumes.
    async fn attach(&self, numbers: Vec<usize>) -> Result<()> {
        let client = &self.s.management;
        let first = numbers.first().copied().unwrap_or_default();
        let (name, uuid) = (format!("{}-vm-{first}", self.label), Uuid::new_v4().to_string());
        lab::virtual_machines::create(client, &self.namespace, &self.s.cluster_id, &name, &uuid, Some(ZONE))
            .await?;
        let claims: Vec<String> = numbers.iter().map(|number| self.claim(*number)).collect();
        let (entries, disks): (Vec<Value>, Vec<Value>) = claims
            .iter()
            .map(|claim| {
                let entry = names::volume_entry(claim);
                let source = json!({"claimName": claim});
                let disk = json!({"name": entry, "attached": true, "diskUUID": Uuid::new_v4()});
                (json!({"name": entry, "persistentVolumeClaim": source}), disk)
            })
            .unzip();
        let vms = lab::virtual_machines::api_in(client, &self.namespace);
        let params = PatchParams::default();
        let spec = Patch::Merge(json!({"spec": {"volumes": entries}}));
        let vm = vms.patch(&name, &params, &spec).await?;
        vms.patch_status(&name, &params, &Patch::Merge(json!({"status": {"volumes": disks}}))).await?;
        let owner = json!({
            "apiVersion": format!("{}/{}", crds::VIRTUAL_MACHINE_GROUP, crds::VIRTUAL_MACHINE_VERSIONS[0]),
            "kind": "VirtualMachine", "name": name, "uid": vm.uid(),
        });
        for (claim, disk) in claims.iter().zip(&disks) {
            self.create_attachment(&name, &uuid, claim, &owner, &disk["diskUUID"]).await?;
        }
        Ok(())
    }

    async fn create_attachment(
        &self,
        vm: &str,
        uuid: &str,
        claim: &str,
        owner: &Value,
        disk: &Value,
    ) -> Result<()> {
        let name = names::volume_attachment(&vm.into(), &claim.into());
        let api: Api<VolumeAttachment> = Api::namespaced(self.s.management.clone(), &self.namespace);
        let attachment = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"bench": self.label}, "ownerReferences": [owner]},
            "spec": {"nodeUUID": uuid, "volumeName": claim},
        }))?;
        api.create(&PostParams::default(), &attachment).await?;
        let status = json!({"status": {"attached": true, "diskUUID": disk, "observedGeneration": 1}});
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
        Ok(())
    }

    /// Removes everything, and waits until it is gone. The scenario removes what is in its namespaces.
    pub(crate) async fn remove(&self) -> Result<()> {
        let own = ListParams::default().labels(&format!("bench={}", self.label));
        for (client, namespace) in [(&self.s.guest, &self.s.name), (&self.s.management, &self.namespace)] {
            let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
            let volumes: Api<PersistentVolume> = Api::all(client.clone());
            claims.delete_collection(&DeleteParams::default(), &own).await?;
            volumes.delete_collection(&DeleteParams::default(), &own).await?;
            eventually("the PersistentVolumes are deleted", LONGEST, || async {
                let left = volumes.list_metadata(&own.clone().limit(1)).await?.items;
                Ok(left.first().map_or(Ok(()), |one| Err(format!("{} is left", one.name_any()))))
            })
            .await?;
        }
        Ok(())
    }
}

impl Tier<'_> {
    /// Creates the claim and the PersistentVolume, which are bound to each other by name.
    async fn create(&self) -> Result<()> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), self.namespace);
        let volume = format!("{}-{}", self.namespace, self.claim);
        let shared = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor", "volumeMode": "Filesystem",
        });
        let mut spec = shared.clone();
        spec["volumeName"] = json!(volume);
        spec["resources"] = json!({"requests": {"storage": "1Mi"}});
        let claim = json!({"metadata": {"name": self.claim, "labels": self.labels}, "spec": spec});
        let claim = claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        let mut spec = shared;
        spec["capacity"] = json!({"storage": "1Mi"});
        spec["persistentVolumeReclaimPolicy"] = json!("Retain");
        spec["csi"] = json!({"driver": self.driver, "volumeHandle": self.handle});
        spec["claimRef"] = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": self.namespace,
            "name": self.claim, "uid": claim.uid(),
        });
        let volume = json!({"metadata": {"name": volume, "labels": self.labels}, "spec": spec});
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let created = volumes.create(&PostParams::default(), &serde_json::from_value(volume)?).await;
        created.with_context(|| format!("cannot create the PersistentVolume of {}", self.claim)).map(drop)
    }
}

fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
}

/// Does this for all items, some at once.
async fn concurrently<T, Working>(items: Vec<T>, work: impl Fn(T) -> Working) -> Result<()>
where
    Working: Future<Output = Result<()>>,
{
    let working = items.into_iter().map(work);
    stream::iter(working).buffer_unordered(AT_ONCE).try_collect::<Vec<()>>().await.map(drop)
}
