//! How long what is asked for may be.
//!
//! What a volume was asked for is noted with its bytes, in an extended attribute of its file, and so is who has it. The
//! smallest limit of the filesystems that pools are on is ext4's: one block, 4 KiB, for all attributes of a file. These
//! bounds keep every record within that, so that no request fails for its length after space was reserved for it.

use crate::{Labels, NodeSpec, Placement, PoolSpec, Problem, ProblemCode, SnapshotSpec, VolumeSpec};

/// The most zones that one request may name.
pub const MAX_ZONES: usize = 64;
/// The most bytes of a zone's name: those of a Kubernetes label's value.
pub const MAX_ZONE: usize = 63;
/// The most bytes of an anti-affinity ID.
pub const MAX_ANTI_AFFINITY_ID: usize = 63;
/// The most bytes of all labels of one object together, written as JSON.
pub const MAX_LABELS: usize = 900;
/// The most bytes of a node's name: those of a Kubernetes object's.
pub const MAX_NODE_NAME: usize = 253;

/// What is too long, with how much is taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OutOfBounds(String);

impl From<OutOfBounds> for Problem {
    fn from(what: OutOfBounds) -> Self {
        Self::new(ProblemCode::Invalid, what.0)
    }
}

type Checked = Result<(), OutOfBounds>;

fn at_most(field: &str, has: usize, most: usize, unit: &str, instead: &str) -> Checked {
    if has <= most {
        return Ok(());
    }
    Err(OutOfBounds(format!("{field} has {has} {unit}, and at most {most} are taken; {instead}")))
}

fn labels(field: &str, labels: &Labels) -> Checked {
    let bytes = serde_json::to_vec(labels).map_or(usize::MAX, |json| json.len());
    at_most(field, bytes, MAX_LABELS, "bytes as JSON", "give fewer or shorter labels")
}

fn zone(field: &str, zone: &str) -> Checked {
    at_most(field, zone.len(), MAX_ZONE, "bytes", "give the zone's name as it is in the nodes' labels")
}

impl Placement {
    fn check(&self) -> Checked {
        let instead = "name the zones that are best, or none where any will do";
        at_most("placement.zones", self.zones.len(), MAX_ZONES, "zones", instead)?;
        self.zones.iter().try_for_each(|one| zone("one of placement.zones", one))?;
        labels("placement.poolLabels", &self.pool_labels)?;
        let group = self.anti_affinity_id.as_ref().map_or(0, String::len);
        at_most("placement.antiAffinityId", group, MAX_ANTI_AFFINITY_ID, "bytes", "give a shorter one")
    }
}

impl VolumeSpec {
    /// Fails where something in it is too long to be kept.
    pub fn check_bounds(&self) -> Checked {
        self.placement.check()?;
        labels("labels", &self.labels)
    }
}

impl SnapshotSpec {
    /// Fails where something in it is too long to be kept.
    pub fn check_bounds(&self) -> Checked {
        labels("labels", &self.labels)
    }
}

impl PoolSpec {
    /// Fails where something in it is too long to be kept.
    pub fn check_bounds(&self) -> Checked {
        labels("labels", &self.labels)
    }
}

impl NodeSpec {
    /// Fails where something in it is too long to be kept with the volumes that the node has.
    pub fn check_bounds(&self) -> Checked {
        at_most("name", self.name.len(), MAX_NODE_NAME, "bytes", "give a shorter one")?;
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
    fn what_is_too_long_is_named_with_what_it_has_and_what_it_may_have() {
        let zones = |count, length| vec!["z".repeat(length); count];
        Placement { zones: zones(MAX_ZONES, MAX_ZONE), ..Placement::default() }.check().unwrap();
        let many = refused(Placement { zones: zones(17_000, 1), ..Placement::default() });
        assert!(many.contains("placement.zones has 17000 zones, and at most 64 are taken"), "{many}");
        let long = refused(Placement { zones: zones(1, 64), ..Placement::default() });
        assert!(long.contains("placement.zones has 64 bytes, and at most 63 are taken"), "{long}");
        let group = Some("g".repeat(64));
        assert!(
            refused(Placement { anti_affinity_id: group, ..Placement::default() }).contains("antiAffinityId")
        );
        let pool_labels = Labels::from([("key".to_owned(), "\u{1}".repeat(160))]);
        let labels = refused(Placement { pool_labels, ..Placement::default() });
        assert!(labels.contains("placement.poolLabels has 970 bytes as JSON"), "{labels}");
    }
}
