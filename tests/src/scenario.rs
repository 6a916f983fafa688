//! One test's world: connections, names of its own, and what it made.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use crds::names;
use infra_api::{Pool, PoolName, PoolSpec, VolumeId};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, Resource, ResourceExt};
use lab::{Lab, LoopNode};
use serde_json::json;

use crate::driver::{self, Driver};
use crate::{PATIENCE, eventually, unique};

/// The guest that the tests use.
const GUEST: &str = "g1";

/// Everything a test needs, and the record of what it made.
pub struct Scenario {
    /// The lab.
    pub lab: Lab,
    /// The scenario's own name, which is also that of its namespace in the guest.
    pub name: String,
    /// The guest's namespace in the management cluster.
    pub namespace: String,
    /// The guest's identity.
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
struct Made {
    claims: BTreeSet<String>,
    volumes: BTreeSet<VolumeId>,
    nodes: Vec<LoopNode>,
    guest_classes: Vec<String>,
    management_classes: Vec<String>,
    quotas: BTreeSet<String>,
    pool_labels: Vec<(PoolName, String)>,
    stopped: BTreeSet<String>,
}

/// Runs a test, removes what it made, however it ended, and then looks for what is left.
pub async fn run<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let scenario = Arc::new(Scenario::begin().await?);
    // In a task of its own, so that a failed assertion doesn't keep the cleaning from being done.
    let outcome = tokio::spawn(body(scenario.clone())).await;
    let cleaned = scenario.clean_up().await.context("cleaning up");
    match outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))) {
        Ok(()) => cleaned,
        Err(error) => match cleaned {
            Ok(()) => Err(error),
            Err(dirty) => Err(error.context(format!("(and afterwards: {dirty:#})"))),
        },
    }
}

/// Keeps the tests of one file apart that would disturb each other.
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

    fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a volume of the default class by a CSI call, and gives its handle.
    pub async fn volume(&self) -> Result<String> {
        let request = driver::new_volume(&self.csi_name(), 4 * crate::MIB, "nestor");
        Ok(self.driver.create(request).await?.volume_id)
    }

    /// A CSI name of the scenario's own; its volume is removed in the end.
    pub fn csi_name(&self) -> String {
        self.own(&unique(&self.name))
    }

    /// Counts the volume of a CSI name as the scenario's own.
    pub fn own(&self, csi_name: &str) -> String {
        self.made().claims.insert(self.claim_name(csi_name));
        csi_name.to_owned()
    }

    /// A machine that this host plays.
    pub async fn node(&self) -> Result<LoopNode> {
        let node = self.lab.add_loop_node(&unique("loop")).await?;
        self.made().nodes.push(node.clone());
        Ok(node)
    }

    /// Gives one of the infra's pools a label, until the scenario ends.
    pub async fn label_pool(&self, key: &str, value: &str) -> Result<()> {
        let pool = self.infra.list_pools().await?.into_iter().next().context("the infra has no pool")?;
        let name = pool.name.clone();
        self.made().pool_labels.push((name.clone(), key.to_owned()));
        let mut spec = spec_of(pool);
        spec.labels.insert(key.to_owned(), value.to_owned());
        self.infra.put_pool(&name, &spec).await?;
        Ok(())
    }

    /// Stops a part of the lab as its orchestrator would. It runs again when the scenario ends, at the latest.
    pub async fn stop_part(&self, part: &str) -> Result<()> {
        self.made().stopped.insert(part.to_owned());
        self.lab.stop(part).await
    }

    /// Kills a part of the lab as a crash would. It runs again when the scenario ends, at the latest.
    pub async fn kill_part(&self, part: &str) -> Result<()> {
        self.made().stopped.insert(part.to_owned());
        self.lab.kill(part).await
    }

    /// Starts a part of the lab again, and the sidecars that end when their driver does, as an orchestrator
    /// would.
    pub async fn start_part(&self, part: &str) -> Result<()> {
        self.lab.start(part).await?;
        if part == "mgmt-csi" {
            self.lab.restart("mgmt-provisioner").await?;
        }
        Ok(())
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

    pub(crate) fn new_quota(&self, class: &str) -> String {
        self.made().quotas.insert(class.to_owned());
        class.to_owned()
    }

    /// Notes every management claim of the scenario and the infra volume behind it.
    async fn take_stock(&self) -> Result<()> {
        let claims = self.claims().list(&ListParams::default()).await?;
        for claim in claims.into_iter().filter(|claim| self.is_own(claim)) {
            self.made().claims.insert(claim.name_any());
            if let Some(uid) = claim.uid() {
                // The name that csi-provisioner gives, which the infra has as the volume's id.
                self.made().volumes.insert(VolumeId::new(format!("pvc-{uid}"))?);
            }
        }
        Ok(())
    }

    fn is_own(&self, claim: &PersistentVolumeClaim) -> bool {
        self.made().claims.contains(&claim.name_any())
            || claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&self.name)
    }

    async fn clean_up(&self) -> Result<()> {
        let stopped = std::mem::take(&mut self.made().stopped);
        for part in stopped {
            self.start_part(&part).await?;
        }
        self.take_stock().await?;
        self.clean_orders().await?;
        self.clean_nodes().await?;
        self.clean_guest().await?;
        let claims = self.made().claims.clone();
        for claim in &claims {
            eventually(&format!("volume {claim} deleted"), PATIENCE, || async {
                Ok(self.driver.delete(claim).await.map_err(|status| format!("{status}")))
            })
            .await?;
        }
        let quotas = std::mem::take(&mut self.made().quotas);
        for quota in quotas {
            delete(&self.quotas(), &quota).await?;
        }
        let classes = std::mem::take(&mut self.made().guest_classes);
        for class in classes {
            delete(&Api::<StorageClass>::all(self.guest.clone()), &class).await?;
        }
        let classes = std::mem::take(&mut self.made().management_classes);
        for class in classes {
            delete(&Api::<StorageClass>::all(self.management.clone()), &class).await?;
        }
        self.nothing_is_left().await?;
        let labels = std::mem::take(&mut self.made().pool_labels);
        for (name, key) in labels {
            let pool = self.infra.get_pool(&name).await?.context("a pool went away")?;
            let mut spec = spec_of(pool);
            spec.labels.remove(&key);
            self.infra.put_pool(&name, &spec).await?;
        }
        Ok(())
    }

    async fn clean_orders(&self) -> Result<()> {
        let own = ListParams::default().labels(&format!("test={}", self.name));
        let orders = self.guest_attachments();
        for order in orders.list(&own).await? {
            delete(&orders, &order.name_any()).await?;
        }
        gone("storage.k8s.io/VolumeAttachments of the guest", || async {
            Ok(orders.list(&own).await?.items.iter().map(ResourceExt::name_any).collect())
        })
        .await
    }

    async fn clean_guest(&self) -> Result<()> {
        let claims = self.guest_claims();
        for claim in claims.list(&ListParams::default()).await? {
            delete(&claims, &claim.name_any()).await?;
        }
        gone("volumes of the guest", || async {
            let volumes = self.guest_volumes().list(&ListParams::default()).await?;
            let own = volumes.iter().filter(|volume| {
                let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
                claim.and_then(|claim| claim.namespace.as_ref()) == Some(&self.name)
            });
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        delete(&Api::<Namespace>::all(self.guest.clone()), &self.name).await
    }

    /// Detaches whatever the scenario's machines still have, and removes them.
    async fn clean_nodes(&self) -> Result<()> {
        let nodes = std::mem::take(&mut self.made().nodes);
        for node in nodes {
            let entries = self.machines().get_opt(&node.name).await?.map(|machine| machine.spec.volumes);
            for claim in entries.unwrap_or_default().into_iter().filter_map(|e| e.persistent_volume_claim) {
                let claim = claim.claim_name;
                eventually(&format!("{claim} detached from {}", node.name), PATIENCE, || async {
                    Ok(self.driver.unpublish(&claim, &node.name).await.map_err(|status| format!("{status}")))
                })
                .await?;
            }
            self.nothing_is_attached(&node).await?;
            self.lab.remove_loop_node(&node.name).await?;
        }
        Ok(())
    }

    /// Waits until the infra and our attachments are free of a machine.
    pub async fn nothing_is_attached(&self, node: &LoopNode) -> Result<()> {
        let uuid = node.uuid.to_string();
        gone(&format!("VolumeAttachments of {}", node.name), || async {
            let list = self.attachments().list(&ListParams::default()).await?;
            let own = list.iter().filter(|one| one.spec.node_uuid.eq_ignore_ascii_case(&uuid));
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone(&format!("attachments of {} in the infra", node.name), || async {
            let list = self.infra.list_attachments(Some(uuid.parse()?), None).await?;
            Ok(list.iter().map(|one| format!("{} ({})", one.id, one.state)).collect())
        })
        .await?;
        let disks: Vec<_> = std::fs::read_dir(&node.by_id_dir).map(Iterator::collect).unwrap_or_default();
        if !disks.is_empty() {
            bail!("{} still shows disks: {disks:?}", node.name);
        }
        Ok(())
    }

    /// Waits until neither tier nor the infra holds anything of the scenario's volumes.
    pub async fn nothing_is_left(&self) -> Result<()> {
        let (claims, volumes) = {
            let made = self.made();
            (made.claims.clone(), made.volumes.clone())
        };
        gone("management claims", || async {
            let list = self.claims().list(&ListParams::default()).await?;
            Ok(list.iter().filter(|claim| self.is_own(claim)).map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("management volumes", || async {
            let list = self.volumes().list(&ListParams::default()).await?;
            let of_own = |name: Option<&String>| name.is_some_and(|name| claims.contains(name));
            let own = list.iter().filter(|volume| {
                let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
                of_own(claim.and_then(|claim| claim.name.as_ref()))
            });
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("VolumeAttachments", || async {
            let list = self.attachments().list(&ListParams::default()).await?;
            let own = list.iter().filter(|one| claims.contains(&one.spec.volume_name));
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("volumes of the infra", || async {
            let list = self.infra.list_volumes(None, None).await?.items;
            let own = list.iter().filter(|volume| {
                volumes.contains(&volume.id)
                    || volume.labels.get("pvc").is_some_and(|claim| claims.contains(claim))
            });
            Ok(own.map(|volume| volume.id.to_string()).collect())
        })
        .await
    }
}

/// What would register a pool as it is.
fn spec_of(pool: Pool) -> PoolSpec {
    PoolSpec { engine: pool.engine, path: pool.path, labels: pool.labels, cordoned: pool.cordoned }
}

/// Deletes an object that may be gone.
async fn delete<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete {name}")),
    }
}

/// Waits until a list is empty.
pub(crate) async fn gone<F, R>(what: &str, list: F) -> Result<()>
where
    F: Fn() -> R,
    R: Future<Output = Result<Vec<String>>>,
{
    eventually(&format!("no {what} left"), PATIENCE, || async {
        let left = list().await?;
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
    })
    .await
}
