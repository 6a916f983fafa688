//! A pod whose VM is killed: until its Node is not ready, and until the pod is ready on the other VM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tests::pods::{self, PodScenario, filesystem};

use crate::report::Report;

/// Name of the StatefulSet.
const SET: &str = "lost";

/// Who taints the Node as out of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taint {
    /// gc-csi, when the VM is proven off.
    Proven,
    /// A person, at once.
    ByHand,
}

impl Taint {
    fn case(self) -> &'static str {
        match self {
            Self::Proven => "killed",
            Self::ByHand => "killed, tainted by hand at once",
        }
    }
}

struct Times {
    not_ready: Duration,
    elsewhere: Duration,
}

/// Kills a VM `count` times.
pub(super) async fn measure(report: &Report, count: u32, taint: Taint) -> Result<()> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(in_scenario(taint).await?);
    }
    let times = |time: fn(&Times) -> Duration| all.iter().map(time).collect::<Vec<_>>();
    report.times(taint.case(), &times(|times| times.elsewhere), &[]);
    report.times_of(taint.case(), "until the Node is not ready", &times(|times| times.not_ready), &[]);
    Ok(())
}

async fn in_scenario(taint: Taint) -> Result<Times> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    pods::run(move |pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        pods.run_record_writer(SET, &volume, 1).await?;
        let lost = pods.ready_on(SET, None).await?;
        let outcome = kill(&pods, &lost, taint).await;
        restore(&pods, &lost).await?;
        // The receiver waits below.
        let _ = sender.send(outcome?);
        Ok(())
    })
    .await?;
    receiver.await.context("the scenario measured nothing")
}

async fn kill(pods: &Arc<PodScenario>, lost: &str, taint: Taint) -> Result<Times> {
    let killed = Instant::now();
    pods.scenario().lab.vm(lost)?.crash().await?;
    if taint == Taint::ByHand {
        pods.set_out_of_service(lost, true).await?;
    }
    pods.node_ready(lost, false).await?;
    let not_ready = killed.elapsed();
    let node = pods.ready_on(SET, Some(lost)).await?;
    ensure!(node != lost, "the pod is on {node} again");
    Ok(Times { not_ready, elsewhere: killed.elapsed() })
}

async fn restore(pods: &PodScenario, lost: &str) -> Result<()> {
    let (s, vm) = (pods.scenario(), pods.scenario().lab.vm(lost)?);
    if !vm.is_running() {
        vm.power_on().await?;
    }
    pods.set_out_of_service(lost, false).await?;
    vm.wait_for_node(&s.guest).await
}
