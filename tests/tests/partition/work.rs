//! Work during a network fault: operations of a controller behind a proxy, and checks of their results.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use crds::names;
use csi::proto::CreateVolumeRequest;
use lab::LoopNode;
use lab::audit::{Entry, Mark};
use tests::driver::new_volume;
use tests::program::{Controller, Running, binary};
use tests::records::{Records, Writer};
use tests::tcp_proxy::TcpProxy;
use tests::{MIB, PATIENCE, PausedProcess, Scenario, eventually};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

/// Long enough to restart servers, wait for status changes and open the proxy again.
pub(super) const LONG_DEADLINE: Duration = Duration::from_secs(600);

/// Duration of a long outage: longer than any retry interval of our programs.
pub(super) fn outage() -> Duration {
    let seconds = std::env::var("NESTOR_TEST_OUTAGE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(12))
}

/// Whether a sidecar retries after this status, assuming that the operation may be done.
pub(super) fn is_retryable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Aborted)
}

/// Prints the time since an instant.
pub(super) fn print_time(what: &str, since: Instant) {
    println!("{what}: {:.1} s", since.elapsed().as_secs_f64());
}

/// Repeats a call like a sidecar until it succeeds; fails on a status that is not retryable.
pub(super) async fn retry_until_done<T, F, R>(what: &str, reopened: Instant, call: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    let answer = eventually(what, PATIENCE, || async {
        match call().await {
            Ok(answer) => Ok(Ok(answer)),
            Err(status) if is_retryable(&status) => Ok(Err(status.to_string())),
            Err(status) => Err(status.into()),
        }
    })
    .await?;
    print_time(&format!("{what}, after the connection's return"), reopened);
    Ok(answer)
}

/// A controller behind a proxy with pending work: a disk to detach, a volume to attach, and a volume to create.
pub(super) struct PendingWork {
    pub(super) proxy: TcpProxy,
    pub(super) controller: Controller,
    pub(super) node: LoopNode,
    pub(super) attached: String,
    pub(super) detached: String,
    pub(super) request: CreateVolumeRequest,
}

impl PendingWork {
    /// Starts the controller behind an open proxy, and a background writer on the attached disk.
    pub(super) async fn start(s: &Scenario) -> Result<(Self, Writer)> {
        let (proxy, controller) = TcpProxy::with_controller(s).await?;
        let (node, attached, detached) = (s.node().await?, s.volume().await?, s.volume().await?);
        let disk = controller.driver.publish(&attached, &node.name).await?;
        let writer = start_writer(&node, &disk)?;
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        Ok((Self { proxy, controller, node, attached, detached, request }, writer))
    }

    /// Opens the proxy, and waits until all failed operations succeed and all watches are back. Returns the opening time.
    pub(super) async fn recover(&self) -> Result<Instant> {
        let Self { proxy, controller, node, detached, request, .. } = self;
        proxy.open().await?;
        let reopened = Instant::now();
        retry_until_done("CreateVolume", reopened, || controller.driver.create(request.clone())).await?;
        retry_until_done("attach", reopened, || controller.driver.publish(detached, &node.name)).await?;
        controller.process.ready().await?;
        print_time("all watches", reopened);
        Ok(reopened)
    }
}

/// Starts an attach, and returns once its entry is in the VM's spec. The attach waits until the returned guard is
/// dropped, because vm-operator-shim is paused.
pub(super) async fn start_attach(
    s: &Scenario,
    controller: &Controller,
    node: &LoopNode,
    handle: &str,
) -> Result<(PausedProcess, JoinHandle<Result<String, Status>>)> {
    let paused = s.pause_component("vm-operator-shim")?;
    let (driver, claim, vm) = (controller.driver.clone(), handle.to_owned(), node.name.clone());
    let mut waiting = tokio::spawn(async move { driver.publish_within(&claim, &vm, LONG_DEADLINE).await });
    during(&mut waiting, has_entry(s, node, handle, true)).await?;
    Ok((paused, waiting))
}

/// Waits for a condition that must be met while a call is in progress.
pub(super) async fn during<T: Debug>(
    call: &mut JoinHandle<T>,
    condition: impl Future<Output = Result<()>>,
) -> Result<()> {
    tokio::select! {
        ended = call => bail!("the call ended too early: {ended:?}"),
        met = condition => met,
    }
}

/// The result of a call that was in progress when its connection broke. If the response to its own write was lost, the
/// call fails, and a repeated call finds the work done.
pub(super) async fn result_of<T, F, R>(waiting: JoinHandle<Result<T, Status>>, again: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    match waiting.await? {
        Err(lost)
            if lost.code() == Code::Unavailable
                && lost.message().contains("failed to change spec.volumes") =>
        {
            retry_until_done("the same call", Instant::now(), again).await
        }
        answer => Ok(answer?),
    }
}

/// Starts a background writer on a node's disk.
pub(super) fn start_writer(node: &LoopNode, disk: &str) -> Result<Writer> {
    let [link, ..] = names::disk_by_id(disk);
    Ok(Records::begin(&node.by_id_dir.join(link), 1 << 20)?.append_in_background())
}

/// Stops a writer that must not have failed.
pub(super) fn stop_writer(writer: Writer) -> Result<()> {
    let written = writer.log().acknowledged();
    let records = writer.stop()?;
    ensure!(written > 0 && records.log().acknowledged() >= written, "nothing was written");
    Ok(())
}

/// Waits until a VM's spec has, or does not have, an entry for a claim.
pub(super) async fn has_entry(s: &Scenario, node: &LoopNode, claim: &str, expected: bool) -> Result<()> {
    eventually(&format!("{claim} in the spec of {}: {expected}", node.name), PATIENCE, || async {
        let volumes = s.vms().get(&node.name).await?.spec.volumes;
        let sources = volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        let there = sources.into_iter().any(|source| source.claim_name.as_str() == claim);
        Ok(if there == expected { Ok(()) } else { Err(format!("{volumes:?}")) })
    })
    .await
}

/// Waits until a VM's status reports a claim's disk as attached, or does not have it.
pub(super) async fn has_disk_status(
    s: &Scenario,
    node: &LoopNode,
    claim: &str,
    attached: bool,
) -> Result<()> {
    eventually(
        &format!("the status of {} has the disk of {claim}: {attached}", node.name),
        PATIENCE,
        || async {
            let disk = s.disk(&node.name, claim).await?;
            let matches =
                if attached { disk.as_ref().is_some_and(|disk| disk.attached) } else { disk.is_none() };
            Ok(if matches { Ok(()) } else { Err(format!("{disk:?}")) })
        },
    )
    .await
}

/// The writes of one attach.
const ONE_ATTACH: [&str; 4] = [
    "create volumeattachments",
    "patch virtualmachines",
    "patch virtualmachines/status",
    "patch volumeattachments/status",
];

/// Waits until the audit log since a mark has the writes of exactly one attach. A write whose response was lost may be
/// logged as failed (504) although it was executed. The log may lag behind the watches.
pub(super) async fn has_writes_of_one_attach(s: &Scenario, mark: Mark, node: &LoopNode) -> Result<()> {
    eventually("the writes of one attach", PATIENCE, || async {
        let entries = s.lab.audit()?.since(mark)?;
        let successful = |is_done: fn(u16) -> bool| successful(&entries, node, is_done);
        let (answered, with_lost) =
            (successful(|code| code < 300), successful(|code| code < 300 || code == 504));
        let is_one = [&answered, &with_lost]
            .into_iter()
            .any(|successful| without_confirmation(successful) == ONE_ATTACH);
        Ok(is_one.then_some(()).ok_or_else(|| format!("{answered:?}, with lost responses {with_lost:?}")))
    })
    .await
}

/// The writes without the PATCH by which a repeated attach confirms its existing entry.
fn without_confirmation(successful: &[String]) -> Vec<String> {
    let mut left = successful.to_vec();
    let patches: Vec<usize> = (0..left.len()).filter(|at| left[*at] == "patch virtualmachines").collect();
    if let [_, confirmation] = patches[..] {
        left.remove(confirmation);
    }
    left
}

/// The writes to a VM and its VolumeAttachments with a matching status code.
fn successful(entries: &[Entry], node: &LoopNode, is_done: impl Fn(u16) -> bool) -> Vec<String> {
    // The names of a VM's VolumeAttachments begin with its name.
    let about = |entry: &Entry| {
        ["virtualmachines", "volumeattachments"].contains(&entry.resource.as_str())
            && entry.name.starts_with(&node.name)
    };
    let successful = entries.iter().filter(|entry| entry.is_write() && is_done(entry.code) && about(entry));
    let mut lines: Vec<String> = successful
        .map(|Entry { verb, resource, subresource, .. }| match subresource.as_str() {
            "" => format!("{verb} {resource}"),
            subresource => format!("{verb} {resource}/{subresource}"),
        })
        .collect();
    lines.sort();
    lines
}

/// Starts a second mgmt-csi in place of the lab's, with the storage infra behind a proxy.
pub(super) async fn mgmt_csi(s: &Scenario, proxy: &TcpProxy) -> Result<Running> {
    let state = s.lab.state();
    let infra = state.infra.as_ref().context("the lab has no storage infra")?;
    let management = state.management.as_ref().context("the lab has no management cluster")?;
    let file = |name: &str| infra.pki.join(name).display().to_string();
    let words = [
        format!("--endpoint=unix://{}", infra.mgmt_socket.display()),
        format!("--kubeconfig={}", management.kubeconfig_of("mgmt-csi").display()),
        format!("--infra-url={}", proxy.url()),
        format!("--infra-ca={}", file("ca.crt")),
        format!("--infra-cert={}", file("driver.crt")),
        format!("--infra-key={}", file("driver.key")),
    ];
    let second = Running::start(&binary(&s.lab, "mgmt-csi"), &words.each_ref().map(String::as_str)).await?;
    second.ready().await?;
    Ok(second)
}
