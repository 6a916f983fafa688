//! Bounds of request fields.
//!
//! The server stores a volume's request and its attachments in an extended attribute of the volume's file. The smallest
//! limit of the supported filesystems is that of ext4: one block of 4 KiB for all attributes of a file. These bounds
//! keep every record below it, so no request fails because of its length after space was reserved for it.

use crate::model::{
    BudgetSpec, Labels, NodeSpec, Owner, Placement, PoolSpec, SnapshotSpec, SuspensionSpec, VolumeSpec,
};
use crate::problem::{Problem, ProblemCode};

/// Maximum number of zones in one request.
pub const MAX_ZONES: usize = 64;
/// Maximum length of a zone name in bytes, that of a Kubernetes label value.
pub const MAX_ZONE: usize = 63;
/// Maximum length of an anti-affinity ID in bytes.
pub const MAX_ANTI_AFFINITY_ID: usize = 63;
/// Maximum size of all labels of one object in bytes, encoded as JSON.
pub const MAX_LABELS: usize = 770;
/// Maximum length of a class name in bytes, that of a Kubernetes object's name.
pub const MAX_CLASS: usize = 253;
/// Maximum length of a node's name in bytes, that of a Kubernetes object's name.
pub const MAX_NODE_NAME: usize = 253;
/// Maximum length of the reason of a suspension in bytes.
pub const MAX_SUSPENSION_REASON: usize = 256;
/// Highest QoS limit, that of QEMU.
pub const MAX_QOS: u64 = 1_000_000_000_000_000;

/// A request field exceeds its bound. The message names the field, its size and the bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OutOfBounds(String);

impl From<OutOfBounds> for Problem {
    fn from(error: OutOfBounds) -> Self {
        Self::new(ProblemCode::Invalid, error.0)
    }
}

type Checked = Result<(), OutOfBounds>;

fn at_most(field: &str, actual: usize, max: usize, unit: &str, advice: &str) -> Checked {
    if actual <= max {
        return Ok(());
    }
    Err(OutOfBounds(format!("{field} has {actual} {unit}, the maximum is {max}; {advice}")))
}

fn labels(field: &str, labels: &Labels) -> Checked {
    let bytes = serde_json::to_vec(labels).map_or(usize::MAX, |json| json.len());
    at_most(field, bytes, MAX_LABELS, "bytes as JSON", "use fewer or shorter labels")
}

fn zone(field: &str, zone: &str) -> Checked {
    at_most(
        field,
        zone.len(),
        MAX_ZONE,
        "bytes",
        "use the zone name from the label topology.kubernetes.io/zone of the nodes",
    )
}

impl Placement {
    fn check(&self) -> Checked {
        let advice = "name only the preferred zones, or none if any zone will do";
        at_most("placement.zones", self.zones.len(), MAX_ZONES, "zones", advice)?;
        self.zones.iter().try_for_each(|one| zone("a zone in placement.zones", one))?;
        labels("placement.poolLabels", &self.pool_labels)?;
        let group = self.anti_affinity_id.as_ref().map_or(0, String::len);
        at_most("placement.antiAffinityId", group, MAX_ANTI_AFFINITY_ID, "bytes", "use a shorter one")
    }
}

impl VolumeSpec {
    /// Fails if a field exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        self.placement.check()?;
        self.owner.check_bounds()?;
        labels("labels", &self.labels)
    }
}

fn class(name: &str) -> Checked {
    at_most("class", name.len(), MAX_CLASS, "bytes", "use the name of a StorageClass")
}

impl Owner {
    /// Fails if the name of the class exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        class(&self.class)
    }
}

impl BudgetSpec {
    /// Fails if the name of a class exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        self.classes.keys().try_for_each(|name| class(name))
    }
}

impl SnapshotSpec {
    /// Fails if a field exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        labels("labels", &self.labels)
    }
}

impl PoolSpec {
    /// Fails if a field exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        let names = serde_json::to_vec(&self.hosts.names).map_or(usize::MAX, |json| json.len());
        let advice = "give the hosts a common label, and name that";
        at_most("hosts.names", names, MAX_LABELS, "bytes as JSON", advice)?;
        labels("hosts.labels", &self.hosts.labels)?;
        labels("labels", &self.labels)
    }
}

impl SuspensionSpec {
    /// Fails if the reason is empty or exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        if self.reason.trim().is_empty() {
            return Err(OutOfBounds(
                "reason is empty; say why, for those who find the volumes suspended".into(),
            ));
        }
        at_most("reason", self.reason.len(), MAX_SUSPENSION_REASON, "bytes", "use a shorter one")
    }
}

impl NodeSpec {
    /// Fails if a field that is recorded with the node's attached volumes exceeds its bound.
    pub fn check_bounds(&self) -> Checked {
        at_most("name", self.name.len(), MAX_NODE_NAME, "bytes", "use a shorter one")?;
        self.zone.as_deref().map_or(Ok(()), |one| zone("zone", one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(placement: Placement) -> String {
        placement.check().unwrap_err().to_string()
    }

    #[test]
    fn the_error_names_the_field_its_size_and_the_bound() {
        let zones = |count, length| vec!["z".repeat(length); count];
        Placement { zones: zones(MAX_ZONES, MAX_ZONE), ..Placement::default() }.check().unwrap();
        let many = refused(Placement { zones: zones(17_000, 1), ..Placement::default() });
        assert!(many.contains("placement.zones has 17000 zones, the maximum is 64"), "{many}");
        let long = refused(Placement { zones: zones(1, 64), ..Placement::default() });
        assert!(long.contains("placement.zones has 64 bytes, the maximum is 63"), "{long}");
        let group = Some("g".repeat(64));
        assert!(
            refused(Placement { anti_affinity_id: group, ..Placement::default() }).contains("antiAffinityId")
        );
        let pool_labels = Labels::from([("key".to_owned(), "\u{1}".repeat(160))]);
        let labels = refused(Placement { pool_labels, ..Placement::default() });
        assert!(labels.contains("placement.poolLabels has 970 bytes as JSON"), "{labels}");
    }
    #[test]
    fn a_suspension_has_a_reason_of_bounded_length() {
        let spec = |reason: &str| SuspensionSpec { reason: reason.into(), pause_nodes: false };
        spec("disk sdb reports errors").check_bounds().unwrap();
        assert!(spec(" ").check_bounds().unwrap_err().to_string().contains("reason is empty"));
        let long = spec(&"r".repeat(257)).check_bounds().unwrap_err().to_string();
        assert!(long.contains("reason has 257 bytes, the maximum is 256"), "{long}");
    }
}
