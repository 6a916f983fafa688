//! Pods that are scheduled but never run, to test scheduling and delayed volume binding without a kubelet.

use anyhow::{Context, Result};
use crds::names;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::json;

use crate::scenario::GUEST;
use crate::{PATIENCE, Scenario, eventually, unique};

/// Label of a scenario's nodes.
const TEST: &str = "test";
const HOSTNAME: &str = "kubernetes.io/hostname";

impl Scenario {
    /// Creates a loop node in a zone with a Node in the guest that has no kubelet: only the scenario's pods are scheduled
    /// there, and none runs. `volumes` limits the number of volumes of the node.
    pub async fn node_for_pods(&self, zone: &str, volumes: Option<i32>) -> Result<LoopNode> {
        let vm = self.lab.add_loop_node_in(zone, GUEST, &unique("loop")).await?;
        self.own_node(vm.clone(), self.driver.clone());
        let name = &vm.name;
        let nodes: Api<Node> = Api::all(self.guest.clone());
        let labels = json!({TEST: self.name, HOSTNAME: name});
        // Only pods that tolerate everything are scheduled to it.
        let node = json!({"metadata": {"name": name, "labels": labels}, "spec": {"unschedulable": true}});
        let node = nodes.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
        let capacity = json!({"cpu": "8", "memory": "8Gi", "pods": "110"});
        let status = Patch::Merge(json!({"status": {"capacity": capacity, "allocatable": capacity}}));
        nodes.patch_status(name, &PatchParams::default(), &status).await?;
        let mut driver =
            json!({"name": names::GUEST_DRIVER, "nodeID": name, "topologyKeys": [names::LABEL_ZONE]});
        if let Some(volumes) = volumes {
            driver["allocatable"] = json!({"count": volumes});
        }
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.uid()});
        let csi_node: CSINode = serde_json::from_value(json!({
            "metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": [driver]},
        }))?;
        Api::all(self.guest.clone()).create(&PostParams::default(), &csi_node).await?;
        eventually(&format!("node {name} has its VM's zone"), PATIENCE, || async {
            let node = nodes.get(name).await?;
            let label = node.labels().get(names::LABEL_ZONE).map(String::as_str);
            Ok(if label == Some(zone) { Ok(()) } else { Err(format!("{label:?}")) })
        })
        .await?;
        Ok(vm)
    }

    /// Pods in the scenario's namespace of the guest.
    pub fn guest_pods(&self) -> Api<Pod> {
        Api::namespaced(self.guest.clone(), &self.name)
    }

    /// Creates a pod with these claims that can be scheduled to all nodes of the scenario, or only to `node`.
    pub async fn pod(&self, name: &str, node: Option<&LoopNode>, claims: &[&str]) -> Result<()> {
        let mut selector = json!({TEST: self.name});
        if let Some(node) = node {
            selector[HOSTNAME] = json!(node.name);
        }
        let volume = |claim: &&str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
        let mount = |claim: &&str| json!({"name": claim, "devicePath": format!("/dev/{claim}")});
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": selector,
                "tolerations": [{"operator": "Exists"}],
                "automountServiceAccountToken": false,
                "volumes": claims.iter().map(volume).collect::<Vec<_>>(),
                "containers": [{
                    "name": "never", "image": "never",
                    "volumeDevices": claims.iter().map(mount).collect::<Vec<_>>(),
                }],
            },
        }))?;
        let pods = self.guest_pods();
        // Pods are rejected until their namespace has its ServiceAccount.
        eventually(&format!("pod {name} is created"), PATIENCE, || async {
            match pods.create(&PostParams::default(), &pod).await {
                Ok(_) => Ok(Ok(())),
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(status.message)),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Waits until a pod is scheduled; returns the node's name.
    pub async fn scheduled(&self, pod: &str) -> Result<String> {
        let pods = self.guest_pods();
        eventually(&format!("pod {pod} is scheduled"), PATIENCE, || async {
            let pod = pods.get(pod).await?;
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            Ok(node.ok_or_else(|| format!("{:?}", why_not(&pod))))
        })
        .await
    }

    /// Waits until the scheduler reports why it cannot schedule a pod, with a message that contains all of `texts`.
    pub async fn not_scheduled(&self, pod: &str, texts: &[&str]) -> Result<String> {
        let pods = self.guest_pods();
        eventually(&format!("pod {pod} is unschedulable with {texts:?}"), PATIENCE, || async {
            let pod = pods.get(pod).await?;
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            anyhow::ensure!(node.is_none(), "pod {} was scheduled to node {node:?}", pod.name_any());
            let why = why_not(&pod).unwrap_or_default();
            Ok(if texts.iter().all(|text| why.contains(text)) { Ok(why) } else { Err(why) })
        })
        .await
    }

    /// Deletes a pod that never ran, without a kubelet.
    pub async fn delete_pod(&self, pod: &str) -> Result<()> {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.guest_pods().delete(pod, &at_once).await.with_context(|| format!("cannot delete pod {pod}"))?;
        Ok(())
    }

    /// Deletes all pods of the scenario.
    pub(crate) async fn remove_pods(&self) -> Result<()> {
        for pod in self.guest_pods().list(&ListParams::default()).await? {
            self.delete_pod(&pod.name_any()).await?;
        }
        Ok(())
    }
}

/// The scheduler's message for a pod that it could not schedule.
fn why_not(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|one| one.type_ == "PodScheduled" && one.status == "False")?;
    condition.message.clone()
}
