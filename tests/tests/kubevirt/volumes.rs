//! Volumes that gc-csi provisions through the management cluster's CSI driver: deletion, and when a new one is formatted.

use std::fs::{File, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_FORMAT_TOKEN, ANNOTATION_NEVER_ATTACHED};
use csi::proto::volume_capability::access_mode::Mode;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;
use tests::driver::{block, mount, new_volume};
use tests::guest::handle;
use tests::pods::{self, ClaimOptions, PodScenario, Script, Volume, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, run};
use tonic::Code;

fn has(claim: &PersistentVolumeClaim, annotation: &str) -> bool {
    claim.annotations().contains_key(annotation)
}

/// Creates a claim of this class in the guest; returns the names of the volumes in both tiers.
async fn bound(s: &Scenario, class: &str) -> Result<(String, String)> {
    s.claim("data", class, "4Mi").await?;
    let (_, volume) = s.bound("data").await?;
    let spec = s.claims().get(&handle(&volume)?).await?.spec;
    let management = spec.and_then(|spec| spec.volume_name).context("the management claim has no volume")?;
    Ok((volume.name_any(), management))
}

#[tokio::test]
async fn a_deleted_claim_leaves_nothing_with_the_policy_delete_and_everything_with_retain() -> Result<()> {
    run(|s| async move {
        for (class, is_kept) in [("nestor", false), ("nestor-retain", true)] {
            let (volume, management) = bound(&s, class).await?;
            let file = s.lab.file_csi_volume(&management);
            ensure!(file.metadata()?.len() == 4 << 20, "{} has another size", file.display());
            let name = handle(&s.guest_volumes().get(&volume).await?)?;
            s.guest_claims().delete("data", &DeleteParams::default()).await?;
            eventually(&format!("{volume} is released or gone"), PATIENCE, || async {
                let status = s.guest_volumes().get_opt(&volume).await?.map(|volume| volume.status);
                let phase = status.map(|status| status.and_then(|status| status.phase).unwrap_or_default());
                let expected = if is_kept { Some("Released") } else { None };
                Ok(if phase.as_deref() == expected { Ok(()) } else { Err(format!("{phase:?}")) })
            })
            .await?;
            let left = (s.claims().get_opt(&name).await?.is_some(), file.exists());
            if is_kept {
                ensure!(left == (true, true), "{class}: {left:?}");
            } else {
                ensure!(!left.0, "{name} is left");
                eventually("the file is gone", PATIENCE, || async {
                    Ok(if file.exists() { Err(file.display().to_string()) } else { Ok(()) })
                })
                .await?;
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn files_for_several_vms_and_readers_are_refused_before_anything_is_created() -> Result<()> {
    run(|s| async move {
        for (capability, text) in [
            (mount(Mode::MultiNodeMultiWriter), "filesystem"),
            (mount(Mode::MultiNodeReaderOnly), "KubeVirt"),
            (block(Mode::MultiNodeReaderOnly), "KubeVirt"),
        ] {
            let mut request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
            request.volume_capabilities = vec![capability];
            let claim = s.claim_name(&request.name);
            let refused = s.driver.create(request).await.unwrap_err();
            ensure!(refused.code() == Code::InvalidArgument, "{refused}");
            ensure!(refused.message().contains(text), "{refused}");
            ensure!(s.claims().get_opt(&claim).await?.is_none(), "{claim} was created");
        }
        Ok(())
    })
    .await
}

/// Overwrites a file with zeros, as if its data was lost.
fn lose_data(file: &Path) -> Result<()> {
    let size = file.metadata()?.len();
    File::create(file).with_context(|| format!("cannot truncate {}", file.display()))?;
    OpenOptions::new().write(true).open(file)?.set_len(size)?;
    Ok(())
}

/// A pod that would use the volume gets this error instead.
async fn is_not_mounted(pods: &PodScenario, volume: &Volume, expected: &[&str]) -> Result<()> {
    // The events of another pod of the same name would count.
    let name = format!("refused-{}", volume.claim);
    let pod = Script::new(&name, &pods.second_node, "true").mount(volume, "/data");
    let pod = pods.start(pod).await?;
    pods.mount_failure(&pod, expected).await?;
    pods.remove(&pod).await?;
    pods.detached(volume).await
}

#[tokio::test]
async fn a_new_volume_is_formatted_at_its_first_attach_and_never_later() -> Result<()> {
    pods::run(|pods| async move {
        let claims = pods.scenario().claims();
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let new = claims.get(&volume.handle).await?;
        ensure!(has(&new, ANNOTATION_NEVER_ATTACHED) && has(&new, ANNOTATION_FORMAT_TOKEN), "{new:?}");
        let write = "echo written > /data/file; sync; cat /data/file";
        let output = pods.run(Script::new("writer", &pods.first_node, write).mount(&volume, "/data")).await?;
        ensure!(output == "written", "{output}");
        pods.detached(&volume).await?;
        let used = claims.get(&volume.handle).await?;
        ensure!(!has(&used, ANNOTATION_NEVER_ATTACHED) && has(&used, ANNOTATION_FORMAT_TOKEN), "{used:?}");

        lose_data(&volume.file)?;
        is_not_mounted(&pods, &volume, &["reads as empty", "not attested blank"]).await
    })
    .await
}

#[tokio::test]
async fn a_volume_of_a_class_without_the_statement_and_a_copy_are_not_formatted() -> Result<()> {
    pods::run(|pods| async move {
        // Nobody states that new volumes of this class are blank.
        let options = ClaimOptions { class: Some("nestor-shareable".to_owned()), ..filesystem("ext4") };
        let unstated = pods.claim("unstated", &options).await?;
        is_not_mounted(&pods, &unstated, &["not attested blank"]).await?;

        let source = pods.claim("source", &filesystem("ext4")).await?;
        let more = json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": source.claim}});
        let copy = pods.claim("copy", &ClaimOptions { more, ..filesystem("ext4") }).await?;
        let claim = pods.scenario().claims().get(&copy.handle).await?;
        ensure!(
            !has(&claim, ANNOTATION_NEVER_ATTACHED) && !has(&claim, ANNOTATION_FORMAT_TOKEN),
            "{claim:?}"
        );
        is_not_mounted(&pods, &copy, &["not attested blank"]).await
    })
    .await
}
