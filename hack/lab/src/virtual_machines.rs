//! `VirtualMachine` objects of the lab's VMs, as a VM Operator would create them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use crds::names::{LABEL_CLUSTER_ID, LABEL_ZONE};
use crds::{VirtualMachine, newest_virtual_machine_version, virtual_machine_resource};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::objects::apply_one;
use crate::wait::eventually;

/// How long the registration of a VM may take. A VM that has just been started may not run yet.
const PATIENCE: Duration = Duration::from_secs(180);

/// The API of `VirtualMachine`s in a namespace, in the newest version that both the cluster and we know.
pub async fn api(client: &Client, namespace: &str) -> Result<Api<VirtualMachine>> {
    let group = kube::discovery::group(client, crds::VIRTUAL_MACHINE_GROUP).await?;
    let served: Vec<String> = group.versions().map(str::to_owned).collect();
    let version = newest_virtual_machine_version(&served).with_context(|| {
        format!("no known version of VirtualMachine is served; the cluster serves {}", served.join(", "))
    })?;
    Ok(Api::namespaced_with(client.clone(), namespace, &virtual_machine_resource(version)))
}

/// The same API in the newest version that we know, without discovery.
pub fn api_in(client: &Client, namespace: &str) -> Api<VirtualMachine> {
    Api::namespaced_with(client.clone(), namespace, &newest())
}

/// The API of `VirtualMachine`s of all namespaces, in the newest version that we know.
pub fn api_everywhere(client: &Client) -> Api<VirtualMachine> {
    Api::all_with(client.clone(), &newest())
}

fn newest() -> kube::core::ApiResource {
    virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0])
}

/// Creates the object of a running VM of the guest with this cluster ID. Its status has the UUID; the rest is what mgmt-csi
/// observes. Without a zone it has that of its host.
pub async fn create(
    client: &Client,
    namespace: &str,
    cluster_id: &str,
    name: &str,
    uuid: &str,
    zone: Option<&str>,
) -> Result<()> {
    let api = api(client, namespace).await?;
    let resource = api.resource_url();
    let version = resource.trim_start_matches('/').split('/').nth(2).unwrap_or_default();
    let mut labels = BTreeMap::from([(LABEL_CLUSTER_ID, cluster_id)]);
    labels.extend(zone.map(|zone| (LABEL_ZONE, zone)));
    let object = json!({
        "apiVersion": format!("vmoperator.vmware.com/{version}"), "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {},
    });
    apply_one(client, object).await?;
    write_status(&api, name, json!({"instanceUUID": uuid})).await
}

/// Writes the status of a running VM, as an administrator of an earlier version without this part of mgmt-csi.
pub(crate) async fn report(
    client: &Client,
    namespace: &str,
    name: &str,
    uuid: &str,
    zone: &str,
) -> Result<()> {
    let status = json!({"biosUUID": uuid, "powerState": "PoweredOn", "zone": zone});
    write_status(&api(client, namespace).await?, name, status).await
}

async fn write_status(api: &Api<VirtualMachine>, name: &str, status: Value) -> Result<()> {
    let status = json!({"status": status});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .with_context(|| format!("cannot write the status of VirtualMachine {name}"))
        .map(drop)
}

/// Waits until mgmt-csi has registered a VM with the storage infra, and reports it as running.
pub async fn wait_until_registered(client: &Client, namespace: &str, name: &str) -> Result<()> {
    let api = api(client, namespace).await?;
    eventually(&format!("mgmt-csi registers VirtualMachine {namespace}/{name}"), PATIENCE, || async {
        let status = api.get(name).await?.status.unwrap_or_default();
        let runs = status.power_state.as_deref() == Some("PoweredOn");
        Ok(if runs { Ok(()) } else { Err(format!("its status is {}", json!(status))) })
    })
    .await
}

/// Deletes a VM's object. Succeeds if it does not exist.
pub async fn delete(client: &Client, namespace: &str, name: &str) -> Result<()> {
    match api(client, namespace).await?.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete VirtualMachine {namespace}/{name}")),
    }
}
