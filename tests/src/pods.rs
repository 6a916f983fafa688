//! Pods on the guest's VMs: small scripts whose output is read from the termination message, so that no kubelet has to
//! be reachable from outside.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use crds::names;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::wait::{Condition, await_condition};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::backing::Backing;
use crate::cleanup::{alone, beside_others, run_and_clean_up};
pub use crate::script::Script;
use crate::script::{phase, termination_message};
use crate::{Scenario, eventually, guest};

/// How long a pod may take from creation to exit: VMs can be emulated, and share this host.
pub(crate) const POD: Duration = Duration::from_secs(600);
/// How long a pod or disk may take to be removed: kubelet reports the volumes in use only every 10 s.
pub const GONE: Duration = Duration::from_secs(400);
/// The only image in the VMs.
pub const IMAGE: &str = "localhost/busybox:1";

/// Limits the number of tests that use the VMs at once, because the VMs are small.
static SLOTS: Semaphore = Semaphore::const_new(3);
/// Alternates the VM on which tests start.
static TURN: AtomicUsize = AtomicUsize::new(0);

/// A scenario with two VMs for its pods.
pub struct PodScenario {
    scenario: Arc<Scenario>,
    /// The node to start on.
    pub first_node: String,
    /// The node to move to.
    pub second_node: String,
    bound: Arc<Mutex<Vec<Volume>>>,
}

/// A bound claim with the objects and the file behind it.
#[derive(Debug, Clone)]
pub struct Volume {
    /// The guest's claim.
    pub claim: String,
    /// The guest's PersistentVolume.
    pub pv: String,
    /// Its volume handle, which is the management claim's name.
    pub handle: String,
    /// The file with its data.
    pub file: PathBuf,
    /// The disk UUID.
    pub disk: String,
}

/// Options of a claim.
#[derive(Debug, Clone, Default)]
pub struct ClaimOptions {
    /// `ext4`, `xfs`, `btrfs`, or `None` for a raw block device.
    pub filesystem: Option<&'static str>,
    /// The StorageClass's `mountOptions`.
    pub options: &'static [&'static str],
    /// The management StorageClass; default `nestor`.
    pub class: Option<String>,
    /// Merged into the claim's spec, which is ReadWriteOnce and 320 MiB: xfs needs at least 300 MiB.
    pub more: Value,
}

/// A claim with this filesystem and no mount options.
pub fn filesystem(name: &'static str) -> ClaimOptions {
    ClaimOptions { filesystem: Some(name), ..ClaimOptions::default() }
}

/// A claim with `volumeMode: Block`.
pub fn block() -> ClaimOptions {
    ClaimOptions::default()
}

/// Runs a test as a scenario. When it ends, its pods are removed first, and all disks must be detached before the
/// scenario cleans up.
pub async fn run<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<PodScenario>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let _slot = SLOTS.acquire().await.context("the semaphore is never closed")?;
    let _beside_others = beside_others().await;
    run_with_pods(body).await
}

/// Runs a test as [`run`] does, while no other scenario of this program runs.
pub async fn run_alone<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<PodScenario>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let _alone = alone().await;
    run_with_pods(body).await
}

async fn run_with_pods<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<PodScenario>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let bound = Arc::new(Mutex::new(Vec::new()));
    let volumes = bound.clone();
    run_and_clean_up(|scenario| async move {
        let pods = Arc::new(PodScenario::new(scenario, volumes).await?);
        let outcome = tokio::spawn(body(pods.clone())).await.unwrap_or_else(|panic| Err(anyhow!("{panic}")));
        let outcome = match outcome {
            Ok(()) => Ok(()),
            Err(error) => Err(anyhow!("{error:#}\n{}", pods.describe().await)),
        };
        let cleaned = pods.remove_pods().await.context("removing pods");
        outcome.and(cleaned)
    })
    .await?;
    let left: Vec<PathBuf> =
        lock(&bound).iter().map(|one| one.file.clone()).filter(|file| file.exists()).collect();
    ensure!(left.is_empty(), "files of volumes are left: {left:?}");
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PodScenario {
    async fn new(scenario: Arc<Scenario>, bound: Arc<Mutex<Vec<Volume>>>) -> Result<Self> {
        let nodes = scenario.lab.vms();
        let turn = TURN.fetch_add(1, Ordering::Relaxed) % 2;
        let [first, second] = [turn, 1 - turn].map(|index| nodes.get(index).cloned());
        let (first_node, second_node) =
            first.zip(second).context("the guest needs two nodes: `cargo lab up --vms 2`")?;
        let pods = Self { scenario, first_node, second_node, bound };
        // Pods are rejected until their namespace has its ServiceAccount.
        let exists = |account: Option<&ServiceAccount>| account.is_some();
        pods.wait("default", "created", crate::PATIENCE, exists).await?;
        Ok(pods)
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.scenario.guest.clone(), &self.scenario.name)
    }

    async fn wait<K>(
        &self,
        name: &str,
        what: &str,
        limit: Duration,
        condition: impl Condition<K>,
    ) -> Result<Option<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
        K: Clone + std::fmt::Debug + Send + DeserializeOwned + 'static,
    {
        let waited = tokio::time::timeout(limit, await_condition(self.api(), name, condition)).await;
        Ok(waited.with_context(|| format!("{} {name} {what}: not within {limit:?}", K::kind(&())))??)
    }

    // ---- volumes ----

    /// Creates a StorageClass and a claim, and returns the bound volume.
    pub async fn claim(&self, name: &str, options: &ClaimOptions) -> Result<Volume> {
        let class = self.scenario.new_guest_class();
        let management_class = options.class.as_deref().unwrap_or("nestor");
        let mut parameters = json!({names::PARAMETER_MANAGEMENT_CLASS: management_class});
        if let Some(filesystem) = options.filesystem {
            parameters["csi.storage.k8s.io/fstype"] = json!(filesystem);
        }
        let storage_class: StorageClass = serde_json::from_value(json!({
            "metadata": {"name": class}, "provisioner": names::GUEST_DRIVER, "parameters": parameters,
            "reclaimPolicy": "Delete", "mountOptions": options.options, "allowVolumeExpansion": true,
        }))?;
        Api::all(self.scenario.guest.clone()).create(&PostParams::default(), &storage_class).await?;
        let mode = if options.filesystem.is_some() { "Filesystem" } else { "Block" };
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": class, "volumeMode": mode,
            "resources": {"requests": {"storage": "320Mi"}},
        });
        // Merging null would clear the spec.
        if !options.more.is_null() {
            json_patch::merge(&mut spec, &options.more);
        }
        let claim: PersistentVolumeClaim =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
        self.api().create(&PostParams::default(), &claim).await?;
        self.bound_volume(name).await
    }

    /// Waits until a claim is bound, and returns its volume.
    pub async fn bound_volume(&self, name: &str) -> Result<Volume> {
        let (_, pv) = self.scenario.bound(name).await?;
        let handle = guest::handle(&pv)?;
        let Backing { file, disk } = self.scenario.backing(&handle).await?;
        let volume = Volume { claim: name.to_owned(), pv: pv.name_any(), handle, file, disk };
        lock(&self.bound).push(volume.clone());
        Ok(volume)
    }

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Waits until the disk is detached from all VMs: in the guest, the management cluster and the hypervisor.
    pub async fn detached(&self, volume: &Volume) -> Result<()> {
        eventually(&format!("disk {} is detached", volume.disk), GONE, || async {
            let left = self.remaining_attachments(volume).await?;
            Ok(if left.is_empty() { Ok(()) } else { Err(left.join(", ")) })
        })
        .await
    }

    async fn remaining_attachments(&self, volume: &Volume) -> Result<Vec<String>> {
        let all = ListParams::default();
        let mut left = Vec::new();
        for one in self.scenario.guest_attachments().list(&all).await? {
            if one.spec.source.persistent_volume_name.as_ref() == Some(&volume.pv) {
                left.push(format!("storage.k8s.io/VolumeAttachment {}", one.name_any()));
            }
        }
        if self.scenario.lab.has_kubevirt() {
            left.extend(self.scenario.kubevirt_entries(&volume.handle).await?);
            return Ok(left);
        }
        for one in self.scenario.attachments().list(&all).await? {
            if one.spec.volume_name.as_str() == volume.handle {
                left.push(format!("VolumeAttachment {}", one.name_any()));
            }
        }
        for vm in self.scenario.vms().list(&all).await? {
            let claims = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
            if claims.into_iter().any(|claim| claim.claim_name.as_str() == volume.handle) {
                left.push(format!("an entry in VirtualMachine {}", vm.name_any()));
            }
        }
        for node in self.scenario.lab.domains().await? {
            match self.scenario.lab.libvirt_disks(&node).await {
                Ok(disks) if !disks.contains(&volume.disk) => {}
                Ok(_) => left.push(format!("a disk in domain {node}")),
                // It may have been removed meanwhile.
                Err(error) => left.push(format!("{error:#}")),
            }
        }
        Ok(left)
    }

    /// Waits until nothing is left of a volume whose claim was deleted: in the guest, the management cluster and the pool.
    pub async fn deleted(&self, volume: &Volume) -> Result<()> {
        eventually(&format!("volume {} is deleted", volume.handle), GONE, || async {
            let mut left = Vec::new();
            if self.scenario.guest_volumes().get_opt(&volume.pv).await?.is_some() {
                left.push(format!("guest PersistentVolume {}", volume.pv));
            }
            if self.scenario.claims().get_opt(&volume.handle).await?.is_some() {
                left.push(format!("management PersistentVolumeClaim {}", volume.handle));
            }
            if volume.file.exists() {
                left.push(volume.file.display().to_string());
            }
            Ok(if left.is_empty() { Ok(()) } else { Err(left.join(", ")) })
        })
        .await
    }

    // ---- pods ----

    /// Runs a pod until it exits, removes it, and returns its output.
    pub async fn run(&self, script: Script) -> Result<String> {
        let name = self.start(script).await?;
        let output = self.finish(&name).await?;
        self.remove(&name).await?;
        Ok(output)
    }

    /// Creates a pod and returns its name.
    pub async fn start(&self, script: Script) -> Result<String> {
        Ok(self.api::<Pod>().create(&PostParams::default(), &script.pod()?).await?.name_any())
    }

    /// Waits until the pod's container runs.
    pub async fn running(&self, pod: &str) -> Result<Pod> {
        let has_started = |pod: Option<&Pod>| matches!(phase(pod), Some("Running" | "Succeeded" | "Failed"));
        let pod = self.wait(pod, "running", POD, has_started).await?.context("the pod is gone")?;
        ensure!(
            phase(Some(&pod)) == Some("Running"),
            "pod {} ended: {:?}",
            pod.name_any(),
            termination_message(&pod)
        );
        Ok(pod)
    }

    /// Waits until the pod has exited, and returns its output. Fails if the script failed.
    pub async fn finish(&self, pod: &str) -> Result<String> {
        let has_ended = |pod: Option<&Pod>| matches!(phase(pod), Some("Succeeded" | "Failed"));
        let pod = self.wait(pod, "ended", POD, has_ended).await?.context("the pod is gone")?;
        let output = termination_message(&pod).unwrap_or_default();
        ensure!(
            phase(Some(&pod)) == Some("Succeeded"),
            "the script of pod {} failed: {output}",
            pod.name_any()
        );
        Ok(output)
    }

    /// Deletes a pod and waits until it is gone.
    pub async fn remove(&self, pod: &str) -> Result<()> {
        let soon = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
        let Some(left) = self.api::<Pod>().delete(pod, &soon).await?.left() else { return Ok(()) };
        let uid = left.uid().unwrap_or_default();
        let is_gone = kube::runtime::conditions::is_deleted(&uid);
        self.wait::<Pod>(pod, "gone", GONE, is_gone).await.map(drop)
    }

    /// Waits for a FailedMount event of a pod whose message contains all of `expected`; returns the message.
    pub async fn mount_failure(&self, pod: &str, expected: &[&str]) -> Result<String> {
        let api = self.api::<Event>();
        let of_pod = ListParams::default().fields(&format!("involvedObject.name={pod},reason=FailedMount"));
        eventually(&format!("event FailedMount of pod {pod} with {expected:?}"), POD, || async {
            let events = api.list(&of_pod).await?.items;
            let messages: Vec<String> = events.into_iter().filter_map(|event| event.message).collect();
            let found = messages.iter().find(|message| expected.iter().all(|word| message.contains(word)));
            Ok(found.cloned().ok_or_else(|| messages.join(" | ")))
        })
        .await
    }

    /// Waits until kubelet reports why the pod's container is waiting; returns the reason.
    pub async fn waiting_reason(&self, pod: &str) -> Result<String> {
        eventually(&format!("the container of pod {pod} waits"), crate::PATIENCE, || async {
            let status = self.api::<Pod>().get(pod).await?.status.unwrap_or_default();
            let container = status.container_statuses.as_ref().and_then(|all| all.first());
            let waiting = container.and_then(|container| container.state.as_ref()?.waiting.as_ref());
            let reason = waiting.and_then(|waiting| waiting.reason.clone());
            Ok(reason.ok_or_else(|| format!("{status:?}")))
        })
        .await
    }

    /// Waits until kubelet reports at least `least` used bytes of a pod's volume; returns used bytes and capacity.
    pub async fn usage(&self, node: &str, pod_uid: &str, claim: &str, least: u64) -> Result<(u64, u64)> {
        let kubelet = self.scenario.lab.kubelet(node).await?;
        eventually(&format!("kubelet of {node} reports the usage of {claim}"), GONE, || async {
            let request = http::Request::get("/stats/summary").body(Vec::new())?;
            // The request fails if any container exits meanwhile.
            let summary: Value = match kubelet.request(request).await {
                Ok(summary) => summary,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let of = |list: &Value, is_it: &dyn Fn(&Value) -> bool| {
                list.as_array()?.iter().find(|one| is_it(one)).cloned()
            };
            let pod = of(&summary["pods"], &|pod| pod["podRef"]["uid"] == pod_uid).unwrap_or_default();
            let volume = of(&pod["volume"], &|volume| volume["pvcRef"]["name"] == claim).unwrap_or_default();
            let numbers = volume["usedBytes"].as_u64().zip(volume["capacityBytes"].as_u64());
            let full = numbers.filter(|(used, _)| *used >= least);
            Ok(full.ok_or_else(|| if volume.is_null() { format!("{pod}") } else { format!("{volume}") }))
        })
        .await
    }

    /// Removes all pods, and waits until their disks are detached.
    async fn remove_pods(&self) -> Result<()> {
        self.remove_sets().await?;
        for pod in self.api::<Pod>().list(&ListParams::default()).await? {
            self.remove(&pod.name_any()).await?;
        }
        let volumes = lock(&self.bound).clone();
        for volume in volumes {
            self.detached(&volume).await?;
        }
        Ok(())
    }

    /// Pods and events, for the error message of a failed test.
    async fn describe(&self) -> String {
        let all = ListParams::default();
        let mut lines = vec![format!("objects in guest namespace {}:", self.scenario.name)];
        for pod in self.api::<Pod>().list(&all).await.map(|list| list.items).unwrap_or_default() {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("no node");
            let phase = phase(Some(&pod)).unwrap_or_default();
            lines.push(format!(
                "pod {} on {node}: {phase} {}",
                pod.name_any(),
                termination_message(&pod).unwrap_or_default()
            ));
        }
        for event in self.api::<Event>().list(&all).await.map(|list| list.items).unwrap_or_default() {
            let about = event.involved_object.name.unwrap_or_default();
            let (reason, message) = (event.reason.unwrap_or_default(), event.message.unwrap_or_default());
            lines.push(format!("{about}: {reason}: {message}"));
        }
        lines.join("\n  ")
    }
}
