//! The large objects of Kubernetes with only those of their fields that somebody here reads. A PersistentVolume alone has
//! room for two dozen kinds of storage: what nobody reads is skipped while an object is decoded, and never takes up memory.
//!
//! These are for reading. Whoever writes sends a patch, or an object of `k8s-openapi`.

mod attachment;
mod claim;
mod metadata;
mod node;
mod pod;
mod quantities;
mod volume;

pub use attachment::{AttachmentSource, VolumeAttachment};
pub use claim::{PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus};
pub use metadata::Metadata;
pub use node::Node;
pub use pod::{Pod, PodVolume};
pub use volume::{ClaimReference, CsiSource, PersistentVolume, PersistentVolumeSpec, PersistentVolumeStatus};

/// Makes a type the same resource as one of `k8s-openapi`.
macro_rules! resource {
    ($lean:ty, $whole:ty) => {
        impl kube::Resource for $lean {
            type DynamicType = ();
            type Scope = <$whole as kube::Resource>::Scope;

            fn kind(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::kind(dynamic)
            }

            fn group(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::group(dynamic)
            }

            fn version(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::version(dynamic)
            }

            fn plural(dynamic: &()) -> std::borrow::Cow<'_, str> {
                <$whole as kube::Resource>::plural(dynamic)
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

/// What is there, or nothing: parts of an object may be missing, or null.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::Deserialize<'de> + Default,
{
    Ok(<Option<T> as serde::Deserialize>::deserialize(deserializer)?.unwrap_or_default())
}

/// A list that may be missing, or null, in no more memory than it needs: most have one member, and grew to have room for
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
