//! Compatibility of gc-csi with the upstream VM Operator.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::{VirtualMachine, names};
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{ControllerGetCapabilitiesRequest, CreateVolumeRequest, ValidateVolumeCapabilitiesRequest};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tests::driver::{block, mount, new_volume};
use tests::hypervisor::HaltedNode;
use tests::program::Controller;
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};
use tonic::Code;

/// Timeout of a call that must not succeed while the disk is attached.
const SHORT: Duration = Duration::from_secs(3);

/// Creates a VirtualMachine whose status only the test writes: vm-operator-shim ignores VMs without a UUID, and status
/// entries with fields of the upstream operator.
async fn vm_with_status(s: &Scenario, entry: &str, disks: &[(&str, &str)]) -> Result<String> {
    let name = unique("vm");
    let resource = crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0]);
    let vm: VirtualMachine = serde_json::from_value(json!({
        "apiVersion": resource.api_version, "kind": resource.kind,
        "metadata": {"name": name, "namespace": s.namespace, "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
        "spec": {"volumes": [{"name": entry, "persistentVolumeClaim": {"claimName": entry}}]},
    }))?;
    s.vms().create(&Default::default(), &vm).await?;
    set_status(s, &name, disks).await?;
    Ok(name)
}

/// Sets the disks in a VM's status: names and UUIDs.
async fn set_status(s: &Scenario, vm: &str, disks: &[(&str, &str)]) -> Result<()> {
    let disks: Vec<Value> = disks
        .iter()
        .map(|(name, disk)| json!({"name": name, "type": "Managed", "attached": true, "diskUUID": disk}))
        .collect();
    let status = Patch::Merge(json!({"status": {"volumes": disks}}));
    s.vms().patch_status(vm, &PatchParams::default(), &status).await?;
    Ok(())
}

#[tokio::test]
async fn a_disk_renamed_by_the_operator_is_not_considered_detached() -> Result<()> {
    run(|s| async move {
        let handle = s.volume().await?;
        let disk = s.infra_volume(&handle).await?.disk_uuid.to_string();
        for renamed in [format!("{handle}:detaching"), format!("{handle}-1:detaching")] {
            let vm = vm_with_status(&s, &handle, &[(&renamed, &disk)]).await?;
            let answer = s.driver.unpublish_within(&handle, &vm, SHORT).await;
            let entries = s.vms().get(&vm).await?.spec.volumes;
            ensure!(entries.is_empty(), "the entry is still in the spec: {entries:?}");
            let late = answer.err().with_context(|| format!("detached, while {renamed} is in the status"))?;
            assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
            let published = s.driver.publish_within(&handle, &vm, SHORT).await.unwrap_err();
            assert_eq!(published.code(), Code::Aborted, "{published}");
            assert!(published.message().contains("still being detached"), "{published}");
            set_status(&s, &vm, &[]).await?;
            s.driver.unpublish(&handle, &vm).await?;
            s.vms().delete(&vm, &DeleteParams::default()).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_detach_waits_for_the_disk_even_if_the_claim_now_belongs_to_another_guest() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &node.name).await?;
        let paused = HaltedNode::paused(&node)?;
        let label =
            |guest: &str| Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: guest}}}));
        s.claims().patch(&handle, &PatchParams::default(), &label("another-guest")).await?;
        eventually("the changed label is observed", PATIENCE, || async {
            let request = ValidateVolumeCapabilitiesRequest {
                volume_id: handle.clone(),
                volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
                ..Default::default()
            };
            let answer = s.driver.calls().validate_volume_capabilities(request).await;
            Ok(answer.map_or_else(
                |status| if status.code() == Code::NotFound { Ok(()) } else { Err(status.to_string()) },
                |_| Err("it still belongs to this guest".to_owned()),
            ))
        })
        .await?;

        let answer = s.driver.unpublish_within(&handle, &node.name, SHORT).await;
        let there = s.infra.list_attachments(Some(node.uuid.to_string().parse()?), None).await?;
        assert_eq!(there.len(), 1, "the disk was detached from a paused VM");
        let refused = answer.err().context("the detach succeeded, but the disk is still attached")?;
        assert!(matches!(refused.code(), Code::Unavailable | Code::DeadlineExceeded), "{refused}");
        // Like with the upstream operator, the disk has a new name in the status.
        let disks = s.vms().get(&node.name).await?.status.unwrap_or_default().volumes;
        let disks: Vec<_> = disks.iter().map(|disk| (&*disk.name, disk.disk_uuid.as_deref())).collect();
        assert_eq!(disks, [(&*names::detaching_entry(&handle), Some(&*disk))]);

        drop(paused);
        eventually("the disk is detached", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &node.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        s.no_attachments(&node).await?;
        s.claims().patch(&handle, &PatchParams::default(), &label(&s.cluster_id)).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_disk_of_another_guests_vm_is_left_alone_and_the_detach_is_refused() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let of =
            |guest: Value| Patch::Merge(json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: guest}}}));
        s.vms().patch(&node.name, &PatchParams::default(), &of(json!("another-guest"))).await?;
        eventually("the detach is refused", PATIENCE, || async {
            let refused = s.driver.unpublish_within(&handle, &node.name, SHORT).await;
            let Err(refused) = refused else { anyhow::bail!("the detach succeeded") };
            let is_final = refused.code() == Code::FailedPrecondition;
            Ok(if is_final { Ok(()) } else { Err(refused.to_string()) })
        })
        .await?;
        assert!(s.disk(&node.name, &handle).await?.is_some_and(|disk| disk.attached));
        s.vms().patch(&node.name, &PatchParams::default(), &of(json!(s.cluster_id))).await?;
        eventually("detached", PATIENCE, || async {
            Ok(s.driver.unpublish(&handle, &node.name).await.map_err(|status| status.to_string()))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_claim_is_attached_through_one_entry_of_a_vm_and_refused_for_a_second() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &node.name).await?;
        let second = json!({
            "name": "second", "persistentVolumeClaim": {"claimName": handle, "readOnly": true},
        });
        s.add_entry(&node.name, second).await?;
        let second = eventually("the status has the second entry", PATIENCE, || async {
            let status = s.vms().get(&node.name).await?.status.unwrap_or_default();
            let found = status.volumes.into_iter().find(|disk| disk.name == "second");
            Ok(found.ok_or_else(|| "no entry".to_owned()))
        })
        .await?;
        assert!(!second.attached, "both entries are attached: {second:?}");
        let error = second.error.unwrap_or_default();
        assert!(error.starts_with("ClaimAttachedTwice") && error.contains(&handle), "{error}");
        let first = s.disk(&node.name, &handle).await?.context("the status does not have the first entry")?;
        assert!(first.attached && first.disk_uuid.as_ref() == Some(&disk), "{first:?}");
        assert!(!s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?.spec.read_only);

        // A detach is refused while another client's entry holds the disk.
        let held = s.driver.unpublish(&handle, &node.name).await.unwrap_err();
        assert_eq!(held.code(), Code::FailedPrecondition, "{held}");
        assert!(held.message().contains("entry second"), "{held}");
        s.remove_entries(&node.name, |entry| entry["name"] == json!("second")).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await
    })
    .await
}

#[tokio::test]
async fn v1alpha6_is_the_storage_version_and_every_earlier_version_is_served() -> Result<()> {
    run(|s| async move {
        let definitions: Api<CustomResourceDefinition> = Api::all(s.management.clone());
        let definition = definitions.get("virtualmachines.vmoperator.vmware.com").await?;
        let versions = definition.spec.versions.iter();
        let stored: Vec<_> =
            versions.clone().filter(|version| version.storage).map(|version| &*version.name).collect();
        assert_eq!(stored, ["v1alpha6"]);
        let node = s.node().await?;
        for version in ["v1alpha2", "v1alpha3", "v1alpha4", "v1alpha5", "v1alpha6"] {
            let resource = crds::virtual_machine_resource(version);
            let pods: Api<VirtualMachine> =
                Api::namespaced_with(s.management.clone(), &s.namespace, &resource);
            let list = pods.list(&ListParams::default()).await.with_context(|| version.to_owned())?;
            let names: Vec<_> = list.iter().filter_map(|vm| vm.metadata.name.clone()).collect();
            assert!(names.contains(&node.name), "{version}: {names:?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn requests_that_the_upstream_operator_refuses_are_refused_early_and_required_fields_are_set()
-> Result<()> {
    run(|s| async move {
        let upstream = Controller::start(&s, &["--vm-operator=upstream"]).await?;
        let reads = mount(Mode::MultiNodeReaderOnly);
        let request = |class: &str, capabilities: &[_]| CreateVolumeRequest {
            volume_capabilities: capabilities.to_vec(),
            ..new_volume(&s.csi_name(), MIB, class)
        };
        let refused =
            upstream.driver.create(request("nestor", std::slice::from_ref(&reads))).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("read-only"), "{refused}");
        let node = s.node().await?;
        let made = s.driver.create(request("nestor", std::slice::from_ref(&reads))).await?.volume_id;
        let refused = upstream.driver.publish_as(&made, &node.name, reads.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id: made,
            volume_capabilities: vec![reads],
            ..Default::default()
        };
        let answer = upstream.driver.calls().validate_volume_capabilities(validate).await?.into_inner();
        assert!(answer.confirmed.is_none() && answer.message.contains("read-only"), "{answer:?}");
        let announced = |driver: &tests::driver::Driver| {
            let mut calls = driver.calls();
            async move {
                let answer = calls.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).await?;
                anyhow::Ok(format!("{answer:?}").contains("PublishReadonly"))
            }
        };
        assert!(announced(&s.driver).await? && !announced(&upstream.driver).await?);

        let many = block(Mode::MultiNodeMultiWriter);
        let shared =
            upstream.driver.create(request("nestor-shareable", std::slice::from_ref(&many))).await?.volume_id;
        upstream.driver.publish_as(&shared, &node.name, many).await?;
        let entries = s.raw_vms().get(&node.name).await?.data["spec"]["volumes"].clone();
        assert_eq!(entries[0]["sharingMode"], json!("MultiWriter"), "{entries}");
        assert_eq!(entries[0]["diskMode"], json!("IndependentPersistent"), "{entries}");
        upstream.driver.unpublish(&shared, &node.name).await?;
        let own =
            upstream.driver.create(request("nestor", &[mount(Mode::SingleNodeWriter)])).await?.volume_id;
        upstream.driver.publish(&own, &node.name).await?;
        let entries = s.raw_vms().get(&node.name).await?.data["spec"]["volumes"].clone();
        assert_eq!(entries, json!([{"name": own, "persistentVolumeClaim": {"claimName": own}}]));
        upstream.driver.unpublish(&own, &node.name).await?;
        upstream.stop().await
    })
    .await
}
