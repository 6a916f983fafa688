//! Work that goes on while a link is away: what a guest's part has to do beneath it, what becomes of it, and what it wrote.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CreateVolumeRequest;
use lab::LoopNode;
use lab::audit::{Entry, Mark};
use tests::driver::new_volume;
use tests::link::Link;
use tests::program::{Controller, Running, binary};
use tests::records::{Records, Writer};
use tests::{Frozen, MIB, PATIENCE, Scenario, eventually};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use super::LONG;

/// How long a link is down that is down for long: longer than any pause before our programs try again.
pub(super) fn outage() -> Duration {
    let seconds = std::env::var("NESTOR_TEST_OUTAGE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(12))
}

/// Whether a sidecar tries again after this, and takes the work for possibly done.
pub(super) fn is_retryable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Aborted)
}

/// Says how long ago something was.
pub(super) fn say(what: &str, since: Instant) {
    println!("{what}: {:.1} s", since.elapsed().as_secs_f64());
}

/// Makes a call until it is answered well, as a sidecar does; every other answer must be one to try again after.
pub(super) async fn healed<T, F, R>(what: &str, back: Instant, call: F) -> Result<T>
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
    say(&format!("{what}, after the return"), back);
    Ok(answer)
}

/// A guest's part beneath a link, with work to do: a disk to unplug, a volume to attach, and one to make.
pub(super) struct Busy {
    pub(super) link: Link,
    pub(super) beyond: Controller,
    pub(super) node: LoopNode,
    pub(super) used: String,
    pub(super) free: String,
    pub(super) wanted: CreateVolumeRequest,
}

impl Busy {
    /// Starts it, over a link that is open, and goes on writing to the disk that is plugged.
    pub(super) async fn beneath_link(s: &Scenario) -> Result<(Self, Writer)> {
        let (link, beyond) = Link::beneath_controller(s).await?;
        let (node, used, free) = (s.node().await?, s.volume().await?, s.volume().await?);
        let disk = beyond.driver.publish(&used, &node.name).await?;
        let writer = write_to(&node, &disk)?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        Ok((Self { link, beyond, node, used, free, wanted }, writer))
    }

    /// Opens the link, and waits until what was refused is done and all watches are back. Says since when it is open.
    pub(super) async fn heals(&self) -> Result<Instant> {
        let Self { link, beyond, node, free, wanted, .. } = self;
        link.open().await?;
        let back = Instant::now();
        healed("CreateVolume", back, || beyond.driver.create(wanted.clone())).await?;
        healed("attach", back, || beyond.driver.publish(free, &node.name)).await?;
        beyond.process.ready().await?;
        say("all watches", back);
        Ok(back)
    }
}

/// Begins an attach, and gives it once its entry is in the machine's spec. It waits for sure, until what is given with
/// it is dropped: the VM Operator stands still meanwhile.
pub(super) async fn under_way(
    s: &Scenario,
    beyond: &Controller,
    node: &LoopNode,
    handle: &str,
) -> Result<(Frozen, JoinHandle<Result<String, Status>>)> {
    let frozen = s.freeze_part("vm-operator-shim")?;
    let (driver, claim, machine) = (beyond.driver.clone(), handle.to_owned(), node.name.clone());
    let waiting = tokio::spawn(async move { driver.publish_within(&claim, &machine, LONG).await });
    entered(s, node, handle, true).await?;
    Ok((frozen, waiting))
}

/// The answer of a call that was under way when its link broke. Where it broke before the call had the answer to its
/// own write, which others saw already, the call says so, and the same call finds the work done.
pub(super) async fn answered<T, F, R>(waiting: JoinHandle<Result<T, Status>>, again: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    match waiting.await? {
        Err(lost)
            if lost.code() == Code::Unavailable
                && lost.message().contains("failed to change spec.volumes") =>
        {
            healed("the same call", Instant::now(), again).await
        }
        answer => Ok(answer?),
    }
}

/// Goes on writing to a machine's disk, as its pod does.
pub(super) fn write_to(node: &LoopNode, disk: &str) -> Result<Writer> {
    let [link, ..] = names::disk_by_id(disk);
    Ok(Records::begin(&node.by_id_dir.join(link), 1 << 20)?.keep_appending())
}

/// Ends a writer that must not have noticed anything.
pub(super) fn unharmed(writer: Writer) -> Result<()> {
    let written = writer.log().acknowledged();
    let records = writer.stop()?;
    ensure!(written > 0 && records.log().acknowledged() >= written, "nothing was written");
    Ok(())
}

/// Waits until a machine's spec has a claim, or has it no more.
pub(super) async fn entered(s: &Scenario, node: &LoopNode, claim: &str, wanted: bool) -> Result<()> {
    eventually(&format!("{claim} in the spec of {}: {wanted}", node.name), PATIENCE, || async {
        let volumes = s.machines().get(&node.name).await?.spec.volumes;
        let sources = volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        let there = sources.into_iter().any(|source| source.claim_name == claim);
        Ok(if there == wanted { Ok(()) } else { Err(format!("{volumes:?}")) })
    })
    .await
}

/// Waits until a machine shows a claim's disk as plugged, or shows nothing of it any more.
pub(super) async fn shown(s: &Scenario, node: &LoopNode, claim: &str, plugged: bool) -> Result<()> {
    eventually(&format!("{} shows the disk of {claim}: {plugged}", node.name), PATIENCE, || async {
        let disk = s.disk(&node.name, claim).await?;
        let as_wanted =
            if plugged { disk.as_ref().is_some_and(|disk| disk.attached) } else { disk.is_none() };
        Ok(if as_wanted { Ok(()) } else { Err(format!("{disk:?}")) })
    })
    .await
}

/// What an attach writes.
const ONE_ATTACH: [&str; 4] = [
    "create volumeattachments",
    "patch virtualmachines",
    "patch virtualmachines/status",
    "patch volumeattachments/status",
];

/// Proves that since a mark the writes of one attach to a machine were carried out, and no more. One whose answer was
/// lost may be told as broken off (504) although it was carried out. What a watch shows may not be in the log yet.
pub(super) async fn attached_once(s: &Scenario, mark: Mark, node: &LoopNode) -> Result<()> {
    eventually("the writes of one attach", PATIENCE, || async {
        let entries = s.lab.audit()?.since(mark)?;
        let done = |is_done: fn(u16) -> bool| done(&entries, node, is_done);
        let (answered, with_lost) = (done(|code| code < 300), done(|code| code < 300 || code == 504));
        let is_one = [&answered, &with_lost].into_iter().any(|done| unconfirmed(done) == ONE_ATTACH);
        Ok(is_one.then_some(()).ok_or_else(|| format!("{answered:?}, with those broken off {with_lost:?}")))
    })
    .await
}

/// The writes without the one by which a repeated attach confirms the entry that it finds.
fn unconfirmed(done: &[String]) -> Vec<String> {
    let mut left = done.to_vec();
    let patches: Vec<usize> = (0..left.len()).filter(|at| left[*at] == "patch virtualmachines").collect();
    if let [_, confirmation] = patches[..] {
        left.remove(confirmation);
    }
    left
}

/// The writes about a machine and its disks that were answered so.
fn done(entries: &[Entry], node: &LoopNode, is_done: impl Fn(u16) -> bool) -> Vec<String> {
    // What a machine's attachments are called begins with its name.
    let about = |entry: &Entry| {
        ["virtualmachines", "volumeattachments"].contains(&entry.resource.as_str())
            && entry.name.starts_with(&node.name)
    };
    let done = entries.iter().filter(|entry| entry.is_write() && is_done(entry.code) && about(entry));
    let mut lines: Vec<String> = done
        .map(|Entry { verb, resource, subresource, .. }| match subresource.as_str() {
            "" => format!("{verb} {resource}"),
            subresource => format!("{verb} {resource}/{subresource}"),
        })
        .collect();
    lines.sort();
    lines
}

/// Another mgmt-csi in the place of the lab's own, with the infra behind a link.
pub(super) async fn mgmt_csi(s: &Scenario, link: &Link) -> Result<Running> {
    let state = s.lab.state();
    let infra = state.infra.as_ref().context("the lab has no infra")?;
    let management = state.management.as_ref().context("the lab has no management cluster")?;
    let file = |name: &str| infra.pki.join(name).display().to_string();
    let words = [
        format!("--endpoint=unix://{}", infra.mgmt_socket.display()),
        format!("--kubeconfig={}", management.kubeconfig_of("mgmt-csi").display()),
        format!("--infra-url={}", link.url()),
        format!("--infra-ca={}", file("ca.crt")),
        format!("--infra-cert={}", file("client.crt")),
        format!("--infra-key={}", file("client.key")),
    ];
    let second = Running::start(&binary(&s.lab, "mgmt-csi"), &words.each_ref().map(String::as_str)).await?;
    second.ready().await?;
    Ok(second)
}
