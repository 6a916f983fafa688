//! Lists of objects in pages, and indexes of them.

use std::collections::BTreeMap;
use std::fmt::Debug;

use crds::{VirtualMachine, VolumeAttachment, names};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;

use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::gather::read::{vm_resource, vms};
use crate::vm_api;

/// Objects per page.
const PAGE: u32 = 500;

/// Lists all objects in pages.
pub async fn list<K>(
    cluster: &Cluster,
    api: Api<K>,
    what: &str,
    labels: Option<&str>,
) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut parameters = ListParams::default().limit(PAGE);
    parameters.label_selector = labels.map(str::to_owned);
    let mut items = Vec::new();
    loop {
        let page = api.list(&parameters).await;
        let page = page.map_err(|error| Error::request(cluster.tier.name(), what, &error))?;
        items.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(items),
        }
    }
}

/// The guest's PersistentVolumes of Nestor.
pub async fn guest_volumes(cluster: &Cluster) -> Result<Vec<PersistentVolume>, Error> {
    let all: Vec<PersistentVolume> = list(cluster, cluster.all(), "PersistentVolumes", None).await?;
    Ok(all.into_iter().filter(|volume| driver(volume) == Some(names::GUEST_DRIVER)).collect())
}

/// CSI driver of a volume.
pub fn driver(volume: &PersistentVolume) -> Option<&str> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.driver.as_str())
}

/// Volume handle of a volume.
pub fn handle(volume: &PersistentVolume) -> Option<&str> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.volume_handle.as_str())
}

/// Claims in the guest's management namespace by name; None if the cluster is not connected.
pub async fn claims(clusters: &Clusters) -> Result<Option<BTreeMap<String, PersistentVolumeClaim>>, Error> {
    let Some(cluster) = &clusters.management else { return Ok(None) };
    let claims: Vec<PersistentVolumeClaim> =
        list(cluster, cluster.namespaced(), "PersistentVolumeClaims", None).await?;
    let named = claims.into_iter().filter_map(|claim| Some((claim.metadata.name.clone()?, claim)));
    Ok(Some(named.collect()))
}

/// VolumeAttachments of the guest's management namespace.
pub async fn attachments(cluster: &Cluster) -> Result<Vec<VolumeAttachment>, Error> {
    list(cluster, cluster.namespaced(), "VolumeAttachments", None).await
}

/// VirtualMachines of the guest's management namespace.
pub async fn machines(cluster: &Cluster) -> Result<Vec<VirtualMachine>, Error> {
    let resource = served_vms(cluster).await?;
    list(cluster, vms(cluster, &resource), "VirtualMachines", None).await
}

/// VirtualMachines of all namespaces with these labels.
pub async fn labelled_machines(cluster: &Cluster, labels: &str) -> Result<Vec<VirtualMachine>, Error> {
    let served = vm_api::served(cluster).await?;
    let mut machines = Vec::new();
    if served.vm_operator || !served.kubevirt {
        let api = Api::all_with(cluster.client.clone(), &served_vms(cluster).await?);
        machines = list(cluster, api, "VirtualMachines", Some(labels)).await?;
    }
    if served.kubevirt {
        let resource = vm_api::kubevirt_resource("VirtualMachine");
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
        let of_kubevirt = list(cluster, api, "VirtualMachines of KubeVirt", Some(labels)).await?;
        // Only who they are is of interest.
        machines.extend(of_kubevirt.into_iter().map(|one| {
            let mut machine = VirtualMachine::new("", &resource, crds::VirtualMachineSpec::default());
            machine.metadata = one.metadata;
            machine
        }));
    }
    Ok(machines)
}

async fn served_vms(cluster: &Cluster) -> Result<ApiResource, Error> {
    vm_resource(&cluster.client).await.map_err(|reason| Error::Request {
        cluster: cluster.tier.name(),
        what: "VirtualMachines".to_owned(),
        reason,
    })
}

/// The guest whose data a management volume holds, as mgmt-csi decides it; None if it is no guest's.
pub fn guest_of(volume: &PersistentVolume) -> Option<&str> {
    let csi = volume.spec.as_ref()?.csi.as_ref().filter(|csi| csi.driver == names::MANAGEMENT_DRIVER)?;
    let label = volume.labels().get(names::LABEL_CLUSTER_ID);
    let attribute = || csi.volume_attributes.as_ref()?.get(names::ATTRIBUTE_CLUSTER_ID);
    label.or_else(attribute).map(String::as_str).filter(|guest| !guest.is_empty())
}
