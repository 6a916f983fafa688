//! Volumes that are images of a Ceph cluster, used by pods on VMs, in a lab with pools of the engine `rbd`:
//! `cargo lab test --only rbd`.

use std::io::Read;
use std::net::{Ipv6Addr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::api::DeleteParams;
use tests::pods::{self, PodScenario, Script, Volume, filesystem};
use tests::{PATIENCE, eventually};

/// Writes files with their checksums until it is told to stop, and prints how many are durable.
const WRITE: &str = "cd /data
    n=0
    until [ -e stop ]; do
        n=$((n + 1))
        dd if=/dev/urandom of=record-$n bs=64k count=1 conv=fsync 2>/dev/null
        sha256sum record-$n >> sums
        sync
    done
    echo $n";

/// Waits for ten more files.
const TEN_MORE: &str = "cd /data
    until [ -e sums ]; do sleep 1; done
    first=$(wc -l < sums)
    until [ $(wc -l < sums) -ge $((first + 10)) ]; do sleep 1; done";

/// Verifies all files, and prints how many there are.
const READ: &str = "cd /data; sha256sum -c sums > /dev/null; wc -l < sums";

/// The names of a volume's images in all pools and their trash.
async fn images(pods: &PodScenario, id: &str) -> Result<Vec<String>> {
    let mut all = pods.scenario().lab.stored().await?;
    all.retain(|name| name.contains(id));
    Ok(all)
}

/// Waits until the storage infra reports all pools as healthy or as unhealthy, also in its metrics.
async fn pools_are(pods: &PodScenario, healthy: bool) -> Result<()> {
    let s = pods.scenario();
    eventually(&format!("the pools are healthy: {healthy}"), PATIENCE, || async {
        let metrics = s.lab.metrics("storage-infra").await?;
        let values: Vec<&str> =
            metrics.lines().filter(|line| line.starts_with("nestor_storage_infra_pool_healthy{")).collect();
        let expected = if healthy { " 1" } else { " 0" };
        let all = values.len() >= 2 && values.iter().all(|line| line.ends_with(expected));
        Ok(if all { Ok(()) } else { Err(format!("{values:?}")) })
    })
    .await
}

#[tokio::test]
async fn no_durable_write_is_lost_when_an_osd_dies_and_the_monitor_restarts() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let ceph = s.lab.ceph()?;
        let (here, there) = (&pods.first_node, &pods.second_node);
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let infra = s.infra_volume(&volume.handle).await?;
        let id = infra.id.as_str();
        ensure!(images(&pods, id).await? == [id], "the images are {:?}", images(&pods, id).await?);
        let writer = pods.start(Script::new("writer", here, WRITE).mount(&volume, "/data")).await?;
        pods.running(&writer).await?;
        let ten_more = |name: &str| Script::new(name, here, TEN_MORE).mount(&volume, "/data");
        pods.run(ten_more("before")).await?;
        let status = ceph.rbd(&["status", &format!("{}/{id}", infra.pool)]).await?;
        ensure!(status.contains("watcher="), "no VM has {id} open: {status}");
        ceph.kill_osd(1).await?;
        ceph.kill_monitor().await?;
        ceph.start_monitor().await?;
        // Two of three replicas are left.
        pods.run(ten_more("after")).await?;
        pods.running(&writer).await?;
        let stop = Script::new("stop", here, "touch /data/stop").mount(&volume, "/data");
        pods.run(stop).await?;
        let wrote = pods.finish(&writer).await?;
        ceph.start_osd(1).await?;
        pods_move_and_find(&pods, &volume, &writer, there, &wrote).await?;

        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        eventually(&format!("the image {id} is removed"), PATIENCE, || async {
            let left = images(&pods, id).await?;
            Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
        })
        .await
    })
    .await
}

/// Removes the writer, and checks on another node that all records are there.
async fn pods_move_and_find(
    pods: &PodScenario,
    volume: &Volume,
    writer: &str,
    node: &str,
    wrote: &str,
) -> Result<()> {
    pods.remove(writer).await?;
    let read = pods.run(Script::new("reader", node, READ).mount(volume, "/data")).await?;
    ensure!(read == wrote, "{wrote} records were durable, but {read} are there");
    Ok(())
}

#[tokio::test]
async fn a_disk_is_attached_only_once_the_cluster_answers() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let ceph = s.lab.ceph()?;
        let node = &pods.first_node;
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        pools_are(&pods, true).await?;
        let pod = Script::new("user", node, "echo 1 > /data/file; cat /data/file").mount(&volume, "/data");
        ceph.kill_monitor().await?;
        let waiting = waits_for_the_cluster(&pods, pod, &volume).await;
        // Whatever was found, for the other tests.
        ceph.start_monitor().await?;
        let pod = waiting?;
        pools_are(&pods, true).await?;
        ensure!(pods.finish(&pod).await? == "1");
        Ok(())
    })
    .await
}

/// Starts a pod with a volume of a cluster without monitor: its attach is refused, and its VM keeps running.
async fn waits_for_the_cluster(pods: &PodScenario, pod: Script, volume: &Volume) -> Result<String> {
    let (s, node) = (pods.scenario(), &pods.first_node);
    pools_are(pods, false).await?;
    let pod = pods.start(pod).await?;
    let refused = eventually("the attach is refused with the reason", PATIENCE, || async {
        let attachment = s.attachment(node, &volume.handle).await?;
        let error = attachment.and_then(|one| one.status).and_then(|status| status.error);
        Ok(error.map(|error| format!("{error:?}")).ok_or_else(|| "there is no error yet".to_owned()))
    })
    .await?;
    ensure!(refused.contains("the storage infra is unavailable"), "{refused}");
    ensure!(!s.lab.libvirt_disks(node).await?.contains(&volume.disk), "the disk is attached");
    // The VM is not frozen: its kubelet answers.
    let kubelet = s.lab.kubelet(node).await?;
    kubelet.request_text(http::Request::get("/healthz").body(Vec::new())?).await?;
    Ok(pod)
}

/// What a port sends to a client that sends a line of text.
const ASK: &str =
    "ask() { echo 'GET / HTTP/1.0' | timeout 10 nc \"$1\" \"$2\" 2>&1 | tr -d '\\0' | head -c 80; echo; }";

#[tokio::test]
async fn a_vm_cannot_reach_the_cluster_that_has_its_disks() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let ports = s.lab.ceph()?.ports();
        // The cluster listens there, and announces itself.
        let mut monitor = TcpStream::connect((Ipv6Addr::LOCALHOST, ports[0]))?;
        monitor.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut banner = [0; 4];
        monitor.read_exact(&mut banner)?;
        ensure!(&banner == b"ceph", "{banner:?}");
        let server = &s.lab.state().guests.get("g1").context("no guest g1")?.cluster.server;
        let api = lab::ports::of_url(server)?;
        let all: Vec<String> = ports.iter().map(u16::to_string).collect();
        let script = format!(
            "{ASK}
            echo \"api: $(ask 10.0.2.2 {api})\"
            for port in {}; do echo \"ceph: $(ask 10.0.2.2 $port)\"; done | sort -u
            card=$(ls /sys/class/net | grep -v lo | head -n 1)
            ip -6 addr add fec0::99/64 dev $card
            echo \"ipv6: $(ask fec0::2 {})\"
            ip -6 addr del fec0::99/64 dev $card",
            all.join(" "),
            ports[0]
        );
        let output = pods.run(Script::new("ask", &pods.first_node, &script).privileged()).await?;
        let answers = |kind: &str| -> Vec<&str> {
            output.lines().filter_map(|line| line.strip_prefix(kind)).map(str::trim).collect()
        };
        ensure!(answers("api:").iter().any(|answer| answer.contains("HTTP")), "no API server: {output}");
        for kind in ["ceph:", "ipv6:"] {
            let found = answers(kind);
            ensure!(!found.is_empty() && found.iter().all(|one| !one.contains("ceph")), "{output}");
        }
        Ok(())
    })
    .await
}
