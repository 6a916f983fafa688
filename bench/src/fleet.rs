//! Fleet: namespaces, simulated `VirtualMachine`s and claims of many guests in the management cluster. The bench writes
//! the specs in place of each guest's gc-csi, so that one host can simulate many clusters.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use anyhow::{Context, Result};
use crds::{VirtualMachine, VolumeAttachment, names};
use futures::{FutureExt, StreamExt, TryStreamExt, future, pin_mut, stream};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use lab::Lab;
use serde_json::json;
use tests::unique;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::observed::{LONGEST, Observed};

/// Maximum number of concurrent requests of the bench.
pub(crate) const AT_ONCE: usize = 32;
/// The zone of all VMs.
pub(crate) const ZONE: &str = "zone-a";

/// A VM, and the claims that should be attached to it.
pub(crate) struct FleetVm {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uuid: Uuid,
    pub(crate) claims: Vec<String>,
}

/// VMs and claims of many guests.
pub(crate) struct Fleet<'a> {
    lab: &'a Lab,
    client: Client,
    namespaces: Vec<String>,
    pub(crate) vms: Vec<FleetVm>,
    /// The volumes' names.
    volumes: Vec<String>,
    attached: AttachedDisks,
}

impl<'a> Fleet<'a> {
    /// Creates everything, and waits until every claim is bound. Nothing is attached.
    pub(crate) async fn make(lab: &'a Lab, guests: usize, vms: usize, volumes: usize) -> Result<Self> {
        let client = lab.management().await?;
        let mut fleet = Self {
            lab,
            attached: AttachedDisks::watch(&client),
            client: client.clone(),
            namespaces: (0..guests).map(|_| unique("bench")).collect(),
            vms: Vec::new(),
            volumes: Vec::new(),
        };
        for name in &fleet.namespaces {
            let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
            Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
        }
        let label = unique("fleet");
        let bound = Observed::watch(
            Api::<PersistentVolumeClaim>::all(client.clone()),
            watcher::Config::default().labels(&format!("bench={label}")),
            |claim| claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound"),
        );
        let mut making = Vec::new();
        for namespace in &fleet.namespaces {
            making.extend((0..vms).map(|_| fleet.create_vm(namespace.clone(), &label, volumes).boxed()));
        }
        let made = stream::iter(making).buffer_unordered(AT_ONCE);
        let made: Vec<(FleetVm, Vec<String>)> = made.try_collect().await?;
        for (vm, volumes) in made {
            fleet.vms.push(vm);
            fleet.volumes.extend(volumes);
        }
        let claims: Vec<String> = fleet.vms.iter().flat_map(|vm| vm.claims.clone()).collect();
        bound.reached(&claims).await.context("claims bound")?;
        Ok(fleet)
    }

    async fn create_vm(
        &self,
        namespace: String,
        label: &str,
        volumes: usize,
    ) -> Result<(FleetVm, Vec<String>)> {
        let (name, uuid) = (unique("vm"), Uuid::new_v4());
        let infra = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        lab::infra::simulate(infra, &uuid.to_string())?;
        lab::virtual_machines::create(&self.client, &namespace, label, &name, &uuid.to_string(), Some(ZONE))
            .await?;
        lab::virtual_machines::wait_until_registered(&self.client, &namespace, &name).await?;
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &namespace);
        let (mut claims, mut made) = (Vec::new(), Vec::new());
        for _ in 0..volumes {
            let claim = serde_json::from_value(json!({
                "metadata": {"name": unique("claim"), "labels": {"bench": label, names::LABEL_CLUSTER_ID: label}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            }))?;
            let claim = api.create(&PostParams::default(), &claim).await?;
            made.push(format!("pvc-{}", claim.uid().context("a claim has no UID")?));
            claims.push(claim.name_any());
        }
        Ok((FleetVm { name, namespace, uuid, claims }, made))
    }

    /// Writes the `spec.volumes` of the VMs from their claims; returns the time of each write.
    pub(crate) async fn write_specs(&self, vms: &[&FleetVm]) -> Result<HashMap<String, Instant>> {
        let mut writing = Vec::new();
        for vm in vms {
            writing.push(self.write_spec(vm).boxed());
        }
        stream::iter(writing).buffer_unordered(AT_ONCE).try_collect().await
    }

    async fn write_spec(&self, vm: &FleetVm) -> Result<(String, Instant)> {
        let api = lab::virtual_machines::api_in(&self.client, &vm.namespace);
        let entries: Vec<_> = vm
                .claims
                .iter()
                .map(|claim| {
                    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
                })
                .collect();
        let patch = json!({"spec": {"volumes": entries}});
        let start = Instant::now();
        api.patch(&vm.name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok((vm.name.clone(), start))
    }

    /// Waits until these VMs have exactly the disks of their claims; returns the time at which each disk, by VM and entry, was
    /// first observed as attached.
    pub(crate) async fn settled(&self, vms: &[&FleetVm]) -> Result<HashMap<(String, String), Instant>> {
        let expected: Vec<(&str, HashSet<String>)> = vms
            .iter()
            .map(|vm| {
                let entries = vm.claims.iter().map(|claim| names::volume_entry(claim));
                (vm.name.as_str(), entries.collect())
            })
            .collect();
        self.attached.settled(&expected).await
    }

    /// Waits until the VolumeAttachments of all claims exist. vm-operator-shim limits the rate at which it creates them.
    pub(crate) async fn requested(&self) -> Result<()> {
        let expected: usize = self.vms.iter().map(|vm| vm.claims.len()).sum();
        tests::eventually("VolumeAttachments of all claims", LONGEST, || async {
            let counts = self.namespaces.iter().map(|namespace| self.attachments_in(namespace));
            let count: usize = future::try_join_all(counts).await?.into_iter().sum();
            Ok(if count == expected { Ok(()) } else { Err(format!("{count} of {expected}")) })
        })
        .await
    }

    /// The number of VolumeAttachments in a namespace.
    async fn attachments_in(&self, namespace: &str) -> Result<usize> {
        let api: Api<VolumeAttachment> = Api::namespaced(self.client.clone(), namespace);
        let first = api.list(&ListParams::default().limit(1)).await?;
        let more = first.metadata.remaining_item_count.unwrap_or_default();
        Ok(first.items.len() + usize::try_from(more)?)
    }

    /// Removes all entries from the VMs' specs, and waits until no VM has a disk.
    pub(crate) async fn detach_all(&mut self) -> Result<()> {
        let claims: Vec<Vec<String>> = self.vms.iter_mut().map(|vm| std::mem::take(&mut vm.claims)).collect();
        let all: Vec<&FleetVm> = self.vms.iter().collect();
        self.write_specs(&all).await?;
        self.settled(&all).await?;
        for (vm, claims) in self.vms.iter_mut().zip(claims) {
            vm.claims = claims;
        }
        Ok(())
    }

    /// Turns a simulated VM off or on.
    pub(crate) fn set_power(&self, vm: &FleetVm, off: bool) -> Result<()> {
        self.set_marker(vm, "off", off)
    }

    /// Blocks or unblocks all hypervisor calls for a simulated VM.
    pub(crate) fn set_blocked(&self, vm: &FleetVm, blocked: bool) -> Result<()> {
        self.set_marker(vm, "hang", blocked)
    }

    /// Creates or removes a file that changes the behaviour of the simulated hypervisor for a VM.
    fn set_marker(&self, vm: &FleetVm, name: &str, present: bool) -> Result<()> {
        let infra = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let dir = infra.simulated_root.join(vm.uuid.to_string());
        std::fs::create_dir_all(&dir)?;
        match present {
            true => std::fs::write(dir.join(name), "")?,
            false => std::fs::remove_file(dir.join(name))?,
        }
        Ok(())
    }

    /// Removes everything. No VM may have a disk.
    pub(crate) async fn remove(self) -> Result<()> {
        let gone = Observed::watch(
            Api::<PersistentVolume>::all(self.client.clone()),
            watcher::Config::default(),
            |_| true,
        );
        stream::iter(&self.vms)
            .map(anyhow::Ok)
            .try_for_each_concurrent(AT_ONCE, |vm| async {
                lab::virtual_machines::delete(&self.client, &vm.namespace, &vm.name).await?;
                let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &vm.namespace);
                for claim in &vm.claims {
                    claims.delete(claim, &DeleteParams::default()).await?;
                }
                Ok(())
            })
            .await?;
        gone.gone(&self.volumes).await.context("volumes gone")?;
        for namespace in &self.namespaces {
            Api::<Namespace>::all(self.client.clone()).delete(namespace, &DeleteParams::default()).await?;
        }
        Ok(())
    }
}

/// The attached disks of each VM, with the times of their first observation.
type Disks = HashMap<String, HashMap<String, Instant>>;

/// A watch of the disks in the VMs' statuses.
struct AttachedDisks {
    disks: watch::Receiver<Disks>,
    watching: JoinHandle<()>,
}

impl Drop for AttachedDisks {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl AttachedDisks {
    fn watch(client: &Client) -> Self {
        let (sender, disks) = watch::channel(Disks::new());
        let vms = watcher(lab::virtual_machines::api_everywhere(client), watcher::Config::default());
        let watching = tokio::spawn(async move {
            let vms = vms.default_backoff().applied_objects();
            pin_mut!(vms);
            while let Some(vm) = vms.next().await {
                // The watcher retries by itself.
                let Ok(vm) = vm else { continue };
                let now = Instant::now();
                sender.send_modify(|all| record(all.entry(vm.name_any()).or_default(), &vm, now));
            }
        });
        Self { disks, watching }
    }

    async fn settled(
        &self,
        expected: &[(&str, HashSet<String>)],
    ) -> Result<HashMap<(String, String), Instant>> {
        let mut disks = self.disks.clone();
        let waiting = disks.wait_for(|all| {
            expected.iter().all(|(vm, entries)| {
                let has = all.get(*vm);
                has.map_or(entries.is_empty(), |has| {
                    has.len() == entries.len() && has.keys().all(|entry| entries.contains(entry))
                })
            })
        });
        let all = tokio::time::timeout(LONGEST, waiting)
            .await
            .with_context(|| format!("disks of {} VMs: not within {LONGEST:?}", expected.len()))?
            .context("the watch ended")?;
        let observed = expected.iter().filter_map(|(vm, _)| Some((*vm, all.get(*vm)?)));
        Ok(observed
            .flat_map(|(vm, has)| has.iter().map(move |(entry, at)| ((vm.to_owned(), entry.clone()), *at)))
            .collect())
    }
}

fn record(known: &mut HashMap<String, Instant>, vm: &VirtualMachine, now: Instant) {
    let status = vm.status.as_ref();
    let volumes = status.map(|status| status.volumes.as_slice()).unwrap_or_default();
    let attached = volumes.iter().filter(|disk| disk.attached);
    // A disk that is being detached is still attached.
    let attached: HashSet<&str> =
        attached.filter_map(|disk| names::entry_candidates(&disk.name).next()).collect();
    known.retain(|entry, _| attached.contains(entry.as_str()));
    for entry in attached {
        known.entry(entry.to_owned()).or_insert(now);
    }
}
