//! Records: metadata stored with the data of each pool, volume and snapshot.
//!
//! A lost catalog can be rebuilt from the records alone, and a catalog that is older than the pools is detected before
//! it does harm. A record is an extended attribute of the object's own file, so it moves and disappears with the data,
//! and the same fsync makes both durable. An attachment is recorded before the hypervisor attaches the disk, so a node
//! without a recorded attachment does not write.

use infra_api::{
    Access, Account, AttachmentId, EngineKind, FormatToken, GUEST_LABEL, Labels, NodeSpec, OnFull, Owner,
    PoolHosts, PoolName, Qos, SnapshotId, VolumeId, VolumeSpec,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Object;

/// Format version that this program writes, and the newest that it reads.
const VERSION: u32 = 1;

/// Record of a pool, a volume or a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Record {
    /// Stored with the pool's marker file.
    Pool(PoolRecord),
    /// Stored with the volume's file.
    Volume(Box<VolumeRecord>),
    /// Stored with the snapshot's file.
    Snapshot(SnapshotRecord),
}

/// Record of a pool. The content of the marker file is its UUID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolRecord {
    /// Name of the pool.
    pub name: PoolName,
    /// Storage engine.
    pub engine: EngineKind,
    /// Labels that placement can select on.
    #[serde(default)]
    pub labels: Labels,
    /// Whether the pool accepts no new volumes.
    #[serde(default)]
    pub cordoned: bool,
    /// What happens when a virtual machine writes while the pool is full.
    #[serde(default)]
    pub on_full: OnFull,
    /// The hosts that reach the pool.
    #[serde(default, skip_serializing_if = "PoolHosts::is_all")]
    pub hosts: PoolHosts,
    /// Revision of the catalog that wrote the record.
    #[serde(default)]
    pub revision: u64,
}

/// Record of a volume. Its present size is that of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRecord {
    /// ID of the object.
    pub id: VolumeId,
    /// UUID of the disk inside virtual machines.
    pub disk_uuid: Uuid,
    /// Size when the record was written; the file is never shorter.
    pub capacity: u64,
    /// The request that created the volume.
    pub spec: VolumeSpec,
    /// Clone family: objects of one family may share blocks.
    pub family: Uuid,
    /// QoS limits.
    #[serde(default)]
    pub qos: Qos,
    /// Creation time, RFC 3339.
    pub created_at: String,
    /// The volume's secret. `None` if an earlier version wrote the record.
    #[serde(default)]
    pub format_token: Option<FormatToken>,
    /// Whether the volume was found to hold data at least once. True if the record does not say.
    #[serde(default = "unknown_is_written")]
    pub written: bool,
    /// Revision of the catalog row that the record was written from.
    #[serde(default)]
    pub revision: u64,
    /// Whom the volume counts for. `None` if an earlier version wrote the record.
    #[serde(default)]
    pub owner: Option<Owner>,
    /// The file is the target of a move that is not complete: another pool has the volume's data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unfinished_move: bool,
    /// The pool from which the volume was moved, until the old file there is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_from: Option<PoolName>,
    /// Attachments that may have the volume.
    #[serde(default)]
    pub holders: Vec<RecordedAttachment>,
}

fn unknown_is_written() -> bool {
    true
}

/// A recorded attachment, with enough of its node to find the virtual machine again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedAttachment {
    /// ID of the attachment.
    pub id: AttachmentId,
    /// UUID of the node.
    pub uuid: Uuid,
    /// Registration of the node.
    pub node: NodeSpec,
    /// Whether the disk is attached read-only.
    #[serde(default)]
    pub read_only: bool,
    /// Access mode.
    pub access: Access,
    /// Creation time, RFC 3339.
    pub created_at: String,
}

/// Record of a snapshot. The file itself tells how much it has allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotRecord {
    /// ID of the object.
    pub id: SnapshotId,
    /// The source volume.
    pub volume: VolumeId,
    /// Size of the source volume when the snapshot was taken.
    pub capacity: u64,
    /// Clone family: objects of one family may share blocks.
    pub family: Uuid,
    /// Labels given at creation.
    #[serde(default)]
    pub labels: Labels,
    /// The point in time of the snapshot, RFC 3339.
    pub created_at: String,
    /// Whom the snapshot counts for. `None` if an earlier version wrote the record.
    #[serde(default)]
    pub owner: Option<Owner>,
}

/// The recorded owner; without one, the guest in the labels.
pub fn owner_or_labelled(recorded: Option<&Owner>, labels: &Labels) -> Owner {
    let labelled = || Account::new(labels.get(GUEST_LABEL)?.as_str()).ok();
    let of_labels = || Owner { account: labelled().unwrap_or_default(), class: String::new() };
    recorded.cloned().unwrap_or_else(of_labels)
}

#[derive(Serialize, Deserialize)]
struct Versioned<R> {
    version: u32,
    #[serde(flatten)]
    record: R,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Record {
    /// Encodes the record.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Versioned { version: VERSION, record: self })
    }

    /// Decodes a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let unreadable = |error: serde_json::Error| format!("cannot decode the record: {error}");
        let Version { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if version > VERSION {
            return Err(format!(
                "the record has format version {version}, this program supports up to {VERSION}: use the version that wrote it"
            ));
        }
        serde_json::from_slice::<Versioned<Self>>(bytes).map(|decoded| decoded.record).map_err(unreadable)
    }

    /// The object that the record describes; `None` for a pool.
    pub fn object(&self) -> Option<Object> {
        match self {
            Self::Pool(_) => None,
            Self::Volume(record) => Some(Object::Volume(record.id.clone())),
            Self::Snapshot(record) => Some(Object::Snapshot(record.id.clone())),
        }
    }

    /// Distinguishes the object from an earlier or later one of the same ID: a volume's disk UUID, a snapshot's clone
    /// family.
    pub fn identity(&self) -> Uuid {
        match self {
            Self::Pool(_) => Uuid::nil(),
            Self::Volume(record) => record.disk_uuid,
            Self::Snapshot(record) => record.family,
        }
    }
}

impl VolumeRecord {
    /// Recorded attachments that are not expected.
    pub fn unexpected_attachments(self, expected: &[RecordedAttachment]) -> Vec<RecordedAttachment> {
        self.holders.into_iter().filter(|one| expected.iter().all(|other| other.id != one.id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record::Snapshot(SnapshotRecord {
            id: SnapshotId::new("s").unwrap(),
            volume: VolumeId::new("v").unwrap(),
            capacity: 1 << 20,
            family: Uuid::from_u128(7),
            labels: Labels::new(),
            created_at: "2026-01-01T00:00:00Z".into(),
            owner: Some(Owner { account: Account::new("g").unwrap(), class: "gold".into() }),
        })
    }

    #[test]
    fn a_record_round_trips_and_a_newer_format_is_rejected() {
        let bytes = record().encode().unwrap();
        assert_eq!(Record::decode(&bytes).unwrap(), record());
        let newer = String::from_utf8(bytes).unwrap().replace(r#""version":1"#, r#""version":2,"more":[]"#);
        assert!(Record::decode(newer.as_bytes()).unwrap_err().contains("format version 2"));
        for bad in ["", "{", r#"{"version":1}"#, r#"{"version":1,"kind":"snapshot"}"#] {
            assert!(Record::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_object_without_a_recorded_owner_counts_for_the_guest_in_its_labels() {
        let labels = |guest: &str| Labels::from([(GUEST_LABEL.to_owned(), guest.to_owned())]);
        let owner = Owner { account: Account::new("g").unwrap(), class: "gold".into() };
        assert_eq!(owner_or_labelled(Some(&owner), &labels("other")), owner);
        assert_eq!(owner_or_labelled(None, &labels("g")).account.as_str(), "g");
        for labels in [labels(""), labels("no/account"), Labels::new()] {
            assert!(owner_or_labelled(None, &labels).is_default());
        }
    }
}
