//! What is noted with the bytes of each object, so that a catalog that is lost can be made again from the pools alone,
//! and one that is older than the pools is noticed before it does harm.
//!
//! A record is an extended attribute of the object's own file: it comes, moves and goes with the bytes, and is on the
//! disk by the same sync. Who has the volume is noted before a hypervisor is asked to plug it; so whoever is not in the
//! record does not write.

use infra_api::{
    Access, AttachmentId, EngineKind, FormatToken, Labels, NodeSpec, OnFull, PoolName, Qos, SnapshotId,
    VolumeId, VolumeSpec,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Object;

/// The form of a record that this program writes, and the newest that it reads.
const VERSION: u32 = 1;

/// What is noted of a pool, a volume or a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Record {
    /// Noted with the pool's marker.
    Pool(PoolRecord),
    /// Noted with the volume's bytes.
    Volume(Box<VolumeRecord>),
    /// Noted with the snapshot's bytes.
    Snapshot(SnapshotRecord),
}

/// What is noted of a pool. Its UUID is the marker's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolRecord {
    /// Its name.
    pub name: PoolName,
    /// How it keeps volumes.
    pub engine: EngineKind,
    /// What placement can ask for.
    #[serde(default)]
    pub labels: Labels,
    /// Takes no new volumes.
    #[serde(default)]
    pub cordoned: bool,
    /// What becomes of a VM that writes while it is full.
    #[serde(default)]
    pub on_full: OnFull,
    /// How new the catalog was.
    #[serde(default)]
    pub revision: u64,
}

/// What is noted of a volume. Its size now is that of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRecord {
    /// Its id.
    pub id: VolumeId,
    /// What the disk is known by.
    pub disk_uuid: Uuid,
    /// The size that it had when this was noted: it has no fewer bytes.
    pub capacity: u64,
    /// What was asked for.
    pub spec: VolumeSpec,
    /// What it may share blocks with.
    pub family: Uuid,
    /// How fast it may be.
    #[serde(default)]
    pub qos: Qos,
    /// RFC 3339.
    pub created_at: String,
    /// Its secret for whoever formats it. None where an earlier version noted this.
    #[serde(default)]
    pub format_token: Option<FormatToken>,
    /// Its bytes were seen to hold data once. Where that is not said, they may have.
    #[serde(default = "unknown_is_written")]
    pub written: bool,
    /// How new the catalog's row was.
    #[serde(default)]
    pub revision: u64,
    /// Who may have it.
    #[serde(default)]
    pub holders: Vec<Holder>,
}

fn unknown_is_written() -> bool {
    true
}

/// Who may have a volume: an attachment, and enough of its node to find the machine again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The attachment.
    pub id: AttachmentId,
    /// The node's UUID.
    pub uuid: Uuid,
    /// The node.
    pub node: NodeSpec,
    /// The node cannot write.
    #[serde(default)]
    pub read_only: bool,
    /// Who may have the volume at the same time.
    pub access: Access,
    /// RFC 3339.
    pub created_at: String,
}

/// What is noted of a snapshot. What it keeps allocated is asked of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotRecord {
    /// Its id.
    pub id: SnapshotId,
    /// The volume whose bytes it keeps.
    pub volume: VolumeId,
    /// The size its volume had.
    pub capacity: u64,
    /// What it may share blocks with.
    pub family: Uuid,
    /// As asked for.
    #[serde(default)]
    pub labels: Labels,
    /// RFC 3339: its moment.
    pub created_at: String,
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
    /// The record as it is written.
    pub fn encode(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Versioned { version: VERSION, record: self })
    }

    /// Reads a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let unreadable = |error: serde_json::Error| format!("what is noted cannot be read: {error}");
        let Version { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if version > VERSION {
            return Err(format!(
                "what is noted has form {version}, this program reads up to {VERSION}: use the version that wrote it"
            ));
        }
        serde_json::from_slice::<Versioned<Self>>(bytes).map(|read| read.record).map_err(unreadable)
    }

    /// The object that the record is of. None for a pool's.
    pub fn object(&self) -> Option<Object> {
        match self {
            Self::Pool(_) => None,
            Self::Volume(record) => Some(Object::Volume(record.id.clone())),
            Self::Snapshot(record) => Some(Object::Snapshot(record.id.clone())),
        }
    }

    /// What tells an object from another of the same id, before or after it: a volume's disk, a snapshot's family.
    pub fn identity(&self) -> Uuid {
        match self {
            Self::Pool(_) => Uuid::nil(),
            Self::Volume(record) => record.disk_uuid,
            Self::Snapshot(record) => record.family,
        }
    }
}

impl VolumeRecord {
    /// Who is noted here and not among those that should be.
    pub fn strangers(self, expected: &[Holder]) -> Vec<Holder> {
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
        })
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_newer_form_is_not_guessed_at() {
        let bytes = record().encode().unwrap();
        assert_eq!(Record::decode(&bytes).unwrap(), record());
        let newer = String::from_utf8(bytes).unwrap().replace(r#""version":1"#, r#""version":2,"more":[]"#);
        assert!(Record::decode(newer.as_bytes()).unwrap_err().contains("form 2"));
        for bad in ["", "{", r#"{"version":1}"#, r#"{"version":1,"kind":"snapshot"}"#] {
            assert!(Record::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
