//! Requests for objects of any kind, by their manifests.

use kube::api::{Api, DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, Preconditions, TypeMeta};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde_json::Value;

use super::{MANAGEMENT, MANAGER};
use crate::error::Error;

/// Label that names the tool that manages an object.
pub(super) const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Its value for objects of a Helm release.
pub(super) const HELM: &str = "Helm";

/// What became of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Created,
    Changed,
    Unchanged,
}

impl Outcome {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
        }
    }
}

/// Kind, namespace and name of an object.
pub(super) fn title(object: &DynamicObject) -> String {
    let name = object.name_any();
    match &object.metadata.namespace {
        Some(namespace) => format!("{} {namespace}/{name}", kind(object)),
        None => format!("{} {name}", kind(object)),
    }
}

/// Kind of an object.
pub(super) fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("", |types| &types.kind)
}

fn api_of(client: &Client, object: &DynamicObject) -> Result<Api<DynamicObject>, Error> {
    let types = object.types.as_ref().ok_or_else(|| Error::Encode("an object without a kind".to_owned()))?;
    let kind = GroupVersionKind::try_from(types).map_err(|error| Error::Encode(error.to_string()))?;
    let resource = ApiResource::from_gvk(&kind);
    Ok(match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    })
}

/// Reads the object with this kind and name; None if it does not exist.
pub(super) async fn read(client: &Client, object: &DynamicObject) -> Result<Option<DynamicObject>, Error> {
    let found = api_of(client, object)?.get_opt(&object.name_any()).await;
    found.map_err(|error| Error::request(MANAGEMENT, title(object), &error))
}

/// Applies an object. `earlier` is what it was before.
pub(super) async fn apply(
    client: &Client,
    object: &DynamicObject,
    earlier: Option<&DynamicObject>,
) -> Result<Outcome, Error> {
    let params = PatchParams::apply(MANAGER).force();
    let applied = api_of(client, object)?.patch(&object.name_any(), &params, &Patch::Apply(object)).await;
    let applied = applied.map_err(|error| Error::change("apply", title(object), &error))?;
    Ok(earlier.map_or(Outcome::Created, |earlier| outcome(earlier, &applied)))
}

/// Whether labels or fields changed. Controllers write the status at any time.
fn outcome(earlier: &DynamicObject, applied: &DynamicObject) -> Outcome {
    let fields = |object: &DynamicObject| {
        let mut fields = object.data.clone();
        if let Some(fields) = fields.as_object_mut() {
            fields.remove("status");
        }
        fields
    };
    let is_same = earlier.labels() == applied.labels() && fields(earlier) == fields(applied);
    if is_same { Outcome::Unchanged } else { Outcome::Changed }
}

/// Deletes an object, if it exists.
pub(super) async fn delete(client: &Client, object: &DynamicObject) -> Result<(), Error> {
    let uid = object.metadata.uid.clone();
    let params = DeleteParams::default();
    let params = match uid.is_some() {
        true => params.preconditions(Preconditions { uid, resource_version: None }),
        false => params,
    };
    match api_of(client, object)?.delete(&object.name_any(), &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(Error::change("delete", title(object), &error)),
    }
}

/// An object of a kind, of which nothing but the name is known.
pub(super) fn named(api_version: &str, kind: &str, namespace: Option<&str>, name: &str) -> DynamicObject {
    DynamicObject {
        types: Some(TypeMeta { api_version: api_version.to_owned(), kind: kind.to_owned() }),
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: namespace.map(str::to_owned),
            ..Default::default()
        },
        data: Value::default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_is_named_with_kind_namespace_and_name() {
        assert_eq!(title(&named("v1", "Secret", Some("a"), "b")), "Secret a/b");
        assert_eq!(title(&named("v1", "Namespace", None, "b")), "Namespace b");
    }

    #[test]
    fn a_change_is_one_of_labels_or_fields() {
        let object = |spec: u32, phase: &str| {
            let mut object = named("v1", "A", None, "a");
            object.data = json!({"spec": spec, "status": phase});
            object
        };
        assert_eq!(outcome(&object(1, "new"), &object(1, "old")), Outcome::Unchanged);
        assert_eq!(outcome(&object(1, "new"), &object(2, "new")), Outcome::Changed);
        let mut labelled = object(1, "new");
        labelled.labels_mut().insert("a".to_owned(), "b".to_owned());
        assert_eq!(outcome(&object(1, "new"), &labelled), Outcome::Changed);
    }
}
