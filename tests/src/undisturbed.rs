//! A pod that must not notice what happens to Nestor's components.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::eventually;
use crate::pods::{POD, PodScenario, Volume};

/// Name of the StatefulSet.
const SET: &str = "writer";
const POD_NAME: &str = "writer-0";

/// A pod that appends durable records to its volume all the time.
pub struct Undisturbed<'a> {
    pods: &'a PodScenario,
    volume: Volume,
    /// The node it runs on.
    pub node: String,
    container: Container,
}

/// What changes if a container is restarted or replaced.
#[derive(Debug, PartialEq, Eq)]
struct Container {
    pod: String,
    id: String,
    restarts: i32,
}

impl<'a> Undisturbed<'a> {
    /// Starts the pod, and waits until it writes.
    pub async fn start(pods: &'a PodScenario, volume: Volume) -> Result<Self> {
        pods.run_record_writer(SET, &volume, 1).await?;
        let node = pods.ready_on(SET, None).await?;
        let container = container(pods).await?;
        Ok(Self { pods, volume, node, container })
    }

    /// Checks that the pod's container is the same, and that it writes more records to the disk.
    pub async fn still_writes(&self) -> Result<()> {
        let now = container(self.pods).await?;
        ensure!(now == self.container, "the container was {:?} and is {now:?}", self.container);
        let before = self.records().await?;
        eventually("the pod writes more records", POD, || async {
            let now = self.records().await?;
            Ok(if now > before { Ok(()) } else { Err(format!("{before} records, then {now}")) })
        })
        .await
    }

    /// Stops the pod, and checks that its records are complete.
    pub async fn finish(self) -> Result<()> {
        let durable = self.records().await?;
        self.pods.remove_sets().await?;
        let found = self.pods.complete_records(&self.node, &self.volume).await?;
        ensure!(found >= durable, "{durable} records were durable, the volume has {found}");
        Ok(())
    }

    async fn records(&self) -> Result<u64> {
        self.pods.durable_records(&self.node, &self.volume).await
    }
}

async fn container(pods: &PodScenario) -> Result<Container> {
    let pod = pods.api::<Pod>().get(POD_NAME).await?;
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_deref());
    let status = statuses.and_then(<[_]>::first).context("the pod has no container")?;
    Ok(Container {
        pod: pod.uid().unwrap_or_default(),
        id: status.container_id.clone().unwrap_or_default(),
        restarts: status.restart_count,
    })
}
