//! Many guests' machines in the management cluster: namespaces, `VirtualMachine`s that are only told of, and claims. What a
//! guest's gc-csi would write there is written by the bench itself, so that one machine can stand for many clusters.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use anyhow::{Context, Result};
use crds::{VirtualMachine, names};
use futures::{FutureExt, StreamExt, TryStreamExt, pin_mut, stream};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use lab::Lab;
use serde_json::json;
use tests::unique;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::seen::{LONGEST, Seen};

/// How many requests of the bench's own are under way at once.
pub(crate) const AT_ONCE: usize = 32;
/// The zone of every machine.
pub(crate) const ZONE: &str = "zone-a";

/// One machine, and the claims whose disks it should have.
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) uuid: Uuid,
    pub(crate) claims: Vec<String>,
}

/// Machines and claims of many guests.
pub(crate) struct Fleet<'a> {
    lab: &'a Lab,
    client: Client,
    namespaces: Vec<String>,
    pub(crate) machines: Vec<Machine>,
    /// The volumes' names.
    volumes: Vec<String>,
    plugged: Plugged,
}

impl<'a> Fleet<'a> {
    /// Makes everything, and waits until every claim is bound. Nothing is attached.
    pub(crate) async fn make(lab: &'a Lab, guests: usize, machines: usize, volumes: usize) -> Result<Self> {
        let client = lab.management().await?;
        let mut fleet = Self {
            lab,
            plugged: Plugged::watch(&client),
            client: client.clone(),
            namespaces: (0..guests).map(|_| unique("bench")).collect(),
            machines: Vec::new(),
            volumes: Vec::new(),
        };
        for name in &fleet.namespaces {
            let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
            Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &namespace).await?;
        }
        let label = unique("fleet");
        let bound = Seen::watch(
            Api::<PersistentVolumeClaim>::all(client.clone()),
            watcher::Config::default().labels(&format!("bench={label}")),
            |claim| claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound"),
        );
        let mut making = Vec::new();
        for namespace in &fleet.namespaces {
            making.extend((0..machines).map(|_| fleet.machine(namespace.clone(), &label, volumes).boxed()));
        }
        let made = stream::iter(making).buffer_unordered(AT_ONCE);
        let made: Vec<(Machine, Vec<String>)> = made.try_collect().await?;
        for (machine, volumes) in made {
            fleet.machines.push(machine);
            fleet.volumes.extend(volumes);
        }
        let claims: Vec<String> = fleet.machines.iter().flat_map(|machine| machine.claims.clone()).collect();
        bound.reached(&claims).await.context("claims bound")?;
        Ok(fleet)
    }

    async fn machine(
        &self,
        namespace: String,
        label: &str,
        volumes: usize,
    ) -> Result<(Machine, Vec<String>)> {
        let (name, uuid) = (unique("machine"), Uuid::new_v4());
        lab::machines::create(&self.client, &namespace, &name, &uuid.to_string(), ZONE).await?;
        let infra = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        lab::infra::register_node(infra, &name, &uuid.to_string(), ZONE, lab::infra::SIMULATED).await?;
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &namespace);
        let (mut claims, mut made) = (Vec::new(), Vec::new());
        for _ in 0..volumes {
            let claim = serde_json::from_value(json!({
                "metadata": {"name": unique("claim"), "labels": {"bench": label}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            }))?;
            let claim = api.create(&PostParams::default(), &claim).await?;
            made.push(format!("pvc-{}", claim.uid().context("a claim has no UID")?));
            claims.push(claim.name_any());
        }
        Ok((Machine { name, namespace, uuid, claims }, made))
    }

    /// Writes the machines' `spec.volumes` as their claims are, all at once; tells when each was written.
    pub(crate) async fn order(&self, machines: &[&Machine]) -> Result<HashMap<String, Instant>> {
        let mut writing = Vec::new();
        for machine in machines {
            writing.push(self.write(machine).boxed());
        }
        stream::iter(writing).buffer_unordered(AT_ONCE).try_collect().await
    }

    async fn write(&self, machine: &Machine) -> Result<(String, Instant)> {
        let api = lab::machines::api_in(&self.client, &machine.namespace);
        let entries: Vec<_> = machine
                .claims
                .iter()
                .map(|claim| {
                    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
                })
                .collect();
        let patch = json!({"spec": {"volumes": entries}});
        let start = Instant::now();
        api.patch(&machine.name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok((machine.name.clone(), start))
    }

    /// Waits until these machines have exactly the disks that they should; tells when each disk, by machine and claim,
    /// was first seen to be plugged.
    pub(crate) async fn settled(&self, machines: &[&Machine]) -> Result<HashMap<(String, String), Instant>> {
        let wanted: Vec<(&str, HashSet<String>)> = machines
            .iter()
            .map(|machine| {
                let entries = machine.claims.iter().map(|claim| names::volume_entry(claim));
                (machine.name.as_str(), entries.collect())
            })
            .collect();
        self.plugged.settled(&wanted).await
    }

    /// Whether a machine is off from now on.
    pub(crate) fn switch(&self, machine: &Machine, off: bool) -> Result<()> {
        let infra = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let dir = infra.simulated_root.join(machine.uuid.to_string());
        std::fs::create_dir_all(&dir)?;
        match off {
            true => std::fs::write(dir.join("off"), "")?,
            false => std::fs::remove_file(dir.join("off"))?,
        }
        Ok(())
    }

    /// Takes everything away again. No machine may have a disk.
    pub(crate) async fn remove(self) -> Result<()> {
        let infra = self.lab.infra()?;
        let gone = Seen::watch(
            Api::<PersistentVolume>::all(self.client.clone()),
            watcher::Config::default(),
            |_| true,
        );
        stream::iter(&self.machines)
            .map(anyhow::Ok)
            .try_for_each_concurrent(AT_ONCE, |machine| async {
                lab::machines::delete(&self.client, &machine.namespace, &machine.name).await?;
                infra.delete_node(machine.uuid).await?;
                let claims: Api<PersistentVolumeClaim> =
                    Api::namespaced(self.client.clone(), &machine.namespace);
                for claim in &machine.claims {
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

/// Which disks are plugged into which machine, with when that was first seen.
type Disks = HashMap<String, HashMap<String, Instant>>;

/// A watch over what machines say of their disks.
struct Plugged {
    disks: watch::Receiver<Disks>,
    watching: JoinHandle<()>,
}

impl Drop for Plugged {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Plugged {
    fn watch(client: &Client) -> Self {
        let (sender, disks) = watch::channel(Disks::new());
        let machines = watcher(lab::machines::api_everywhere(client), watcher::Config::default());
        let watching = tokio::spawn(async move {
            let machines = machines.default_backoff().applied_objects();
            pin_mut!(machines);
            while let Some(machine) = machines.next().await {
                // It tries again by itself.
                let Ok(machine) = machine else { continue };
                let now = Instant::now();
                sender.send_modify(|all| note(all.entry(machine.name_any()).or_default(), &machine, now));
            }
        });
        Self { disks, watching }
    }

    async fn settled(
        &self,
        wanted: &[(&str, HashSet<String>)],
    ) -> Result<HashMap<(String, String), Instant>> {
        let mut disks = self.disks.clone();
        let waiting = disks.wait_for(|all| {
            wanted.iter().all(|(machine, entries)| {
                let has = all.get(*machine);
                has.map_or(entries.is_empty(), |has| {
                    has.len() == entries.len() && has.keys().all(|entry| entries.contains(entry))
                })
            })
        });
        let all = tokio::time::timeout(LONGEST, waiting)
            .await
            .with_context(|| format!("disks of {} machines, within {LONGEST:?}", wanted.len()))?
            .context("the watch ended")?;
        let seen = wanted.iter().filter_map(|(machine, _)| Some((*machine, all.get(*machine)?)));
        Ok(seen
            .flat_map(|(machine, has)| {
                has.iter().map(move |(entry, at)| ((machine.to_owned(), entry.clone()), *at))
            })
            .collect())
    }
}

fn note(known: &mut HashMap<String, Instant>, machine: &VirtualMachine, now: Instant) {
    let status = machine.status.as_ref();
    let volumes = status.map(|status| status.volumes.as_slice()).unwrap_or_default();
    let plugged = volumes.iter().filter(|disk| disk.attached);
    // A disk that is leaving is still there.
    let plugged: HashSet<&str> =
        plugged.filter_map(|disk| names::entry_candidates(&disk.name).next()).collect();
    known.retain(|entry, _| plugged.contains(entry.as_str()));
    for entry in plugged {
        known.entry(entry.to_owned()).or_insert(now);
    }
}
