//! StatefulSets with a pod that appends durable records, and that is recreated on another VM.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::eventually;
use crate::objects::delete;
use crate::pods::{GONE, IMAGE, POD, PodScenario, Script, Volume};

/// Folder on the VM's own disk with the number of the last durable record, so that it survives the loss of the volume.
const ACKNOWLEDGED: &str = "/var/lib/nestor-test";

impl PodScenario {
    /// Creates a StatefulSet with one pod, `<name>-0`, which appends numbered records to a file on the volume. Each record
    /// is synced to the disk before its number is stored on the VM as acknowledged. The pod is ready after a few records. It
    /// waits for some seconds after each record: without a pause, it takes all of an emulated CPU.
    pub async fn run_record_writer(&self, name: &str, volume: &Volume, pause: u32) -> Result<()> {
        let script = "set -eu
            cd /data; touch records
            n=$(wc -l < records)
            # The records must be complete and in order, otherwise the pod fails.
            seq 1 $n | cmp - records
            echo $n > began.new; sync; mv began.new began; sync
            i=0
            while :; do
                n=$((n + 1)); i=$((i + 1))
                echo $n | dd of=records oflag=append conv=notrunc,fsync 2>/dev/null
                # Overwrite in place: a truncated file can be empty if the VM dies in between.
                echo $n | dd of=/acknowledged/$HANDLE conv=notrunc,fsync 2>/dev/null
                [ $i -ne 5 ] || touch /tmp/ready
                [ $PAUSE -eq 0 ] || sleep $PAUSE
            done";
        let set: StatefulSet = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "serviceName": name, "replicas": 1, "selector": {"matchLabels": {"set": name}},
                "template": {
                    "metadata": {"labels": {"set": name}},
                    "spec": {
                        "hostNetwork": true, "automountServiceAccountToken": false, "enableServiceLinks": false,
                        "terminationGracePeriodSeconds": 1,
                        "containers": [{
                            "name": "script", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", script],
                            "env": [
                                {"name": "HANDLE", "value": volume.handle},
                                {"name": "PAUSE", "value": pause.to_string()},
                            ],
                            "readinessProbe": {"exec": {"command": ["sh", "-c", "test -e /tmp/ready"]}, "periodSeconds": 1},
                            "volumeMounts": [
                                {"name": "data", "mountPath": "/data"},
                                {"name": "acknowledged", "mountPath": "/acknowledged"},
                            ],
                        }],
                        "volumes": [
                            {"name": "data", "persistentVolumeClaim": {"claimName": volume.claim}},
                            {"name": "acknowledged", "hostPath": {"path": ACKNOWLEDGED, "type": "DirectoryOrCreate"}},
                        ],
                    },
                },
            },
        }))
        .context("invalid manifest of the StatefulSet")?;
        self.api::<StatefulSet>().create(&PostParams::default(), &set).await?;
        Ok(())
    }

    /// Waits until the pod of a StatefulSet is ready on a node other than `not_on`; returns the node's name.
    pub async fn ready_on(&self, name: &str, not_on: Option<&str>) -> Result<String> {
        let pod = format!("{name}-0");
        eventually(&format!("pod {pod} is ready on a node other than {not_on:?}"), POD, || async {
            let Some(pod) = self.api::<Pod>().get_opt(&pod).await? else {
                return Ok(Err("no pod".to_owned()));
            };
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
            let ready =
                conditions.unwrap_or_default().iter().any(|one| one.type_ == "Ready" && one.status == "True");
            Ok(match node {
                Some(node) if ready && not_on != Some(node.as_str()) => Ok(node),
                node => Err(format!("on {node:?}, ready: {ready}")),
            })
        })
        .await
    }

    /// The number of acknowledged records on a VM that runs again.
    pub async fn acknowledged_records(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = format!("cat {ACKNOWLEDGED}/{0}; rm {ACKNOWLEDGED}/{0}", volume.handle);
        let output = self.run(Script::on_vm("acknowledged", node, &script)).await?;
        output.parse().with_context(|| format!("{node} reports {output:?}"))
    }

    /// The number of acknowledged records on a VM whose pod still writes.
    pub async fn durable_records(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = format!("cat {ACKNOWLEDGED}/{}", volume.handle);
        let output = self.run(Script::on_vm("durable", node, &script)).await?;
        output.parse().with_context(|| format!("{node} reports {output:?}"))
    }

    /// The number of records on a volume that is not in use. Fails if they are not complete and in order.
    pub async fn complete_records(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = "n=$(wc -l < /data/records); seq 1 $n | cmp - /data/records; echo $n";
        let output = self.run(Script::new("complete", node, script).mount(volume, "/data")).await?;
        output.parse().with_context(|| format!("the volume has {output:?}"))
    }

    /// The number of complete records that the newest pod found at its start. The volume must not be in use.
    pub async fn recovered_records(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = "n=$(wc -l < /data/records); seq 1 $n | cmp - /data/records; cat /data/began";
        let output = self.run(Script::new("found", node, script).mount(volume, "/data")).await?;
        output.parse().with_context(|| format!("the volume has {output:?}"))
    }

    /// Deletes all StatefulSets, which would recreate removed pods.
    pub async fn remove_sets(&self) -> Result<()> {
        let sets = self.api::<StatefulSet>();
        for set in sets.list(&ListParams::default()).await? {
            delete(&sets, &set.name_any()).await?;
            for pod in self
                .api::<Pod>()
                .list(&ListParams::default().labels(&format!("set={}", set.name_any())))
                .await?
            {
                let soon = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
                if let Err(error) = self.api::<Pod>().delete(&pod.name_any(), &soon).await {
                    ensure!(matches!(&error, kube::Error::Api(status) if status.code == 404), "{error}");
                }
            }
        }
        eventually("no pods of StatefulSets left", GONE, || async {
            let left = self.api::<Pod>().list(&ListParams::default().labels("set")).await?.items;
            let names: Vec<String> = left.iter().map(ResourceExt::name_any).collect();
            Ok(if names.is_empty() { Ok(()) } else { Err(format!("{names:?}")) })
        })
        .await
    }

    // ---- nodes ----

    /// Waits until a node is ready, or not ready.
    pub async fn node_ready(&self, name: &str, expected: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.scenario().guest.clone());
        eventually(&format!("node {name} ready: {expected}"), POD, || async {
            let status = nodes.get(name).await?.status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            let ready = conditions.iter().find(|one| one.type_ == "Ready").map(|one| one.status.clone());
            Ok(if (ready.as_deref() == Some("True")) == expected {
                Ok(())
            } else {
                Err(format!("{ready:?}"))
            })
        })
        .await
    }

    /// Adds the out-of-service taint to a node or removes it.
    pub async fn set_out_of_service(&self, name: &str, lost: bool) -> Result<()> {
        self.scenario().set_out_of_service_taint(name, lost).await
    }
}

impl crate::Scenario {
    /// Adds the out-of-service taint to a guest node or removes it, and waits until gc-csi has annotated the VM.
    pub async fn set_out_of_service_taint(&self, name: &str, lost: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.guest.clone());
        let key = crds::names::TAINT_OUT_OF_SERVICE;
        let mut taints = nodes.get(name).await?.spec.and_then(|spec| spec.taints).unwrap_or_default();
        taints.retain(|taint| taint.key != key);
        let mut taints: Vec<serde_json::Value> =
            taints.into_iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
        if lost {
            taints.push(json!({"key": key, "value": "nodeshutdown", "effect": "NoExecute"}));
        }
        let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
        nodes.patch(name, &PatchParams::default(), &patch).await?;
        eventually(
            &format!("VirtualMachine {name} is annotated as out of service: {lost}"),
            crate::PATIENCE,
            || async {
                let vm = self.vms().get(name).await?;
                let annotated = vm.annotations().contains_key(crds::names::ANNOTATION_OUT_OF_SERVICE);
                Ok(if annotated == lost { Ok(()) } else { Err(format!("{:?}", vm.annotations())) })
            },
        )
        .await
    }
}
