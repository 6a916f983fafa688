//! Guests and VMs that exist only in a scenario's own management namespace.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use infra_api::{Volume, VolumeId};
use kube::Client;
use lab::cluster::{
    prepare_guest_account, prepare_guest_kubevirt, prepare_guest_namespace, remove_guest_account,
};
use lab::state::Guest;
use lab::{LoopNode, infra, virtual_machines};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::chart::{self, Chart};
use crate::driver::{Driver, new_volume};
use crate::objects::gone;
use crate::own_namespace::OwnNamespace;
use crate::program::{Controller, management_cluster};
use crate::scenario::GUEST;
use crate::{MIB, PATIENCE, Scenario, eventually, unique};

/// A guest of an [`OwnNamespace`]. It uses the first guest's API server, but none of its objects.
pub struct Tenant {
    /// Name of the guest and of its Cluster object.
    pub name: String,
    /// Name of its ServiceAccount in the management cluster.
    pub account: String,
    /// Its cluster ID.
    pub cluster_id: String,
    /// The kubeconfig of its account in the management cluster.
    pub kubeconfig: PathBuf,
    /// A client of the management cluster with that account.
    pub client: Client,
    namespace: OwnNamespace,
}

impl Scenario {
    /// Creates a management namespace for the scenario; it is removed with its content when the scenario ends.
    pub async fn own_namespace(&self) -> Result<OwnNamespace> {
        let namespace = OwnNamespace::named(&self.management, unique(&self.name));
        self.created().namespaces.push(namespace.clone());
        namespace.create().await?;
        Ok(namespace)
    }

    /// Creates a guest in the namespace, with the rights of any guest.
    pub async fn tenant(&self, namespace: &OwnNamespace) -> Result<Tenant> {
        let guest = self.account(&namespace.name, &Uuid::new_v4().to_string()).await?;
        self.tenant_of(guest, namespace).await
    }

    /// Creates a guest in the namespace, with the rights of any guest, but without admission policies.
    pub async fn tenant_without_policies(&self, namespace: &OwnNamespace) -> Result<Tenant> {
        let guest = self.new_guest(&namespace.name, &Uuid::new_v4().to_string())?;
        prepare_guest_account(management_cluster(self)?, &guest).await?;
        self.tenant_of(guest, namespace).await
    }

    async fn tenant_of(&self, guest: Guest, namespace: &OwnNamespace) -> Result<Tenant> {
        Ok(Tenant {
            kubeconfig: management_cluster(self)?.kubeconfig_of(&guest.account()),
            client: self.lab.management_as(&guest).await?,
            account: guest.account(),
            name: guest.cluster.name,
            cluster_id: guest.cluster_id,
            namespace: namespace.clone(),
        })
    }

    /// Creates an account with this cluster ID in a management namespace, with the rights and admission policies of any
    /// guest; it is removed when the scenario ends.
    pub(crate) async fn account(&self, namespace: &str, cluster_id: &str) -> Result<Guest> {
        let guest = self.new_guest(namespace, cluster_id)?;
        prepare_guest_namespace(management_cluster(self)?, &guest).await?;
        if self.lab.has_kubevirt() {
            prepare_guest_kubevirt(management_cluster(self)?, &guest).await?;
        }
        Ok(guest)
    }

    /// A client of the management cluster with the rights of the first guest, but without admission policies.
    pub async fn management_without_policies(&self) -> Result<Client> {
        let guest = self.new_guest(&self.namespace, &self.cluster_id)?;
        prepare_guest_account(management_cluster(self)?, &guest).await?;
        self.lab.management_as(&guest).await
    }

    pub(crate) fn new_guest(&self, namespace: &str, cluster_id: &str) -> Result<Guest> {
        let like = self.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let (namespace, cluster_id) = (namespace.to_owned(), cluster_id.to_owned());
        let mut guest = Guest { namespace, cluster_id, ..like.clone() };
        guest.cluster.name = unique("guest");
        self.created().accounts.push(guest.clone());
        Ok(guest)
    }

    /// Removes the accounts of the scenario with their rights and policies.
    pub(crate) async fn remove_accounts(&self) -> Result<()> {
        let accounts = std::mem::take(&mut self.created().accounts);
        for guest in &accounts {
            remove_guest_account(management_cluster(self)?, guest).await?;
        }
        Ok(())
    }

    /// Creates a loop node of the guest with this cluster ID in the namespace.
    pub async fn node_in(&self, namespace: &OwnNamespace, cluster_id: &str) -> Result<LoopNode> {
        let record = self.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let (name, uuid, zone) = (unique("loop"), Uuid::new_v4(), infra::ZONES[0]);
        self.created().infra_nodes.push(uuid);
        let client = namespace.client();
        let by_id_dir = record.loop_root.join(uuid.to_string());
        // The hypervisor has a VM with this UUID.
        std::fs::create_dir_all(&by_id_dir)?;
        virtual_machines::create(client, &namespace.name, cluster_id, &name, &uuid.to_string(), Some(zone))
            .await?;
        virtual_machines::wait_until_registered(client, &namespace.name, &name).await?;
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

    /// Removes the namespaces of the scenario, and waits until the nodes of their VMs are removed.
    pub(crate) async fn remove_own_namespaces(&self) -> Result<()> {
        let namespaces = std::mem::take(&mut self.created().namespaces);
        for namespace in &namespaces {
            namespace.remove().await?;
            self.no_volumes_of(&namespace.name).await?;
        }
        let nodes = std::mem::take(&mut self.created().infra_nodes);
        for uuid in nodes {
            eventually(&format!("node {uuid} removed"), PATIENCE, || async {
                let node = self.infra.get_node(uuid).await?;
                Ok(node.map_or(Ok(()), |node| Err(format!("{node:?}"))))
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until the storage infra has no volumes of a namespace.
    async fn no_volumes_of(&self, namespace: &str) -> Result<()> {
        let is_of = |volume: &Volume| volume.labels.get("namespace").is_some_and(|name| name == namespace);
        gone(&format!("volumes of {namespace} in the storage infra"), || async {
            let list = self.infra.list_volumes(None, None).await?.items;
            Ok(list.iter().filter(|volume| is_of(volume)).map(|volume| volume.id.to_string()).collect())
        })
        .await
    }
}

impl Tenant {
    /// Starts its gc-csi with additional flags.
    pub async fn start(&self, s: &Scenario, more: &[&str]) -> Result<Controller> {
        Controller::start_in(s, &self.namespace.name, &self.kubeconfig, &self.cluster_id, more).await
    }

    /// Starts its gc-csi with --on-guest-deletion=Delete and its Cluster object.
    pub async fn start_deleting(&self, s: &Scenario) -> Result<Controller> {
        let cluster = format!("--cluster-object={}", self.name);
        self.start(s, &["--on-guest-deletion=Delete", &cluster]).await
    }

    /// Applies its admission policies as the chart has them with more fields in its entry of `guests`.
    pub async fn apply_policies(&self, s: &Scenario, more: &Value) -> Result<()> {
        let mut guest = json!({
            "name": self.account, "namespace": self.namespace.name, "cluster": self.name,
            "clusterId": self.cluster_id,
        });
        json_patch::merge(&mut guest, more);
        let objects = admission_policies(&json!({"guests": [guest]})).await?;
        ensure!(objects.len() == 10, "{objects:?}");
        for object in &objects {
            chart::apply(&s.management, object, false).await?;
        }
        Ok(())
    }
}

/// The admission policies and bindings of the management chart with these values.
pub async fn admission_policies(values: &Value) -> Result<Vec<Value>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), serde_json::to_vec(values)?)?;
    let chart = Chart::management().await?;
    let objects = chart.render("nestor-system", &[&chart.example("smallest"), file.path()], &[]).await?;
    let is_policy = |object: &Value| {
        object["kind"].as_str().is_some_and(|kind| kind.starts_with("ValidatingAdmissionPolicy"))
    };
    Ok(objects.into_iter().filter(is_policy).collect())
}

/// Creates a volume of the default class with a CSI call; returns its handle.
pub async fn new_claim(driver: &Driver) -> Result<String> {
    new_claim_of(driver, "nestor").await
}

/// Creates a volume of this class of the management cluster with a CSI call; returns its handle.
pub async fn new_claim_of(driver: &Driver, class: &str) -> Result<String> {
    Ok(driver.create(new_volume(&unique("volume"), 4 * MIB, class)).await?.volume_id)
}
