//! Trace contexts on claims and snapshots: mgmt-csi continues the trace of the operation that wrote the object.

use crds::names::{ANNOTATION_DELETION_TRACEPARENT, ANNOTATION_TRACEPARENT};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use process_kit::operation;
use process_kit::trace::TraceParent;
use serde_json::{Value, json};

use crate::management::error::ApiError;

/// Adds the context of an operation to a merge patch of an object, or removes that of an earlier operation.
pub(super) fn add_to(patch: &mut Value, object: &ObjectMeta, context: Option<&TraceParent>) {
    if context.is_some() || annotation(object, ANNOTATION_TRACEPARENT).is_some() {
        let context = context.map(ToString::to_string);
        patch["metadata"]["annotations"] = json!({ANNOTATION_TRACEPARENT: context});
    }
}

/// Writes the context of this deletion to the object with `patch`, if the deletion is traced. Returns the resourceVersion with
/// which to delete: it is new if there was one. A failure is ignored: the deletion reports what is wrong.
pub(super) async fn write_before_deletion<P>(
    object: &ObjectMeta,
    version: Option<String>,
    patch: P,
) -> Option<String>
where
    P: AsyncFnOnce(Value) -> Result<ObjectMeta, ApiError>,
{
    let context = operation::trace_parent();
    let Some(body) = before_deletion(object, version.as_deref(), context.as_ref()) else {
        return version;
    };
    match patch(body).await {
        Ok(patched) => version.and(patched.resource_version),
        Err(error) => {
            tracing::debug!(object = object.name, %error, "the deletion's trace ends here");
            version
        }
    }
}

/// Merge patch with the context of a deletion, which cannot carry one; None if the deletion is not traced, or if the object
/// has this context already. Fails if the object is not at `version` any more, if that is given.
fn before_deletion(
    object: &ObjectMeta,
    version: Option<&str>,
    context: Option<&TraceParent>,
) -> Option<Value> {
    let context = context?.to_string();
    if annotation(object, ANNOTATION_DELETION_TRACEPARENT) == Some(&context) {
        return None;
    }
    let annotations = json!({ANNOTATION_DELETION_TRACEPARENT: context});
    let mut patch = json!({"metadata": {"uid": object.uid, "annotations": annotations}});
    // The API server refuses a patch that removes the resourceVersion.
    if let Some(version) = version {
        patch["metadata"]["resourceVersion"] = json!(version);
    }
    Some(patch)
}

fn annotation<'a>(object: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    object.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn object(annotation: &str) -> ObjectMeta {
        ObjectMeta {
            uid: Some("u".to_owned()),
            annotations: Some([(annotation.to_owned(), CONTEXT.to_owned())].into()),
            ..ObjectMeta::default()
        }
    }

    #[test]
    fn a_change_has_its_context_or_removes_that_of_an_earlier_operation() {
        let patched = |object: &ObjectMeta, context: Option<&TraceParent>| {
            let mut patch = json!({"metadata": {"uid": "u"}});
            add_to(&mut patch, object, context);
            patch["metadata"].get("annotations").cloned()
        };
        let (new, old) = (ObjectMeta::default(), object(ANNOTATION_TRACEPARENT));
        let context = TraceParent::parse(CONTEXT);
        assert_eq!(patched(&new, None), None);
        assert_eq!(patched(&old, None), Some(json!({ANNOTATION_TRACEPARENT: null})));
        for object in [new, old] {
            assert_eq!(patched(&object, context.as_ref()), Some(json!({ANNOTATION_TRACEPARENT: CONTEXT})));
        }
    }

    #[test]
    fn only_a_traced_deletion_is_preceded_by_a_patch() {
        let context = TraceParent::parse(CONTEXT);
        let object = |annotation| before_deletion(&object(annotation), Some("7"), context.as_ref());
        assert_eq!(before_deletion(&ObjectMeta::default(), Some("7"), None), None);
        assert_eq!(object(ANNOTATION_DELETION_TRACEPARENT), None, "a repetition after a conflict");
        let patch = object(ANNOTATION_TRACEPARENT).unwrap();
        let annotations = json!({ANNOTATION_DELETION_TRACEPARENT: CONTEXT});
        assert_eq!(
            patch,
            json!({"metadata": {"uid": "u", "resourceVersion": "7", "annotations": annotations}})
        );
        let patch = before_deletion(&ObjectMeta::default(), None, context.as_ref()).unwrap();
        assert_eq!(patch["metadata"].get("resourceVersion"), None);
    }
}
