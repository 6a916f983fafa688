//! Links that are cut, half-open, slow, or break in the middle of an answer, and servers that are away, while volumes
//! are made, attached and detached. One test at a time, since some stop parts that all share.
//!
//! `NESTOR_TEST_OUTAGE` is how long a link is down that is down for long, in seconds.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CreateVolumeRequest;
use lab::LoopNode;
use lab::audit::{Entry, Mark};
use lab::vm::virsh;
use tests::driver::{late, new_volume};
use tests::link::Link;
use tests::pods::{self, Script, filesystem};
use tests::program::{Controller, Running, binary};
use tests::records::{Records, Writer};
use tests::{Frozen, MIB, PATIENCE, Scenario, alone, eventually, run};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

/// Short enough that the answer comes before anybody notices that the link is down.
const SOON: Duration = Duration::from_secs(3);
/// Longer than it takes to start what was away, to be told, and to open the link again.
const LONG: Duration = Duration::from_secs(600);

#[tokio::test]
async fn calls_over_a_link_that_is_cut_fail_by_its_name_and_heal_with_it() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (busy, writer) = Busy::beneath_link(&s).await?;
        let Busy { link, beyond, node, used, free, wanted } = &busy;

        link.cut();
        let begun = Instant::now();
        while begun.elapsed() < outage() {
            let refusals = [
                beyond.driver.create(wanted.clone()).await.map(drop),
                beyond.driver.publish(free, &node.name).await.map(drop),
                beyond.driver.unpublish(used, &node.name).await,
            ];
            for refused in refusals {
                let refused = refused.unwrap_err();
                assert_eq!(refused.code(), Code::Unavailable, "{refused}");
                assert!(refused.message().contains(&link.url()), "{refused}");
            }
            // The pace of a sidecar.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        beyond.process.not_ready_because(&[&link.url()]).await?;

        busy.heals().await?;
        unharmed(writer)?;
        beyond.driver.unpublish(used, &node.name).await?;
        busy.beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_half_open_link_is_noticed_and_its_return_too() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (busy, writer) = Busy::beneath_link(&s).await?;
        let Busy { link, beyond, node, used, free, wanted } = &busy;

        link.stall();
        let begun = Instant::now();
        // Its own words: it answered before its caller gave up.
        late("attach", &["management"], || beyond.driver.publish_within(free, &node.name, SOON)).await?;
        late("detach", &["management"], || beyond.driver.unpublish_within(used, &node.name, SOON)).await?;
        let refused = beyond.driver.create(wanted.clone()).await.unwrap_err();
        assert!(is_retryable(&refused) && refused.message().contains(&link.url()), "{refused}");
        beyond.process.not_ready_because(&["cannot watch VirtualMachines", &link.url()]).await?;
        say("half-open link noticed, after its beginning", begun);

        let back = busy.heals().await?;
        unharmed(writer)?;
        healed("detach", back, || beyond.driver.unpublish(used, &node.name)).await?;
        busy.beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_call_that_waits_behind_a_link_that_comes_back_gets_its_answer() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = Link::beneath_controller(&s).await?;
        let (node, handle) = (s.node().await?, s.volume().await?);
        let mark = s.lab.audit()?.mark()?;
        let (frozen, waiting) = under_way(&s, &beyond, &node, &handle).await?;
        link.stall();
        drop(frozen);
        shown(&s, &node, &handle, true).await?;
        link.open().await?;
        let back = Instant::now();
        let disk = answered(waiting, || beyond.driver.publish(&handle, &node.name)).await?;
        say("attach under way", back);
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        attached_once(&s, mark, &node).await?;

        let frozen = s.freeze_part("vm-operator-shim")?;
        let (driver, claim, machine) = (beyond.driver.clone(), handle.clone(), node.name.clone());
        let waiting = tokio::spawn(async move { driver.unpublish_within(&claim, &machine, LONG).await });
        entered(&s, &node, &handle, false).await?;
        link.stall();
        drop(frozen);
        shown(&s, &node, &handle, false).await?;
        link.open().await?;
        let back = Instant::now();
        answered(waiting, || beyond.driver.unpublish(&handle, &node.name)).await?;
        say("detach under way", back);
        s.nothing_is_attached(&node).await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_watch_that_expired_is_read_anew_and_the_call_behind_it_gets_its_answer() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = Link::beneath_controller(&s).await?;
        let (node, used, handle) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let (frozen, waiting) = under_way(&s, &beyond, &node, &handle).await?;
        link.stall();

        // A server that starts remembers nothing of what was before.
        s.kill_part("mgmt-apiserver").await?;
        s.kill_part("mgmt-etcd").await?;
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        s.start_part("mgmt-etcd").await?;
        s.start_part("mgmt-apiserver").await?;
        let back = Instant::now();
        drop(frozen);
        shown(&s, &node, &handle, true).await?;
        say("attach with etcd and the API server restarted in its midst", back);

        link.open().await?;
        let back = Instant::now();
        let disk = answered(waiting, || beyond.driver.publish(&handle, &node.name)).await?;
        say("attach under way behind a watch that expired", back);
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        assert!(
            beyond.process.log().contains("the watch of VirtualMachines has expired"),
            "{}",
            beyond.process.log()
        );
        healed("detach", back, || s.driver.unpublish(&handle, &node.name)).await?;
        unharmed(writer)?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_found_done_and_not_done_again() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = Link::beneath_controller(&s).await?;
        let mut node = s.node().await?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        link.reset_next_answer();
        let first = beyond.driver.create(wanted.clone()).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        let handle =
            healed("CreateVolume", Instant::now(), || beyond.driver.create(wanted.clone())).await?.volume_id;

        // Something else that the server tells may come before the answer: then once more.
        let mark = loop {
            let mark = s.lab.audit()?.mark()?;
            link.reset_next_answer();
            match beyond.driver.publish(&handle, &node.name).await {
                Err(lost) => {
                    assert!(is_retryable(&lost), "{lost}");
                    break mark;
                }
                Ok(_) => {
                    healed("detach", Instant::now(), || beyond.driver.unpublish(&handle, &node.name)).await?;
                    // What was written for this one may come into the audit log after the next mark.
                    node = s.node().await?;
                }
            }
        };
        let disk = healed("attach", Instant::now(), || beyond.driver.publish(&handle, &node.name)).await?;
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        attached_once(&s, mark, &node).await?;

        link.reset_next_answer();
        let first = beyond.driver.unpublish(&handle, &node.name).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        healed("detach", Instant::now(), || beyond.driver.unpublish(&handle, &node.name)).await?;
        s.nothing_is_attached(&node).await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_slow_link_makes_calls_slow_and_nothing_else() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = Link::beneath_controller(&s).await?;
        let node = s.node().await?;
        link.slow(Duration::from_millis(300));
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        let handle = beyond.driver.create(wanted).await?.volume_id;
        beyond.driver.publish(&handle, &node.name).await?;
        beyond.driver.unpublish(&handle, &node.name).await?;
        s.nothing_is_attached(&node).await?;
        beyond.process.ready().await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_link_to_the_infra_that_is_half_open_is_told_on_every_tier_and_heals() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle, used) = (s.node().await?, s.bound_claim("data").await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let infra = s.lab.state().infra.clone().context("the lab has no infra")?;
        let link = Link::to(&infra.url).await?;
        s.stop_part("mgmt-csi").await?;
        let second = mgmt_csi(&s, &link).await?;

        link.stall();
        let begun = Instant::now();
        late("attach", &[], || s.driver.publish_within(&handle, &node.name, SOON)).await?;
        s.told("data", &["storage infra", &link.url()]).await?;
        say("half-open link to the infra told on the guest's claim, after its beginning", begun);
        second.not_ready_because(&["storage infra", &link.url()]).await?;
        link.open().await?;
        let back = Instant::now();
        healed("attach over the infra's link", back, || s.driver.publish(&handle, &node.name)).await?;

        link.stall();
        late("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SOON)).await?;
        link.open().await?;
        let back = Instant::now();
        healed("detach over the infra's link", back, || s.driver.unpublish(&handle, &node.name)).await?;
        unharmed(writer)?;
        let ended = second.stop().await?;
        ensure!(ended.success(), "mgmt-csi ended with {ended}");
        s.start_part("mgmt-csi").await
    })
    .await
}

#[tokio::test]
async fn an_infra_that_stands_still_or_is_away_is_waited_for_and_nothing_is_done_twice() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle, used) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");

        let frozen = s.freeze_part("storage-infra")?;
        late("attach", &[], || s.driver.publish_within(&handle, &node.name, SOON)).await?;
        drop(frozen);
        let back = Instant::now();
        healed("attach after the infra stood still", back, || s.driver.publish(&handle, &node.name)).await?;

        s.kill_part("storage-infra").await?;
        let begun = Instant::now();
        while begun.elapsed() < outage() {
            // Each ends when it is told what is wrong, or at its deadline: no tighter pace is needed.
            late("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SOON)).await?;
            late("CreateVolume", &[], || s.driver.create(wanted.clone())).await?;
        }
        s.start_part("storage-infra").await?;
        let back = Instant::now();
        healed("detach after the infra was away", back, || s.driver.unpublish(&handle, &node.name)).await?;
        let made =
            healed("CreateVolume after the infra was away", back, || s.driver.create(wanted.clone())).await?;
        let volumes = s.infra.list_volumes(None, None).await?.items;
        let of_claim = |claim: Option<&String>| claim == Some(&made.volume_id);
        let made = volumes.iter().filter(|volume| of_claim(volume.labels.get("pvc"))).count();
        assert_eq!(made, 1, "{volumes:?}");
        unharmed(writer)
    })
    .await
}

#[tokio::test]
async fn a_pod_never_notices_that_libvirtd_and_the_management_cluster_are_away() -> Result<()> {
    let _alone = alone().await;
    pods::run(|machines| async move {
        let s = machines.scenario();
        let (data, more) = (
            machines.claim("data", &filesystem("ext4")).await?,
            machines.claim("more", &filesystem("ext4")).await?,
        );
        // Numbered records, each durable before the next; until it is told to end.
        let records = "number=0
            while [ ! -e /data/end ]; do
                number=$((number + 1)); echo $number >> /data/records; sync
                [ $number -gt 20 ] && [ ! -e /data/begun ] && touch /data/begun
                sleep 0.2
            done
            [ \"$(seq 1 $number | sha256sum)\" = \"$(sha256sum < /data/records)\" ]
            echo whole";
        let here = machines.here.clone();
        let pod = machines.start(Script::new("writer", &here, records).mount(&data, "/data")).await?;
        machines.running(&pod).await?;

        for part in ["mgmt-apiserver", "libvirtd"] {
            s.kill_part(part).await?;
        }
        late("attach", &[], || s.driver.publish_within(&more.handle, &here, SOON)).await?;
        for part in ["mgmt-apiserver", "libvirtd"] {
            s.start_part(part).await?;
        }
        let back = Instant::now();
        // Through everything that was away, into the machine whose pod goes on.
        let script = Script::new("second", &here, "touch /more/here; sync; echo well").mount(&more, "/more");
        assert_eq!(machines.run(script).await?, "well");
        say("a second pod's volume on the same machine, ended", back);

        let end = "until [ -e /data/begun ]; do sleep 1; done; touch /data/end; sync; echo told";
        let end = Script::new("end", &here, end).mount(&data, "/data");
        assert_eq!(machines.run(end).await?, "told");
        assert_eq!(machines.finish(&pod).await?, "whole");
        let domains = virsh(s.lab.run(), ["list", "--name"]).await?;
        ensure!(domains.lines().any(|name| name == here), "libvirt lost the machine: {domains}");
        Ok(())
    })
    .await
}

/// How long a link is down that is down for long: longer than any pause before our programs try again.
fn outage() -> Duration {
    let seconds = std::env::var("NESTOR_TEST_OUTAGE").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(12))
}

/// Whether a sidecar tries again after this, and takes the work for possibly done.
fn is_retryable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Aborted)
}

/// Says how long ago something was.
fn say(what: &str, since: Instant) {
    println!("{what}: {:.1} s", since.elapsed().as_secs_f64());
}

/// Makes a call until it is answered well, as a sidecar does; every other answer must be one to try again after.
async fn healed<T, F, R>(what: &str, back: Instant, call: F) -> Result<T>
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
struct Busy {
    link: Link,
    beyond: Controller,
    node: LoopNode,
    used: String,
    free: String,
    wanted: CreateVolumeRequest,
}

impl Busy {
    /// Starts it, over a link that is open, and goes on writing to the disk that is plugged.
    async fn beneath_link(s: &Scenario) -> Result<(Self, Writer)> {
        let (link, beyond) = Link::beneath_controller(s).await?;
        let (node, used, free) = (s.node().await?, s.volume().await?, s.volume().await?);
        let disk = beyond.driver.publish(&used, &node.name).await?;
        let writer = write_to(&node, &disk)?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        Ok((Self { link, beyond, node, used, free, wanted }, writer))
    }

    /// Opens the link, and waits until what was refused is done and all watches are back. Says since when it is open.
    async fn heals(&self) -> Result<Instant> {
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
async fn under_way(
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
async fn answered<T, F, R>(waiting: JoinHandle<Result<T, Status>>, again: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    match waiting.await? {
        Err(lost)
            if lost.code() == Code::Unavailable && lost.message().contains("cannot change the disks") =>
        {
            healed("the same call", Instant::now(), again).await
        }
        answer => Ok(answer?),
    }
}

/// Goes on writing to a machine's disk, as its pod does.
fn write_to(node: &LoopNode, disk: &str) -> Result<Writer> {
    let [link, ..] = names::disk_by_id(disk);
    Ok(Records::begin(&node.by_id_dir.join(link), 1 << 20)?.keep_appending())
}

/// Ends a writer that must not have noticed anything.
fn unharmed(writer: Writer) -> Result<()> {
    let written = writer.log().acknowledged();
    let records = writer.stop()?;
    ensure!(written > 0 && records.log().acknowledged() >= written, "nothing was written");
    Ok(())
}

/// Waits until a machine's spec has a claim, or has it no more.
async fn entered(s: &Scenario, node: &LoopNode, claim: &str, wanted: bool) -> Result<()> {
    eventually(&format!("{claim} in the spec of {}: {wanted}", node.name), PATIENCE, || async {
        let volumes = s.machines().get(&node.name).await?.spec.volumes;
        let sources = volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        let there = sources.into_iter().any(|source| source.claim_name == claim);
        Ok(if there == wanted { Ok(()) } else { Err(format!("{volumes:?}")) })
    })
    .await
}

/// Waits until a machine shows a claim's disk as plugged, or shows nothing of it any more.
async fn shown(s: &Scenario, node: &LoopNode, claim: &str, plugged: bool) -> Result<()> {
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
async fn attached_once(s: &Scenario, mark: Mark, node: &LoopNode) -> Result<()> {
    eventually("the writes of one attach", PATIENCE, || async {
        let entries = s.lab.audit()?.since(mark)?;
        let done = |is_done: fn(u16) -> bool| done(&entries, node, is_done);
        let (answered, with_lost) = (done(|code| code < 300), done(|code| code < 300 || code == 504));
        let is_one = answered == ONE_ATTACH || with_lost == ONE_ATTACH;
        Ok(is_one.then_some(()).ok_or_else(|| format!("{answered:?}, with those broken off {with_lost:?}")))
    })
    .await
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
async fn mgmt_csi(s: &Scenario, link: &Link) -> Result<Running> {
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
