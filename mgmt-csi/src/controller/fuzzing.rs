//! Fuzz target of the Controller service's requests.

use crds::anti_affinity::AntiAffinity;
use crds::names::{ANNOTATION_REQUESTED_ZONES, CsiName, MAX_REQUESTED_ZONES, MAX_ZONE};
use csi::{Message, capability, proto};
use futures::FutureExt;
use infra_api::{List, SnapshotId, VolumeId};
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use tonic::{Code, Status};

use super::create::read_source;
use super::parameters::Parameters;
use super::{access, claims, limits, pages};
use crate::infra::{ReadError, snapshot_id, volume_id};

/// Codes with which a request is refused. csi-provisioner does not expect that a repetition helps.
const REFUSALS: [Code; 4] = [Code::InvalidArgument, Code::OutOfRange, Code::NotFound, Code::Aborted];

/// Requests: StorageClass parameters, QoS limits, sources, topologies and pages; and IDs derived from names. The first byte
/// selects the message.
pub fn management_requests(data: &[u8]) {
    let Some((kind, message)) = data.split_first() else { return };
    match kind % 4 {
        0 => of_message(message, create),
        1 => of_message(message, |request: &proto::ControllerModifyVolumeRequest| {
            limits::read(&request.mutable_parameters).map(|qos| {
                assert!(qos.iops != Some(0) && qos.bytes_per_second != Some(0));
            })
        }),
        2 => of_message(message, |request: &proto::ListVolumesRequest| {
            let empty = |_: Option<u32>, _: Option<String>| {
                std::future::ready(Ok::<_, ReadError>(List::<()> { items: Vec::new(), next: None }))
            };
            let page = pages::collect("volumes", request.max_entries, &request.starting_token, empty);
            let (items, next) = page.now_or_never().expect("nothing waits in memory")?;
            assert!(items.is_empty() && next.is_empty());
            Ok(())
        }),
        _ => {
            let text = String::from_utf8_lossy(message);
            requested_zones(&text);
            anti_affinity(&text);
        }
    }
}

fn of_message<M: Message + Default>(bytes: &[u8], validate: impl FnOnce(&M) -> Result<(), Status>) {
    let Ok(message) = M::decode(bytes) else { return };
    if let Err(refusal) = validate(&message) {
        assert!(REFUSALS.contains(&refusal.code()) && !refusal.message().is_empty(), "{refusal}");
    }
}

fn create(request: &proto::CreateVolumeRequest) -> Result<(), Status> {
    ids(&CsiName::new(&request.name));
    let capabilities = capability::required_all(&request.volume_capabilities)?;
    let parameters = Parameters::read(&request.parameters)?;
    access::refusal(&capabilities, parameters.shareable);
    request.volume_content_source.as_ref().map(read_source).transpose()?;
    limits::read(&request.mutable_parameters).map(|_| ())
}

/// The same name always has the same ID, and the ID is valid.
fn ids(name: &CsiName) {
    let (volume, snapshot) = (volume_id(name), snapshot_id(name));
    assert_eq!((&volume, volume.as_str()), (&volume_id(name), snapshot.as_str()));
    VolumeId::new(volume.as_str()).expect("a derived ID is valid");
    SnapshotId::new(snapshot.as_str()).expect("a derived ID is valid");
}

/// The annotation with which a guest requests anti-affinity.
fn anti_affinity(text: &str) {
    match text.parse::<AntiAffinity>() {
        Ok(read) => assert_eq!(read.to_string(), text),
        Err(refusal) => assert!(refusal.contains("preferred:GROUP")),
    }
}

/// The annotation with which a guest requests zones.
fn requested_zones(text: &str) {
    let mut claim = PersistentVolumeClaim::default();
    claim.metadata.annotations = Some([(ANNOTATION_REQUESTED_ZONES.to_owned(), text.to_owned())].into());
    match claims::requested_zones(&Key::new("guest", "claim"), &claim) {
        Ok(zones) => {
            assert!(zones.len() <= MAX_REQUESTED_ZONES);
            assert!(zones.iter().all(|zone| (1..=MAX_ZONE).contains(&zone.len()) && !zone.contains(',')));
        }
        Err(refusal) => assert_eq!(refusal.code(), Code::InvalidArgument),
    }
}
