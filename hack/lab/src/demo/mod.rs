//! `cargo lab demo`: a volume's whole life, with the objects of both clusters that it moves through.

mod trace;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::cluster::objects::apply;
use crate::lab::Lab;
use crate::ui::Ui;
use crate::wait::eventually;
use trace::Tracer;

const MANIFEST: &str = include_str!("../../manifests/demo.yaml");
const NAMESPACE: &str = "demo";
const POD: &str = "writer-0";
const CLAIM: &str = "data-writer-0";
/// Emulated machines take their time beside other work.
const PATIENCE: Duration = Duration::from_secs(600);

struct Demo<'a> {
    ui: &'a Ui,
    guest: Client,
    tracer: Tracer,
    steps: u32,
}

/// What the pod's first container said.
struct Report {
    did: String,
    sum: String,
    device: String,
    pod: String,
}

/// Runs the demo over a lab of two machines. An error is a claim that did not hold.
pub(crate) async fn demo(ui: &Ui, lab: &Lab) -> Result<()> {
    let [first, second] = <[String; 2]>::try_from(lab.vms())
        .map_err(|vms| anyhow::anyhow!("the demo needs two virtual machines, the lab has {}", vms.len()))?;
    let guest = lab.guest("g1").await?;
    let mut demo = Demo { ui, tracer: Tracer::new(lab, &guest).await?, guest, steps: 0 };
    demo.tell(&[&first, &second], lab).await?;

    demo.step(
        "a person applies a StorageClass and a StatefulSet with a claim; the second machine is cordoned",
    );
    demo.cordon(&second, true).await?;
    apply(&demo.guest, "manifests/demo.yaml", MANIFEST).await?;
    let chain = demo.tracer.chain(NAMESPACE, CLAIM).await?;
    demo.show(&chain.lines());

    demo.step(&format!("the pod runs on {first} and writes 64 MiB with their checksum"));
    let wrote = demo.report(&first, None).await?;
    ensure!(wrote.did == "wrote", "the new volume was not empty: the pod says {:?}", wrote.did);
    demo.show(&demo.tracer.attachment(&chain, &first, &wrote.device).await?);
    demo.show(&[format!("pod {POD} on {first}: wrote, sha256 {}", wrote.sum)]);

    demo.step(&format!("{first} is cordoned and the pod deleted: the volume moves to {second}"));
    demo.cordon(&second, false).await?;
    demo.cordon(&first, true).await?;
    demo.delete::<Pod>(POD).await?;
    let verified = demo.report(&second, Some(&wrote.pod)).await?;
    demo.show(&demo.tracer.attachment(&chain, &second, &verified.device).await?);
    ensure!(verified.did == "verified", "the data is gone: the pod says {:?}", verified.did);
    ensure!(verified.sum == wrote.sum, "the checksum was {} and is {}", wrote.sum, verified.sum);
    demo.show(&[format!("pod {POD} on {second}: verified, sha256 {} as before", verified.sum)]);

    demo.step("the StatefulSet and its claim are deleted: nothing of the volume is left, on any tier");
    demo.delete::<StatefulSet>("writer").await?;
    demo.delete::<PersistentVolumeClaim>(CLAIM).await?;
    let nothing = eventually("nothing is left of the volume", PATIENCE, || async {
        let left = demo.tracer.leftovers(&chain).await?;
        Ok(if left.iter().all(|place| place.found.is_empty()) {
            Ok(left)
        } else {
            let full = left.into_iter().filter(|place| !place.found.is_empty());
            Err(full.map(|place| place.to_string()).collect::<Vec<_>>().join("; "))
        })
    })
    .await?;
    demo.show(&nothing.iter().map(ToString::to_string).collect::<Vec<_>>());
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

    /// Both machines are nodes: real kubelets that know the driver.
    async fn tell(&mut self, machines: &[&String], lab: &Lab) -> Result<()> {
        self.step("both virtual machines have joined the guest cluster");
        let nodes: Api<Node> = Api::all(self.guest.clone());
        for name in machines {
            let node = nodes.get(name).await.with_context(|| format!("guest Node {name}"))?;
            let info =
                node.status.and_then(|status| status.node_info).context("the node says nothing of itself")?;
            let uuid = lab.vm(name)?.uuid;
            ensure!(
                info.system_uuid.eq_ignore_ascii_case(&uuid.to_string()),
                "{name} is another machine: its kubelet sees UUID {}, libvirt knows {uuid}",
                info.system_uuid
            );
            self.show(&[format!(
                "guest Node {name}: kubelet {}, kernel {}, UUID {uuid}",
                info.kubelet_version, info.kernel_version
            )]);
        }
        Ok(())
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

    /// Waits until the pod runs on a machine, and gives what it said. `not` is the pod that was there before.
    async fn report(&self, node: &str, not: Option<&str>) -> Result<Report> {
        let pods: Api<Pod> = Api::namespaced(self.guest.clone(), NAMESPACE);
        let what = format!("guest pod {NAMESPACE}/{POD} runs on {node}");
        eventually(&what, PATIENCE, || async {
            let Some(pod) = pods.get_opt(POD).await? else { return Ok(Err("there is no pod".to_owned())) };
            let uid = pod.uid().unwrap_or_default();
            if not == Some(uid.as_str()) {
                return Ok(Err("the old pod is still there".to_owned()));
            }
            let status = pod.status.unwrap_or_default();
            let started = status.init_container_statuses.unwrap_or_default().into_iter().next();
            let Some(ended) = started.and_then(|container| container.state?.terminated) else {
                return Ok(Err(format!("it is {}", status.phase.unwrap_or_default())));
            };
            if ended.exit_code != 0 {
                bail!(
                    "its first container failed with code {} ({})",
                    ended.exit_code,
                    ended.reason.unwrap_or_default()
                );
            }
            if status.phase.as_deref() != Some("Running") {
                return Ok(Err("its first container ended, its second has not begun".to_owned()));
            }
            let on = pod.spec.and_then(|spec| spec.node_name).unwrap_or_default();
            ensure!(on == node, "it runs on {on}");
            let said = ended.message.unwrap_or_default();
            let [did, sum, device] = said.split_whitespace().collect::<Vec<_>>()[..] else {
                bail!("its first container said {said:?}");
            };
            let (did, sum, device) = (did.to_owned(), sum.to_owned(), device.to_owned());
            Ok(Ok(Report { did, sum, device, pod: uid }))
        })
        .await
    }
}
