//! Network faults while volumes are created, attached and detached: connections that are cut, half-open, slow or reset
//! in the middle of a response, and servers that are down. The tests run one at a time, because some stop shared
//! components.
//!
//! `NESTOR_TEST_OUTAGE` sets the duration of long outages, in seconds.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::vm::virsh;
use tests::driver::{late, new_volume};
use tests::pods::{self, Script, filesystem};
use tests::tcp_proxy::TcpProxy;
use tests::{MIB, alone, run};
use tonic::Code;

mod work;

use work::{
    Busy, LONG, answered, attached_once, entered, healed, is_retryable, mgmt_csi, outage, say, shown,
    under_way, unharmed, write_to,
};

/// Short enough that the call times out before the connection is known to be broken.
const SOON: Duration = Duration::from_secs(3);

#[tokio::test]
async fn calls_over_a_cut_connection_fail_with_its_url_and_succeed_after_its_return() -> Result<()> {
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
            // The retry interval of a sidecar.
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
async fn a_half_open_connection_and_its_return_are_detected() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (busy, writer) = Busy::beneath_link(&s).await?;
        let Busy { link, beyond, node, used, free, wanted } = &busy;

        link.stall();
        let begun = Instant::now();
        // The driver answers before its client gives up.
        late("attach", &["management"], || beyond.driver.publish_within(free, &node.name, SOON)).await?;
        late("detach", &["management"], || beyond.driver.unpublish_within(used, &node.name, SOON)).await?;
        let refused = beyond.driver.create(wanted.clone()).await.unwrap_err();
        assert!(is_retryable(&refused) && refused.message().contains(&link.url()), "{refused}");
        beyond.process.not_ready_because(&["failed to watch VirtualMachines", &link.url()]).await?;
        say("half-open connection detected after its start", begun);

        let back = busy.heals().await?;
        unharmed(writer)?;
        healed("detach", back, || beyond.driver.unpublish(used, &node.name)).await?;
        busy.beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_call_that_waits_over_a_broken_connection_completes_after_its_return() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = TcpProxy::with_controller(&s).await?;
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

        let frozen = s.pause_component("vm-operator-shim")?;
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
        s.no_attachments(&node).await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn an_expired_watch_is_relisted_and_the_waiting_call_completes() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = TcpProxy::with_controller(&s).await?;
        let (node, used, handle) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let (frozen, waiting) = under_way(&s, &beyond, &node, &handle).await?;
        link.stall();
        // One more write, so that the watch is not at the latest revision and cannot resume.
        s.annotate_machine(&node.name, "written-behind-the-link").await?;

        // A restarted API server has no watch history.
        s.kill_component("mgmt-apiserver").await?;
        s.kill_component("mgmt-etcd").await?;
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        s.start_component("mgmt-etcd").await?;
        s.start_component("mgmt-apiserver").await?;
        let back = Instant::now();
        drop(frozen);
        shown(&s, &node, &handle, true).await?;
        say("attach across a restart of etcd and the API server", back);

        link.open().await?;
        let back = Instant::now();
        let disk = answered(waiting, || beyond.driver.publish(&handle, &node.name)).await?;
        say("attach in progress behind an expired watch", back);
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        beyond.process.has_logged("the watch of VirtualMachines expired").await?;
        healed("detach", back, || s.driver.unpublish(&handle, &node.name)).await?;
        unharmed(writer)?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_write_whose_response_is_lost_is_found_and_not_repeated() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = TcpProxy::with_controller(&s).await?;
        let mut node = s.node().await?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        link.reset_next_response();
        let first = beyond.driver.create(wanted.clone()).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        let handle =
            healed("CreateVolume", Instant::now(), || beyond.driver.create(wanted.clone())).await?.volume_id;

        // Another response may be lost instead; then try again.
        let mark = loop {
            let mark = s.lab.audit()?.mark()?;
            link.reset_next_response();
            match beyond.driver.publish(&handle, &node.name).await {
                Err(lost) => {
                    assert!(is_retryable(&lost), "{lost}");
                    break mark;
                }
                Ok(_) => {
                    healed("detach", Instant::now(), || beyond.driver.unpublish(&handle, &node.name)).await?;
                    // The audit log may have late writes for this node after the next mark.
                    node = s.node().await?;
                }
            }
        };
        let disk = healed("attach", Instant::now(), || beyond.driver.publish(&handle, &node.name)).await?;
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        attached_once(&s, mark, &node).await?;

        link.reset_next_response();
        let first = beyond.driver.unpublish(&handle, &node.name).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        healed("detach", Instant::now(), || beyond.driver.unpublish(&handle, &node.name)).await?;
        s.no_attachments(&node).await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_slow_connection_only_delays_calls() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (link, beyond) = TcpProxy::with_controller(&s).await?;
        let node = s.node().await?;
        link.slow(Duration::from_millis(300));
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        let handle = beyond.driver.create(wanted).await?.volume_id;
        beyond.driver.publish(&handle, &node.name).await?;
        beyond.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;
        beyond.process.ready().await?;
        beyond.stop().await
    })
    .await
}

#[tokio::test]
async fn a_half_open_connection_to_the_infra_is_reported_on_every_tier_and_recovers() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle, used) = (s.node().await?, s.bound_claim("data").await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let infra = s.lab.state().infra.clone().context("the lab has no storage infra")?;
        let link = TcpProxy::to(&infra.url).await?;
        s.stop_component("mgmt-csi").await?;
        let second = mgmt_csi(&s, &link).await?;

        link.stall();
        let begun = Instant::now();
        late("attach", &[], || s.driver.publish_within(&handle, &node.name, SOON)).await?;
        s.wait_for_event("data", &["storage infra", &link.url()]).await?;
        say("half-open connection to the infra reported on the guest's claim after its start", begun);
        second.not_ready_because(&["storage infra", &link.url()]).await?;
        link.open().await?;
        let back = Instant::now();
        healed("attach over the connection to the infra", back, || s.driver.publish(&handle, &node.name))
            .await?;

        link.stall();
        late("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SOON)).await?;
        link.open().await?;
        let back = Instant::now();
        healed("detach over the connection to the infra", back, || s.driver.unpublish(&handle, &node.name))
            .await?;
        unharmed(writer)?;
        let status = second.stop().await?;
        ensure!(status.success(), "mgmt-csi exited with {status}");
        s.start_component("mgmt-csi").await
    })
    .await
}

#[tokio::test]
async fn calls_wait_for_a_paused_or_stopped_infra_and_are_executed_once() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle, used) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = write_to(&node, &s.driver.publish(&used, &node.name).await?)?;
        let wanted = new_volume(&s.csi_name(), 4 * MIB, "nestor");

        let frozen = s.pause_component("storage-infra")?;
        late("attach", &[], || s.driver.publish_within(&handle, &node.name, SOON)).await?;
        drop(frozen);
        let back = Instant::now();
        healed("attach after the infra was paused", back, || s.driver.publish(&handle, &node.name)).await?;

        s.kill_component("storage-infra").await?;
        let begun = Instant::now();
        while begun.elapsed() < outage() {
            // Each call ends with an error or at its deadline, so no pause is needed.
            late("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SOON)).await?;
            late("CreateVolume", &[], || s.driver.create(wanted.clone())).await?;
        }
        s.start_component("storage-infra").await?;
        let back = Instant::now();
        healed("detach after the infra was down", back, || s.driver.unpublish(&handle, &node.name)).await?;
        let made =
            healed("CreateVolume after the infra was down", back, || s.driver.create(wanted.clone())).await?;
        let volumes = s.infra.list_volumes(None, None).await?.items;
        let of_claim = |claim: Option<&String>| claim == Some(&made.volume_id);
        let made = volumes.iter().filter(|volume| of_claim(volume.labels.get("pvc"))).count();
        assert_eq!(made, 1, "{volumes:?}");
        unharmed(writer)
    })
    .await
}

#[tokio::test]
async fn a_pod_is_not_affected_while_libvirtd_and_the_management_cluster_are_down() -> Result<()> {
    let _alone = alone().await;
    pods::run(|machines| async move {
        let s = machines.scenario();
        let (data, more) = (
            machines.claim("data", &filesystem("ext4")).await?,
            machines.claim("more", &filesystem("ext4")).await?,
        );
        // Writes numbered records, each durable before the next, until the file `end` exists.
        let records = "number=0
            while [ ! -e /data/end ]; do
                number=$((number + 1)); echo $number >> /data/records; sync
                [ $number -gt 20 ] && [ ! -e /data/begun ] && touch /data/begun
                sleep 0.2
            done
            [ \"$(seq 1 $number | sha256sum)\" = \"$(sha256sum < /data/records)\" ]
            echo complete";
        let here = machines.here.clone();
        let pod = machines.start(Script::new("writer", &here, records).mount(&data, "/data")).await?;
        machines.running(&pod).await?;

        for component in ["mgmt-apiserver", "libvirtd"] {
            s.kill_component(component).await?;
        }
        late("attach", &[], || s.driver.publish_within(&more.handle, &here, SOON)).await?;
        for component in ["mgmt-apiserver", "libvirtd"] {
            s.start_component(component).await?;
        }
        let back = Instant::now();
        // Attached to the running VM through the restarted components.
        let script = Script::new("second", &here, "touch /more/here; sync; echo ok").mount(&more, "/more");
        assert_eq!(machines.run(script).await?, "ok");
        say("a second pod's volume on the same VM, pod completed", back);

        let end = "until [ -e /data/begun ]; do sleep 1; done; touch /data/end; sync; echo done";
        let end = Script::new("end", &here, end).mount(&data, "/data");
        assert_eq!(machines.run(end).await?, "done");
        assert_eq!(machines.finish(&pod).await?, "complete");
        let domains = virsh(s.lab.run(), ["list", "--name"]).await?;
        ensure!(domains.lines().any(|name| name == here), "libvirt lost the domain: {domains}");
        Ok(())
    })
    .await
}
