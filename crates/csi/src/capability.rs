//! Volume capabilities: validated and converted to types (CSI specification, "VolumeCapability").

use crate::Status;
use crate::proto::validate_volume_capabilities_response::Confirmed;
use crate::proto::{
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, VolumeCapability,
    volume_capability,
};

/// Access type of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Block device.
    Block,
    /// Mounted filesystem.
    Mount {
        /// `ext4`, `xfs`, `btrfs`, or empty for the driver's default.
        fs_type: String,
        /// Mount options of the StorageClass.
        flags: Vec<String>,
        /// Group of the filesystem, if the driver sets it.
        group: Option<String>,
    },
}

/// Access mode of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One node, read-write.
    SingleNodeWriter,
    /// One node, one workload, read-write.
    SingleNodeSingleWriter,
    /// One node, several workloads, read-write.
    SingleNodeMultiWriter,
    /// One node, read-only.
    SingleNodeReaderOnly,
    /// Many nodes, read-only.
    MultiNodeReaderOnly,
    /// Many nodes, one of them read-write.
    MultiNodeSingleWriter,
    /// Many nodes, read-write.
    MultiNodeMultiWriter,
}

impl Mode {
    /// Whether the volume may be attached to several nodes.
    pub fn is_multi_node(self) -> bool {
        matches!(self, Self::MultiNodeReaderOnly | Self::MultiNodeSingleWriter | Self::MultiNodeMultiWriter)
    }

    /// Whether the mode is read-only.
    pub fn is_read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }

    /// Name of the access mode in Kubernetes.
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

/// A volume capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// Access type.
    pub access: Access,
    /// Access mode.
    pub mode: Mode,
}

impl TryFrom<&VolumeCapability> for Capability {
    type Error = Status;

    fn try_from(requested: &VolumeCapability) -> Result<Self, Status> {
        use volume_capability::access_mode::Mode as Wire;
        let access = match &requested.access_type {
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
        let number = requested.access_mode.as_ref().map_or(0, |mode| mode.mode);
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
                    "volume capability has the unknown access mode {number}"
                )));
            }
        };
        Ok(Self { access, mode })
    }
}

/// Validates a capability that is required in a request.
pub fn required(requested: Option<&VolumeCapability>) -> Result<Capability, Status> {
    requested
        .ok_or_else(|| Status::invalid_argument("volume capability is missing in the request"))?
        .try_into()
}

/// Validates all capabilities of a request: at least one, all with the same access type.
pub fn required_all(requested: &[VolumeCapability]) -> Result<Vec<Capability>, Status> {
    let all: Vec<Capability> = requested.iter().map(Capability::try_from).collect::<Result<_, _>>()?;
    let Some(first) = all.first() else {
        return Err(Status::invalid_argument("volume capabilities are missing in the request"));
    };
    if all.iter().any(|one| (one.access == Access::Block) != (first.access == Access::Block)) {
        return Err(Status::invalid_argument(
            "volume capabilities request both block and mount access: a volume supports only one of them",
        ));
    }
    Ok(all)
}

/// Answer to ValidateVolumeCapabilities: confirms all capabilities, or contains the reason of the refusal.
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
