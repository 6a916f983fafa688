//! Partial objects: large Kubernetes types with only the fields that Nestor reads. A PersistentVolume alone has fields for
//! two dozen storage types; unused fields are skipped while decoding and use no memory.
//!
//! Partial objects are read-only: writes use patches, or types of `k8s-openapi`.

mod attachment;
mod claim;
mod metadata;
mod node;
mod pod;
mod quantities;
mod trim;
mod volume;

pub use attachment::{AttachmentSource, VolumeAttachment};
pub use claim::{PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus};
pub use metadata::Metadata;
pub use node::Node;
pub use pod::{Pod, PodVolume};
pub use trim::{identity, only, with_prefix};
pub use volume::{ClaimReference, CsiSource, PersistentVolume, PersistentVolumeSpec, PersistentVolumeStatus};

/// Implements [`kube::Resource`] for a partial type like its complete type.
macro_rules! resource {
    ($partial:ty, $complete:ty) => {
        impl kube::Resource for $partial {
            type DynamicType = ();
            type Scope = <$complete as kube::Resource>::Scope;

            fn kind(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$complete as kube::Resource>::kind(dynamic)
            }

            fn group(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$complete as kube::Resource>::group(dynamic)
            }

            fn version(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$complete as kube::Resource>::version(dynamic)
            }

            fn plural(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$complete as kube::Resource>::plural(dynamic)
            }

            fn meta(&self) -> &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}
use resource;

/// Decodes a missing or null value as the default.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::Deserialize<'de> + Default,
{
    Ok(<Option<T> as serde::Deserialize>::deserialize(deserializer)?.unwrap_or_default())
}

/// Decodes a list that may be missing or null, and shrinks it to its length: most lists have one element but a capacity of
/// four.
fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::Deserialize<'de>,
{
    let mut list: Vec<T> = or_default(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}
