//! Links that are cut, half-open, slow, or break in the middle of an answer, and servers that are away, while volumes
//! are made, attached and detached. One test at a time, since some stop parts that all share.
//!
//! `NESTOR_TEST_OUTAGE` is how long a link is down that is down for long, in seconds.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::vm::virsh;
use tests::driver::{late, new_volume};
use tests::link::Link;
use tests::pods::{self, Script, filesystem};
use tests::{MIB, alone, run};
use tonic::Code;

mod work;

use work::{
    Busy, answered, attached_once, entered, healed, is_retryable, mgmt_csi, outage, say, shown, under_way,
    unharmed, write_to,
};

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
        // Were it at the very last that was written, its watch could go on from there.
        s.annotate_machine(&node.name, "written-behind-the-link").await?;

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
        beyond.process.has_logged("the watch of VirtualMachines has expired").await?;
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
