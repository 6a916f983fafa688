//! Traces: the spans of all programs about one operation are one trace; without a collector, and without tracing, nothing
//! changes. The tests run one at a time, because they restart the lab's programs.

use std::sync::Arc;

use anyhow::{Context, Result};
use crds::names;
use csi::proto::ControllerModifyVolumeRequest;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::audit::Entry;
use serde_json::json;
use tests::collector::{Collector, Target, with_traces};
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone, unique};

use crate::requests::{count_by_kind, requests_since};

const GC: &str = "gc-csi";
const MGMT: &str = "mgmt-csi";
const SHIM: &str = "vm-operator-shim";
const INFRA: &str = "storage-infra";
/// The reconcile of a VolumeAttachment.
const RECONCILE: (&str, &str) = (MGMT, "reconcile volume-attachments");

#[tokio::test]
async fn the_spans_of_each_operation_are_one_trace_through_all_programs() -> Result<()> {
    traced(|s, collector| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let create = trace_of_claim(&s, &handle).await?;
        let put = "PUT /v1/volumes/{id}";
        let chain = [(GC, "CreateVolume"), (MGMT, "CreateVolume"), (MGMT, put), (INFRA, put)];
        let root = collector.has_chain(&create, &chain).await?;
        assert!(!root.has_failed && root.attributes.contains_key("nestor.request_id"), "{root:?}");

        s.driver.expand(&handle, 8 * MIB).await?;
        let expand = trace_of_claim(&s, &handle).await?;
        let (call, put) = ("ControllerExpandVolume", "PUT /v1/volumes/{id}/size");
        collector.has_chain(&expand, &[(GC, call), (MGMT, call), (MGMT, put), (INFRA, put)]).await?;

        s.driver.publish(&handle, &node.name).await?;
        let attach = trace_of_entry(&s, &node.name, &handle).await?;
        let (call, put) = ((GC, "ControllerPublishVolume"), "PUT /v1/attachments/{id}");
        let chain = [call, (SHIM, "create attachment"), RECONCILE, (MGMT, put), (INFRA, put)];
        let root = collector.has_chain(&attach, &chain).await?;
        assert_eq!(root.attributes["nestor.volume"], handle);
        assert_eq!(root.attributes["nestor.node"], node.name);

        s.driver.unpublish(&handle, &node.name).await?;
        let detach = trace_of_entry(&s, &node.name, &handle).await?;
        let (call, delete) = ((GC, "ControllerUnpublishVolume"), "DELETE /v1/attachments/{id}");
        collector.has_chain(&detach, &[call, (SHIM, "delete attachment")]).await?;
        collector.has_chain(&detach, &[call, RECONCILE, (MGMT, delete), (INFRA, delete)]).await?;

        s.driver.publish("no-such-claim", &node.name).await.unwrap_err();
        failed_call_is_marked(&collector).await?;
        s.driver.delete(&handle).await?;
        collector.stop().await
    })
    .await
}

#[tokio::test]
async fn a_change_of_limits_and_the_deletion_of_a_volume_are_one_trace_each() -> Result<()> {
    traced(|s, collector| async move {
        let handle = s.volume().await?;
        let class = s.attributes_class(&[("iops", "300")]).await?;
        s.driver.calls().controller_modify_volume(modification(&handle, &class)).await?;
        let modify = trace_of_claim(&s, &handle).await?;
        let (call, put) = ("ControllerModifyVolume", "PUT /v1/volumes/{id}/qos");
        collector.has_chain(&modify, &[(GC, call), (MGMT, call), (MGMT, put), (INFRA, put)]).await?;

        requests_since(&s, s.lab.audit()?.mark()?).await?;
        let mark = s.lab.audit()?.mark()?;
        s.driver.delete(&handle).await?;
        let mut writes = count_by_kind(&requests_since(&s, mark).await?, Entry::is_write);
        writes.retain(|kind, _| kind.starts_with(GC));
        let expected = ["gc-csi delete persistentvolumeclaims", "gc-csi patch persistentvolumeclaims"];
        assert_eq!(writes, expected.map(|line| (line.to_owned(), 1)).into());
        let (call, delete) = ("DeleteVolume", "DELETE /v1/volumes/{id}");
        let trace = collector.trace_of((GC, call), ("nestor.volume", &handle)).await?;
        collector.has_chain(&trace, &[(GC, call), (MGMT, call), (MGMT, delete), (INFRA, delete)]).await?;
        collector.stop().await
    })
    .await
}

#[tokio::test]
async fn the_creation_and_the_deletion_of_a_snapshot_are_one_trace_each() -> Result<()> {
    traced(|s, collector| async move {
        let handle = s.volume().await?;
        let snapshot = s.csi_snapshot(&unique(&s.name), &handle).await?.snapshot_id;
        let object = s.snapshots().get(&snapshot).await?;
        let create = trace_id(object.annotations().get(names::ANNOTATION_TRACEPARENT))?;
        let (call, put) = ("CreateSnapshot", "PUT /v1/snapshots/{id}");
        collector.has_chain(&create, &[(GC, call), (MGMT, call), (MGMT, put), (INFRA, put)]).await?;

        s.driver.delete_snapshot(&snapshot).await?;
        let (call, delete) = ("DeleteSnapshot", "DELETE /v1/snapshots/{id}");
        let trace = collector.trace_of((GC, call), ("nestor.snapshot", &snapshot)).await?;
        assert_ne!(trace, create);
        collector.has_chain(&trace, &[(GC, call), (MGMT, call), (MGMT, delete), (INFRA, delete)]).await?;
        s.driver.delete(&handle).await?;
        collector.stop().await
    })
    .await
}

#[tokio::test]
async fn a_traced_attach_has_as_many_requests_as_another_and_leaves_one_annotation() -> Result<()> {
    traced(|s, collector| async move {
        let (node, first, second) = (s.node().await?, s.volume().await?, s.volume().await?);
        s.driver.publish(&first, &node.name).await?;
        s.driver.unpublish(&first, &node.name).await?;
        s.no_attachments(&node).await?;
        requests_since(&s, s.lab.audit()?.mark()?).await?;

        let mark = s.lab.audit()?.mark()?;
        s.driver.publish(&second, &node.name).await?;
        let writes = count_by_kind(&requests_since(&s, mark).await?, Entry::is_write);
        let expected = [
            "gc-csi patch virtualmachines",
            "mgmt-csi patch volumeattachments/status",
            "vm-operator-shim create volumeattachments",
            "vm-operator-shim patch virtualmachines/status",
        ];
        assert_eq!(writes, expected.map(|line| (line.to_owned(), 1)).into());
        let left = s.vms().get(&node.name).await?.annotations().clone();
        let mut left = left.into_keys().filter(|key| key.starts_with(names::ANNOTATION_TRACE_PREFIX));
        assert_eq!(left.next(), Some(names::trace_annotation(&second)));
        assert_eq!(left.next(), None, "the detached disk has no annotation any more");

        let mark = s.lab.audit()?.mark()?;
        s.driver.unpublish(&second, &node.name).await?;
        let writes = count_by_kind(&requests_since(&s, mark).await?, Entry::is_write);
        assert_eq!(writes.values().sum::<usize>(), 4, "{writes:?}");
        collector.stop().await
    })
    .await
}

#[tokio::test]
async fn malformed_contexts_are_ignored() -> Result<()> {
    traced(|s, collector| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let bad = "00-zz\n".repeat(1000);
        let patch = |key: &str| Patch::Merge(json!({"metadata": {"annotations": {key: bad}}}));
        let params = PatchParams::default();
        s.claims().patch(&handle, &params, &patch(names::ANNOTATION_TRACEPARENT)).await?;
        s.vms().patch(&node.name, &params, &patch(&names::trace_annotation(&handle))).await?;
        // An entry of another client, which does not know these annotations.
        let entry = json!({"name": handle, "persistentVolumeClaim": {"claimName": handle}});
        s.add_entry(&node.name, entry).await?;
        eventually("the disk is attached", PATIENCE, || async {
            let disk = s.disk(&node.name, &handle).await?;
            Ok(if disk.as_ref().is_some_and(|disk| disk.attached) {
                Ok(())
            } else {
                Err(format!("{disk:?}"))
            })
        })
        .await?;
        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        assert!(!attachment.annotations().contains_key(names::ANNOTATION_TRACEPARENT));
        s.driver.unpublish(&handle, &node.name).await?;
        s.driver.expand(&handle, 8 * MIB).await?;

        // Deleted by somebody else, so that gc-csi does not replace the context.
        let volume = s.infra_volume(&handle).await?.id;
        s.claims().patch(&handle, &params, &patch(names::ANNOTATION_DELETION_TRACEPARENT)).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        eventually("the volume is deleted", PATIENCE, || async {
            let left = s.infra.get_volume(&volume).await?;
            Ok(left.map_or(Ok(()), |volume| Err(format!("{volume:?}"))))
        })
        .await?;
        collector.stop().await
    })
    .await
}

#[tokio::test]
async fn without_a_collector_operations_work_and_the_programs_say_so_once() -> Result<()> {
    run_alone(|s| async move {
        // Nothing listens on the discard port.
        let target = Target { endpoint: "http://127.0.0.1:9".to_owned(), ca: None, ratio: None };
        with_traces(&s, Some(&target), |s| async move {
            let (node, handle) = (s.node().await?, s.volume().await?);
            let told = || has_logged(&s, "cannot export spans");
            let before = told()?;
            for _ in 0..3 {
                let lost = dropped(&s).await?;
                s.driver.publish(&handle, &node.name).await?;
                s.driver.unpublish(&handle, &node.name).await?;
                more_are_dropped(&s, lost).await?;
            }
            // The create was told already, or the first attach.
            assert!(told()? <= before + 1);
            assert!(told()? > 0);
            Ok(())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn spans_arrive_over_tls_and_a_wrong_authority_is_named_in_the_log() -> Result<()> {
    run_alone(|s| async move {
        let collector = Arc::new(Collector::start_with_tls().await?);
        let (target, wrong) = (collector.target(), collector.target_with_wrong_ca());
        let received = collector.clone();
        with_traces(&s, Some(&target), |s| async move {
            let create = trace_of_claim(&s, &s.volume().await?).await?;
            let put = "PUT /v1/volumes/{id}";
            let chain = [(GC, "CreateVolume"), (MGMT, "CreateVolume"), (MGMT, put), (INFRA, put)];
            received.has_chain(&create, &chain).await.map(drop)
        })
        .await?;
        let text = "invalid peer certificate: UnknownIssuer; --otlp-ca must be";
        let before = has_logged(&s, text)?;
        with_traces(&s, Some(&wrong), move |s| async move {
            s.volume().await?;
            eventually("the wrong authority is logged", PATIENCE, || async {
                let now = has_logged(&s, text)?;
                Ok(if now > before { Ok(()) } else { Err(format!("{now} times")) })
            })
            .await
        })
        .await?;
        Arc::into_inner(collector).context("it is still used")?.stop().await
    })
    .await
}

#[tokio::test]
async fn without_tracing_no_object_has_a_trace_context() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let claim = s.claims().get(&handle).await?;
        let vm = s.vms().get(&node.name).await?;
        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        for annotations in [claim.annotations(), vm.annotations(), attachment.annotations()] {
            let found = annotations.keys().find(|key| key.contains("trace"));
            assert_eq!(found, None);
        }
        s.driver.unpublish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

/// Runs a test while the programs export their spans to a collector.
async fn traced<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Collector) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    run_alone(|s| async move {
        let collector = Collector::start().await?;
        let target = collector.target();
        with_traces(&s, Some(&target), |s| body(s, collector)).await
    })
    .await
}

/// The call that gives a volume a management VolumeAttributesClass.
fn modification(handle: &str, class: &str) -> ControllerModifyVolumeRequest {
    let parameter = (names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS.to_owned(), class.to_owned());
    ControllerModifyVolumeRequest {
        volume_id: handle.to_owned(),
        mutable_parameters: [parameter].into(),
        ..Default::default()
    }
}

/// The trace in the annotation of a claim.
async fn trace_of_claim(s: &Scenario, claim: &str) -> Result<String> {
    let claim = s.claims().get(claim).await?;
    trace_id(claim.annotations().get(names::ANNOTATION_TRACEPARENT))
}

/// The trace in the annotation of a VM for a claim's entry.
async fn trace_of_entry(s: &Scenario, vm: &str, claim: &str) -> Result<String> {
    let vm = s.vms().get(vm).await?;
    trace_id(vm.annotations().get(&names::trace_annotation(claim)))
}

fn trace_id(context: Option<&String>) -> Result<String> {
    let context = context.context("no trace context")?;
    assert_eq!(context.len(), 55, "{context}");
    context.split('-').nth(1).map(str::to_owned).context("not a trace context")
}

async fn failed_call_is_marked(collector: &Collector) -> Result<()> {
    eventually("the failed call is marked", PATIENCE, || async {
        let spans = collector.spans()?;
        let found = spans.iter().any(|span| span.has_failed && span.name == "ControllerPublishVolume");
        Ok(if found { Ok(()) } else { Err(format!("{} spans", spans.len())) })
    })
    .await
}

/// How often gc-csi has logged a text.
fn has_logged(s: &Scenario, text: &str) -> Result<usize> {
    Ok(std::fs::read_to_string(s.lab.run().log("g1-gc-csi"))?.matches(text).count())
}

/// Waits until gc-csi has dropped more spans.
async fn more_are_dropped(s: &Scenario, before: u64) -> Result<()> {
    eventually("spans are dropped", PATIENCE, || async {
        let now = dropped(s).await?;
        Ok(if now > before { Ok(()) } else { Err(format!("{now}")) })
    })
    .await
}

async fn dropped(s: &Scenario) -> Result<u64> {
    let metrics = s.lab.metrics("g1-gc-csi").await?;
    let value = metrics.lines().find_map(|line| line.strip_prefix("nestor_gc_csi_spans_dropped_total "));
    value.context("no such metric")?.parse().context("not a number")
}
