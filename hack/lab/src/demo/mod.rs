//! `cargo lab demo`: the lifecycle of a volume, with the objects involved in both clusters.

mod kubevirt;
mod libvirt;
mod records;
mod trace;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::ceph::Engine;
use crate::cluster::objects::apply;
use crate::lab::Lab;
use crate::ui::Ui;
use crate::wait::eventually;
use trace::{Chain, Tracer};

const MANIFEST: &str = include_str!("../../manifests/demo.yaml");
const NAMESPACE: &str = "demo";
const POD: &str = "writer-0";
const CLAIM: &str = "data-writer-0";
/// Emulated VMs are slow on a busy host.
const PATIENCE: Duration = Duration::from_secs(600);

struct Demo<'a> {
    ui: &'a Ui,
    guest: Client,
    tracer: Tracer,
    steps: u32,
}

/// Termination message of the pod's init container.
struct Report {
    action: String,
    sum: String,
    device: String,
    pod: String,
}

/// Runs the demo in a lab with two VMs. Fails if a step does not behave as described.
pub async fn demo(ui: &Ui, lab: &Lab) -> Result<()> {
    let [first, second] = <[String; 2]>::try_from(lab.vms()).map_err(|vms| {
        anyhow::anyhow!("the demo needs two virtual machines, but the lab has {}", vms.len())
    })?;
    let guest = lab.guest("g1").await?;
    let mut demo = Demo { ui, tracer: Tracer::new(lab, &guest).await?, guest, steps: 0 };
    demo.check_nodes(&[&first, &second], lab).await?;

    demo.step("apply a StorageClass and a StatefulSet with a claim; the second VM is cordoned");
    demo.cordon(&second, true).await?;
    apply(&demo.guest, "manifests/demo.yaml", MANIFEST).await?;
    let chain = demo.tracer.chain(NAMESPACE, CLAIM).await?;
    demo.show(chain.lines());

    demo.step(&format!("the pod runs on {first} and writes 64 MiB with their checksum"));
    let wrote = demo.report(&first, None).await?;
    ensure!(wrote.action == "wrote", "the new volume was not empty: the pod reported {:?}", wrote.action);
    demo.show(&demo.tracer.attachment(&chain, &first, &wrote.device).await?);
    demo.show(&[format!("pod {POD} on {first}: wrote, sha256 {}", wrote.sum)]);

    demo.step(&format!("{first} is cordoned and the pod deleted: the volume moves to {second}"));
    demo.cordon(&second, false).await?;
    demo.cordon(&first, true).await?;
    demo.delete::<Pod>(POD).await?;
    let verified = demo.report(&second, Some(&wrote.pod)).await?;
    demo.show(&demo.tracer.attachment(&chain, &second, &verified.device).await?);
    ensure!(verified.action == "verified", "the data is gone: the pod reported {:?}", verified.action);
    ensure!(verified.sum == wrote.sum, "the checksum changed from {} to {}", wrote.sum, verified.sum);
    demo.show(&[format!("pod {POD} on {second}: verified, sha256 {} as before", verified.sum)]);

    if lab.state().engine == Engine::Rbd {
        records::survive(&mut demo, lab, [&first, &second]).await?;
    }

    demo.step("the StatefulSet and its claim are deleted: the volume is removed from every tier");
    demo.delete::<StatefulSet>("writer").await?;
    demo.delete::<PersistentVolumeClaim>(CLAIM).await?;
    let empty = demo.removed(&chain).await?;
    demo.show(&empty);
    let none = DeleteParams::default();
    Api::<Namespace>::all(demo.guest.clone()).delete(NAMESPACE, &none).await?;
    Api::<StorageClass>::all(demo.guest.clone()).delete("demo", &none).await?;
    Ok(())
}

impl Demo<'_> {
    fn step(&mut self, text: &str) {
        self.steps += 1;
        self.ui.line(format!("== {}. {text}", self.steps));
    }

    fn show(&self, lines: &[String]) {
        for line in lines {
            self.ui.line(format!("     {line}"));
        }
    }

    /// Checks that both VMs are nodes of the guest with the right identity.
    async fn check_nodes(&mut self, vms: &[&String], lab: &Lab) -> Result<()> {
        self.step("both virtual machines have joined the guest cluster");
        let nodes: Api<Node> = Api::all(self.guest.clone());
        for name in vms {
            let node = nodes.get(name).await.with_context(|| format!("guest Node {name}"))?;
            let info = node.status.and_then(|status| status.node_info).context("the Node has no nodeInfo")?;
            let uuid = lab.vm(name)?.uuid;
            ensure!(
                info.system_uuid.eq_ignore_ascii_case(&uuid.to_string()),
                "{name} is a different VM: its kubelet reports UUID {}, but the domain has UUID {uuid}",
                info.system_uuid
            );
            self.show(&[format!(
                "guest Node {name}: kubelet {}, kernel {}, UUID {uuid}",
                info.kubelet_version, info.kernel_version
            )]);
        }
        Ok(())
    }

    /// Waits until a volume is removed from every tier, and returns what was looked at.
    async fn removed(&self, chain: &Chain) -> Result<Vec<String>> {
        let left = eventually("the volume is removed everywhere", PATIENCE, || async {
            let left = self.tracer.leftovers(chain).await?;
            Ok(if left.iter().all(|leftovers| leftovers.found.is_empty()) {
                Ok(left)
            } else {
                let remaining = left.into_iter().filter(|leftovers| !leftovers.found.is_empty());
                Err(remaining.map(|leftovers| leftovers.to_string()).collect::<Vec<_>>().join("; "))
            })
        })
        .await?;
        Ok(left.iter().map(ToString::to_string).collect())
    }

    async fn cordon(&self, node: &str, cordoned: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.guest.clone());
        let patch = json!({"spec": {"unschedulable": cordoned}});
        nodes
            .patch(node, &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .with_context(|| format!("cannot cordon guest Node {node}"))
            .map(drop)
    }

    async fn delete<K>(&self, name: &str) -> Result<()>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::namespaced(self.guest.clone(), NAMESPACE);
        api.delete(name, &DeleteParams::default())
            .await
            .map(drop)
            .with_context(|| format!("cannot delete guest {} {NAMESPACE}/{name}", K::kind(&())))
    }

    /// Waits until the pod runs on a node, and returns its report. `not` is the UID of the previous pod.
    async fn report(&self, node: &str, not: Option<&str>) -> Result<Report> {
        let pods: Api<Pod> = Api::namespaced(self.guest.clone(), NAMESPACE);
        let what = format!("guest pod {NAMESPACE}/{POD} runs on {node}");
        eventually(&what, PATIENCE, || async {
            let Some(pod) = pods.get_opt(POD).await? else {
                return Ok(Err("the pod does not exist".to_owned()));
            };
            let uid = pod.uid().unwrap_or_default();
            if not == Some(uid.as_str()) {
                return Ok(Err("the previous pod still exists".to_owned()));
            }
            let status = pod.status.unwrap_or_default();
            let started = status.init_container_statuses.unwrap_or_default().into_iter().next();
            let Some(ended) = started.and_then(|container| container.state?.terminated) else {
                return Ok(Err(format!("the pod is {}", status.phase.unwrap_or_default())));
            };
            if ended.exit_code != 0 {
                bail!(
                    "its init container failed with code {} ({})",
                    ended.exit_code,
                    ended.reason.unwrap_or_default()
                );
            }
            if status.phase.as_deref() != Some("Running") {
                return Ok(Err(
                    "the init container has exited, the main container has not started".to_owned()
                ));
            }
            let on = pod.spec.and_then(|spec| spec.node_name).unwrap_or_default();
            ensure!(on == node, "the pod runs on {on}");
            let message = ended.message.unwrap_or_default();
            let [action, sum, device] = message.split_whitespace().collect::<Vec<_>>()[..] else {
                bail!("the init container reported {message:?}");
            };
            let (action, sum, device) = (action.to_owned(), sum.to_owned(), device.to_owned());
            Ok(Ok(Report { action, sum, device, pod: uid }))
        })
        .await
    }
}
