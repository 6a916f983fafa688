//! Requests of the Node service as types: every field is checked here, and nowhere else.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use crds::names::CONTEXT_DISK_UUID;
use csi::capability::{self, Access, Capability};
use csi::{Status, proto, request};
use tokio::time::Instant;
use uuid::Uuid;

use super::filesystem::MountOptions;
use super::publish::Publish;
use super::stage::{Stage, WantedFilesystem};

/// Longest path that the kernel takes, in bytes (PATH_MAX with its final NUL).
const MAX_PATH: usize = 4095;

/// Key in a volume context by which kubelet tells of an inline volume.
const CONTEXT_EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

pub(super) fn stage(wanted: &proto::NodeStageVolumeRequest, until: Instant) -> Result<Stage, Status> {
    let staging = path("staging_target_path", &wanted.staging_target_path)?;
    let capability = capability(wanted.volume_capability.as_ref())?;
    let disk = disk(&wanted.publish_context)?;
    let filesystem = filesystem(&capability)?;
    let read_only = is_read_only(&capability, filesystem.as_ref());
    Ok(Stage { disk, staging, filesystem, read_only, until })
}

pub(super) fn publish(wanted: &proto::NodePublishVolumeRequest) -> Result<Publish, Status> {
    let target = path("target_path", &wanted.target_path)?;
    let capability = capability(wanted.volume_capability.as_ref())?;
    if wanted.volume_context.get(CONTEXT_EPHEMERAL).is_some_and(|value| value == "true") {
        return Err(Status::invalid_argument(
            "the driver has no inline volumes: use a generic ephemeral volume (ephemeral.volumeClaimTemplate)",
        ));
    }
    let staging = path("staging_target_path", &wanted.staging_target_path)?;
    let disk = disk(&wanted.publish_context)?;
    let filesystem = filesystem(&capability)?;
    Ok(Publish {
        disk,
        read_only: wanted.readonly || is_read_only(&capability, filesystem.as_ref()),
        staging: filesystem.is_some().then_some(staging),
        target,
        single_writer: capability.mode == capability::Mode::SingleNodeSingleWriter,
    })
}

/// An absolute path that says where it leads.
pub(super) fn path(field: &str, value: &str) -> Result<PathBuf, Status> {
    let refused = |why: String| Err(Status::invalid_argument(format!("{field} {why}")));
    if value.is_empty() {
        return refused("is missing in the request".to_owned());
    }
    if value.len() > MAX_PATH {
        return refused(format!("has {} bytes; a path can have {MAX_PATH}", value.len()));
    }
    let path = Path::new(value);
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !plain || path.parent().is_none() || value.contains('\0') {
        return refused(format!("{value:?} is not an absolute path without '..'"));
    }
    Ok(path.to_owned())
}

pub(super) fn volume_id(value: &str) -> Result<String, Status> {
    request::required("volume_id", value).map(str::to_owned)
}

fn capability(wanted: Option<&proto::VolumeCapability>) -> Result<Capability, Status> {
    use capability::Mode;
    let capability = capability::required(wanted)?;
    let is_mount = matches!(capability.access, Access::Mount { .. });
    match capability.mode {
        Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter if is_mount => {
            Err(Status::invalid_argument(format!(
                "access mode {} is refused for a filesystem on a disk: written from one machine and used \
                 from another it breaks; use ReadOnlyMany, or a block volume",
                capability.mode.kubernetes_name()
            )))
        }
        _ => Ok(capability),
    }
}

fn filesystem(capability: &Capability) -> Result<Option<WantedFilesystem>, Status> {
    let invalid = |error: &dyn std::error::Error| Status::invalid_argument(error.to_string());
    match &capability.access {
        Access::Block => Ok(None),
        Access::Mount { fs_type, flags, .. } => {
            let kind = match fs_type.as_str() {
                "" => None,
                name => Some(name.parse().map_err(|error| invalid(&error))?),
            };
            let options = MountOptions::new(flags).map_err(|error| invalid(&error))?;
            Ok(Some(WantedFilesystem { kind, options }))
        }
    }
}

fn is_read_only(capability: &Capability, filesystem: Option<&WantedFilesystem>) -> bool {
    capability.mode.is_read_only() || filesystem.is_some_and(|wanted| wanted.options.is_read_only())
}

/// The disk that the controller attached.
fn disk(context: &HashMap<String, String>) -> Result<Uuid, Status> {
    let text = context.get(CONTEXT_DISK_UUID).ok_or_else(|| {
        Status::invalid_argument(format!(
            "publish_context has no {CONTEXT_DISK_UUID}: the volume was not attached by this driver's controller"
        ))
    })?;
    // Only a whole UUID: names of files are made of it.
    Uuid::try_parse(text).map_err(|_| {
        Status::invalid_argument(format!("{CONTEXT_DISK_UUID} {text:?} in publish_context is not a UUID"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_where_it_leads() {
        assert!(path("p", "/var/lib/kubelet/x").is_ok());
        for bad in ["", "relative", "/", "/a/../b", "/a/..", &format!("/{}", "x".repeat(MAX_PATH))] {
            assert!(path("p", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_disk_uuid_cannot_lead_elsewhere() {
        let of = |value: &str| disk(&HashMap::from([(CONTEXT_DISK_UUID.to_owned(), value.to_owned())]));
        assert!(of("6F9C1B2A-0d3e-4f5a-8b7c-1234567890ab").is_ok());
        for bad in ["", "../../sda", "6f9c1b2a"] {
            assert_eq!(of(bad).unwrap_err().code(), tonic::Code::InvalidArgument, "{bad}");
        }
        assert_eq!(disk(&HashMap::new()).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}
