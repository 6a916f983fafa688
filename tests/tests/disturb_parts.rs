//! Components that are paused or killed, or get malformed responses, during operations. The tests run one at a time,
//! because each disturbs shared components.

use std::time::Duration;

use anyhow::{Context, Result};
use crds::names;
use infra_api::VolumeState;
use kube::ResourceExt;
use kube::api::{DeleteParams, DynamicObject, ListParams};
use serde_json::json;
use tests::bytes::{noise, read, write};
use tests::driver::{Driver, new_volume};
use tests::fake_infra::{Answer, FakeInfra};
use tests::program::{Running, binary};
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone};
use tonic::Code;

#[tokio::test]
async fn a_call_returns_before_its_deadline_and_the_next_call_finds_the_work_done() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let frozen = s.pause_component("vm-operator-shim")?;
        // A tenth of it is reserved for the response.
        let time = Duration::from_secs(10);
        let late = s.driver.publish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        assert!(late.message().contains(&handle) && late.message().contains(&node.name), "{late}");
        drop(frozen);
        s.driver.publish(&handle, &node.name).await?;

        let frozen = s.pause_component("vm-operator-shim")?;
        let late = s.driver.unpublish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        drop(frozen);
        s.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;

        let frozen = s.pause_component("mgmt-csi")?;
        let late = s.driver.publish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        drop(frozen);
        s.driver.publish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn attach_and_detach_succeed_after_each_component_was_killed() -> Result<()> {
    run_alone(|s| async move {
        for component in ["vm-operator-shim", "mgmt-csi", "storage-infra"] {
            let (node, handle) = (s.node().await?, s.volume().await?);
            s.kill_component(component).await?;
            let early =
                s.driver.publish_within(&handle, &node.name, Duration::from_secs(2)).await.unwrap_err();
            // The client itself reports CANCELLED if the response is too late.
            assert!(
                matches!(early.code(), Code::DeadlineExceeded | Code::Unavailable | Code::Cancelled),
                "{component} is down: {early}"
            );
            s.start_component(component).await?;
            eventually(&format!("an attach after {component} is back"), PATIENCE, || async {
                Ok(s.driver.publish(&handle, &node.name).await.map_err(|status| status.to_string()))
            })
            .await?;
            s.kill_component(component).await?;
            s.start_component(component).await?;
            eventually(&format!("a detach after {component} is back"), PATIENCE, || async {
                Ok(s.driver.unpublish(&handle, &node.name).await.map_err(|status| status.to_string()))
            })
            .await?;
            s.no_attachments(&node).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_expansion_completes_when_a_component_is_killed_meanwhile() -> Result<()> {
    run_alone(|s| async move {
        // A claim per case: csi-resizer does not expand a claim whose filesystem expansion is pending.
        for (component, lower_component) in [("g1-gc-csi", "mgmt-csi"), ("mgmt-csi", "storage-infra")] {
            let management_claim = s.bound_claim(component).await?;
            // The component of the next tier is paused, so that the expansion is in progress for sure.
            let frozen = s.pause_component(lower_component)?;
            s.request(component, "8Mi").await?;
            s.expansion_started(&management_claim, 8).await?;
            s.kill_component(component).await?;
            drop(frozen);
            s.start_component(component).await?;
            s.expanded(component, 8).await.with_context(|| format!("{component} was killed"))?;
        }
        let management_claim = s.bound_claim("storage-infra").await?;
        s.kill_component("storage-infra").await?;
        s.request("storage-infra", "8Mi").await?;
        s.expansion_started(&management_claim, 8).await?;
        s.start_component("storage-infra").await?;
        s.expanded("storage-infra", 8).await.context("storage-infra was killed")?;
        let file = s.file_of(&s.infra_volume(&management_claim).await?).await?;
        assert_eq!(std::fs::metadata(file)?.len(), 8 << 20);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn one_snapshot_is_created_when_a_driver_is_killed_meanwhile() -> Result<()> {
    run_alone(|s| async move {
        for (component, lower_component) in [("g1-gc-csi", "mgmt-csi"), ("mgmt-csi", "storage-infra")] {
            s.claim(component, "nestor", "4Mi").await?;
            let (volume, file) = s.bound_file(component).await?;
            let id = s.infra_volume(&volume).await?.id;
            write(&file, &noise(8, 4 << 20))?;
            // The component of the next tier is paused, so that the snapshot is in progress for sure.
            let frozen = s.pause_component(lower_component)?;
            s.snapshot(component, component).await?;
            eventually(&format!("a management snapshot of {volume}"), PATIENCE, || async {
                let list = s.snapshots().list(&ListParams::default()).await?;
                let of = |one: &DynamicObject| {
                    one.data["spec"]["source"]["persistentVolumeClaimName"] == volume
                        && one.data["status"]["boundVolumeSnapshotContentName"].is_string()
                };
                Ok(list.iter().any(of).then_some(()).ok_or_else(|| format!("none of {}", list.items.len())))
            })
            .await?;
            s.kill_component(component).await?;
            drop(frozen);
            s.start_component(component).await?;
            s.snapshot_ready(component).await.with_context(|| format!("{component} was killed"))?;
            let kept = s.infra.list_snapshots(Some(&id), None, None).await?.items;
            assert!(
                kept.len() == 1 && kept[0].state == VolumeState::Ready,
                "{component} was killed: {kept:?}"
            );
            let restored = format!("from-{component}");
            s.restore(&restored, component, "4Mi").await?;
            assert!(
                read(&s.bound_file(&restored).await?.1, 4 << 20)? == noise(8, 4 << 20),
                "{component} was killed"
            );
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn malformed_responses_of_the_infra_are_reported_and_retried() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        let pki = s.lab.state().infra.clone().context("the lab has no infra")?.pki;
        let fake = FakeInfra::start(&pki, Answer::json(200, "{\"half\":")).await?;

        // A second mgmt-csi replaces the lab's, with the fake storage infra.
        let management = s.lab.state().management.clone().context("the lab has no management cluster")?;
        s.stop_component("mgmt-csi").await?;
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("csi.sock");
        let (endpoint, file) =
            (format!("unix://{}", socket.display()), |name: &str| pki.join(name).display().to_string());
        let second = Running::start(
            &binary(&s.lab, "mgmt-csi"),
            &[
                "--endpoint",
                &endpoint,
                "--kubeconfig",
                &management.kubeconfig_of("mgmt-csi").display().to_string(),
                "--infra-url",
                &fake.url,
                "--infra-ca",
                &file("ca.crt"),
                "--infra-cert",
                &file("driver.crt"),
                "--infra-key",
                &file("driver.key"),
            ],
        )
        .await?;
        let driver = eventually("the second mgmt-csi serves", PATIENCE, || async {
            Ok(Driver::connect(&socket).await.map_err(|error| format!("{error:#}; {}", second.log())))
        })
        .await?;

        let mut request = new_volume(&tests::unique("fake"), MIB, "");
        request.parameters.clear();
        for answer in [
            Answer::json(200, "{\"half\":"),
            Answer::json(200, "{}"),
            Answer { status: 200, content_type: "text/html", body: "<html>a proxy</html>".into() },
            Answer { status: 500, content_type: "text/plain", body: "boom".into() },
            Answer::json(404, "{\"status\":404,\"code\":\"unheard-of\"}"),
            Answer { status: 302, content_type: "text/plain", body: String::new() },
        ] {
            fake.respond_with(answer.clone());
            let refused = driver.create(request.clone()).await.unwrap_err();
            assert!(
                matches!(refused.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Internal),
                "{answer:?}: {refused}"
            );
            assert!(refused.message().contains("the storage infra"), "{answer:?}: {refused}");
            second.has_logged(&request.name).await?;
            let refused = driver.delete("fake-volume").await.unwrap_err();
            let is_reported =
                |name: &str| refused.message().contains(name) || refused.message().contains("HTTP 404");
            assert!(is_reported("fake-volume"), "{answer:?}: {refused}");
        }
        assert!(!fake.requests().is_empty());

        // An attach fails with a clear error, and succeeds with the real storage infra.
        fake.respond_with(Answer {
            status: 200,
            content_type: "text/html",
            body: "<html>a proxy</html>".into(),
        });
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("the response of the storage infra is invalid"), "{refused}");
        s.wait_for_event("data", &["the response of the storage infra is invalid"]).await?;
        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        let status = attachment.status.unwrap_or_default();
        assert!(!status.attached && status.error.is_some(), "{status:?}");

        let status = second.stop().await?;
        assert!(status.success(), "mgmt-csi exited with {status}");
        s.start_component("mgmt-csi").await?;
        eventually("an attach with the real storage infra", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &node.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_consumer_record_is_removed_if_the_volume_was_deleted_while_the_driver_was_down() -> Result<()> {
    run_alone(|s| async move {
        let second = s.second_guest().await?;
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, second.cluster_id);
        let handle = s.management_claim(&[(&share, "rw")], json!({})).await?;
        let record = format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, second.cluster_id);
        let volume = second.static_volume(&handle, &json!({})).await?.name_any();
        recorded(&s, &handle, &record, true).await?;
        s.stop_component("g2-gc-csi").await?;
        second.volumes().delete(&volume, &DeleteParams::default()).await?;
        s.start_component("g2-gc-csi").await?;
        recorded(&s, &handle, &record, false).await
    })
    .await
}

/// Waits until an annotation is, or is not, on a management claim.
async fn recorded(s: &Scenario, claim: &str, record: &str, expected: bool) -> Result<()> {
    eventually(&format!("{record} on {claim}: {expected}"), PATIENCE, || async {
        let claim = s.claims().get(claim).await?;
        let there = claim.annotations().contains_key(record);
        Ok(if there == expected { Ok(()) } else { Err(format!("{:?}", claim.annotations())) })
    })
    .await
}
