//! Exports and imports of volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::volumes::{Owner, Qos};
use crate::ids::{PoolName, VolumeId};
use crate::stream::{Checksum, Position};

/// State of an import.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Import {
    /// The volume.
    pub volume: VolumeId,
    /// Whether all of the stream was received and verified: then the volume is ready.
    pub complete: bool,
    /// End of the last extent that was received and verified, in the volume. An import is resumed after it.
    pub received_bytes: u64,
    /// Checksum of the stream up to there; absent if nothing was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<Checksum>,
}

impl Import {
    /// The position after which the stream continues; `None` if nothing was received.
    pub fn position(&self) -> Option<Position> {
        self.checksum.map(|checksum| Position { offset: self.received_bytes, checksum })
    }
}

/// A file or an RBD image that becomes a volume: the body of `PUT /v1/volumes/{id}/adoption`.
///
/// Path, pool and `shareable` identify the request: repeating it returns the existing volume (200).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Adoption {
    /// Absolute path of the file on the host of the storage infra: raw, or a qcow2 image without a backing file. It must be
    /// in the directory of a pool, or in one that the server's flag `--file-dir` permits. Or an image in the Ceph pool or
    /// namespace of a pool of the engine `rbd`: `rbd:POOL/IMAGE` or `rbd:POOL/NAMESPACE/IMAGE`.
    #[schema(pattern = "^(/|rbd:)")]
    pub path: String,
    /// Only this pool. By default the pool whose directory has the file, else one on its filesystem, else any. An image stays
    /// in its pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolName>,
    /// Initial QoS limits.
    #[serde(default, skip_serializing_if = "Qos::is_unlimited")]
    pub qos: Qos,
    /// Whether several nodes may have the volume attached for writing at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shareable: bool,
    /// The account that the volume counts for, and its class.
    #[serde(default, skip_serializing_if = "Owner::is_default")]
    pub owner: Owner,
}

/// Where the file of a volume goes: the body of `PUT /v1/volumes/{id}/release`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Release {
    /// Absolute path on the filesystem of the volume's pool, in the directory of a pool or in one that the server's flag
    /// `--file-dir` permits. It must not exist. By default `<id>.img` in the directory of the volume's pool. For a volume in a
    /// pool of the engine `rbd`, an image in the same place: `rbd:POOL/IMAGE` or `rbd:POOL/NAMESPACE/IMAGE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// A volume that was released.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Released {
    /// The ID that the volume had.
    pub volume: VolumeId,
    /// Where its file is: a raw image. Or the RBD image, as `rbd:POOL/IMAGE` or `rbd:POOL/NAMESPACE/IMAGE`.
    pub path: String,
}

/// Where an earlier export ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePoint {
    /// Checksum of the header of the earlier export.
    pub header: Checksum,
    /// The end of its last verified extent.
    pub after: Position,
}
