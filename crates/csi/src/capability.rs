//! What a caller wants of a volume, checked once and then carried as types.
//! (CSI specification, "VolumeCapability".)

use crate::Status;
use crate::proto::validate_volume_capabilities_response::Confirmed;
use crate::proto::{
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, VolumeCapability,
    volume_capability,
};

/// How the volume is presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// A raw block device.
    Block,
    /// A mounted filesystem; an empty type means the driver's default.
    Mount {
        /// `ext4`, `xfs`, `btrfs`, or empty.
        fs_type: String,
        /// Options for mount(8), as the StorageClass gave them.
        flags: Vec<String>,
        /// Group that should own the filesystem, where the driver sets it.
        group: Option<String>,
    },
}

/// Who may use the volume at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One node, read and write.
    SingleNodeWriter,
    /// One node, one workload.
    SingleNodeSingleWriter,
    /// One node, many workloads.
    SingleNodeMultiWriter,
    /// One node, read only.
    SingleNodeReaderOnly,
    /// Many nodes, read only.
    MultiNodeReaderOnly,
    /// Many nodes, one of them writes.
    MultiNodeSingleWriter,
    /// Many nodes, all may write.
    MultiNodeMultiWriter,
}

impl Mode {
    /// Whether more than one node may hold the volume.
    pub fn is_multi_node(self) -> bool {
        matches!(self, Self::MultiNodeReaderOnly | Self::MultiNodeSingleWriter | Self::MultiNodeMultiWriter)
    }

    /// Whether nobody may write.
    pub fn is_read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }

    /// The name that Kubernetes users know.
    pub fn kubernetes_name(self) -> &'static str {
        match self {
            Self::SingleNodeWriter | Self::SingleNodeMultiWriter | Self::SingleNodeReaderOnly => {
                "ReadWriteOnce"
            }
            Self::SingleNodeSingleWriter => "ReadWriteOncePod",
            Self::MultiNodeReaderOnly => "ReadOnlyMany",
            Self::MultiNodeSingleWriter | Self::MultiNodeMultiWriter => "ReadWriteMany",
        }
    }
}

/// One wanted capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// How the volume is presented.
    pub access: Access,
    /// Who may use it at once.
    pub mode: Mode,
}

impl TryFrom<&VolumeCapability> for Capability {
    type Error = Status;

    fn try_from(wanted: &VolumeCapability) -> Result<Self, Status> {
        use volume_capability::access_mode::Mode as Wire;
        let access = match &wanted.access_type {
            Some(volume_capability::AccessType::Block(_)) => Access::Block,
            Some(volume_capability::AccessType::Mount(mount)) => Access::Mount {
                fs_type: mount.fs_type.clone(),
                flags: mount.mount_flags.clone(),
                group: Some(mount.volume_mount_group.clone()).filter(|g| !g.is_empty()),
            },
            None => {
                return Err(Status::invalid_argument(
                    "volume capability has no access type: set block or mount",
                ));
            }
        };
        let number = wanted.access_mode.as_ref().map_or(0, |mode| mode.mode);
        let mode = match Wire::try_from(number).unwrap_or(Wire::Unknown) {
            Wire::SingleNodeWriter => Mode::SingleNodeWriter,
            Wire::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
            Wire::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
            Wire::SingleNodeReaderOnly => Mode::SingleNodeReaderOnly,
            Wire::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
            Wire::MultiNodeSingleWriter => Mode::MultiNodeSingleWriter,
            Wire::MultiNodeMultiWriter => Mode::MultiNodeMultiWriter,
            Wire::Unknown => {
                return Err(Status::invalid_argument(format!(
                    "volume capability has access mode {number}, which the CSI specification does not name"
                )));
            }
        };
        Ok(Self { access, mode })
    }
}

/// One wanted capability that a request must carry.
pub fn required(wanted: Option<&VolumeCapability>) -> Result<Capability, Status> {
    wanted.ok_or_else(|| Status::invalid_argument("volume capability is missing in the request"))?.try_into()
}

/// All wanted capabilities: at least one, and all presented the same way.
pub fn required_all(wanted: &[VolumeCapability]) -> Result<Vec<Capability>, Status> {
    let all: Vec<Capability> = wanted.iter().map(Capability::try_from).collect::<Result<_, _>>()?;
    let Some(first) = all.first() else {
        return Err(Status::invalid_argument("volume capabilities are missing in the request"));
    };
    if all.iter().any(|one| (one.access == Access::Block) != (first.access == Access::Block)) {
        return Err(Status::invalid_argument(
            "volume capabilities ask for block and mount at once: a volume is one or the other",
        ));
    }
    Ok(all)
}

/// The answer to ValidateVolumeCapabilities: all of it as it was asked, or why not.
pub fn validated(
    request: ValidateVolumeCapabilitiesRequest,
    refusal: Option<String>,
) -> ValidateVolumeCapabilitiesResponse {
    let confirmed = Confirmed {
        volume_context: request.volume_context,
        volume_capabilities: request.volume_capabilities,
        parameters: request.parameters,
        mutable_parameters: request.mutable_parameters,
    };
    ValidateVolumeCapabilitiesResponse {
        confirmed: refusal.is_none().then_some(confirmed),
        message: refusal.unwrap_or_default(),
    }
}
