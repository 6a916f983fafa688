//! A pod that counts what it has written for good, and that its StatefulSet brings back on another machine.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::eventually;
use crate::pods::{GONE, IMAGE, Machines, POD, Script, Volume};
use crate::scenario::delete;

/// Where a machine keeps the number of the last record that is durable on the volume. It is on the machine's own disk, so
/// that it tells of what was acknowledged whatever became of the volume.
const ACKNOWLEDGED: &str = "/var/lib/nestor-test";

impl Machines {
    /// Makes a StatefulSet of one pod, `<name>-0`, which appends numbered records to a file on the volume: each is synced
    /// to the disk before its number is kept on the machine as acknowledged, and before the next one. The pod is ready
    /// once it has written some.
    pub async fn keep_counting(&self, name: &str, volume: &Volume) -> Result<()> {
        let script = "set -eu
            cd /data; touch records
            n=$(wc -l < records)
            # Records are whole and in order, or the pod does not come up.
            seq 1 $n | cmp - records
            echo $n > began.new; sync; mv began.new began; sync
            i=0
            while :; do
                n=$((n + 1)); i=$((i + 1))
                echo $n | dd of=records oflag=append conv=notrunc,fsync 2>/dev/null
                # In its place: a file that is cut off first can be empty where the machine dies in between.
                echo $n | dd of=/acknowledged/$HANDLE conv=notrunc,fsync 2>/dev/null
                [ $i -ne 5 ] || touch /tmp/ready
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
                            "env": [{"name": "HANDLE", "value": volume.handle}],
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
        .context("the test's own StatefulSet is not one")?;
        self.api::<StatefulSet>().create(&PostParams::default(), &set).await?;
        Ok(())
    }

    /// Waits until the pod of a StatefulSet is ready on a node other than `not_on`, and gives the node's name.
    pub async fn counts_on(&self, name: &str, not_on: Option<&str>) -> Result<String> {
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

    /// How many records were acknowledged on a machine that runs again.
    pub async fn acknowledged_on(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = format!("cat {ACKNOWLEDGED}/{0}; rm {ACKNOWLEDGED}/{0}", volume.handle);
        let said = self.run(Script::in_machine("acknowledged", node, &script)).await?;
        said.parse().with_context(|| format!("{node} says {said:?}"))
    }

    /// How many whole records the newest pod found when it came up, by the volume itself; the volume must not be in use.
    pub async fn found(&self, node: &str, volume: &Volume) -> Result<u64> {
        let script = "n=$(wc -l < /data/records); seq 1 $n | cmp - /data/records; cat /data/began";
        let said = self.run(Script::new("found", node, script).mount(volume, "/data")).await?;
        said.parse().with_context(|| format!("the volume says {said:?}"))
    }

    /// Deletes all StatefulSets, which would bring pods back that are removed.
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

    /// Waits until a node is ready, or isn't.
    pub async fn node_ready(&self, name: &str, wanted: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.scenario().guest.clone());
        eventually(&format!("node {name} ready: {wanted}"), POD, || async {
            let status = nodes.get(name).await?.status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            let ready = conditions.iter().find(|one| one.type_ == "Ready").map(|one| one.status.clone());
            Ok(if (ready.as_deref() == Some("True")) == wanted { Ok(()) } else { Err(format!("{ready:?}")) })
        })
        .await
    }

    /// Says of a node that it is out of service, or takes that back.
    pub async fn set_out_of_service(&self, name: &str, lost: bool) -> Result<()> {
        self.scenario().taint_out_of_service(name, lost).await
    }
}

impl crate::Scenario {
    /// Says of a guest's node that it is out of service, or takes that back, as people do.
    pub async fn taint_out_of_service(&self, name: &str, lost: bool) -> Result<()> {
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
            &format!("VirtualMachine {name} is said to be out of service: {lost}"),
            crate::PATIENCE,
            || async {
                let machine = self.machines().get(name).await?;
                let said = machine.annotations().contains_key(crds::names::ANNOTATION_OUT_OF_SERVICE);
                Ok(if said == lost { Ok(()) } else { Err(format!("{:?}", machine.annotations())) })
            },
        )
        .await
    }
}
