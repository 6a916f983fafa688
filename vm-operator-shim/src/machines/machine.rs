//! `Machine` of Cluster API as partial object: the fields that the shim reads. They are the same in v1beta1 and v1beta2.

use crds::names::CLUSTER_GROUP;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{ApiResource, GroupVersionKind, Object};
use kube_kit::informer::Key;
use kube_kit::partial::identity;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Versions of Cluster API with these fields, newest first.
const VERSIONS: [&str; 2] = ["v1beta2", "v1beta1"];

/// A `Machine`, in the version that the cluster serves.
pub(super) type Machine = Object<MachineSpec, MachineStatus>;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MachineSpec {
    /// Name of the Cluster in the same namespace.
    #[serde(default)]
    pub(super) cluster_name: String,
    /// ID of the VM, set by the infrastructure provider. Example: `libvirt:///42103d4a-9a5f-4b51-8f5c-0c9f7a4c1e11`.
    #[serde(default, rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub(super) provider_id: Option<String>,
    /// Zone that the VM was requested in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) failure_domain: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MachineStatus {
    /// The Node in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node_ref: Option<NodeReference>,
    /// Zone in which the infrastructure provider has placed the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) failure_domain: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct NodeReference {
    #[serde(default)]
    pub(super) name: String,
}

/// Extension of a `Machine`.
pub(super) trait MachineExt {
    /// Key of its Cluster.
    fn cluster(&self) -> Key;
    /// Name of its Node, once it has joined the guest.
    fn node_name(&self) -> Option<&str>;
    /// Its zone, if it has one.
    fn zone(&self) -> Option<&str>;
}

impl MachineExt for Machine {
    fn cluster(&self) -> Key {
        Key::new(self.metadata.namespace.clone().unwrap_or_default(), self.spec.cluster_name.clone())
    }

    fn node_name(&self) -> Option<&str> {
        let name = self.status.as_ref()?.node_ref.as_ref()?.name.as_str();
        Some(name).filter(|name| !name.is_empty())
    }

    fn zone(&self) -> Option<&str> {
        let placed = self.status.as_ref().and_then(|status| status.failure_domain.as_deref());
        [placed, self.spec.failure_domain.as_deref()].into_iter().flatten().find(|zone| !zone.is_empty())
    }
}

/// The newest supported version of Cluster API among the versions that a cluster serves.
pub(super) fn newest_version(served: &[String]) -> Option<&'static str> {
    VERSIONS.into_iter().find(|known| served.iter().any(|version| version == known))
}

pub(super) fn machine_resource(version: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(CLUSTER_GROUP, version, "Machine"), "machines")
}

pub(super) fn cluster_resource(version: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(CLUSTER_GROUP, version, "Cluster"), "clusters")
}

/// The UUID of a VM in its provider ID: the last segment.
pub(super) fn uuid(provider_id: &str) -> Option<Uuid> {
    let last = provider_id.trim_end_matches('/').rsplit('/').next()?;
    // Other forms, such as 32 digits, can be IDs of something else.
    (last.len() == 36).then(|| Uuid::parse_str(last).ok()).flatten()
}

/// Drops all fields that the shim does not read.
pub(super) fn trim(machine: &mut Machine) {
    let deletion_timestamp = machine.metadata.deletion_timestamp.take();
    machine.metadata = ObjectMeta { deletion_timestamp, ..identity(&mut machine.metadata) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_is_the_last_segment_of_the_provider_id() {
        let id = "42103d4a-9a5f-4b51-8f5c-0c9f7a4c1e11";
        for known in ["vsphere://", "libvirt:///", "openstack:///", "proxmox://", "openstack://region/"] {
            assert_eq!(uuid(&format!("{known}{id}")).unwrap().to_string(), id, "{known}");
        }
        let upper = format!("vsphere://{}", id.to_uppercase());
        assert_eq!(uuid(&upper).unwrap().to_string(), id);
        for other in ["kubevirt://guest-md-0-abc", "aws:///zone/i-0123456789abcdef0", "", "vsphere://", id] {
            assert_eq!(uuid(other).is_some(), other == id, "{other}");
        }
    }
}
