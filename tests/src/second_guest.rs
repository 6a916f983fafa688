//! The lab's second guest, which shares its management namespace with the first one.

use anyhow::Result;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Api, PostParams};
use lab::LoopNode;
use serde_json::Value;

use crate::driver::Driver;
use crate::{K8sAttachments, Scenario, guest, unique};

/// The second guest's name in the lab.
const NAME: &str = "g2";

/// The second guest, for one scenario.
pub struct SecondGuest<'a> {
    scenario: &'a Scenario,
    /// The cluster, as its administrator.
    pub client: Client,
    /// Its cluster ID.
    pub cluster_id: String,
    /// Its gc-csi's Controller service.
    pub driver: Driver,
}

impl Scenario {
    /// The lab's second guest.
    pub async fn second_guest(&self) -> Result<SecondGuest<'_>> {
        anyhow::ensure!(
            self.lab.guest_namespace(NAME)? == self.namespace,
            "guest {NAME} has a management namespace of its own: `cargo lab up --guests 2 --one-namespace`"
        );
        Ok(SecondGuest {
            client: self.lab.guest(NAME).await?,
            cluster_id: self.lab.cluster_id(NAME)?,
            driver: Driver::connect(&self.lab.controller_socket(NAME)?).await?,
            scenario: self,
        })
    }
}

impl SecondGuest<'_> {
    /// Its PersistentVolumes.
    pub fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Its claims in the namespace `default`.
    pub fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// The scenario's storage.k8s.io/VolumeAttachments in this guest.
    pub fn k8s_attachments(&self) -> K8sAttachments {
        K8sAttachments::new(&self.client, &self.scenario.name)
    }

    /// Creates a loop node of this guest; it is removed when the scenario ends.
    pub async fn node(&self) -> Result<LoopNode> {
        let node = self.scenario.lab.add_loop_node_to(NAME, &unique("loop")).await?;
        self.scenario.own_node(node.clone(), self.driver.clone());
        Ok(node)
    }

    /// Creates a static PersistentVolume for a management claim (see [`guest::static_volume`]); it is removed when the
    /// scenario ends.
    pub async fn static_volume(&self, handle: &str, more: &Value) -> Result<PersistentVolume> {
        let name = unique(&self.scenario.name);
        let volume = guest::static_volume(&name, &self.scenario.name, handle, more)?;
        self.scenario.own_second_volume();
        Ok(self.volumes().create(&PostParams::default(), &volume).await?)
    }
}
