//! Scenario: the clients of one test, its unique names, and a record of the objects it created.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use crds::names;
use infra_api::{PoolName, VolumeId};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use kube::api::{Api, DynamicObject, PostParams};
use kube::{Client, ResourceExt};
use lab::state::Guest;
use lab::{Lab, LoopNode};
use rustix::process::Pid;
use serde_json::json;

use crate::driver::{self, Driver};
use crate::own_namespace::OwnNamespace;
use crate::own_pool::OwnPool;
use crate::paused_process::PausedProcess;
use crate::unique;

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
    created: Mutex<Created>,
}

/// What the scenario created and stopped, for the cleanup.
#[derive(Default)]
pub(crate) struct Created {
    pub(crate) claims: BTreeSet<String>,
    pub(crate) volumes: BTreeSet<VolumeId>,
    pub(crate) nodes: Vec<(LoopNode, Driver)>,
    pub(crate) second_guest_volumes: bool,
    pub(crate) guest_classes: Vec<String>,
    pub(crate) management_classes: Vec<String>,
    pub(crate) management_claims: Vec<String>,
    pub(crate) snapshot_classes: Vec<String>,
    pub(crate) management_snapshots: BTreeSet<String>,
    pub(crate) attributes_classes: Vec<String>,
    pub(crate) pools: Vec<OwnPool>,
    pub(crate) quotas: BTreeSet<String>,
    pub(crate) budgets: Vec<String>,
    pub(crate) pool_labels: Vec<(PoolName, String)>,
    pub(crate) stopped: BTreeSet<String>,
    pub(crate) namespaces: Vec<OwnNamespace>,
    /// Guests with accounts in the management cluster.
    pub(crate) accounts: Vec<Guest>,
    /// Roles and bindings of accounts whose rights a test changes.
    pub(crate) role_objects: Vec<(Client, serde_json::Value)>,
    /// Nodes in the storage infra that belong to these namespaces.
    pub(crate) infra_nodes: Vec<uuid::Uuid>,
}

/// gc-csi's Controller service. In a lab whose Nestor runs in pods, its socket is not on this host: all calls fail.
async fn driver(lab: &Lab) -> Result<Driver> {
    let socket = lab.controller_socket(GUEST)?;
    if lab.deployment().is_ok() { Driver::at(&socket) } else { Driver::connect(&socket).await }
}

impl Scenario {
    /// Connects to the lab and creates the namespace of the scenario.
    pub(crate) async fn begin() -> Result<Self> {
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
            driver: driver(&lab).await?,
            lab,
            created: Mutex::default(),
        })
    }

    pub(crate) fn created(&self) -> MutexGuard<'_, Created> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a volume of the default class with a CSI call; returns its handle.
    pub async fn volume(&self) -> Result<String> {
        let request = driver::new_volume(&self.csi_name(), 4 * crate::MIB, "nestor");
        Ok(self.driver.create(request).await?.volume_id)
    }

    /// Name of the management claim for a CSI volume name.
    pub fn claim_name(&self, csi_name: &str) -> String {
        names::management_pvc("pvc", &self.cluster_id, csi_name)
    }

    /// A unique CSI name; its volume is deleted when the scenario ends.
    pub fn csi_name(&self) -> String {
        self.own(&unique(&self.name))
    }

    /// Adds the volume of a CSI name to the cleanup.
    pub fn own(&self, csi_name: &str) -> String {
        self.created().claims.insert(self.claim_name(csi_name));
        csi_name.to_owned()
    }

    /// Creates a loop node.
    pub async fn node(&self) -> Result<LoopNode> {
        let node = self.lab.add_loop_node(&unique("loop")).await?;
        self.own_node(node.clone(), self.driver.clone());
        Ok(node)
    }

    /// Creates the object of a VM that libvirt has as a domain.
    pub async fn domain_node(&self, name: &str, uuid: uuid::Uuid) -> Result<LoopNode> {
        let node = self.lab.add_domain_node(GUEST, name, uuid).await?;
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
        self.created().nodes.push((node, driver));
    }

    /// Adds the volumes of the second guest to the cleanup.
    pub(crate) fn own_second_volume(&self) {
        self.created().second_guest_volumes = true;
    }

    /// Stops a component of the lab with SIGTERM. It is started again when the scenario ends, at the latest.
    pub async fn stop_component(&self, component: &str) -> Result<()> {
        self.created().stopped.insert(component.to_owned());
        self.lab.stop(component).await
    }

    /// Kills a component of the lab, like a crash. It is started again when the scenario ends, at the latest.
    pub async fn kill_component(&self, component: &str) -> Result<()> {
        self.created().stopped.insert(component.to_owned());
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
        self.created().guest_classes.push(name.clone());
        name
    }

    pub(crate) fn new_management_class(&self) -> String {
        let name = unique(&self.name);
        self.created().management_classes.push(name.clone());
        name
    }

    /// Adds a management claim that gc-csi does not create to the cleanup.
    pub fn new_management_claim(&self) -> String {
        let name = unique(&self.name);
        let mut created = self.created();
        created.management_claims.push(name.clone());
        created.claims.insert(name.clone());
        name
    }

    pub(crate) fn new_snapshot_class(&self) -> String {
        let name = unique(&self.name);
        self.created().snapshot_classes.push(name.clone());
        name
    }

    /// Adds a management snapshot to the cleanup.
    pub(crate) fn own_snapshot(&self, name: String) -> String {
        self.created().management_snapshots.insert(name.clone());
        name
    }

    pub(crate) fn is_own_snapshot(&self, snapshot: &DynamicObject) -> bool {
        self.created().management_snapshots.contains(&snapshot.name_any())
            || snapshot.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&self.name)
    }

    pub(crate) fn new_attributes_class(&self) -> String {
        let name = unique(&self.name);
        self.created().attributes_classes.push(name.clone());
        name
    }

    pub(crate) fn new_quota(&self, class: &str) -> String {
        self.created().quotas.insert(class.to_owned());
        class.to_owned()
    }

    pub(crate) fn is_own(&self, claim: &PersistentVolumeClaim) -> bool {
        self.created().claims.contains(&claim.name_any())
            || claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&self.name)
    }
}
