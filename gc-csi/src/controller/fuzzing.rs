//! Fuzz target of the Controller service's requests.

use std::sync::Arc;

use csi::locks::VolumeLocks;
use csi::{Message, Status};
use futures::FutureExt;
use tonic::Code;

use super::testing::{InMemory, Outcomes, deadline};
use super::{create, delete, expand, publish, snapshots};
use crate::management::provisioner::BoundClaim;
use crate::management::snapshots::VolumeSnapshot;
use crate::management::volume_entries::Attached;
use crate::vm_volumes::AttachedDisk;

/// Codes with which a request is refused. The sidecars do not expect that a repetition helps.
const REFUSALS: [Code; 4] =
    [Code::InvalidArgument, Code::FailedPrecondition, Code::OutOfRange, Code::NotFound];

/// Requests, handled with clusters in which every write succeeds. The first byte selects the message. Every error is final,
/// and every answer identifies its object.
pub fn guest_requests(data: &[u8]) {
    let Some((kind, message)) = data.split_first() else { return };
    let (clusters, locks, until) = (clusters(), VolumeLocks::default(), deadline());
    match kind % 7 {
        0 => of_message(message, |request| {
            answer(create::create(&clusters, &locks, request, until)).map(|created| {
                assert!(created.volume.is_some_and(|volume| !volume.volume_id.is_empty()));
            })
        }),
        1 => of_message(message, |request| {
            answer(delete::delete(&clusters, &locks, &request, until)).map(drop)
        }),
        2 => of_message(message, |request| {
            answer(expand::expand(&clusters, &locks, &request, until)).map(|expanded| {
                assert!(expanded.capacity_bytes > 0 && expanded.node_expansion_required);
            })
        }),
        3 => of_message(message, |request| {
            answer(publish::publish(&clusters, &locks, &request, until)).map(|published| {
                assert!(published.publish_context.contains_key(crds::names::CONTEXT_DISK_UUID));
            })
        }),
        4 => of_message(message, |request| {
            answer(publish::unpublish(&clusters, &locks, &request, until)).map(drop)
        }),
        5 => of_message(message, |request| {
            answer(snapshots::create(&clusters, Some(&clusters), &locks, request, until)).map(|taken| {
                assert!(taken.snapshot.is_some_and(|snapshot| snapshot.creation_time.is_some()));
            })
        }),
        _ => of_message(message, |request| {
            answer(snapshots::delete(Some(&clusters), &locks, &request, until)).map(drop)
        }),
    }
}

fn of_message<M: Message + Default>(bytes: &[u8], handle: impl FnOnce(M) -> Result<(), Status>) {
    let Ok(request) = M::decode(bytes) else { return };
    if let Err(refusal) = handle(request) {
        assert!(REFUSALS.contains(&refusal.code()) && !refusal.message().is_empty(), "{refusal}");
    }
}

/// The answer of a call, which does not wait in memory.
fn answer<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    call.now_or_never().expect("nothing waits in memory")
}

/// Clusters in which one write of each kind succeeds.
fn clusters() -> InMemory {
    let text = str::to_owned;
    let bound =
        BoundClaim { name: "pvc-1".into(), volume: text("pv-1"), capacity: 1 << 30, zones: vec![text("a")] };
    let disk = AttachedDisk { uuid: text("d"), blank_attestation: None, format_token: None };
    InMemory {
        creations: Outcomes::of([Ok(bound)]),
        deletions: Outcomes::of([Ok(())]),
        expansions: Outcomes::of([Ok(1 << 30)]),
        attaches: Outcomes::of([Ok(Attached { disk, volume: text("pv-1"), shared: false, boot: None })]),
        detaches: Outcomes::of([Ok(())]),
        snapshot_creations: Outcomes::of([Ok(Arc::new(snapshot()))]),
        snapshot_deletions: Outcomes::of([Ok(())]),
        ..InMemory::default()
    }
}

fn snapshot() -> VolumeSnapshot {
    let json = serde_json::json!({
        "metadata": {"name": "snap-1", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"source": {"persistentVolumeClaimName": "pvc-1"}},
        "status": {"readyToUse": true, "restoreSize": "1Gi"},
    });
    serde_json::from_value(json).expect("the snapshot is well-formed")
}
