//! Volume health: conditions, events and metrics of abnormal volumes, and their recovery.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::{ControllerGetVolumeRequest, ListVolumesRequest, VolumeCondition};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::DeleteParams;
use rustix::process::Signal;
use tests::driver::Driver;
use tests::guest::handle;
use tests::hypervisor::BareDomain;
use tests::pods::{self, ClaimOptions, Script, filesystem};
use tests::{PATIENCE, Scenario, eventually, run};

/// The metrics that count abnormal volumes: component and metric.
const COUNTS: [(&str, &str); 2] =
    [("g1-gc-csi", "nestor_gc_csi_volumes_abnormal"), ("mgmt-csi", "nestor_mgmt_csi_volumes_abnormal")];

/// How long kubelet may take to report a volume: it checks every one to two minutes, in a VM that may be emulated.
const KUBELET: Duration = Duration::from_secs(600);

/// The health condition of a claim: status, reason and message.
fn health_condition(claim: &PersistentVolumeClaim) -> Option<(&str, &str, &str)> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|one| one.type_ == names::CONDITION_HEALTHY)?;
    Some((&condition.status, condition.reason.as_deref()?, condition.message.as_deref()?))
}

/// Waits until the claims of both tiers have this health condition.
async fn has_health(s: &Scenario, claim: &str, handle: &str, status: &str, texts: &[&str]) -> Result<()> {
    eventually(&format!("health of {claim} is {status} with {texts:?}"), PATIENCE, || async {
        let claims = [s.claims().get(handle).await?, s.guest_claims().get(claim).await?];
        let matches = |claim: &PersistentVolumeClaim| {
            health_condition(claim).is_some_and(|(is, _, message)| {
                is == status && texts.iter().all(|text| message.contains(text))
            })
        };
        let observed: Vec<_> = claims.iter().map(health_condition).collect();
        Ok(if claims.iter().all(matches) { Ok(()) } else { Err(format!("{observed:?}")) })
    })
    .await
}

/// The condition and the nodes of a volume in the responses of ControllerGetVolume and ListVolumes.
async fn csi_conditions(driver: &Driver, volume: &str) -> Result<[(VolumeCondition, Vec<String>); 2]> {
    let request = ControllerGetVolumeRequest { volume_id: volume.to_owned() };
    let got =
        driver.calls().controller_get_volume(request).await?.into_inner().status.context("no status")?;
    let list = driver.calls().list_volumes(ListVolumesRequest::default()).await?.into_inner().entries;
    let is_it = |entry: &csi::proto::list_volumes_response::Entry| {
        entry.volume.as_ref().is_some_and(|one| one.volume_id == volume)
    };
    let listed =
        list.into_iter().find(is_it).and_then(|entry| entry.status).context("the volume is not listed")?;
    let condition = |condition: Option<VolumeCondition>| condition.context("no condition");
    Ok([
        (condition(got.volume_condition)?, got.published_node_ids),
        (condition(listed.volume_condition)?, listed.published_node_ids),
    ])
}

/// Waits until a driver reports a volume as abnormal with this text, or as normal.
async fn csi_reports(driver: &Driver, volume: &str, abnormal: Option<&str>, nodes: &[&str]) -> Result<()> {
    eventually(&format!("CSI reports {volume} as {abnormal:?} on {nodes:?}"), PATIENCE, || async {
        let reported = csi_conditions(driver, volume).await?;
        let matches = reported.iter().all(|(condition, published)| {
            condition.abnormal == abnormal.is_some()
                && abnormal.is_none_or(|text| condition.message.contains(text))
                && published == nodes
        });
        Ok(if matches { Ok(()) } else { Err(format!("{reported:?}")) })
    })
    .await
}

/// Waits until the metrics of both tiers count any abnormal volumes, or none.
async fn metrics_count_abnormal(s: &Scenario, any: bool) -> Result<()> {
    for (component, metric) in COUNTS {
        eventually(&format!("{metric} counts any: {any}"), PATIENCE, || async {
            let metrics = s.lab.metrics(component).await?;
            let line = metrics.lines().find_map(|line| line.strip_prefix(metric)?.trim().parse::<u64>().ok());
            let count = line.with_context(|| format!("{component} has no metric {metric}"))?;
            Ok(if (count > 0) == any { Ok(()) } else { Err(format!("{count}")) })
        })
        .await?;
    }
    Ok(())
}

// ---- pools and files ----

#[tokio::test]
async fn an_unavailable_pool_and_its_return_are_reported_on_every_tier() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[("test", &s.name)]).await?;
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        s.claim("data", &class, "4Mi").await?;
        let (_, volume) = s.bound("data").await?;
        let handle = handle(&volume)?;
        let infra = s.infra_volume(&handle).await?;
        assert_eq!(infra.pool, pool.name);
        let management = Driver::connect(&s.lab.mgmt_socket()?).await?;
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        csi_reports(&s.driver, &handle, None, &[]).await?;
        let attachment = s.k8s_attach(&volume.name_any(), &node.name).await?;
        s.attached(&attachment).await?;
        csi_reports(&s.driver, &handle, None, &[&node.name]).await?;
        assert_eq!(
            health_condition(&s.guest_claims().get("data").await?),
            None,
            "a volume that was never abnormal has no condition"
        );

        pool.hide()?;
        let texts = ["not healthy"];
        has_health(&s, "data", &handle, "False", &texts).await?;
        s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionAbnormal", &texts).await?;
        s.wait_for_management_reason_of("PersistentVolumeClaim", &handle, "VolumeConditionAbnormal", &texts)
            .await?;
        csi_reports(&s.driver, &handle, Some("not healthy"), &[&node.name]).await?;
        mgmt_csi_reports(&management, infra.id.as_str(), Some("not healthy")).await?;
        metrics_count_abnormal(&s, true).await?;

        pool.show()?;
        has_health(&s, "data", &handle, "True", &[]).await?;
        s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionNormal", &["healthy"]).await?;
        s.wait_for_management_reason_of(
            "PersistentVolumeClaim",
            &handle,
            "VolumeConditionNormal",
            &["healthy"],
        )
        .await?;
        csi_reports(&s.driver, &handle, None, &[&node.name]).await?;
        mgmt_csi_reports(&management, infra.id.as_str(), None).await?;
        metrics_count_abnormal(&s, false).await?;
        s.k8s_detach(&attachment).await?;
        csi_reports(&s.driver, &handle, None, &[]).await
    })
    .await
}

/// Waits until the management driver reports a volume as abnormal with this text, or as normal.
async fn mgmt_csi_reports(driver: &Driver, volume: &str, abnormal: Option<&str>) -> Result<()> {
    eventually(&format!("the management driver reports {volume} as {abnormal:?}"), PATIENCE, || async {
        let reported = csi_conditions(driver, volume).await?;
        let matches = reported.iter().all(|(condition, _)| {
            condition.abnormal == abnormal.is_some()
                && abnormal.is_none_or(|text| condition.message.contains(text))
        });
        Ok(if matches { Ok(()) } else { Err(format!("{reported:?}")) })
    })
    .await
}

/// A file that is renamed until this is dropped.
struct HiddenFile(PathBuf, PathBuf);

impl HiddenFile {
    fn take(file: PathBuf) -> Result<Self> {
        let hidden = file.with_extension("away");
        std::fs::rename(&file, &hidden).with_context(|| format!("cannot move {}", file.display()))?;
        Ok(Self(file, hidden))
    }
}

impl Drop for HiddenFile {
    fn drop(&mut self) {
        let _ = std::fs::rename(&self.1, &self.0);
    }
}

#[tokio::test]
async fn a_missing_volume_file_is_reported_for_its_volume_only() -> Result<()> {
    run(|s| async move {
        let handle = s.bound_claim("data").await?;
        let healthy = s.bound_claim("healthy").await?;
        s.pod("user", None, &["data"]).await?;
        let infra = s.infra_volume(&handle).await?;
        let hidden = HiddenFile::take(s.file_of(&infra).await?)?;
        let texts = ["missing"];
        has_health(&s, "data", &handle, "False", &texts).await?;
        s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionAbnormal", &texts).await?;
        s.wait_for_reason_of("Pod", "user", "VolumeConditionAbnormal", &[&texts[..], &["data"]].concat())
            .await?;
        csi_reports(&s.driver, &handle, Some("missing"), &[]).await?;
        csi_reports(&s.driver, &healthy, None, &[]).await?;
        drop(hidden);
        has_health(&s, "data", &handle, "True", &[]).await?;
        s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionNormal", &["healthy"]).await?;
        s.wait_for_reason_of("Pod", "user", "VolumeConditionNormal", &["data", "healthy"]).await?;
        assert_eq!(health_condition(&s.guest_claims().get("healthy").await?), None);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_management_claim_deleted_under_its_pod_is_reported_on_the_pod() -> Result<()> {
    run(|s| async move {
        let handle = s.bound_claim("data").await?;
        s.pod("user", None, &["data"]).await?;
        s.pod("bystander", None, &["other"]).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        let texts = ["data", &handle, "does not exist"];
        s.wait_for_reason_of("Pod", "user", "ManagementClaimNotFound", &texts).await?;
        let others = s.events_of("Pod", "bystander").await?;
        ensure!(others.iter().all(|(reason, _)| reason != "ManagementClaimNotFound"), "{others:?}");
        Ok(())
    })
    .await
}

// ---- VMs ----

#[tokio::test]
async fn a_disk_detached_by_virsh_is_reported_and_attached_again() -> Result<()> {
    run(|s| async move {
        let vm = BareDomain::start(&s).await?;
        let outcome = disk_is_reported_and_attached_again(&s, &vm).await;
        outcome.and(vm.remove(&s).await)
    })
    .await
}

async fn disk_is_reported_and_attached_again(s: &Scenario, vm: &BareDomain) -> Result<()> {
    let name = vm.node.name.as_str();
    s.lab.join_guest(&vm.node).await?;
    s.claim("data", "nestor", "4Mi").await?;
    let (_, volume) = s.bound("data").await?;
    let handle = handle(&volume)?;
    let attachment = s.k8s_attach(&volume.name_any(), name).await?;
    let disk = s.attached(&attachment).await?;
    csi_reports(&s.driver, &handle, None, &[name]).await?;

    // storage-infra reports the loss and attaches the disk again at once. It cannot attach to a paused QEMU, so that the
    // test has time to observe the report.
    let infra = s.pause_component("storage-infra")?;
    s.libvirt_detach(name, &disk).await?;
    eventually("the disk is detached", PATIENCE, || async {
        let left = s.libvirt_disk(name, &disk).await?;
        Ok(left.map_or(Ok(()), Err))
    })
    .await?;
    vm.signal(s, Signal::STOP)?;
    drop(infra);
    let texts = ["disappeared from a running VM"];
    has_health(s, "data", &handle, "False", &texts).await?;
    s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionAbnormal", &texts).await?;

    vm.signal(s, Signal::CONT)?;
    has_health(s, "data", &handle, "True", &[]).await?;
    ensure!(s.libvirt_disk(name, &disk).await?.is_some(), "the disk is not attached again");
    s.wait_for_reason_of("PersistentVolumeClaim", "data", "VolumeConditionNormal", &["healthy"]).await?;
    csi_reports(&s.driver, &handle, None, &[name]).await?;
    s.k8s_detach(&attachment).await
}

#[tokio::test]
async fn filesystems_that_became_read_only_are_reported_on_the_pod() -> Result<()> {
    pods::run(|pods| async move {
        let options = ClaimOptions { options: &["errors=remount-ro"], ..filesystem("ext4") };
        let failing = pods.claim("failing", &options).await?;
        let stopped = pods.claim("stopped", &filesystem("xfs")).await?;
        let pod = Script::new("pod", &pods.first_node, "exec sleep 10000");
        let pod = pods.start(pod.mount(&failing, "/failing").mount(&stopped, "/stopped")).await?;
        pods.running(&pod).await?;
        // The first gets an error (Linux, Documentation/ABI/testing/sysfs-fs-ext4); not every kernel then reports the
        // filesystem as read-only. The second is remounted read-only, while its mount in the pod is not.
        let fail = format!(
            "device=$(grep -m1 '{}' /proc/self/mounts | cut -d' ' -f1)
            echo 1 > /sys/fs/ext4/$(basename \"$device\")/trigger_fs_error
            device=$(grep -m1 '{}' /proc/self/mounts | cut -d' ' -f1)
            mount -o remount,ro \"$device\" $(grep -m1 \"^$device .*globalmount\" /proc/self/mounts | cut -d' ' -f2)",
            failing.pv, stopped.pv
        );
        pods.run(Script::on_vm("fail", &pods.first_node, &fail)).await?;
        for texts in [["Volume failing", "ext4 filesystem"], ["Volume stopped", "xfs filesystem became read-only"]] {
            let (reason, _) = eventually(&format!("kubelet reports {texts:?}"), KUBELET, || async {
                let events = pods.scenario().events_of("Pod", &pod).await?;
                let found = events.iter().find(|(_, message)| texts.iter().all(|text| message.contains(text)));
                Ok(found.cloned().ok_or_else(|| format!("{events:?}")))
            })
            .await?;
            ensure!(reason == "VolumeConditionAbnormal", "{reason}");
        }
        Ok(())
    })
    .await
}
