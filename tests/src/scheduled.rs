//! Pods that are given to a node and never run, for what happens before a kubelet has to do with it: scheduling, and
//! making volumes for whom they are scheduled with.

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
    /// A machine in a zone that this host plays, and its node in the guest, which has no kubelet: only the scenario's pods
    /// are given to it, and none runs. It says that it takes so many volumes, where that is limited.
    pub async fn node_for_pods(&self, zone: &str, volumes: Option<i32>) -> Result<LoopNode> {
        let machine = self.lab.add_loop_node_in(zone, GUEST, &unique("loop")).await?;
        self.own_node(machine.clone(), self.driver.clone());
        let name = &machine.name;
        let nodes: Api<Node> = Api::all(self.guest.clone());
        let labels = json!({TEST: self.name, HOSTNAME: name});
        // Whose pods tolerate everything can use it all the same.
        let node = json!({"metadata": {"name": name, "labels": labels}, "spec": {"unschedulable": true}});
        let node = nodes.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
        let room = json!({"cpu": "8", "memory": "8Gi", "pods": "110"});
        let status = Patch::Merge(json!({"status": {"capacity": room, "allocatable": room}}));
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
        eventually(&format!("node {name} has its machine's zone"), PATIENCE, || async {
            let node = nodes.get(name).await?;
            let label = node.labels().get(names::LABEL_ZONE).map(String::as_str);
            Ok(if label == Some(zone) { Ok(()) } else { Err(format!("{label:?}")) })
        })
        .await?;
        Ok(machine)
    }

    /// Pods in the scenario's namespace of the guest.
    pub fn guest_pods(&self) -> Api<Pod> {
        Api::namespaced(self.guest.clone(), &self.name)
    }

    /// Creates a pod that uses these claims and can be given to any node for the scenario's pods, or to this one.
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
        // Pods are refused until their namespace has its account.
        eventually(&format!("pod {name} is taken"), PATIENCE, || async {
            match pods.create(&PostParams::default(), &pod).await {
                Ok(_) => Ok(Ok(())),
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(status.message)),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Waits until a pod is given to a node, and gives the node's name.
    pub async fn scheduled(&self, pod: &str) -> Result<String> {
        let pods = self.guest_pods();
        eventually(&format!("pod {pod} is given to a node"), PATIENCE, || async {
            let pod = pods.get(pod).await?;
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            Ok(node.ok_or_else(|| format!("{:?}", why_not(&pod))))
        })
        .await
    }

    /// Waits until the scheduler says why a pod cannot be given to any node, in words that have all of these.
    pub async fn not_scheduled(&self, pod: &str, texts: &[&str]) -> Result<String> {
        let pods = self.guest_pods();
        eventually(&format!("pod {pod} is given to no node for {texts:?}"), PATIENCE, || async {
            let pod = pods.get(pod).await?;
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            anyhow::ensure!(node.is_none(), "pod {} was given to node {node:?}", pod.name_any());
            let why = why_not(&pod).unwrap_or_default();
            Ok(if texts.iter().all(|text| why.contains(text)) { Ok(why) } else { Err(why) })
        })
        .await
    }

    /// Deletes a pod that never ran, and so needs no kubelet for that.
    pub async fn delete_pod(&self, pod: &str) -> Result<()> {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.guest_pods().delete(pod, &at_once).await.with_context(|| format!("cannot delete pod {pod}"))?;
        Ok(())
    }

    /// Deletes the pods that are left.
    pub(crate) async fn clean_pods(&self) -> Result<()> {
        for pod in self.guest_pods().list(&ListParams::default()).await? {
            self.delete_pod(&pod.name_any()).await?;
        }
        Ok(())
    }
}

/// What the scheduler says of a pod that it could not place.
fn why_not(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let told = conditions.iter().find(|told| told.type_ == "PodScheduled" && told.status == "False")?;
    told.message.clone()
}
