//! `CreateVolume`: empty, from a snapshot, or from another volume.

use crds::anti_affinity::{AntiAffinity, ClassParameters};
use crds::names::{ANNOTATION_TRACEPARENT, CsiName};
use csi::capability;
use csi::proto;
use csi::proto::volume_content_source::{SnapshotSource, Type as Content, VolumeSource as FromVolume};
use csi::request::{Size, required};
use infra_api::{GUEST_LABEL, Owner, SnapshotId, Volume, VolumeId, VolumeSource, VolumeSpec, VolumeState};
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::operation;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::convert::to_proto;
use super::parameters::Parameters;
use super::sources::{Receiver, Source};
use super::{Controller, access, anti_affinity, claims, limits};
use crate::budgets::account;
use crate::cluster::{annotation, storage_class};
use crate::infra::volume_id;
use crate::ownership::labelled_guest;

/// Size of a volume without a requested size, in bytes.
const DEFAULT_SIZE: u64 = 1 << 30;

impl Controller {
    /// Creates the volume. A final error is returned only if no volume exists, because csi-provisioner does not retry after
    /// it; if an earlier request created the volume, or that is unknown, the error is retryable.
    pub(super) async fn create(
        &self,
        request: &proto::CreateVolumeRequest,
        deadline: Instant,
    ) -> Result<proto::Volume, Status> {
        let name = CsiName::from(required("name", &request.name)?);
        let id = volume_id(&name);
        let _guard = self.locks.acquire(id.as_str())?;
        match self.create_volume(&id, &name, request, deadline).await {
            Err(refusal) if is_final(refusal.code()) => {
                Err(self.retryable_if_created(&id, refusal, deadline).await)
            }
            created => created,
        }
    }

    /// Turns a final error into a retryable one if the volume exists or may exist.
    async fn retryable_if_created(&self, id: &VolumeId, refusal: Status, deadline: Instant) -> Status {
        match self.infra.get_volume(id, deadline).await {
            Ok(None) => refusal,
            Ok(Some(volume)) => Status::aborted(format!(
                "{}; an earlier request created volume {id} ({}); delete the claim to delete the volume",
                refusal.message(),
                volume.state
            )),
            Err(error) => Status::aborted(format!(
                "{}; it is unknown whether an earlier request created volume {id}: {}",
                refusal.message(),
                error.message().guest()
            )),
        }
    }

    async fn create_volume(
        &self,
        id: &VolumeId,
        name: &CsiName,
        request: &proto::CreateVolumeRequest,
        deadline: Instant,
    ) -> Result<proto::Volume, Status> {
        let capabilities = capability::required_all(&request.volume_capabilities)?;
        let Parameters { mut placement, mut labels, anti_affinity, shareable, disk, claim: claim_key } =
            Parameters::read(&request.parameters)?;
        if let Some(why) = access::refusal(&capabilities, shareable) {
            return Err(Status::invalid_argument(why));
        }
        let source = request.volume_content_source.as_ref().map(read_source).transpose()?;
        let claim = match &claim_key {
            Some(key) => self.claims.find(key, deadline).await?.map(|claim| (key, claim)),
            None => None,
        };
        let context = claim.as_ref().and_then(|(_, claim)| annotation(claim, ANNOTATION_TRACEPARENT));
        operation::continue_trace(context);
        if let Some((key, claim)) = &claim {
            placement.zones = claims::requested_zones(key, claim)?;
        } else if claim_key.is_some()
            && let Some(created) = self.created_before(id, deadline).await?
        {
            return Ok(to_proto(&Volume { source, ..created }));
        }
        let receiver = match (&claim, &claim_key) {
            (Some((key, claim)), _) => Receiver::Claim(key, claim),
            (None, Some(_)) => Receiver::Nobody,
            (None, None) => Receiver::Unknown,
        };
        let guest = claim.as_ref().and_then(|(_, claim)| labelled_guest(claim));
        if claim_key.is_some() {
            labels.insert(GUEST_LABEL.to_owned(), guest.unwrap_or_default().to_owned());
        }
        let class = claim.as_ref().and_then(|(_, claim)| storage_class(claim)).unwrap_or_default();
        let owner = Owner { account: account(guest)?, class: class.to_owned() };
        let spread = match &claim {
            Some((key, claim)) => self.anti_affinity(key, claim, anti_affinity.as_ref(), deadline).await?,
            None => anti_affinity.and_then(|class| class.of_unknown_claim()),
        };
        if let Some(spread) = spread {
            let namespace = claim_key.as_ref().map(|key| key.namespace.as_str()).unwrap_or_default();
            anti_affinity::place(&mut placement, &spread, namespace, guest);
        }
        let qos = limits::or_default(&request.mutable_parameters, self.default_qos)?;
        let range = request.capacity_range.as_ref();
        let size = self.size(id, range, source.as_ref(), receiver, deadline).await?;
        let spec = VolumeSpec {
            capacity_bytes: size.required,
            limit_bytes: size.limit,
            placement,
            source,
            qos,
            // Only for volumes that request it, so that no other can be attached twice by mistake.
            shareable: access::is_shared(&capabilities),
            disk,
            owner,
            labels,
        };
        let mut volume = self.infra.create_volume(id, &spec, deadline).await?;
        if !size.admits(volume.capacity_bytes) {
            return Err(Status::already_exists(format!(
                "volume {id} exists with {} bytes, but the request is for at least {} bytes{}",
                volume.capacity_bytes,
                size.required,
                size.limit.map(|limit| format!(" and at most {limit}")).unwrap_or_default(),
            )));
        }
        if volume.qos != spec.qos {
            // An earlier request had another VolumeAttributesClass.
            volume = self.infra.limit_volume(id, &spec.qos, deadline).await?;
        }
        let zones = volume.reachable_zones().join(",");
        if let Some((key, claim)) = claim.as_ref().filter(|_| !zones.is_empty()) {
            self.claims.annotate_zones(key, claim, &zones, deadline).await?;
        }
        tracing::info!(volume = %id, name = name.as_str(), bytes = volume.capacity_bytes, pool = %volume.pool, "created");
        Ok(to_proto(&Volume { source: spec.source, ..volume }))
    }

    /// Required size and limit of the volume. Fails if the receiver's guest may not read the source. If the volume exists, its
    /// source is not checked: it may be deleted or larger by now.
    async fn size(
        &self,
        id: &VolumeId,
        range: Option<&proto::CapacityRange>,
        source: Option<&VolumeSource>,
        receiver: Receiver<'_>,
        deadline: Instant,
    ) -> Result<Size, Status> {
        let Some(source) = source else { return Size::from_range(range, DEFAULT_SIZE) };
        if let Some(created) = self.infra.get_volume(id, deadline).await? {
            return Size::from_range(range, created.capacity_bytes);
        }
        let missing = |what: &str| {
            Status::not_found(format!("the storage infra has no {what}, the source of volume {id}"))
        };
        let (what, source_bytes) = match source {
            VolumeSource::Snapshot(source) => {
                let what = format!("snapshot {source}");
                let found = self.infra.get_snapshot(source, deadline).await?;
                let found = found.ok_or_else(|| missing(&what))?;
                let guest = found.labels.get(GUEST_LABEL).map(String::as_str);
                let copied = Source { volume: &found.volume, snapshot: Some((source, guest)) };
                self.refuse_foreign_source(receiver, &copied, deadline).await?;
                (what, found.capacity_bytes)
            }
            VolumeSource::Volume(source) => {
                let what = format!("volume {source}");
                let found = self.infra.get_volume(source, deadline).await?;
                let bytes = found.ok_or_else(|| missing(&what))?.capacity_bytes;
                let copied = Source { volume: source, snapshot: None };
                self.refuse_foreign_source(receiver, &copied, deadline).await?;
                (what, bytes)
            }
        };
        size_with_source(&format!("volume {id}"), range, &what, source_bytes)
    }

    /// The anti-affinity of the volume of a claim.
    async fn anti_affinity(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        class: Option<&ClassParameters>,
        deadline: Instant,
    ) -> Result<Option<AntiAffinity>, Status> {
        if class.is_none() {
            return anti_affinity::of_claim(key, claim, None);
        }
        // The cache does not have the names of the guest's objects.
        let whole = self.claims.read(key, deadline).await?;
        anti_affinity::of_claim(key, whole.as_ref().unwrap_or(claim), class)
    }

    /// The volume that an earlier request created for a claim that is gone by now. csi-provisioner retries until it gets the
    /// volume, and then deletes it.
    async fn created_before(&self, id: &VolumeId, deadline: Instant) -> Result<Option<Volume>, Status> {
        match self.infra.get_volume(id, deadline).await? {
            Some(volume) if volume.state == VolumeState::Ready => Ok(Some(volume)),
            Some(volume) => Err(Status::aborted(format!(
                "the storage infra has not finished yet: volume {id} is {}",
                volume.state
            ))),
            None => Ok(None),
        }
    }
}

/// Whether csi-provisioner treats a code as final, with no volume left behind. ALREADY_EXISTS itself means that a volume
/// exists.
fn is_final(code: Code) -> bool {
    !matches!(
        code,
        Code::Unavailable | Code::Aborted | Code::Cancelled | Code::DeadlineExceeded | Code::AlreadyExists
    )
}

/// Required size and limit of a volume whose source has `source_bytes` bytes.
fn size_with_source(
    volume: &str,
    range: Option<&proto::CapacityRange>,
    source: &str,
    source_bytes: u64,
) -> Result<Size, Status> {
    let size = Size::from_range(range, source_bytes)?;
    if size.required < source_bytes {
        return Err(Status::out_of_range(format!(
            "{volume} is requested with {} bytes, but its source {source} has {source_bytes}; request at least {source_bytes} bytes",
            size.required
        )));
    }
    Ok(size)
}

pub(super) fn read_source(source: &proto::VolumeContentSource) -> Result<VolumeSource, Status> {
    match &source.r#type {
        None => Err(Status::invalid_argument("volume_content_source has neither a snapshot nor a volume")),
        Some(Content::Snapshot(SnapshotSource { snapshot_id })) => {
            let id = required("volume_content_source.snapshot.snapshot_id", snapshot_id)?;
            SnapshotId::new(id)
                .map(VolumeSource::Snapshot)
                .map_err(|_| Status::not_found(format!("the storage infra has no snapshot {id:?}")))
        }
        Some(Content::Volume(FromVolume { volume_id })) => {
            let id = required("volume_content_source.volume.volume_id", volume_id)?;
            VolumeId::new(id)
                .map(VolumeSource::Volume)
                .map_err(|_| Status::not_found(format!("the storage infra has no volume {id:?}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::convert::write_source;
    use super::*;

    #[test]
    fn a_volume_is_at_least_as_large_as_its_source() {
        let of = |required_bytes, limit_bytes| {
            let range = proto::CapacityRange { required_bytes, limit_bytes };
            size_with_source("volume v", Some(&range), "snapshot s", 10)
        };
        assert_eq!(size_with_source("volume v", None, "snapshot s", 10).unwrap().required, 10);
        assert_eq!(of(0, 20).unwrap(), Size { required: 10, limit: Some(20) });
        assert_eq!(of(15, 0).unwrap().required, 15);
        for short in [of(9, 0), of(0, 9), of(9, 20)] {
            let status = short.unwrap_err();
            assert_eq!(status.code(), Code::OutOfRange);
            assert!(status.message().contains("snapshot s") && status.message().contains("10"), "{status}");
        }
    }

    #[test]
    fn a_source_is_returned_unchanged_and_an_invalid_id_is_not_found() {
        let named = |content| proto::VolumeContentSource { r#type: Some(content) };
        let snapshot = |id: &str| named(Content::Snapshot(SnapshotSource { snapshot_id: id.into() }));
        let volume = |id: &str| named(Content::Volume(FromVolume { volume_id: id.into() }));
        for source in [snapshot("s-1"), volume("v-1")] {
            assert_eq!(write_source(&read_source(&source).unwrap()), source);
        }
        assert_eq!(read_source(&snapshot("../etc")).unwrap_err().code(), Code::NotFound);
        assert_eq!(read_source(&volume("")).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(
            read_source(&proto::VolumeContentSource { r#type: None }).unwrap_err().code(),
            Code::InvalidArgument
        );
    }
}
