//! Registration of gc-csi-node with a real kubelet that refuses it at first.

use std::fs;

use anyhow::{Context, Result, anyhow, ensure};
use crds::names;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::storage::v1::CSINode;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tests::pods::{self, PodScenario, Script, filesystem};
use tests::{PATIENCE, eventually};

/// The message of a plugin that kubelet refused.
const REFUSED: &str = "kubelet refused the registration of the driver";

/// Prints the process ID of the plugin in a VM.
const PROCESS: &str = "for folder in /proc/[0-9]*; do
        read -r name < $folder/comm || continue
        [ \"$name\" != gc-csi-node ] || echo ${folder#/proc/}
    done 2>/dev/null";

#[tokio::test]
async fn a_driver_that_kubelet_refused_is_registered_later_without_a_restart() -> Result<()> {
    pods::run_alone(|pods| async move {
        let policy = Policy::create(&pods).await?;
        let outcome = refused(&pods).await;
        let lifted = policy.delete().await;
        let refused = outcome.and_then(|refused| lifted.map(|()| refused))?;
        registered(&pods).await?;
        let process = process(&pods).await?;
        ensure!(process == refused, "process {refused} was refused, process {process} is registered");
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let script = Script::new("pod", &pods.first_node, "echo content > /data/file; cat /data/file");
        let output = pods.run(script.mount(&volume, "/data")).await?;
        ensure!(output == "content", "{output}");
        Ok(())
    })
    .await
}

/// Removes the driver from the CSINode, restarts the plugin, and waits until kubelet has refused it. Returns its process ID.
/// While the CSINode lists the driver, kubelet registers it without a write.
async fn refused(pods: &PodScenario) -> Result<u32> {
    forget(pods).await?;
    let before = process(pods).await?;
    let logged = log(pods)?.len();
    pods.run(Script::on_vm("kill", &pods.first_node, &format!("kill -9 {before}"))).await?;
    eventually("kubelet refuses the registration", PATIENCE, || async {
        let log = log(pods)?;
        let new = log.get(logged..).unwrap_or_default();
        let refusal = new.lines().find(|line| line.contains(REFUSED));
        Ok(refusal.map(drop).ok_or_else(|| new.to_owned()))
    })
    .await?;
    ensure!(!is_registered(pods).await?, "kubelet refused the driver and its CSINode lists it");
    let after = process(pods).await?;
    ensure!(after != before, "process {before} was not replaced");
    Ok(after)
}

/// Removes the driver from the CSINode.
async fn forget(pods: &PodScenario) -> Result<()> {
    let nodes: Api<CSINode> = Api::all(pods.scenario().guest.clone());
    let mut node = nodes.get(&pods.first_node).await?;
    node.spec.drivers.retain(|driver| driver.name != names::GUEST_DRIVER);
    nodes.replace(&pods.first_node, &PostParams::default(), &node).await?;
    Ok(())
}

async fn registered(pods: &PodScenario) -> Result<()> {
    eventually("kubelet registers the driver", PATIENCE, || async {
        Ok(if is_registered(pods).await? { Ok(()) } else { Err("its CSINode does not list it".to_owned()) })
    })
    .await
}

async fn is_registered(pods: &PodScenario) -> Result<bool> {
    let nodes: Api<CSINode> = Api::all(pods.scenario().guest.clone());
    let drivers = nodes.get(&pods.first_node).await?.spec.drivers;
    Ok(drivers.iter().any(|driver| driver.name == names::GUEST_DRIVER))
}

/// The plugin's process ID in the VM.
async fn process(pods: &PodScenario) -> Result<u32> {
    let found = pods.run(Script::on_vm("process", &pods.first_node, PROCESS)).await?;
    found.parse().map_err(|_| anyhow!("processes of the plugin: {found:?}"))
}

/// The plugin's log, which its VM writes to this host.
fn log(pods: &PodScenario) -> Result<String> {
    let path = pods.scenario().lab.run().log(&format!("{}-gc-csi-node", pods.first_node));
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// An admission policy that refuses to add the driver to the CSINode of a VM, so that its kubelet fails to register it.
struct Policy {
    client: Client,
    name: String,
}

impl Policy {
    /// Creates the policy, and waits until the API server applies it.
    async fn create(pods: &PodScenario) -> Result<Self> {
        let (client, name) = (pods.scenario().guest.clone(), pods.scenario().name.clone());
        let this = Self { client, name };
        let created = this.create_on(&pods.first_node).await;
        if created.is_err() {
            this.delete().await?;
        }
        created.map(|()| this)
    }

    async fn create_on(&self, node: &str) -> Result<()> {
        let is_other = format!("object.metadata.name != '{node}'");
        let is_without = format!("!object.spec.drivers.exists(one, one.name == '{}')", names::GUEST_DRIVER);
        let rule = json!({
            "apiGroups": ["storage.k8s.io"], "apiVersions": ["v1"], "resources": ["csinodes"],
            "operations": ["CREATE", "UPDATE"],
        });
        let policy: ValidatingAdmissionPolicy = serde_json::from_value(json!({
            "metadata": {"name": self.name},
            "spec": {
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": format!("{is_other} || {is_without}")}],
            },
        }))?;
        let binding: ValidatingAdmissionPolicyBinding = serde_json::from_value(json!({
            "metadata": {"name": self.name},
            "spec": {"policyName": self.name, "validationActions": ["Deny"]},
        }))?;
        Api::all(self.client.clone()).create(&PostParams::default(), &policy).await?;
        Api::all(self.client.clone()).create(&PostParams::default(), &binding).await?;
        self.is_applied(node).await
    }

    /// Waits until a change of the CSINode that keeps the driver is refused.
    async fn is_applied(&self, node: &str) -> Result<()> {
        let nodes: Api<CSINode> = Api::all(self.client.clone());
        let trial = PatchParams { dry_run: true, ..PatchParams::default() };
        let change = Patch::Merge(json!({"metadata": {"labels": {"trial": "true"}}}));
        eventually("the admission policy is applied", PATIENCE, || async {
            match nodes.patch(node, &trial, &change).await {
                Err(kube::Error::Api(status)) if status.message.contains(&self.name) => Ok(Ok(())),
                other => Ok(Err(format!("{other:?}"))),
            }
        })
        .await
    }

    async fn delete(&self) -> Result<()> {
        let none = DeleteParams::default();
        Api::<ValidatingAdmissionPolicyBinding>::all(self.client.clone()).delete(&self.name, &none).await?;
        Api::<ValidatingAdmissionPolicy>::all(self.client.clone()).delete(&self.name, &none).await?;
        Ok(())
    }
}
