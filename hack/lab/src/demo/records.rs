//! The part of the demo with a Ceph cluster: its daemons die while a pod writes records.

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::Api;
use serde_json::{Value, json};

use super::{Demo, NAMESPACE, PATIENCE};
use crate::cluster::objects::apply_one;
use crate::lab::Lab;
use crate::wait::eventually;

const CLAIM: &str = "records";
/// The OSD that dies.
const OSD: u8 = 1;

/// Writes records with their checksums until it is told to stop, and reports how many are durable.
const WRITE: &str = "cd /data
    n=0
    until [ -e stop ]; do
        n=$((n + 1))
        dd if=/dev/urandom of=record-$n bs=64k count=1 conv=fsync 2>/dev/null
        sha256sum record-$n >> sums
        sync
    done
    echo $n > /dev/termination-log";

/// Waits for ten more records, and then tells the writer to stop.
const STOP: &str = "cd /data
    until [ -e sums ]; do sleep 1; done
    first=$(wc -l < sums)
    until [ $(wc -l < sums) -ge $((first + 10)) ]; do sleep 1; done
    touch stop
    echo $first > /dev/termination-log";

/// Verifies all records, and reports how many there are.
const READ: &str = "cd /data
    sha256sum -c sums > /dev/null
    wc -l < sums > /dev/termination-log";

/// Kills an OSD and restarts the monitor while a pod on `first` writes; a pod on `second` verifies the records.
pub(super) async fn survive(demo: &mut Demo<'_>, lab: &Lab, [first, second]: [&str; 2]) -> Result<()> {
    let ceph = lab.ceph()?;
    demo.step(&format!("a pod on {first} writes records; OSD {OSD} is killed and the monitor is restarted"));
    apply_one(&demo.guest, claim()).await?;
    demo.tracer.chain(NAMESPACE, CLAIM).await?;
    for (node, cordoned) in [(first, false), (second, true)] {
        demo.cordon(node, cordoned).await?;
    }
    start(demo, "record-writer", first, WRITE).await?;
    writes(demo).await?;
    ceph.kill_osd(OSD).await?;
    ceph.kill_monitor().await?;
    ceph.start_monitor().await?;
    writes(demo).await?;
    demo.show(&[format!("ceph: {}", ceph.ceph(&["osd", "stat"]).await?.trim())]);
    start(demo, "record-stop", first, STOP).await?;
    let seen = ended(demo, "record-stop").await?;
    let wrote = ended(demo, "record-writer").await?;
    demo.show(&[format!("{seen} records after the faults, {wrote} at the end: the writes continued")]);
    ceph.start_osd(OSD).await?;

    demo.step(&format!("OSD {OSD} is back; the volume moves to {second}, where a pod verifies all records"));
    for pod in ["record-writer", "record-stop"] {
        demo.delete::<Pod>(pod).await?;
    }
    demo.cordon(second, false).await?;
    start(demo, "record-reader", second, READ).await?;
    let read = ended(demo, "record-reader").await?;
    ensure!(read == wrote, "{wrote} records were durable, but {read} are there");
    demo.show(&[format!("pod record-reader on {second}: verified {read} records, none is lost")]);
    demo.delete::<Pod>("record-reader").await?;
    demo.delete::<PersistentVolumeClaim>(CLAIM).await
}

fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": NAMESPACE},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "demo",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

async fn start(demo: &Demo<'_>, name: &str, node: &str, script: &str) -> Result<()> {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node, "restartPolicy": "Never", "terminationGracePeriodSeconds": 2,
            "enableServiceLinks": false, "automountServiceAccountToken": false,
            "containers": [{
                "name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never",
                "command": ["sh", "-euc", script],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    });
    apply_one(&demo.guest, pod).await.map(drop)
}

/// Waits until the writer runs; fails if it has ended.
async fn writes(demo: &Demo<'_>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(demo.guest.clone(), NAMESPACE);
    eventually("the pod record-writer runs", PATIENCE, || async {
        let status = pods.get("record-writer").await?.status.unwrap_or_default();
        match status.phase.as_deref() {
            Some("Running") => Ok(Ok(())),
            Some("Pending") | None => Ok(Err("it is pending".to_owned())),
            Some(other) => bail!("the pod record-writer is {other}: its volume failed"),
        }
    })
    .await
}

/// Waits until a pod has succeeded, and returns its report.
async fn ended(demo: &Demo<'_>, name: &str) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(demo.guest.clone(), NAMESPACE);
    eventually(&format!("the pod {name} has ended"), PATIENCE, || async {
        let status = pods.get(name).await?.status.unwrap_or_default();
        let phase = status.phase.unwrap_or_default();
        let ended = status
            .container_statuses
            .unwrap_or_default()
            .into_iter()
            .find_map(|container| container.state?.terminated);
        let Some(ended) = ended else { return Ok(Err(format!("it is {phase}"))) };
        ensure!(ended.exit_code == 0, "the pod {name} failed with code {}", ended.exit_code);
        let message = ended.message.context("it reported nothing")?;
        Ok(Ok(message.trim().to_owned()))
    })
    .await
}
