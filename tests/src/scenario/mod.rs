//! Scenario: the clients of one test, its unique names, and a record of the objects it created.

mod cleanup;
mod leftovers;
mod objects;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow};
use crds::names;
use infra_api::{PoolName, VolumeId};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use kube::api::{Api, DynamicObject, PostParams};
use kube::{Client, ResourceExt};
use lab::{Lab, LoopNode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::driver::{self, Driver};
use crate::own_namespace::OwnNamespace;
use crate::pools::OwnPool;
use crate::unique;

pub(crate) use objects::{delete, gone, set_policy};

/// The guest that the tests use.
pub(crate) const GUEST: &str = "g1";

/// Everything a test needs, and the record of what it created.
pub struct Scenario {
    /// The lab.
    pub lab: Lab,
    /// Name of the scenario and of its namespace in the guest.
    pub name: String,
    /// The guest's namespace in the management cluster.
    pub namespace: String,
    /// The guest's cluster ID.
    pub cluster_id: String,
    /// The guest cluster, as its administrator.
    pub guest: Client,
    /// The management cluster, as its administrator.
    pub management: Client,
    /// The storage infra.
    pub infra: infra_api::Client,
    /// gc-csi's Controller service.
    pub driver: Driver,
    made: Mutex<Made>,
}

#[derive(Default)]
pub(crate) struct Made {
    claims: BTreeSet<String>,
    volumes: BTreeSet<VolumeId>,
    nodes: Vec<(LoopNode, Driver)>,
    second_guest_volumes: bool,
    guest_classes: Vec<String>,
    management_classes: Vec<String>,
    management_claims: Vec<String>,
    snapshot_classes: Vec<String>,
    management_snapshots: BTreeSet<String>,
    attributes_classes: Vec<String>,
    pub(crate) pools: Vec<OwnPool>,
    quotas: BTreeSet<String>,
    pub(crate) pool_labels: Vec<(PoolName, String)>,
    stopped: BTreeSet<String>,
    pub(crate) places: Vec<OwnNamespace>,
    pub(crate) machines: Vec<uuid::Uuid>,
}

/// A paused process (SIGSTOP) that continues when this is dropped.
pub struct PausedProcess(Pid);

impl PausedProcess {
    pub(crate) fn stop(pid: Pid) -> Result<Self> {
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }
}

impl Drop for PausedProcess {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Runs a test, removes its objects and checks for leftovers, whether the test succeeded or not.
pub async fn run<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let scenario = Arc::new(Scenario::begin().await?);
    // In its own task, so that a failed assertion does not skip the cleanup.
    let outcome = tokio::spawn(body(scenario.clone())).await;
    let cleaned = scenario.clean_up().await.context("cleanup");
    match outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))) {
        Ok(()) => cleaned,
        Err(error) => match cleaned {
            Ok(()) => Err(error),
            Err(dirty) => Err(error.context(format!("(the cleanup failed too: {dirty:#})"))),
        },
    }
}

/// Serializes tests of one program that would disturb each other.
pub async fn alone() -> tokio::sync::MutexGuard<'static, ()> {
    static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    ALONE.lock().await
}

impl Scenario {
    async fn begin() -> Result<Self> {
        let lab = Lab::from_env()?;
        let guest = lab.guest(GUEST).await?;
        let name = unique("test");
        let namespace = json!({"metadata": {"name": name}});
        let namespaces: Api<Namespace> = Api::all(guest.clone());
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace)?).await?;
        Ok(Self {
            name,
            namespace: lab.guest_namespace(GUEST)?,
            cluster_id: lab.cluster_id(GUEST)?,
            guest,
            management: lab.management().await?,
            infra: lab.infra()?,
            driver: Driver::connect(&lab.controller_socket(GUEST)?).await?,
            lab,
            made: Mutex::default(),
        })
    }

    pub(crate) fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a volume of the default class with a CSI call; returns its handle.
    pub async fn volume(&self) -> Result<String> {
        let request = driver::new_volume(&self.csi_name(), 4 * crate::MIB, "nestor");
        Ok(self.driver.create(request).await?.volume_id)
    }

    /// A unique CSI name; its volume is deleted when the scenario ends.
    pub fn csi_name(&self) -> String {
        self.own(&unique(&self.name))
    }

    /// Adds the volume of a CSI name to the cleanup.
    pub fn own(&self, csi_name: &str) -> String {
        self.made().claims.insert(self.claim_name(csi_name));
        csi_name.to_owned()
    }

    /// Creates a loop node.
    pub async fn node(&self) -> Result<LoopNode> {
        let node = self.lab.add_loop_node(&unique("loop")).await?;
        self.own_node(node.clone(), self.driver.clone());
        Ok(node)
    }

    /// Creates a simulated node that csi-attacher can attach to.
    pub async fn simulated_node(&self) -> Result<LoopNode> {
        let node = self.lab.add_simulated_node(GUEST, &unique("vm")).await?;
        self.own_node(node.clone(), self.driver.clone());
        self.lab.join_guest(&node).await?;
        Ok(node)
    }

    /// Adds a node to the cleanup, which detaches its disks with this driver.
    pub(crate) fn own_node(&self, node: LoopNode, driver: Driver) {
        self.made().nodes.push((node, driver));
    }

    /// Adds the volumes of the second guest to the cleanup.
    pub(crate) fn own_second_volume(&self) {
        self.made().second_guest_volumes = true;
    }

    /// Stops a component of the lab with SIGTERM. It is started again when the scenario ends, at the latest.
    pub async fn stop_component(&self, component: &str) -> Result<()> {
        self.made().stopped.insert(component.to_owned());
        self.lab.stop(component).await
    }

    /// Kills a component of the lab, like a crash. It is started again when the scenario ends, at the latest.
    pub async fn kill_component(&self, component: &str) -> Result<()> {
        self.made().stopped.insert(component.to_owned());
        self.lab.kill(component).await
    }

    /// Pauses a component of the lab (SIGSTOP) until the result is dropped.
    pub fn pause_component(&self, component: &str) -> Result<PausedProcess> {
        let pid = self.lab.pid(component).and_then(Pid::from_raw);
        PausedProcess::stop(pid.with_context(|| format!("{component} is not running"))?)
    }

    /// Starts a component of the lab again, and the sidecars that exited with it.
    pub async fn start_component(&self, component: &str) -> Result<()> {
        self.lab.start(component).await
    }

    pub(crate) fn new_guest_class(&self) -> String {
        let name = unique(&self.name);
        self.made().guest_classes.push(name.clone());
        name
    }

    pub(crate) fn new_management_class(&self) -> String {
        let name = unique(&self.name);
        self.made().management_classes.push(name.clone());
        name
    }

    /// Adds a management claim that gc-csi does not create to the cleanup.
    pub(crate) fn new_management_claim(&self) -> String {
        let name = unique(&self.name);
        let mut made = self.made();
        made.management_claims.push(name.clone());
        made.claims.insert(name.clone());
        name
    }

    pub(crate) fn new_snapshot_class(&self) -> String {
        let name = unique(&self.name);
        self.made().snapshot_classes.push(name.clone());
        name
    }

    /// Adds a management snapshot to the cleanup.
    pub(crate) fn own_snapshot(&self, name: String) -> String {
        self.made().management_snapshots.insert(name.clone());
        name
    }

    pub(crate) fn is_own_snapshot(&self, snapshot: &DynamicObject) -> bool {
        self.made().management_snapshots.contains(&snapshot.name_any())
            || snapshot.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&self.name)
    }

    pub(crate) fn new_attributes_class(&self) -> String {
        let name = unique(&self.name);
        self.made().attributes_classes.push(name.clone());
        name
    }

    pub(crate) fn new_quota(&self, class: &str) -> String {
        self.made().quotas.insert(class.to_owned());
        class.to_owned()
    }

    fn is_own(&self, claim: &PersistentVolumeClaim) -> bool {
        self.made().claims.contains(&claim.name_any())
            || claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&self.name)
    }
}
