//! Partial metadata: without managed fields.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::Resource;
use serde::{Deserialize, Deserializer};

use super::list;

/// An object of any type, reduced to its metadata.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(bound = "")]
pub struct Metadata<K> {
    /// Metadata without managed fields.
    #[serde(default, deserialize_with = "read")]
    pub metadata: ObjectMeta,
    #[serde(skip)]
    whole: PhantomData<fn() -> K>,
}

impl<K: Resource> Resource for Metadata<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Annotation of `kubectl apply`: a copy of the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Read {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default, deserialize_with = "list")]
    finalizers: Vec<String>,
    #[serde(default, deserialize_with = "list")]
    owner_references: Vec<OwnerReference>,
}

/// Decodes metadata.
pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let read = Read::deserialize(deserializer)?;
    let mut annotations = read.annotations;
    if let Some(annotations) = &mut annotations {
        annotations.remove(LAST_APPLIED);
    }
    Ok(ObjectMeta {
        name: read.name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        generation: read.generation,
        creation_timestamp: read.creation_timestamp,
        deletion_timestamp: read.deletion_timestamp,
        labels: read.labels.filter(|labels| !labels.is_empty()),
        annotations: annotations.filter(|annotations| !annotations.is_empty()),
        finalizers: Some(read.finalizers).filter(|finalizers| !finalizers.is_empty()),
        owner_references: Some(read.owner_references).filter(|owners| !owners.is_empty()),
        ..ObjectMeta::default()
    })
}
