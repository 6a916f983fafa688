//! Parts of the system that stand still, are killed, or answer nonsense while work is under way. One test at
//! a time, since each disturbs the parts that all share.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::DeleteParams;
use rustix::process::{Pid, Signal, kill_process};
use tests::driver::{Driver, new_volume};
use tests::fake_infra::{Answer, FakeInfra};
use tests::program::{Running, binary};
use tests::{MIB, PATIENCE, Scenario, alone, eventually, run};
use tonic::Code;

/// A part that stands still until this is dropped.
struct Frozen(Pid);

impl Frozen {
    fn freeze(s: &Scenario, part: &str) -> Result<Self> {
        let pid = s.lab.pid(part).and_then(Pid::from_raw).with_context(|| format!("{part} does not run"))?;
        kill_process(pid, Signal::STOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[tokio::test]
async fn a_call_answers_before_its_deadline_and_the_next_finds_the_work_done() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let frozen = Frozen::freeze(&s, "vm-operator-shim")?;
        let time = Duration::from_secs(2);
        let late = s.driver.publish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        assert!(late.message().contains(&handle) && late.message().contains(&node.name), "{late}");
        drop(frozen);
        s.driver.publish(&handle, &node.name).await?;

        let frozen = Frozen::freeze(&s, "vm-operator-shim")?;
        let late = s.driver.unpublish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        drop(frozen);
        s.driver.unpublish(&handle, &node.name).await?;
        s.nothing_is_attached(&node).await?;

        let frozen = Frozen::freeze(&s, "mgmt-csi")?;
        let late = s.driver.publish_within(&handle, &node.name, time).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        drop(frozen);
        s.driver.publish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn work_goes_on_after_each_part_was_killed_in_its_midst() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        for part in ["vm-operator-shim", "mgmt-csi", "storage-infra"] {
            let (node, handle) = (s.node().await?, s.volume().await?);
            s.kill_part(part).await?;
            let early =
                s.driver.publish_within(&handle, &node.name, Duration::from_secs(2)).await.unwrap_err();
            assert!(
                matches!(early.code(), Code::DeadlineExceeded | Code::Unavailable),
                "{part} is down: {early}"
            );
            s.start_part(part).await?;
            eventually(&format!("an attach after {part} is back"), PATIENCE, || async {
                Ok(s.driver.publish(&handle, &node.name).await.map_err(|status| status.to_string()))
            })
            .await?;
            s.kill_part(part).await?;
            s.start_part(part).await?;
            eventually(&format!("a detach after {part} is back"), PATIENCE, || async {
                Ok(s.driver.unpublish(&handle, &node.name).await.map_err(|status| status.to_string()))
            })
            .await?;
            s.nothing_is_attached(&node).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn nonsense_from_the_infra_is_told_and_tried_again_and_nothing_is_lost() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        let pki = s.lab.state().infra.clone().context("the lab has no infra")?.pki;
        let fake = FakeInfra::start(&pki, Answer::json(200, "{\"half\":")).await?;

        // Another mgmt-csi in the place of the real one, with the fake as its infra.
        let management = s.lab.state().management.clone().context("the lab has no management cluster")?;
        s.stop_part("mgmt-csi").await?;
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
                &file("client.crt"),
                "--infra-key",
                &file("client.key"),
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
            fake.answer(answer.clone());
            let refused = driver.create(request.clone()).await.unwrap_err();
            assert!(
                matches!(refused.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Internal),
                "{answer:?}: {refused}"
            );
            let told =
                |name: &str| refused.message().contains(name) || refused.message().contains("HTTP 404");
            assert!(told(&request.name), "{answer:?}: {refused}");
            let refused = driver.delete("fake-volume").await.unwrap_err();
            let told =
                |name: &str| refused.message().contains(name) || refused.message().contains("HTTP 404");
            assert!(told("fake-volume"), "{answer:?}: {refused}");
        }
        assert!(!fake.asked().is_empty());

        // An attach through it fails in plain words, and heals once the real ones are back.
        fake.answer(Answer { status: 200, content_type: "text/html", body: "<html>a proxy</html>".into() });
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(refused.message().contains("another server"), "{refused}");
        s.told("data", &["another server"]).await?;
        let order = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        let status = order.status.unwrap_or_default();
        assert!(!status.attached && status.error.is_some(), "{status:?}");

        let status = second.stop().await?;
        assert!(status.success(), "mgmt-csi ended with {status}");
        s.start_part("mgmt-csi").await?;
        eventually("an attach with the real infra", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &node.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}
