//! Network faults while volumes are created, attached and detached: connections that are cut, half-open, slow or reset
//! in the middle of a response, and servers that are down. The tests run one at a time, because some stop shared
//! components.
//!
//! `NESTOR_TEST_OUTAGE` sets the duration of long outages, in seconds.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::vm::virsh;
use tests::driver::{new_volume, times_out};
use tests::pods::{self, Script, filesystem};
use tests::tcp_proxy::TcpProxy;
use tests::{MIB, run_alone};
use tonic::Code;

mod work;

use work::{
    LONG_DEADLINE, PendingWork, during, has_disk_status, has_entry, has_writes_of_one_attach, is_retryable,
    mgmt_csi, outage, print_time, result_of, retry_until_done, start_attach, start_writer, stop_writer,
};

/// Short enough that the call times out before the connection is known to be broken.
const SHORT_DEADLINE: Duration = Duration::from_secs(3);

#[tokio::test]
async fn calls_over_a_cut_connection_fail_with_its_url_and_succeed_after_its_return() -> Result<()> {
    run_alone(|s| async move {
        let (pending, writer) = PendingWork::start(&s).await?;
        let PendingWork { proxy, controller, node, attached, detached, request } = &pending;

        proxy.cut();
        let start = Instant::now();
        while start.elapsed() < outage() {
            let refusals = [
                controller.driver.create(request.clone()).await.map(drop),
                controller.driver.publish(detached, &node.name).await.map(drop),
                controller.driver.unpublish(attached, &node.name).await,
            ];
            for refused in refusals {
                let refused = refused.unwrap_err();
                assert_eq!(refused.code(), Code::Unavailable, "{refused}");
                assert!(refused.message().contains(&proxy.url()), "{refused}");
            }
            // The retry interval of a sidecar.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        controller.process.not_ready_because(&[&proxy.url()]).await?;

        pending.recover().await?;
        stop_writer(writer)?;
        controller.driver.unpublish(attached, &node.name).await?;
        pending.controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_half_open_connection_and_its_return_are_detected() -> Result<()> {
    run_alone(|s| async move {
        let (pending, writer) = PendingWork::start(&s).await?;
        let PendingWork { proxy, controller, node, attached, detached, request } = &pending;

        proxy.stall();
        let start = Instant::now();
        // The driver answers before its client gives up.
        times_out("attach", &["management"], || {
            controller.driver.publish_within(detached, &node.name, SHORT_DEADLINE)
        })
        .await?;
        times_out("detach", &["management"], || {
            controller.driver.unpublish_within(attached, &node.name, SHORT_DEADLINE)
        })
        .await?;
        let refused = controller.driver.create(request.clone()).await.unwrap_err();
        assert!(is_retryable(&refused) && refused.message().contains(&proxy.url()), "{refused}");
        controller.process.not_ready_because(&["failed to watch VirtualMachines", &proxy.url()]).await?;
        print_time("half-open connection detected after its start", start);

        let reopened = pending.recover().await?;
        stop_writer(writer)?;
        retry_until_done("detach", reopened, || controller.driver.unpublish(attached, &node.name)).await?;
        pending.controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_call_that_waits_over_a_broken_connection_completes_after_its_return() -> Result<()> {
    run_alone(|s| async move {
        let (proxy, controller) = TcpProxy::with_controller(&s).await?;
        let (node, handle) = (s.node().await?, s.volume().await?);
        let mark = s.lab.audit()?.mark()?;
        let (paused, waiting) = start_attach(&s, &controller, &node, &handle).await?;
        proxy.stall();
        drop(paused);
        has_disk_status(&s, &node, &handle, true).await?;
        proxy.open().await?;
        let reopened = Instant::now();
        let disk = result_of(waiting, || controller.driver.publish(&handle, &node.name)).await?;
        print_time("attach under way", reopened);
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        has_writes_of_one_attach(&s, mark, &node).await?;

        // Requests have another connection than watches, and it may be found to be dead later.
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        retry_until_done("CreateVolume", reopened, || controller.driver.create(request.clone())).await?;
        let paused = s.pause_component("vm-operator-shim")?;
        let (driver, claim, vm) = (controller.driver.clone(), handle.clone(), node.name.clone());
        let mut waiting =
            tokio::spawn(async move { driver.unpublish_within(&claim, &vm, LONG_DEADLINE).await });
        during(&mut waiting, has_entry(&s, &node, &handle, false)).await?;
        proxy.stall();
        drop(paused);
        has_disk_status(&s, &node, &handle, false).await?;
        proxy.open().await?;
        let reopened = Instant::now();
        result_of(waiting, || controller.driver.unpublish(&handle, &node.name)).await?;
        print_time("detach under way", reopened);
        s.no_attachments(&node).await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn an_expired_watch_is_relisted_and_the_waiting_call_completes() -> Result<()> {
    run_alone(|s| async move {
        let (proxy, controller) = TcpProxy::with_controller(&s).await?;
        let (node, attached, handle) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = start_writer(&node, &s.driver.publish(&attached, &node.name).await?)?;
        let (paused, waiting) = start_attach(&s, &controller, &node, &handle).await?;
        proxy.stall();
        // One more write, so that the watch is not at the latest revision and cannot resume.
        s.annotate_vm(&node.name, "written-behind-the-link").await?;

        // A restarted API server has no watch history.
        s.kill_component("mgmt-apiserver").await?;
        s.kill_component("mgmt-etcd").await?;
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        s.start_component("mgmt-etcd").await?;
        s.start_component("mgmt-apiserver").await?;
        let reopened = Instant::now();
        drop(paused);
        has_disk_status(&s, &node, &handle, true).await?;
        print_time("attach across a restart of etcd and the API server", reopened);

        proxy.open().await?;
        let reopened = Instant::now();
        let disk = result_of(waiting, || controller.driver.publish(&handle, &node.name)).await?;
        print_time("attach in progress behind an expired watch", reopened);
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        controller.process.has_logged("the watch of VirtualMachines expired").await?;
        retry_until_done("detach", reopened, || s.driver.unpublish(&handle, &node.name)).await?;
        stop_writer(writer)?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_write_whose_response_is_lost_is_found_and_not_repeated() -> Result<()> {
    run_alone(|s| async move {
        let (proxy, controller) = TcpProxy::with_controller(&s).await?;
        let mut node = s.node().await?;
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        proxy.reset_next_response();
        let first = controller.driver.create(request.clone()).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        let handle =
            retry_until_done("CreateVolume", Instant::now(), || controller.driver.create(request.clone()))
                .await?
                .volume_id;

        // Another response may be lost instead; then try again.
        let mark = loop {
            let mark = s.lab.audit()?.mark()?;
            proxy.reset_next_response();
            match controller.driver.publish(&handle, &node.name).await {
                Err(lost) => {
                    assert!(is_retryable(&lost), "{lost}");
                    break mark;
                }
                Ok(_) => {
                    retry_until_done("detach", Instant::now(), || {
                        controller.driver.unpublish(&handle, &node.name)
                    })
                    .await?;
                    // The audit log may have late writes for this node after the next mark.
                    node = s.node().await?;
                }
            }
        };
        let disk =
            retry_until_done("attach", Instant::now(), || controller.driver.publish(&handle, &node.name))
                .await?;
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        has_writes_of_one_attach(&s, mark, &node).await?;

        proxy.reset_next_response();
        let first = controller.driver.unpublish(&handle, &node.name).await;
        assert!(first.as_ref().err().is_none_or(is_retryable), "{first:?}");
        retry_until_done("detach", Instant::now(), || controller.driver.unpublish(&handle, &node.name))
            .await?;
        s.no_attachments(&node).await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_slow_connection_only_delays_calls() -> Result<()> {
    run_alone(|s| async move {
        let (proxy, controller) = TcpProxy::with_controller(&s).await?;
        let node = s.node().await?;
        proxy.slow(Duration::from_millis(300));
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        let handle = controller.driver.create(request).await?.volume_id;
        controller.driver.publish(&handle, &node.name).await?;
        controller.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;
        controller.process.ready().await?;
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_half_open_connection_to_the_infra_is_reported_on_every_tier_and_recovers() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle, attached) = (s.node().await?, s.bound_claim("data").await?, s.volume().await?);
        let writer = start_writer(&node, &s.driver.publish(&attached, &node.name).await?)?;
        let infra = s.lab.state().infra.clone().context("the lab has no storage infra")?;
        let proxy = TcpProxy::to(&infra.url).await?;
        s.stop_component("mgmt-csi").await?;
        let second = mgmt_csi(&s, &proxy).await?;

        proxy.stall();
        let start = Instant::now();
        times_out("attach", &[], || s.driver.publish_within(&handle, &node.name, SHORT_DEADLINE)).await?;
        s.wait_for_event("data", &["the storage infra", "respond"]).await?;
        print_time("half-open connection to the infra reported on the guest's claim after its start", start);
        second.not_ready_because(&["storage infra", &proxy.url()]).await?;
        proxy.open().await?;
        let reopened = Instant::now();
        retry_until_done("attach over the connection to the infra", reopened, || {
            s.driver.publish(&handle, &node.name)
        })
        .await?;

        proxy.stall();
        times_out("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SHORT_DEADLINE)).await?;
        proxy.open().await?;
        let reopened = Instant::now();
        retry_until_done("detach over the connection to the infra", reopened, || {
            s.driver.unpublish(&handle, &node.name)
        })
        .await?;
        stop_writer(writer)?;
        let status = second.stop().await?;
        ensure!(status.success(), "mgmt-csi exited with {status}");
        s.start_component("mgmt-csi").await
    })
    .await
}

#[tokio::test]
async fn calls_wait_for_a_paused_or_stopped_infra_and_are_executed_once() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle, attached) = (s.node().await?, s.volume().await?, s.volume().await?);
        let writer = start_writer(&node, &s.driver.publish(&attached, &node.name).await?)?;
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");

        let paused = s.pause_component("storage-infra")?;
        times_out("attach", &[], || s.driver.publish_within(&handle, &node.name, SHORT_DEADLINE)).await?;
        drop(paused);
        let reopened = Instant::now();
        retry_until_done("attach after the infra was paused", reopened, || {
            s.driver.publish(&handle, &node.name)
        })
        .await?;

        s.kill_component("storage-infra").await?;
        let start = Instant::now();
        while start.elapsed() < outage() {
            // Each call ends with an error or at its deadline, so no pause is needed.
            times_out("detach", &[], || s.driver.unpublish_within(&handle, &node.name, SHORT_DEADLINE))
                .await?;
            times_out("CreateVolume", &[], || s.driver.create(request.clone())).await?;
        }
        s.start_component("storage-infra").await?;
        let reopened = Instant::now();
        retry_until_done("detach after the infra was down", reopened, || {
            s.driver.unpublish(&handle, &node.name)
        })
        .await?;
        let made = retry_until_done("CreateVolume after the infra was down", reopened, || {
            s.driver.create(request.clone())
        })
        .await?;
        let volumes = s.infra.list_volumes(None, None).await?.items;
        let of_claim = |claim: Option<&String>| claim == Some(&made.volume_id);
        let made = volumes.iter().filter(|volume| of_claim(volume.labels.get("pvc"))).count();
        assert_eq!(made, 1, "{volumes:?}");
        stop_writer(writer)
    })
    .await
}

#[tokio::test]
async fn a_pod_is_not_affected_while_libvirtd_and_the_management_cluster_are_down() -> Result<()> {
    pods::run_alone(|pods| async move {
        let s = pods.scenario();
        let (data, more) =
            (pods.claim("data", &filesystem("ext4")).await?, pods.claim("more", &filesystem("ext4")).await?);
        // Writes numbered records, each durable before the next, until the file `end` exists.
        let records = "number=0
            while [ ! -e /data/end ]; do
                number=$((number + 1)); echo $number >> /data/records; sync
                [ $number -gt 20 ] && [ ! -e /data/begun ] && touch /data/begun
                sleep 0.2
            done
            [ \"$(seq 1 $number | sha256sum)\" = \"$(sha256sum < /data/records)\" ]
            echo complete";
        let here = pods.first_node.clone();
        let pod = pods.start(Script::new("writer", &here, records).mount(&data, "/data")).await?;
        pods.running(&pod).await?;

        for component in ["mgmt-apiserver", "libvirtd"] {
            s.kill_component(component).await?;
        }
        times_out("attach", &[], || s.driver.publish_within(&more.handle, &here, SHORT_DEADLINE)).await?;
        for component in ["mgmt-apiserver", "libvirtd"] {
            s.start_component(component).await?;
        }
        let reopened = Instant::now();
        // Attached to the running VM through the restarted components.
        let script = Script::new("second", &here, "touch /more/here; sync; echo ok").mount(&more, "/more");
        assert_eq!(pods.run(script).await?, "ok");
        print_time("a second pod's volume on the same VM, pod completed", reopened);

        let end = "until [ -e /data/begun ]; do sleep 1; done; touch /data/end; sync; echo done";
        let end = Script::new("end", &here, end).mount(&data, "/data");
        assert_eq!(pods.run(end).await?, "done");
        assert_eq!(pods.finish(&pod).await?, "complete");
        let domains = virsh(s.lab.run(), ["list", "--name"]).await?;
        ensure!(domains.lines().any(|name| name == here), "libvirt lost the domain: {domains}");
        Ok(())
    })
    .await
}
