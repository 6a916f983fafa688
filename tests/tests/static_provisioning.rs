//! Static provisioning: PersistentVolumes written by hand for management claims.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerModifyVolumeRequest, ListVolumesRequest,
    ValidateVolumeCapabilitiesRequest, VolumeCapability,
};
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::bytes::{checksum, device, noise, read, write};
use tests::driver::{block, mount};
use tests::guest::static_volume;
use tests::pods::{self, Script};
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tonic::Code;

/// The label that shares a claim with a guest.
fn share(cluster_id: &str) -> String {
    format!("{}{cluster_id}", names::LABEL_SHARE_PREFIX)
}

// ---- existing data ----

#[tokio::test]
async fn pods_find_existing_data_and_nothing_is_formatted() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let size = json!({"resources": {"requests": {"storage": "16Mi"}}});
        let files = s.management_claim(&own, size).await?;
        let raw = s.management_claim(&own, json!({"volumeMode": "Block"})).await?;

        let folder = tempfile::tempdir()?;
        let kept = folder.path().join("kept");
        std::fs::write(&kept, noise(1, 1 << 20))?;
        let file = s.file_of(&s.infra_volume(&files).await?).await?;
        let make = ["-q".as_ref(), "-F".as_ref(), "-d".as_ref(), folder.path().as_os_str(), file.as_os_str()];
        lab::process::run(&mut lab::process::command("mkfs.ext4", make)).await?;
        let identity = filesystem_uuid(&file).await?;
        let device = s.file_of(&s.infra_volume(&raw).await?).await?;
        write(&device, &noise(2, 4 << 20))?;
        let (kept, device) = (checksum(&kept).await?, checksum(&device).await?);

        s.static_claim("files", &files, json!({"capacity": {"storage": "16Mi"}})).await?;
        s.static_claim("raw", &raw, json!({"volumeMode": "Block"})).await?;
        let (files, raw) = (pods.bound_volume("files").await?, pods.bound_volume("raw").await?);
        let script = "sha256sum < /files/kept; sha256sum < /dev/raw; echo more > /files/more; sync";
        let pod =
            Script::new("here", &pods.first_node, script).mount(&files, "/files").device(&raw, "/dev/raw");
        let output = pods.run(pod).await?;
        ensure!(output == format!("{kept}  -\n{device}  -"), "written {kept} and {device}, read {output}");

        let script = "sha256sum < /files/kept; cat /files/more";
        let pod = Script::new("there", &pods.second_node, script).mount(&files, "/files");
        let output = pods.run(pod).await?;
        ensure!(output == format!("{kept}  -\nmore"), "on the other VM: {output}");

        pods.detached(&files).await?;
        let after = filesystem_uuid(&files.file).await?;
        ensure!(after == identity, "filesystem {identity} has become {after}");
        Ok(())
    })
    .await
}

async fn filesystem_uuid(file: &Path) -> Result<String> {
    let probe =
        ["-p".as_ref(), "-s".as_ref(), "UUID".as_ref(), "-o".as_ref(), "value".as_ref(), file.as_os_str()];
    lab::process::run(&mut lab::process::command("blkid", probe)).await
}

// ---- one claim, several guests ----

/// Waits until exactly these consumers are recorded on a management claim: cluster ID, volume, mode.
async fn consumers(s: &Scenario, claim: &str, expected: &[(&str, &str, &str)]) -> Result<()> {
    let expected: BTreeMap<String, Value> = expected
        .iter()
        .map(|(id, volume, mode)| ((*id).to_owned(), json!({"pv": volume, "mode": mode})))
        .collect();
    eventually(&format!("the consumers of management claim {claim}"), PATIENCE, || async {
        let found = s.claims().get(claim).await?;
        let mut there = BTreeMap::new();
        for (key, value) in found.annotations() {
            if let Some(id) = key.strip_prefix(names::ANNOTATION_CONSUMER_PREFIX) {
                there.insert(id.to_owned(), serde_json::from_str(value)?);
            }
        }
        Ok(if there == expected { Ok(()) } else { Err(format!("{there:?}, not {expected:?}")) })
    })
    .await
}

#[tokio::test]
async fn two_guests_read_one_management_claim_and_are_recorded_as_consumers() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let shares = [share(&s.cluster_id), share(&second.cluster_id)];
        // The claim belongs to the platform team.
        let labels = [(shares[0].as_str(), "ro"), (shares[1].as_str(), "ro")];
        let reading = json!({"accessModes": ["ReadOnlyMany"]});
        let handle = s.management_claim(&labels, reading.clone()).await?;
        let bytes = noise(3, 4 << 20);
        write(&s.file_of(&s.infra_volume(&handle).await?).await?, &bytes)?;
        consumers(&s, &handle, &[]).await?;

        let first_volume = s.static_claim("data", &handle, reading.clone()).await?.name_any();
        let second_volume = second.static_volume(&handle, &reading).await?.name_any();
        let first_entry = (s.cluster_id.as_str(), first_volume.as_str(), "ro");
        let second_entry = (second.cluster_id.as_str(), second_volume.as_str(), "ro");
        consumers(&s, &handle, &[first_entry, second_entry]).await?;

        let (here, there) = (s.node().await?, second.node().await?);
        s.lab.join_guest(&here).await?;
        s.lab.join_guest(&there).await?;
        let one = s.k8s_attachments().attach(&first_volume, &here.name).await?;
        let other = second.k8s_attachments().attach(&second_volume, &there.name).await?;
        for (node, disk) in [
            (&here, s.k8s_attachments().attached(&one).await?),
            (&there, second.k8s_attachments().attached(&other).await?),
        ] {
            assert!(read(&device(node, &disk), bytes.len())? == bytes, "{} reads other data", node.name);
            let attachments = s.infra.list_attachments(Some(node.uuid), None).await?;
            assert!(attachments.iter().all(|one| one.read_only), "{attachments:?}");
        }

        // Only the record of the guest that releases the claim is removed.
        second.k8s_attachments().detach(&other).await?;
        second.volumes().delete(&second_volume, &DeleteParams::default()).await?;
        consumers(&s, &handle, &[first_entry]).await?;
        s.k8s_attachments().detach(&one).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        s.guest_volumes().delete(&first_volume, &DeleteParams::default()).await?;
        consumers(&s, &handle, &[]).await?;
        assert!(
            s.claims().get(&handle).await?.metadata.deletion_timestamp.is_none(),
            "the claim was deleted"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_single_writer_claim_moves_between_vms_and_guests() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let shared = share(&second.cluster_id);
        let labels = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str()), (shared.as_str(), "rw")];
        let handle = s.management_claim(&labels, json!({})).await?;
        let own_pv = s.static_claim("data", &handle, json!({})).await?.name_any();
        let other_pv = second.static_volume(&handle, &json!({})).await?.name_any();
        // The owner is not recorded as a consumer, only the other guest.
        consumers(&s, &handle, &[(&second.cluster_id, &other_pv, "rw")]).await?;

        let (here, there, far) = (s.node().await?, s.node().await?, second.node().await?);
        for node in [&here, &there, &far] {
            s.lab.join_guest(node).await?;
        }
        let first = s.k8s_attachments().attach(&own_pv, &here.name).await?;
        let disk = s.k8s_attachments().attached(&first).await?;
        write(&device(&here, &disk), b"written in the first guest")?;

        // A second writer is refused on another VM of the guest and in the other guest.
        let another = s.k8s_attachments().attach(&own_pv, &there.name).await?;
        s.k8s_attachments().refused(&another, &["FailedPrecondition", &here.name]).await?;
        let writer = mount(Mode::SingleNodeWriter);
        let refused = s.driver.refusal(&handle, &there.name, &writer).await?;
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&here.name), "{refused}");
        let elsewhere = second.k8s_attachments().attach(&other_pv, &far.name).await?;
        let refused =
            second.k8s_attachments().refused(&elsewhere, &["FailedPrecondition", "of another guest"]).await?;
        assert!(!refused.contains(&here.name), "it names the other guest's VM: {refused}");
        let refused = second.driver.refusal(&handle, &far.name, &writer).await?;
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let message = refused.message();
        assert!(message.contains("of another guest") && !message.contains(&here.name), "{refused}");

        // After the detach, the other guest's attach succeeds, and the data is there.
        s.k8s_attachments().detach(&another).await?;
        s.k8s_attachments().detach(&first).await?;
        assert_eq!(second.k8s_attachments().attached(&elsewhere).await?, disk, "the same disk");
        let text = b"written in the first guest";
        assert_eq!(read(&device(&far, &disk), text.len())?, text);
        let refused = s.driver.publish(&handle, &here.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let message = refused.message();
        assert!(message.contains("of another guest") && !message.contains(&far.name), "{refused}");
        second.k8s_attachments().detach(&elsewhere).await
    })
    .await
}

#[tokio::test]
async fn a_guest_can_use_but_not_change_a_shared_claim() -> Result<()> {
    run(|s| async move {
        let shared = share(&s.cluster_id);
        let labels = [(names::LABEL_CLUSTER_ID, "the-owner"), (shared.as_str(), "rw")];
        let handle = s.management_claim(&labels, json!({})).await?;
        s.static_claim("data", &handle, json!({})).await?;
        let mut calls = s.driver.calls();

        let capabilities = vec![mount(Mode::SingleNodeWriter)];
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id: handle.clone(),
            volume_capabilities: capabilities.clone(),
            ..Default::default()
        };
        let answer = calls.validate_volume_capabilities(validate).await?.into_inner();
        assert_eq!(answer.confirmed.map(|confirmed| confirmed.volume_capabilities), Some(capabilities));
        let listed = calls.list_volumes(ListVolumesRequest::default()).await?.into_inner();
        let listed = listed.entries.into_iter().filter_map(|entry| entry.volume);
        assert!(listed.into_iter().any(|volume| volume.volume_id == handle), "it is not listed");

        let expand = ControllerExpandVolumeRequest {
            volume_id: handle.clone(),
            capacity_range: Some(CapacityRange { required_bytes: 8 * MIB, limit_bytes: 0 }),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let modify = ControllerModifyVolumeRequest {
            volume_id: handle.clone(),
            mutable_parameters: [(
                names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS.to_owned(),
                "gold".to_owned(),
            )]
            .into(),
            ..Default::default()
        };
        // Final codes: a retry by this guest can never succeed.
        for refused in [
            calls.controller_expand_volume(expand).await.unwrap_err(),
            calls.controller_modify_volume(modify).await.unwrap_err(),
        ] {
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            let texts = [handle.as_str(), "shared with this guest", "owner"];
            assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        }
        let refused = s.driver.delete(&handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let texts = [handle.as_str(), "the-owner", "Retain"];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        let claim = s.claims().get(&handle).await?;
        assert!(claim.metadata.deletion_timestamp.is_none());
        assert_eq!(s.infra_volume(&handle).await?.capacity_bytes, 4 << 20);

        let node = s.node().await?;
        s.driver.publish(&handle, &node.name).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_that_is_no_longer_shared_is_not_found_but_can_be_detached() -> Result<()> {
    run(|s| async move {
        let shared = share(&s.cluster_id);
        let handle = s.management_claim(&[(&shared, "rw")], json!({})).await?;
        let volume = s.static_claim("data", &handle, json!({})).await?.name_any();
        consumers(&s, &handle, &[(&s.cluster_id, &volume, "rw")]).await?;
        let node = s.node().await?;
        s.driver.publish(&handle, &node.name).await?;

        s.label_volume(&handle, &json!({&shared: null})).await?;
        s.wait_for_event("data", &[&volume, &handle, &shared]).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;
        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");

        // Its record would block the owner's deletion.
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        s.guest_volumes().delete(&volume, &DeleteParams::default()).await?;
        consumers(&s, &handle, &[]).await
    })
    .await
}

#[tokio::test]
async fn a_guest_is_recorded_until_its_last_volume_is_deleted_and_as_writer_while_one_writes() -> Result<()> {
    run(|s| async move {
        let shared = share(&s.cluster_id);
        let modes = json!({"accessModes": ["ReadWriteOnce", "ReadOnlyMany"]});
        let handle = s.management_claim(&[(&shared, "rw")], modes).await?;
        let volume =
            |modes: &str| static_volume(&unique(&s.name), &s.name, &handle, &json!({"accessModes": [modes]}));
        let volumes = s.guest_volumes();
        let reader = volumes.create(&PostParams::default(), &volume("ReadOnlyMany")?).await?.name_any();
        let as_reader = (s.cluster_id.as_str(), reader.as_str(), "ro");
        consumers(&s, &handle, &[as_reader]).await?;

        let writer = volumes.create(&PostParams::default(), &volume("ReadWriteOnce")?).await?.name_any();
        let record = format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, s.cluster_id);
        eventually("the guest is recorded as a writer", PATIENCE, || async {
            let claim = s.claims().get(&handle).await?;
            let record = claim.annotations().get(&record).cloned().unwrap_or_default();
            Ok(if record.contains("\"rw\"") { Ok(()) } else { Err(record) })
        })
        .await?;

        volumes.delete(&writer, &DeleteParams::default()).await?;
        consumers(&s, &handle, &[as_reader]).await?;
        volumes.delete(&reader, &DeleteParams::default()).await?;
        consumers(&s, &handle, &[]).await
    })
    .await
}

#[tokio::test]
async fn a_claim_shared_read_only_can_be_attached_by_a_read_only_volume() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let handle = s.management_claim(&[(&share(&s.cluster_id), "ro")], json!({})).await?;
        let volume = s.static_claim("data", &handle, json!({"csi": {"readOnly": true}})).await?.name_any();
        consumers(&s, &handle, &[(&s.cluster_id, &volume, "ro")]).await?;
        let attachment = s.k8s_attachments().attach(&volume, &node.name).await?;
        s.k8s_attachments().attached(&attachment).await?;
        let attachments = s.infra.list_attachments(Some(node.uuid), None).await?;
        assert!(attachments.len() == 1 && attachments[0].read_only, "{attachments:?}");
        s.k8s_attachments().detach(&attachment).await
    })
    .await
}

// ---- incompatible volumes ----

/// A guest volume that is incompatible with its management claim.
struct IncompatibleVolume {
    /// Name of the guest's claim.
    name: &'static str,
    /// Labels of the management claim.
    labels: Vec<(String, String)>,
    /// Spec fields of the management claim, whose default is a filesystem of 4 MiB, ReadWriteOnce.
    management_spec: Value,
    /// Spec fields of the guest's volume.
    guest_spec: Value,
    /// Capability of the attach.
    capability: VolumeCapability,
    /// Texts in the error, besides the names of both objects.
    texts: Vec<String>,
}

#[tokio::test]
async fn a_volume_incompatible_with_its_management_claim_is_reported_and_never_attached() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let own = || vec![(names::LABEL_CLUSTER_ID.to_owned(), s.cluster_id.clone())];
        let texts = |texts: &[&str]| texts.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for incompatible in [
            IncompatibleVolume {
                name: "larger",
                labels: own(),
                management_spec: json!({}),
                guest_spec: json!({"capacity": {"storage": "8Mi"}}),
                capability: mount(Mode::SingleNodeWriter),
                texts: texts(&["8Mi", "4Mi"]),
            },
            IncompatibleVolume {
                name: "block-of-filesystem",
                labels: own(),
                management_spec: json!({}),
                guest_spec: json!({"volumeMode": "Block"}),
                capability: block(Mode::SingleNodeWriter),
                texts: texts(&["volumeMode", "Block", "Filesystem"]),
            },
            IncompatibleVolume {
                name: "filesystem-of-block",
                labels: own(),
                management_spec: json!({"volumeMode": "Block"}),
                guest_spec: json!({}),
                capability: mount(Mode::SingleNodeWriter),
                texts: texts(&["volumeMode", "Block", "Filesystem"]),
            },
            IncompatibleVolume {
                name: "another-access-mode",
                labels: own(),
                management_spec: json!({}),
                guest_spec: json!({"accessModes": ["ReadOnlyMany"]}),
                capability: mount(Mode::MultiNodeReaderOnly),
                texts: texts(&["ReadOnlyMany", "ReadWriteOnce"]),
            },
            IncompatibleVolume {
                name: "writer-of-a-reader",
                labels: own(),
                management_spec: json!({"accessModes": ["ReadOnlyMany"]}),
                guest_spec: json!({}),
                capability: mount(Mode::SingleNodeWriter),
                texts: texts(&["ReadWriteOnce", "ReadOnlyMany"]),
            },
            IncompatibleVolume {
                name: "shared-for-reading",
                labels: vec![(share(&s.cluster_id), "ro".to_owned())],
                management_spec: json!({}),
                guest_spec: json!({}),
                capability: mount(Mode::SingleNodeWriter),
                texts: texts(&["shared read-only"]),
            },
        ] {
            refused_everywhere(&s, &node, incompatible).await?;
        }
        s.no_attachments(&node).await
    })
    .await
}

/// Checks that the same error is in the event on the guest's claim, the CSI status, and csi-attacher's attachError.
async fn refused_everywhere(s: &Scenario, node: &LoopNode, incompatible: IncompatibleVolume) -> Result<()> {
    let name = incompatible.name;
    let labels: Vec<_> =
        incompatible.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let handle = s.management_claim(&labels, incompatible.management_spec).await?;
    let volume = s.static_claim(name, &handle, incompatible.guest_spec).await.context(name)?.name_any();
    let mut texts: Vec<&str> = incompatible.texts.iter().map(String::as_str).collect();
    texts.extend([volume.as_str(), handle.as_str()]);
    s.wait_for_event(name, &texts).await.context(name)?;
    let Err(refused) = s.driver.publish_as(&handle, &node.name, incompatible.capability).await else {
        anyhow::bail!("{name}: it was attached");
    };
    assert_eq!(refused.code(), Code::FailedPrecondition, "{name}: {refused}");
    assert!(texts.iter().all(|text| refused.message().contains(text)), "{name}: {refused}");
    let attachment = s.k8s_attachments().attach(&volume, &node.name).await?;
    texts.push("FailedPrecondition");
    s.k8s_attachments().refused(&attachment, &texts).await.context(name)?;
    s.k8s_attachments().detach(&attachment).await
}

#[tokio::test]
async fn a_claim_of_another_guest_is_reported_like_a_missing_one() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let foreign = s.management_claim(&[(names::LABEL_CLUSTER_ID, "another-guest")], json!({})).await?;
        let shared_elsewhere = share("another-guest");
        let elsewhere = s.management_claim(&[(&shared_elsewhere, "rw")], json!({})).await?;
        let absent = unique(&s.name);
        let mut messages = Vec::new();
        for (name, handle) in [("absent", &absent), ("foreign", &foreign), ("elsewhere", &elsewhere)] {
            let volume = s.static_claim(name, handle, json!({})).await?.name_any();
            let (_, event) = s.wait_for_event(name, &[&volume, handle]).await?;
            let answer = s.driver.publish(handle, &node.name).await.unwrap_err();
            assert_eq!(answer.code(), Code::NotFound, "{name}: {answer}");
            let attachment = s.k8s_attachments().attach(&volume, &node.name).await?;
            s.k8s_attachments().refused(&attachment, &["NotFound", &volume, handle]).await?;
            s.k8s_attachments().detach(&attachment).await?;
            let without = |text: &str| text.replace(&volume, "VOLUME").replace(handle.as_str(), "CLAIM");
            messages.push((without(&event), without(answer.message())));
        }
        assert!(messages.iter().all(|one| *one == messages[0]), "{messages:#?}");
        consumers(&s, &foreign, &[]).await?;

        // An unbound volume gets the event itself.
        let lonely = static_volume(&unique(&s.name), &s.name, &absent, &json!({}))?;
        let lonely = s.guest_volumes().create(&PostParams::default(), &lonely).await?.name_any();
        s.wait_for_event_of("PersistentVolume", &lonely, &[&lonely, &absent]).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_refused_volume_is_attached_once_its_management_claim_is_shared() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        s.lab.join_guest(&node).await?;
        let handle = s.management_claim(&[], json!({})).await?;
        let volume = s.static_claim("data", &handle, json!({})).await?.name_any();
        let attachment = s.k8s_attachments().attach(&volume, &node.name).await?;
        s.k8s_attachments().refused(&attachment, &["NotFound", &handle]).await?;
        // Only a claim that was reported as incompatible is reported as compatible.
        s.wait_for_event("data", &[&volume, &handle]).await?;

        s.label_volume(&handle, &json!({share(&s.cluster_id): "rw"})).await?;
        s.k8s_attachments().attached(&attachment).await?;
        let (reason, _) = s.wait_for_event("data", &["now compatible"]).await?;
        assert_eq!(reason, "VolumeCompatible");
        consumers(&s, &handle, &[(&s.cluster_id, &volume, "rw")]).await?;
        s.k8s_attachments().detach(&attachment).await
    })
    .await
}
