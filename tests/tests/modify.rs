//! VolumeAttributesClasses: chosen in the guest and applied by the hypervisor, also while a pod uses the volume.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::ControllerModifyVolumeRequest;
use infra_api::Qos;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tests::guest::handle;
use tests::pods::{self, ClaimOptions, PodScenario, Script, Volume};
use tests::{PATIENCE, Scenario, eventually, run, unique};
use tonic::Code;

const UNLIMITED: Qos = Qos { iops: None, bytes_per_second: None };

/// Sets the VolumeAttributesClass of a guest claim.
async fn set_class(s: &Scenario, claim: &str, class: &str) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"volumeAttributesClassName": class}}));
    s.guest_claims().patch(claim, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until the guest claim's status has a VolumeAttributesClass.
async fn has_class(s: &Scenario, claim: &str, class: &str) -> Result<()> {
    eventually(&format!("guest claim {claim} has VolumeAttributesClass {class}"), PATIENCE, || async {
        let status = s.guest_claims().get(claim).await?.status.unwrap_or_default();
        let matches = status.current_volume_attributes_class_name.as_deref() == Some(class)
            && status.modify_volume_status.is_none();
        Ok(if matches { Ok(()) } else { Err(format!("{status:?}; events: {:?}", s.events(claim).await?)) })
    })
    .await
}

/// The current VolumeAttributesClass in a claim's status.
fn current(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.status.as_ref()?.current_volume_attributes_class_name.as_deref()
}

/// Checks that the management claim has this class, and the storage infra its limits.
async fn is_limited(s: &Scenario, handle: &str, class: &str, qos: Qos) -> Result<()> {
    let management_claim = s.claims().get(handle).await?;
    let requested =
        management_claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    ensure!(
        (requested, current(&management_claim)) == (Some(class), Some(class)),
        "{:?} {:?}",
        requested,
        management_claim.status
    );
    let limits = s.infra_volume(handle).await?.qos;
    ensure!(limits == qos, "the storage infra limits to {limits:?}");
    Ok(())
}

#[tokio::test]
async fn a_class_limits_a_volume_from_its_creation_and_can_be_changed() -> Result<()> {
    run(|s| async move {
        let silver = s.attributes_class(&[("iops", "300"), ("bytesPerSecond", "10Mi")]).await?;
        let gold = s.attributes_class(&[("bytesPerSecond", "50M")]).await?;
        let open = s.attributes_class(&[("iops", "0")]).await?;
        s.claim_with("data", "nestor", "4Mi", json!({"volumeAttributesClassName": silver})).await?;
        let (claim, volume) = s.bound("data").await?;
        assert_eq!(current(&claim), Some(silver.as_str()));
        let handle = handle(&volume)?;
        is_limited(&s, &handle, &silver, Qos { iops: Some(300), bytes_per_second: Some(10 << 20) }).await?;
        for (class, qos) in
            [(&gold, Qos { iops: None, bytes_per_second: Some(50_000_000) }), (&open, UNLIMITED)]
        {
            set_class(&s, "data", class).await?;
            has_class(&s, "data", class).await?;
            is_limited(&s, &handle, class, qos).await?;
        }
        // A volume created without a class can get one.
        let plain = s.bound_claim("plain").await?;
        assert_eq!(s.infra_volume(&plain).await?.qos, UNLIMITED);
        set_class(&s, "plain", "gold").await?;
        has_class(&s, "plain", "gold").await?;
        is_limited(&s, &plain, "gold", Qos { iops: Some(2000), bytes_per_second: Some(80 << 20) }).await
    })
    .await
}

#[tokio::test]
async fn a_class_without_a_management_class_is_refused_with_the_reason() -> Result<()> {
    run(|s| async move {
        let class = s.guest_attributes_class().await?;
        let texts = ["VolumeAttributesClass", &class, "does not exist in the management cluster"];

        s.claim_with("new", "nestor", "1Mi", json!({"volumeAttributesClassName": class})).await?;
        let (reason, _) = s.wait_for_event("new", &texts).await?;
        assert_eq!(reason, "ProvisioningFailed");

        let handle = s.bound_claim("data").await?;
        let of = |parameters: &[(&str, &str)]| ControllerModifyVolumeRequest {
            volume_id: handle.clone(),
            mutable_parameters: parameters
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..Default::default()
        };
        let absent = [(names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS, class.as_str())];
        let refused = s.driver.calls().controller_modify_volume(of(&absent)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        let refused = s.driver.calls().controller_modify_volume(of(&[("iops", "300")])).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("iops") && refused.message().contains(absent[0].0), "{refused}");
        let unknown = ControllerModifyVolumeRequest { volume_id: unique("never-was"), ..of(&absent) };
        let refused = s.driver.calls().controller_modify_volume(unknown).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");

        set_class(&s, "data", &class).await?;
        let (reason, _) = s.wait_for_event("data", &texts).await?;
        assert_eq!(reason, "VolumeModifyFailed");
        assert_eq!(s.infra_volume(&handle).await?.qos, UNLIMITED);
        set_class(&s, "data", "standard").await?;
        has_class(&s, "data", "standard").await
    })
    .await
}

#[tokio::test]
async fn a_class_refused_by_the_management_tier_is_reported_until_another_is_chosen() -> Result<()> {
    run(|s| async move {
        let odd = s.attributes_class(&[("speed", "high")]).await?;
        let good = s.attributes_class(&[("iops", "400")]).await?;
        s.claim_with("data", "nestor", "4Mi", json!({"volumeAttributesClassName": good})).await?;
        let handle = handle(&s.bound("data").await?.1)?;
        set_class(&s, "data", &odd).await?;
        let (reason, _) = s.wait_for_event("data", &[&odd, "speed", "unknown"]).await?;
        assert_eq!(reason, "VolumeModifyFailed");
        eventually("the guest claim's modification is infeasible", PATIENCE, || async {
            let status = s.guest_claims().get("data").await?.status.unwrap_or_default();
            let state = status.modify_volume_status.as_ref().map(|state| state.status.as_str());
            Ok(if state == Some("Infeasible") { Ok(()) } else { Err(format!("{status:?}")) })
        })
        .await?;
        let limits = Qos { iops: Some(400), bytes_per_second: None };
        assert_eq!(s.infra_volume(&handle).await?.qos, limits);
        set_class(&s, "data", &good).await?;
        has_class(&s, "data", &good).await?;
        is_limited(&s, &handle, &good, limits).await
    })
    .await
}

// ---- on a VM ----

/// The hypervisor's limits of a disk in the running domain: operations and bytes per second.
async fn libvirt_limits(pods: &PodScenario, volume: &Volume) -> Result<(Option<u64>, Option<u64>)> {
    let xml = pods.scenario().libvirt_disk(&pods.first_node, &volume.disk).await?;
    let xml = xml.context("the disk is not attached")?;
    let limit = |name: &str| {
        let rest = xml.split(&format!("<{name}>")).nth(1)?;
        rest.split('<').next()?.parse::<u64>().ok().filter(|limit| *limit > 0)
    };
    Ok((limit("total_iops_sec"), limit("total_bytes_sec")))
}

/// How long each of these commands takes on the volume, by the VM's clock.
async fn durations(
    pods: &PodScenario,
    volume: &Volume,
    name: &str,
    commands: &[&str],
) -> Result<Vec<Duration>> {
    let timed = |command: &&str| {
        format!(
            "begin=$(cut -d' ' -f1 /proc/uptime)\n{command} 2>/dev/null\necho $begin $(cut -d' ' -f1 /proc/uptime)\n"
        )
    };
    let script: String = commands.iter().map(timed).collect();
    let output = pods.run(Script::new(name, &pods.first_node, &script).device(volume, "/dev/volume")).await?;
    let time = |line: &str| {
        let (begin, end) = line.split_once(' ')?;
        Some(Duration::from_secs_f64(end.parse::<f64>().ok()? - begin.parse::<f64>().ok()?))
    };
    output.lines().map(|line| time(line).with_context(|| format!("no times: {output}"))).collect()
}

/// Checks that each command took at least as long as its limit implies. The hypervisor allows a burst of a tenth of a
/// second, and completes the last requests early.
fn at_least(durations: &[Duration], seconds: f64) -> Result<()> {
    let least = Duration::from_secs_f64(seconds * 0.9);
    ensure!(durations.iter().all(|time| *time >= least), "{durations:?}, but the limit implies {seconds} s");
    Ok(())
}

#[tokio::test]
async fn limits_apply_on_the_vm_and_change_while_a_pod_uses_the_volume() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let bytes = s.attributes_class(&[("bytesPerSecond", "2Mi")]).await?;
        let operations = s.attributes_class(&[("iops", "20")]).await?;
        let open = s.attributes_class(&[("bytesPerSecond", "0")]).await?;
        let more = json!({
            "volumeAttributesClassName": bytes, "resources": {"requests": {"storage": "32Mi"}},
        });
        let volume = pods.claim("raw", &ClaimOptions { more, ..pods::block() }).await?;
        let user = Script::new("user", &pods.first_node, "exec sleep 100000").device(&volume, "/dev/volume");
        let user = pods.start(user).await?;
        pods.running(&user).await?;

        ensure!(libvirt_limits(&pods, &volume).await? == (None, Some(2 << 20)));
        let write = "dd if=/dev/zero of=/dev/volume bs=128k count=96 conv=notrunc oflag=direct";
        let read = "dd if=/dev/volume of=/dev/null bs=128k count=96 iflag=direct";
        at_least(&durations(&pods, &volume, "bytes", &[write, read]).await?, 6.0)?;

        set_class(s, "raw", &operations).await?;
        has_class(s, "raw", &operations).await?;
        ensure!(libvirt_limits(&pods, &volume).await? == (Some(20), None));
        let write = "dd if=/dev/zero of=/dev/volume bs=4k count=100 conv=notrunc oflag=direct";
        let read = "dd if=/dev/volume of=/dev/null bs=4k count=100 iflag=direct";
        at_least(&durations(&pods, &volume, "operations", &[write, read]).await?, 5.0)?;

        set_class(s, "raw", &open).await?;
        has_class(s, "raw", &open).await?;
        ensure!(libvirt_limits(&pods, &volume).await? == (None, None));
        pods.running(&user).await.map(drop)
    })
    .await
}
