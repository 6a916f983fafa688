//! Validation of Node service requests and their conversion to typed parameters. No other module reads request fields.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use crds::names::{
    CONTEXT_BLANK_ATTESTATION, CONTEXT_BLANK_BOOT, CONTEXT_DISK_UUID, CONTEXT_FORMAT_TOKEN,
    CONTEXT_MANAGEMENT_VOLUME, CONTEXT_OVERRIDDEN_PIN, CONTEXT_SHARED, MANAGEMENT_VOLUME,
};
use csi::capability::{self, Access, Capability};
use csi::{Status, proto, request};
use tokio::time::Instant;
use uuid::Uuid;

use super::content::{Attestations, FormatToken};
use super::expand::ExpandParams;
use super::mount_options::MountOptions;
use super::publish::PublishParams;
use super::stage::{RequestedFilesystem, StageParams};

/// Maximum length of a path in bytes (PATH_MAX without the final NUL).
const MAX_PATH: usize = 4095;

/// ID of the running kernel's boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Key of the volume context that marks an inline ephemeral volume.
const CONTEXT_EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

pub(super) fn stage(
    requested: &proto::NodeStageVolumeRequest,
    until: Instant,
) -> Result<StageParams, Status> {
    let staging = path("staging_target_path", &requested.staging_target_path)?;
    let capability = capability(requested.volume_capability.as_ref())?;
    let disk = disk(&requested.publish_context)?;
    same_bytes(&requested.volume_context, &requested.publish_context)?;
    let filesystem = filesystem(&capability, is_shared(&requested.publish_context))?;
    let read_only = is_read_only(&capability, filesystem.as_ref());
    let attestations = attestations(&requested.publish_context)?;
    Ok(StageParams { disk, staging, filesystem, read_only, attestations, until })
}

pub(super) fn publish(
    requested: &proto::NodePublishVolumeRequest,
    until: Instant,
) -> Result<PublishParams, Status> {
    let target = path("target_path", &requested.target_path)?;
    let capability = capability(requested.volume_capability.as_ref())?;
    if requested.volume_context.get(CONTEXT_EPHEMERAL).is_some_and(|value| value == "true") {
        return Err(Status::invalid_argument(
            "inline volumes are not supported: use a generic ephemeral volume (ephemeral.volumeClaimTemplate)",
        ));
    }
    let staging = path("staging_target_path", &requested.staging_target_path)?;
    let disk = disk(&requested.publish_context)?;
    same_bytes(&requested.volume_context, &requested.publish_context)?;
    let filesystem = filesystem(&capability, is_shared(&requested.publish_context))?;
    let read_only = is_read_only(&capability, filesystem.as_ref());
    let attestations = attestations(&requested.publish_context)?;
    Ok(PublishParams {
        disk,
        read_only: requested.readonly || read_only,
        staged: filesystem.map(|filesystem| StageParams {
            disk,
            staging,
            filesystem: Some(filesystem),
            read_only,
            attestations,
            until,
        }),
        target,
        single_writer: capability.mode == capability::Mode::SingleNodeSingleWriter,
        attestations,
    })
}

pub(super) fn expand(
    requested: &proto::NodeExpandVolumeRequest,
    until: Instant,
) -> Result<ExpandParams, Status> {
    let staging = match requested.staging_target_path.as_str() {
        "" => None,
        given => Some(path("staging_target_path", given)?),
    };
    let path = volume_path(&requested.volume_path)?;
    // The mount determines the volume type, but an invalid capability is still an error.
    if requested.volume_capability.is_some() {
        capability(requested.volume_capability.as_ref())?;
    }
    Ok(ExpandParams {
        path,
        staging,
        size: request::Size::from_range(requested.capacity_range.as_ref(), 0)?,
        until,
    })
}

/// Parses volume_path. An invalid path is NOT_FOUND (CSI specification, NodeGetVolumeStats errors).
pub(super) fn volume_path(value: &str) -> Result<PathBuf, Status> {
    if value.is_empty() {
        return Err(Status::invalid_argument("volume_path is missing in the request"));
    }
    path("volume_path", value).map_err(|refused| Status::not_found(refused.message()))
}

/// Parses an absolute path without `..`.
pub(super) fn path(field: &str, value: &str) -> Result<PathBuf, Status> {
    let refused = |reason: String| Err(Status::invalid_argument(format!("{field} {reason}")));
    if value.is_empty() {
        return refused("is missing in the request".to_owned());
    }
    if value.len() > MAX_PATH {
        return refused(format!("has {} bytes; the maximum is {MAX_PATH}", value.len()));
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

fn capability(requested: Option<&proto::VolumeCapability>) -> Result<Capability, Status> {
    use capability::Mode;
    let capability = capability::required(requested)?;
    let is_mount = matches!(capability.access, Access::Mount { .. });
    match capability.mode {
        Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter if is_mount => {
            Err(Status::invalid_argument(format!(
                "access mode {} is refused for a filesystem volume: a disk filesystem that one node writes while another \
                 uses it gets corrupted; use ReadOnlyMany or a block volume",
                capability.mode.kubernetes_name()
            )))
        }
        _ => Ok(capability),
    }
}

/// The requested filesystem; `shared` means that several guests use the volume.
fn filesystem(capability: &Capability, shared: bool) -> Result<Option<RequestedFilesystem>, Status> {
    let invalid = |error: &dyn std::error::Error| Status::invalid_argument(error.to_string());
    match &capability.access {
        Access::Block => Ok(None),
        Access::Mount { fs_type, flags, .. } => {
            let kind = match fs_type.as_str() {
                "" => None,
                name => Some(name.parse().map_err(|error| invalid(&error))?),
            };
            let options = MountOptions::new(flags, kind, shared).map_err(|error| invalid(&error))?;
            Ok(Some(RequestedFilesystem { kind, options }))
        }
    }
}

fn is_read_only(capability: &Capability, filesystem: Option<&RequestedFilesystem>) -> bool {
    capability.mode.is_read_only() || filesystem.is_some_and(|requested| requested.options.is_read_only())
}

/// Whether several guests use the volume.
fn is_shared(context: &HashMap<String, String>) -> bool {
    context.get(CONTEXT_SHARED).is_some_and(|shared| shared == "true")
}

/// UUID of the disk that the controller attached.
fn disk(context: &HashMap<String, String>) -> Result<Uuid, Status> {
    let text = context.get(CONTEXT_DISK_UUID).ok_or_else(|| {
        Status::invalid_argument(format!(
            "publish_context has no {CONTEXT_DISK_UUID}: the volume was not attached by this driver's controller plugin"
        ))
    })?;
    // Only a complete UUID: it becomes part of file names.
    Uuid::try_parse(text).map_err(|_| {
        Status::invalid_argument(format!("{CONTEXT_DISK_UUID} {text:?} in publish_context is not a UUID"))
    })
}

/// Fails if the attached disk belongs to another management PersistentVolume than the one the volume is pinned to.
fn same_bytes(volume: &HashMap<String, String>, attached: &HashMap<String, String>) -> Result<(), Status> {
    let Some(pinned) = volume.get(MANAGEMENT_VOLUME).filter(|pinned| !pinned.is_empty()) else {
        return Ok(());
    };
    let there = attached.get(CONTEXT_MANAGEMENT_VOLUME);
    if there == Some(pinned) || attached.get(CONTEXT_OVERRIDDEN_PIN) == Some(pinned) {
        return Ok(());
    }
    let there = there.map_or("a disk for which the controller plugin reported no volume", String::as_str);
    Err(Status::failed_precondition(format!(
        "the volume is pinned to management PersistentVolume {pinned}, but the attached disk is {there}: nothing was mounted; \
         delete the pods on this node that use the volume, so that it is detached and attached again"
    )))
}

/// Whether a boot ID is that of the running kernel.
fn is_present_boot(boot: &str) -> bool {
    std::fs::read_to_string(BOOT_ID).is_ok_and(|present| present.trim() == boot)
}

/// Attestations of the storage infra about the disk; missing keys mean none.
fn attestations(context: &HashMap<String, String>) -> Result<Attestations, Status> {
    // The error does not contain the value: the format token is a secret.
    let invalid = |key: &str| Status::invalid_argument(format!("{key} in publish_context is not a UUID"));
    let blank = context.get(CONTEXT_BLANK_ATTESTATION).map(|text| Uuid::try_parse(text));
    let token = context.get(CONTEXT_FORMAT_TOKEN).map(|text| FormatToken::parse(text));
    let blank = blank.transpose().map_err(|_| invalid(CONTEXT_BLANK_ATTESTATION))?;
    let holds = context.get(CONTEXT_BLANK_BOOT).is_none_or(|boot| is_present_boot(boot));
    Ok(Attestations {
        blank: blank.filter(|_| holds),
        token: token.map(|token| token.ok_or_else(|| invalid(CONTEXT_FORMAT_TOKEN))).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use csi::proto::volume_capability::AccessType;
    use csi::proto::volume_capability::access_mode::Mode;

    use super::*;

    #[test]
    fn a_path_is_absolute_and_has_no_parent_components() {
        assert!(path("p", "/var/lib/kubelet/x").is_ok());
        for bad in ["", "relative", "/", "/a/../b", "/a/..", &format!("/{}", "x".repeat(MAX_PATH))] {
            assert!(path("p", bad).is_err(), "{bad}");
        }
    }

    fn requested(access: AccessType, mode: Mode) -> proto::VolumeCapability {
        let access_mode = Some(proto::volume_capability::AccessMode { mode: mode.into() });
        proto::VolumeCapability { access_mode, access_type: Some(access) }
    }

    #[test]
    fn multi_node_writers_are_accepted_for_block_volumes_only() {
        let block = || AccessType::Block(proto::volume_capability::BlockVolume {});
        let mount = || AccessType::Mount(proto::volume_capability::MountVolume::default());
        for mode in [Mode::MultiNodeMultiWriter, Mode::MultiNodeSingleWriter] {
            assert!(capability(Some(&requested(block(), mode))).is_ok());
            let refused = capability(Some(&requested(mount(), mode))).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            assert!(refused.message().contains("ReadWriteMany is refused for a filesystem"), "{refused}");
        }
        assert!(capability(Some(&requested(mount(), Mode::MultiNodeReaderOnly))).is_ok());
    }

    #[test]
    fn a_reader_only_access_mode_is_published_read_only() {
        let request = |mode| proto::NodePublishVolumeRequest {
            target_path: "/target".to_owned(),
            staging_target_path: "/staging".to_owned(),
            publish_context: [(CONTEXT_DISK_UUID.to_owned(), Uuid::from_u128(1).to_string())].into(),
            volume_capability: Some(requested(
                AccessType::Block(proto::volume_capability::BlockVolume {}),
                mode,
            )),
            ..proto::NodePublishVolumeRequest::default()
        };
        assert!(publish(&request(Mode::MultiNodeReaderOnly), Instant::now()).unwrap().read_only);
        assert!(!publish(&request(Mode::MultiNodeMultiWriter), Instant::now()).unwrap().read_only);
    }

    #[test]
    fn an_expansion_needs_a_path_and_a_valid_range() {
        let request = |path: &str, required_bytes, limit_bytes| proto::NodeExpandVolumeRequest {
            volume_path: path.to_owned(),
            capacity_range: Some(proto::CapacityRange { required_bytes, limit_bytes }),
            ..proto::NodeExpandVolumeRequest::default()
        };
        let read = |requested: &proto::NodeExpandVolumeRequest| expand(requested, Instant::now());
        let good = read(&request("/volume", 10, 0)).unwrap();
        assert_eq!((good.size.required, good.size.limit, good.staging), (10, None, None));
        let without_range =
            proto::NodeExpandVolumeRequest { capacity_range: None, ..request("/volume", 0, 0) };
        assert_eq!(read(&without_range).unwrap().size.required, 0);
        for (bad, code) in [
            (request("", 10, 0), tonic::Code::InvalidArgument),
            (request("some/path", 10, 0), tonic::Code::NotFound),
            (request("/volume", -1, 0), tonic::Code::InvalidArgument),
            (request("/volume", 10, 5), tonic::Code::OutOfRange),
        ] {
            assert_eq!(read(&bad).unwrap_err().code(), code, "{bad:?}");
        }
        let odd = proto::NodeExpandVolumeRequest {
            volume_capability: Some(proto::VolumeCapability::default()),
            ..request("/volume", 10, 0)
        };
        assert_eq!(read(&odd).unwrap_err().code(), tonic::Code::InvalidArgument);
    }

    #[test]
    fn a_disk_of_another_management_volume_than_the_pinned_one_is_refused() {
        let context = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let volume = context(&[(MANAGEMENT_VOLUME, "a")]);
        let there = |name| (CONTEXT_MANAGEMENT_VOLUME, name);
        for (volume, attached) in [
            (&volume, context(&[there("a")])),
            // An operator overrode the pin, and the controller plugin knew it.
            (&volume, context(&[there("b"), (CONTEXT_OVERRIDDEN_PIN, "a")])),
            (&context(&[]), context(&[there("b")])),
            (&context(&[]), context(&[])),
        ] {
            assert_eq!(same_bytes(volume, &attached).map_err(|refused| refused.to_string()), Ok(()));
        }
        for attached in [
            context(&[there("b")]),
            context(&[there("b"), (CONTEXT_OVERRIDDEN_PIN, "c")]),
            context(&[(CONTEXT_DISK_UUID, "x")]),
        ] {
            let refused = same_bytes(&volume, &attached).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
        }
    }

    #[test]
    fn an_invalid_attestation_is_refused_without_showing_the_secret() {
        let uuid = Uuid::from_u128(7).to_string();
        let of = |key: &str, value: &str| attestations(&HashMap::from([(key.to_owned(), value.to_owned())]));
        assert_eq!(of(CONTEXT_BLANK_ATTESTATION, &uuid).unwrap().blank, Some(Uuid::from_u128(7)));
        assert!(of(CONTEXT_FORMAT_TOKEN, &uuid).unwrap().token.is_some());
        assert!(of("other", "x").unwrap().blank.is_none());
        for key in [CONTEXT_BLANK_ATTESTATION, CONTEXT_FORMAT_TOKEN] {
            let refused = of(key, "not-one").unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument);
            assert!(refused.message().contains(key) && !refused.message().contains("not-one"), "{refused}");
        }
    }

    #[test]
    fn an_attestation_of_another_boot_does_not_hold() {
        let uuid = Uuid::from_u128(7).to_string();
        let of = |boot: &str| {
            let keys = [(CONTEXT_BLANK_ATTESTATION, uuid.as_str()), (CONTEXT_BLANK_BOOT, boot)];
            let keys = keys.map(|(key, value)| (key.to_owned(), value.to_owned()));
            attestations(&HashMap::from(keys)).unwrap().blank
        };
        let present = std::fs::read_to_string(BOOT_ID).unwrap();
        assert_eq!(of(present.trim()), Some(Uuid::from_u128(7)));
        assert_eq!(of("another"), None);
        assert_eq!(of(""), None);
    }

    #[test]
    fn a_disk_uuid_cannot_contain_a_path() {
        let of = |value: &str| disk(&HashMap::from([(CONTEXT_DISK_UUID.to_owned(), value.to_owned())]));
        assert!(of("6F9C1B2A-0d3e-4f5a-8b7c-1234567890ab").is_ok());
        for bad in ["", "../../sda", "6f9c1b2a"] {
            assert_eq!(of(bad).unwrap_err().code(), tonic::Code::InvalidArgument, "{bad}");
        }
        assert_eq!(disk(&HashMap::new()).unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}
