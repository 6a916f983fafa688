//! Access modes: what each one allows, on which nodes, and the error if it is not supported.

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::volume_capability::{AccessType, access_mode::Mode};
use csi::proto::{CreateVolumeRequest, ValidateVolumeCapabilitiesRequest, VolumeCapability};
use infra_api::{Access, Attachment};
use kube::ResourceExt;
use lab::LoopNode;
use serde_json::json;
use tests::driver::{block, mount, new_volume};
use tests::guest::handle;
use tests::pods::{self, ClaimOptions, Script, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, run};
use tonic::Code;

fn new_with(s: &Scenario, class: &str, capabilities: Vec<VolumeCapability>) -> CreateVolumeRequest {
    CreateVolumeRequest { volume_capabilities: capabilities, ..new_volume(&s.csi_name(), MIB, class) }
}

/// The storage infra's attachments of a volume.
async fn infra_attachments(s: &Scenario, handle: &str) -> Result<Vec<Attachment>> {
    let volume = s.infra_volume(handle).await?.id;
    Ok(s.infra.list_attachments(None, Some(&volume)).await?)
}

/// A loop node that csi-attacher can attach to.
async fn joined(s: &Scenario) -> Result<LoopNode> {
    let node = s.node().await?;
    s.lab.join_guest(&node).await?;
    Ok(node)
}

// ---- supported modes ----

#[tokio::test]
async fn each_supported_access_mode_is_requested_unchanged_from_the_management_tier() -> Result<()> {
    run(|s| async move {
        for (requested, class, mode) in [
            (mount(Mode::SingleNodeWriter), "nestor", "ReadWriteOnce"),
            (mount(Mode::SingleNodeSingleWriter), "nestor", "ReadWriteOncePod"),
            (mount(Mode::SingleNodeMultiWriter), "nestor", "ReadWriteOnce"),
            (mount(Mode::MultiNodeReaderOnly), "nestor", "ReadOnlyMany"),
            (block(Mode::SingleNodeWriter), "nestor", "ReadWriteOnce"),
            (block(Mode::SingleNodeSingleWriter), "nestor", "ReadWriteOncePod"),
            (block(Mode::MultiNodeReaderOnly), "nestor", "ReadOnlyMany"),
            (block(Mode::MultiNodeMultiWriter), "nestor-shareable", "ReadWriteMany"),
        ] {
            let is_block = matches!(requested.access_type, Some(AccessType::Block(_)));
            let made = s.driver.create(new_with(&s, class, vec![requested.clone()])).await;
            let volume = made.with_context(|| format!("{mode} of {class}, block: {is_block}"))?.volume_id;
            let spec = s.claims().get(&volume).await?.spec.context("the management claim has no spec")?;
            assert_eq!(spec.access_modes, Some(vec![mode.to_owned()]));
            let volume_mode = if is_block { "Block" } else { "Filesystem" };
            assert_eq!(spec.volume_mode.as_deref(), Some(volume_mode));
            // Only a volume that was requested as shared can be attached twice.
            assert_eq!(s.infra_volume(&volume).await?.shareable, mode == "ReadWriteMany");
            let request = ValidateVolumeCapabilitiesRequest {
                volume_id: volume,
                volume_capabilities: vec![requested],
                ..Default::default()
            };
            let answer = s.driver.calls().validate_volume_capabilities(request).await?.into_inner();
            assert!(answer.confirmed.is_some(), "{mode}: {}", answer.message);
        }
        Ok(())
    })
    .await
}

// ---- unsupported modes ----

#[tokio::test]
async fn each_unsupported_access_mode_is_refused_with_its_reason_and_leaves_nothing() -> Result<()> {
    run(|s| async move {
        let own = s.management_class(&[]).await?;
        let not_shareable = s.management_class(&[(names::PARAMETER_SHAREABLE, "false")]).await?;
        let many = ["ReadWriteMany", "filesystem", "volumeMode Block"];
        let one_writes = ["MULTI_NODE_SINGLE_WRITER"];
        let asks_for = |class: &str| {
            vec!["ReadWriteMany".to_owned(), class.to_owned(), names::PARAMETER_SHAREABLE.to_owned()]
        };
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        for (requested, class, expected) in [
            (mount(Mode::MultiNodeMultiWriter), own.as_str(), texts(&many)),
            (mount(Mode::MultiNodeMultiWriter), "nestor-shareable", texts(&many)),
            (block(Mode::MultiNodeMultiWriter), &own, asks_for(&own)),
            (block(Mode::MultiNodeMultiWriter), &not_shareable, asks_for(&not_shareable)),
            (mount(Mode::MultiNodeSingleWriter), &own, texts(&one_writes)),
            (block(Mode::MultiNodeSingleWriter), "nestor-shareable", texts(&one_writes)),
        ] {
            let request = new_with(&s, class, vec![requested]);
            let refused = s.driver.create(request.clone()).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            let missing: Vec<_> = expected.iter().filter(|text| !refused.message().contains(*text)).collect();
            assert!(missing.is_empty(), "{refused} does not contain {missing:?}");
            assert!(s.claims().get_opt(&s.claim_name(&request.name)).await?.is_none(), "{refused}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_guest_claim_with_an_unsupported_access_mode_gets_an_event_with_the_reason() -> Result<()> {
    run(|s| async move {
        let many = json!({"accessModes": ["ReadWriteMany"]});
        s.claim_with("files", "nestor-shareable", "1Mi", many.clone()).await?;
        let mut raw = many;
        raw["volumeMode"] = json!("Block");
        s.claim_with("raw", "nestor", "1Mi", raw).await?;
        let (reason, _) =
            s.wait_for_event("files", &["ReadWriteMany", "filesystem", "volumeMode Block"]).await?;
        assert_eq!(reason, "ProvisioningFailed");
        let (reason, _) = s
            .wait_for_event("raw", &["ReadWriteMany", "StorageClass nestor", names::PARAMETER_SHAREABLE])
            .await?;
        assert_eq!(reason, "ProvisioningFailed");
        Ok(())
    })
    .await
}

// ---- single node ----

#[tokio::test]
async fn a_single_node_volume_is_refused_to_a_second_node_with_the_name_of_the_first() -> Result<()> {
    run(|s| async move {
        let (first, second) = (joined(&s).await?, joined(&s).await?);
        for (claim, class, mode, more) in [
            ("once", "nestor", Mode::SingleNodeWriter, json!({})),
            (
                "once-pod",
                "nestor",
                Mode::SingleNodeSingleWriter,
                json!({"accessModes": ["ReadWriteOncePod"]}),
            ),
            // The class allows more than this claim requests.
            ("raw", "nestor-shareable", Mode::SingleNodeWriter, json!({"volumeMode": "Block"})),
        ] {
            s.claim_with(claim, class, "1Mi", more).await?;
            let (_, volume) = s.bound(claim).await?;
            let attachment = s.k8s_attach(&volume.name_any(), &first.name).await?;
            s.attached(&attachment).await?;
            let other = s.k8s_attach(&volume.name_any(), &second.name).await?;
            s.k8s_attachments().refused(&other, &["attached to VirtualMachine", &first.name]).await?;
            let handle = handle(&volume)?;
            let requested = if claim == "raw" { block(mode) } else { mount(mode) };
            let refused = s.driver.refusal(&handle, &second.name, &requested).await?;
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            assert!(refused.message().contains(&first.name), "{refused}");
            let there = infra_attachments(&s, &handle).await?;
            assert_eq!(
                there.iter().map(|one| (one.node, one.access)).collect::<Vec<_>>(),
                [(first.uuid, Access::SingleNode)]
            );
            s.k8s_detach(&attachment).await?;
            s.attached(&other).await?;
            s.k8s_detach(&other).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_second_pod_of_a_read_write_once_pod_claim_waits_until_the_first_is_deleted() -> Result<()> {
    run(|s| async move {
        let node = s.node_for_pods("zone-a", None).await?;
        let once_pod = json!({"accessModes": ["ReadWriteOncePod"], "volumeMode": "Block"});
        s.claim_with("data", "nestor", "1Mi", once_pod).await?;
        s.bound("data").await?;
        s.pod("first", None, &["data"]).await?;
        assert_eq!(s.scheduled("first").await?, node.name);
        s.pod("second", None, &["data"]).await?;
        s.not_scheduled("second", &["ReadWriteOncePod"]).await?;
        s.delete_pod("first").await?;
        assert_eq!(s.scheduled("second").await?, node.name);
        Ok(())
    })
    .await
}

// ---- several readers ----

#[tokio::test]
async fn a_read_only_many_volume_is_attached_read_only_to_each_node() -> Result<()> {
    run(|s| async move {
        let (first, second) = (joined(&s).await?, joined(&s).await?);
        s.claim_with("data", "nestor", "1Mi", json!({"accessModes": ["ReadOnlyMany"]})).await?;
        let (_, volume) = s.bound("data").await?;
        let handle = handle(&volume)?;
        let mut attachments = Vec::new();
        for node in [&first, &second] {
            let attachment = s.k8s_attach(&volume.name_any(), &node.name).await?;
            let disk = s.attached(&attachment).await?;
            assert!(is_read_only(node, &disk)?, "{} has a writable disk", node.name);
            attachments.push(attachment);
        }
        let there = infra_attachments(&s, &handle).await?;
        assert_eq!(there.len(), 2);
        assert!(
            there.iter().all(|one| one.read_only && one.access == Access::MultiNodeReadOnly),
            "{there:?}"
        );

        let third = s.node().await?;
        let refused = s.driver.publish(&handle, &third.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("ReadOnlyMany"), "{refused}");
        for attachment in attachments {
            s.k8s_detach(&attachment).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_writer_and_readers_exclude_each_other_with_the_name_of_the_other_vm() -> Result<()> {
    run(|s| async move {
        let (reads, writes) = (mount(Mode::MultiNodeReaderOnly), mount(Mode::SingleNodeWriter));
        let volume = s.driver.create(new_with(&s, "nestor", vec![writes, reads.clone()])).await?.volume_id;
        let (reader, writer) = (s.node().await?, s.node().await?);
        s.driver.publish_as(&volume, &reader.name, reads.clone()).await?;
        let refused = s.driver.publish(&volume, &writer.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&reader.name), "{refused}");
        s.driver.unpublish(&volume, &reader.name).await?;

        s.driver.publish(&volume, &writer.name).await?;
        let refused = s.driver.publish_as(&volume, &reader.name, reads.clone()).await.unwrap_err();
        assert!(refused.message().contains(&writer.name), "{refused}");
        s.driver.unpublish(&volume, &writer.name).await?;
        eventually("an attach to the reader after the writer was detached", PATIENCE, || async {
            Ok(s.driver
                .publish_as(&volume, &reader.name, reads.clone())
                .await
                .map_err(|status| format!("{status}")))
        })
        .await?;
        s.driver.unpublish(&volume, &reader.name).await.context("detach from the reader")
    })
    .await
}

/// Whether a disk of a loop node is read-only in the kernel.
fn is_read_only(node: &LoopNode, disk: &str) -> Result<bool> {
    let shown = names::disk_by_id(disk).map(|name| node.by_id_dir.join(name));
    let shown = shown.iter().find(|path| path.exists()).context("the node has no such disk")?;
    let device = std::fs::canonicalize(shown)?;
    let name = device.file_name().context("a device has a name")?.to_string_lossy().into_owned();
    Ok(std::fs::read_to_string(format!("/sys/block/{name}/ro"))?.trim() == "1")
}

#[tokio::test]
async fn pods_on_two_vms_read_one_prefilled_volume() -> Result<()> {
    pods::run(|pods| async move {
        let source = pods.claim("source", &filesystem("ext4")).await?;
        let write = Script::new("writer", &pods.first_node, "echo kept > /data/file; sync");
        pods.run(write.mount(&source, "/data")).await?;
        // A copy of a mounted filesystem would need a journal replay, which is a write.
        pods.detached(&source).await?;
        let more = json!({
            "accessModes": ["ReadOnlyMany"],
            "dataSource": {"kind": "PersistentVolumeClaim", "name": "source"},
        });
        let shared = pods.claim("shared", &ClaimOptions { more, ..filesystem("ext4") }).await?;
        let look = "[ \"$(cat /data/file)\" = kept ]; touch /data/new && exit 1";
        let holds = Script::new("holds", &pods.first_node, &format!("{look}\nexec sleep 1000"));
        let holds = pods.start(holds.mount(&shared, "/data")).await?;
        pods.running(&holds).await?;
        let output = pods
            .run(
                Script::new("other", &pods.second_node, &format!("{look}\ncat /data/file"))
                    .mount(&shared, "/data"),
            )
            .await?;
        ensure!(output.contains("Read-only file system") && output.ends_with("kept"), "{output}");
        pods.running(&holds).await.map(drop)
    })
    .await
}

// ---- several writers ----

#[tokio::test]
async fn a_shareable_raw_volume_is_attached_read_write_to_several_nodes() -> Result<()> {
    run(|s| async move {
        let nodes = [joined(&s).await?, joined(&s).await?];
        let many = json!({"accessModes": ["ReadWriteMany"], "volumeMode": "Block"});
        s.claim_with("raw", "nestor-shareable", "1Mi", many).await?;
        let (_, volume) = s.bound("raw").await?;
        let mut attachments = Vec::new();
        for node in &nodes {
            let attachment = s.k8s_attach(&volume.name_any(), &node.name).await?;
            let disk = s.attached(&attachment).await?;
            assert!(!is_read_only(node, &disk)?, "{} has a read-only disk", node.name);
            attachments.push(attachment);
        }
        let there = infra_attachments(&s, &handle(&volume)?).await?;
        assert_eq!(there.len(), 2);
        assert!(there.iter().all(|one| !one.read_only && one.access == Access::MultiNode), "{there:?}");
        for attachment in attachments {
            s.k8s_detach(&attachment).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn pods_on_two_vms_read_what_the_other_writes_to_a_shared_raw_volume() -> Result<()> {
    pods::run(|pods| async move {
        let options = ClaimOptions {
            class: Some("nestor-shareable".to_owned()),
            more: json!({"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "4Mi"}}}),
            ..pods::block()
        };
        let volume = pods.claim("raw", &options).await?;
        // Direct I/O, to bypass the page caches of both VMs.
        let talk = |says: &str, at: u8, hears: &str, from: u8| {
            format!(
                "printf '{says}' | dd of=/dev/volume bs=4096 seek={at} conv=sync,notrunc oflag=direct 2>/dev/null
                until heard=$(dd if=/dev/volume bs=4096 skip={from} count=1 iflag=direct 2>/dev/null | head -c {}) &&
                    [ \"$heard\" = '{hears}' ]; do sleep 1; done
                echo \"$heard\"",
                hears.len()
            )
        };
        let one = Script::new("one", &pods.first_node, &talk("from one", 0, "from two", 1));
        let two = Script::new("two", &pods.second_node, &talk("from two", 1, "from one", 0));
        for pod in [one, two] {
            pods.start(pod.device(&volume, "/dev/volume")).await?;
        }
        for (pod, heard) in [("one", "from two"), ("two", "from one")] {
            let output = pods.finish(pod).await?;
            ensure!(output == heard, "pod {pod} read {output:?}");
        }
        Ok(())
    })
    .await
}
