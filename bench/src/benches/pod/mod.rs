//! Bench: what a person waits for, on real virtual machines: from the creation of a pod, with or without its claim, until
//! its container runs; from the deletion of a pod until it runs on another VM; from the loss of a VM until its pod runs
//! elsewhere. The floor is the same pod with an emptyDir.

mod lost;
mod node_calls;
mod timeline;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use crds::names;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tests::pods::{self, IMAGE, PodScenario};
use tests::{Scenario, eventually, unique};

use crate::observed::LONGEST;
use crate::report::Report;
use crate::work::Work;
use lost::Taint;
use node_calls::NodeLog;
use timeline::{Fact, Timeline};

/// A filesystem of the volumes.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Filesystem {
    Ext4,
    Xfs,
    Btrfs,
}

impl Filesystem {
    fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }
}

/// The volumes, and the lost virtual machines.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Filesystems of the volumes.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["ext4", "xfs"])]
    filesystems: Vec<Filesystem>,
    /// Size of the volumes.
    #[arg(long, default_value = "320Mi")]
    size: String,
    /// Number of times a VM is killed, and as often with a taint by hand.
    #[arg(long, default_value_t = 1)]
    killed: u32,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, options: &Options) -> Result<()> {
    let (starts, count, chosen) = (report.clone(), work.clone(), options.clone());
    pods::run(move |pods| async move { measure(pods, starts, &count, &chosen).await }).await?;
    for taint in [Taint::Proven, Taint::ByHand] {
        lost::measure(report, options.killed, taint).await?;
    }
    Ok(())
}

async fn measure(pods: Arc<PodScenario>, report: Report, work: &Work, options: &Options) -> Result<()> {
    let s = pods.scenario();
    let bench = Bench { s, timeline: Timeline::watch(s), nodes: [&pods.first_node, &pods.second_node] };
    for _ in 0..work.warm_up() {
        bench.with_empty_dir(bench.nodes[0]).await?;
    }
    for filesystem in &options.filesystems {
        bench.measure(&report, work.count(), filesystem.name(), &options.size).await?;
    }
    Ok(())
}

/// A pod from the request until its container ran.
struct Sample {
    total: Duration,
    /// The parts of the total, in order.
    steps: Vec<(&'static str, Duration)>,
    /// What Nestor's calls took of it, and the sidecars' around them.
    nestor: Duration,
}

/// The samples of one case.
#[derive(Default)]
struct Case {
    samples: Vec<Sample>,
    floor: Vec<Duration>,
}

impl Case {
    fn report(&self, report: &Report, name: &str) {
        let totals: Vec<Duration> = self.samples.iter().map(|sample| sample.total).collect();
        report.times(name, &totals, &self.floor);
        let steps = self.samples.first().into_iter().flat_map(|first| &first.steps).enumerate();
        for (at, (step, _)) in steps {
            let times: Vec<Duration> =
                self.samples.iter().filter_map(|sample| Some(sample.steps.get(at)?.1)).collect();
            report.times_of(name, step, &times, &[]);
        }
        let nestor: Vec<Duration> = self.samples.iter().map(|sample| sample.nestor).collect();
        report.times_of(name, "claim, detach, attach, stage", &nestor, &[]);
    }
}

/// A volume of a bound claim.
struct Volume {
    claim: String,
    name: String,
    handle: String,
}

struct Bench<'a> {
    s: &'a Scenario,
    timeline: Timeline,
    nodes: [&'a String; 2],
}

impl Bench<'_> {
    async fn measure(&self, report: &Report, count: usize, filesystem: &str, size: &str) -> Result<()> {
        let class = |binding| self.class(filesystem, binding);
        let (immediate, delayed) = (class("Immediate").await?, class("WaitForFirstConsumer").await?);
        let [mut new, mut late, mut known, mut moved] = std::array::from_fn(|_| Case::default());
        let [here, there] = self.nodes;
        // Alternating, so that other load on the host affects all cases equally.
        for _ in 0..count {
            let floor = self.with_empty_dir(here).await?;
            for case in [&mut new, &mut late, &mut known, &mut moved] {
                case.floor.push(floor);
            }
            let (pod, volume, sample) = self.with_new_claim(&delayed, size, here).await?;
            late.samples.push(sample);
            self.remove(&pod, Some(&volume)).await?;
            let (pod, volume, sample) = self.with_new_claim(&immediate, size, here).await?;
            new.samples.push(sample);
            self.detach(&pod, &volume, here).await?;
            let (pod, sample) = self.with_volume(&volume, here).await?;
            known.samples.push(sample);
            let (pod, sample) = self.moves(&pod, &volume, [here, there]).await?;
            moved.samples.push(sample);
            self.remove(&pod, Some(&volume)).await?;
        }
        new.report(report, &format!("new {filesystem}"));
        late.report(report, &format!("first use {filesystem}"));
        known.report(report, &format!("used {filesystem}"));
        moved.report(report, &format!("moved {filesystem}"));
        Ok(())
    }

    // ---- objects ----

    async fn class(&self, filesystem: &str, binding: &str) -> Result<String> {
        let parameters =
            [(names::PARAMETER_MANAGEMENT_CLASS, "nestor"), ("csi.storage.k8s.io/fstype", filesystem)];
        self.s.guest_class_with(&parameters, json!({"volumeBindingMode": binding})).await
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.s.guest.clone(), &self.s.name)
    }

    async fn claim(&self, class: &str, size: &str) -> Result<String> {
        let name = unique("claim");
        self.s.claim(&name, class, size).await?;
        Ok(name)
    }

    /// Creates a pod that waits on a node, with a volume at /data.
    async fn pod(&self, node: &str, volume: Value) -> Result<String> {
        let mut volume = volume;
        volume["name"] = json!("data");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": unique("pod")},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "hostNetwork": true, "automountServiceAccountToken": false, "enableServiceLinks": false,
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "wait", "image": IMAGE, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", "trap exit TERM; sleep 100000 & wait"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }],
                "volumes": [volume],
            },
        }))?;
        Ok(self.pods().create(&PostParams::default(), &pod).await?.name_any())
    }

    async fn pod_with(&self, node: &str, claim: &str) -> Result<String> {
        self.pod(node, json!({"persistentVolumeClaim": {"claimName": claim}})).await
    }

    /// Waits until a claim is bound, and returns its volume.
    async fn volume(&self, claim: &str) -> Result<Volume> {
        let (_, pv) = self.s.bound(claim).await?;
        Ok(Volume { claim: claim.to_owned(), name: pv.name_any(), handle: tests::guest::handle(&pv)? })
    }

    /// Removes a pod, and its claim and volume.
    async fn remove(&self, pod: &str, volume: Option<&Volume>) -> Result<()> {
        self.pods().delete(pod, &DeleteParams::default()).await?;
        gone(&self.pods(), pod).await?;
        let Some(volume) = volume else { return Ok(()) };
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.s.guest.clone(), &self.s.name);
        claims.delete(&volume.claim, &DeleteParams::default()).await?;
        gone(&self.s.guest_volumes(), &volume.name).await
    }

    /// Removes a pod, and waits until its volume is detached.
    async fn detach(&self, pod: &str, volume: &Volume, node: &str) -> Result<()> {
        let since = Instant::now();
        self.remove(pod, None).await?;
        let detached = Fact::Detached { volume: volume.name.clone(), node: node.to_owned() };
        self.timeline.after(since, detached).await.map(drop)
    }

    // ---- cases ----

    /// A pod with an emptyDir.
    async fn with_empty_dir(&self, node: &str) -> Result<Duration> {
        let start = Instant::now();
        let pod = self.pod(node, json!({"emptyDir": {}})).await?;
        let running = self.timeline.after(start, Fact::Running { pod: pod.clone() }).await?;
        self.remove(&pod, None).await?;
        Ok(running - start)
    }

    /// A claim and a pod that are created together.
    async fn with_new_claim(&self, class: &str, size: &str, node: &str) -> Result<(String, Volume, Sample)> {
        let (log, start) = (NodeLog::mark(self.s, node)?, Instant::now());
        let claim = self.claim(class, size).await?;
        let pod = self.pod_with(node, &claim).await?;
        let bound = self.timeline.after(start, Fact::Bound { claim: claim.clone() }).await?;
        let volume = self.volume(&claim).await?;
        let mut steps = Steps::since(start);
        steps.own("claim bound", bound);
        let sample = self.started(steps, &pod, &volume, node, &log).await?;
        Ok((pod, volume, sample))
    }

    /// A pod whose volume is attached to no VM and has a filesystem.
    async fn with_volume(&self, volume: &Volume, node: &str) -> Result<(String, Sample)> {
        let (log, start) = (NodeLog::mark(self.s, node)?, Instant::now());
        let pod = self.pod_with(node, &volume.claim).await?;
        let sample = self.started(Steps::since(start), &pod, volume, node, &log).await?;
        Ok((pod, sample))
    }

    /// A pod that is deleted on one node and created on another.
    async fn moves(&self, old: &str, volume: &Volume, [from, to]: [&String; 2]) -> Result<(String, Sample)> {
        let (log, start) = (NodeLog::mark(self.s, to)?, Instant::now());
        self.pods().delete(old, &DeleteParams::default()).await?;
        let pod = self.pod_with(to, &volume.claim).await?;
        let on = |fact: fn(String, String) -> Fact| fact(volume.name.clone(), from.clone());
        let requested = on(|volume, node| Fact::DetachRequested { volume, node });
        let detached = on(|volume, node| Fact::Detached { volume, node });
        let mut steps = Steps::since(start);
        steps.other("until the detach", self.timeline.after(start, requested).await?);
        steps.own("detached", self.timeline.after(start, detached).await?);
        let sample = self.started(steps, &pod, volume, to, &log).await?;
        Ok((pod, sample))
    }

    /// Waits until a pod runs, and adds the steps from the schedule to the container.
    async fn started(
        &self,
        mut steps: Steps,
        pod: &str,
        volume: &Volume,
        node: &str,
        log: &NodeLog,
    ) -> Result<Sample> {
        let start = steps.start;
        let of_pod = |fact: fn(String) -> Fact| self.timeline.after(start, fact(pod.to_owned()));
        let of_volume = |fact: fn(String, String) -> Fact, volume: &str| {
            self.timeline.after(start, fact(volume.to_owned(), node.to_owned()))
        };
        let running = of_pod(|pod| Fact::Running { pod }).await?;
        steps.other("scheduled", of_pod(|pod| Fact::Scheduled { pod }).await?);
        let requested = of_volume(|volume, node| Fact::AttachRequested { volume, node }, &volume.name);
        steps.other("attach requested", requested.await?);
        let attached = of_volume(|volume, node| Fact::Attached { volume, node }, &volume.name);
        steps.own("attached", attached.await?);
        let reported = of_volume(|volume, node| Fact::Reported { volume, node }, &volume.handle);
        steps.other("reported on the Node", reported.await?);
        let calls = log.calls(&volume.handle).await?;
        steps.own("staged", steps.last + calls.stage);
        steps.own("published", steps.last + calls.publish);
        steps.other("kubelet and container", running);
        Ok(steps.end(running))
    }
}

/// Waits until an object is gone.
async fn gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    eventually(&format!("{name} is gone"), LONGEST, || async {
        Ok(if api.get_opt(name).await?.is_none() { Ok(()) } else { Err("it exists".to_owned()) })
    })
    .await
}

/// The steps of a sample, each since the one before.
struct Steps {
    start: Instant,
    last: Instant,
    steps: Vec<(&'static str, Duration)>,
    nestor: Duration,
}

impl Steps {
    fn since(start: Instant) -> Self {
        Self { start, last: start, steps: Vec::new(), nestor: Duration::ZERO }
    }

    /// A step of Kubernetes.
    fn other(&mut self, step: &'static str, end: Instant) {
        let took = end.saturating_duration_since(self.last);
        self.steps.push((step, took));
        self.last = self.last.max(end);
    }

    /// A step that waits for Nestor.
    fn own(&mut self, step: &'static str, end: Instant) {
        self.nestor += end.saturating_duration_since(self.last);
        self.other(step, end);
    }

    fn end(self, end: Instant) -> Sample {
        Sample { total: end - self.start, steps: self.steps, nestor: self.nestor }
    }
}
