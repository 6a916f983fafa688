//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::events::take_events;
use crate::{
    Attachment, AttachmentSpec, Capacity, Event, Health, List, MAX_LABELS, MAX_NODE_NAME, MAX_ZONE,
    MAX_ZONES, Node, NodeSpec, Pool, PoolSpec, Problem, Qos, Snapshot, SnapshotSpec, Volume, VolumeId,
    VolumeSize, VolumeSpec,
};

/// Bodies of requests and responses. The first byte selects the type. What can be decoded is the same after encoding, and a
/// request within its bounds has short names and labels.
pub fn infra_bodies(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else { return };
    match kind % 16 {
        0 => body_of(body, volume_spec),
        1 => body_of(body, |spec: &NodeSpec| {
            let fits = spec.name.len() <= MAX_NODE_NAME && spec.zone.as_deref().is_none_or(is_zone);
            assert_eq!(spec.check_bounds().is_ok(), fits);
        }),
        2 => body_of(body, |spec: &PoolSpec| assert_eq!(spec.check_bounds().is_ok(), is_short(&spec.labels))),
        3 => {
            body_of(body, |spec: &SnapshotSpec| {
                assert_eq!(spec.check_bounds().is_ok(), is_short(&spec.labels));
            });
        }
        4 => body_of(body, |_: &AttachmentSpec| ()),
        5 => body_of(body, |_: &VolumeSize| ()),
        6 => body_of(body, |_: &Qos| ()),
        7 => body_of(body, |_: &Volume| ()),
        8 => body_of(body, |_: &List<Snapshot>| ()),
        9 => body_of(body, |_: &Node| ()),
        10 => body_of(body, |_: &Pool| ()),
        11 => body_of(body, |_: &Attachment| ()),
        12 => body_of(body, |_: &Capacity| ()),
        13 => body_of(body, |_: &Health| ()),
        14 => body_of(body, |problem: &Problem| assert!(!problem.to_string().is_empty())),
        _ => body_of(body, |_: &Event| ()),
    }
}

fn body_of<T: DeserializeOwned + Serialize + PartialEq + Debug>(body: &[u8], check: impl FnOnce(&T)) {
    let Ok(decoded) = serde_json::from_slice::<T>(body) else { return };
    let encoded = serde_json::to_vec(&decoded).expect("what was decoded can be encoded");
    assert_eq!(serde_json::from_slice::<T>(&encoded).expect("what was encoded can be decoded"), decoded);
    check(&decoded);
}

fn volume_spec(spec: &VolumeSpec) {
    if spec.check_bounds().is_ok() {
        let placement = &spec.placement;
        assert!(placement.zones.len() <= MAX_ZONES && placement.zones.iter().all(|zone| is_zone(zone)));
        assert!(is_short(&spec.labels) && is_short(&placement.pool_labels));
    }
}

fn is_zone(zone: &str) -> bool {
    zone.len() <= MAX_ZONE
}

fn is_short(labels: &crate::Labels) -> bool {
    serde_json::to_vec(labels).expect("labels can be encoded").len() <= MAX_LABELS
}

/// The event stream, in chunks of the length that the first byte gives: the same events as in one chunk. The rest of an event
/// stays in the buffer.
pub fn infra_events(data: &[u8]) {
    let Some((length, stream)) = data.split_first() else { return };
    let mut whole = stream.to_vec();
    let expected = take_events(&mut whole);
    let (mut buffer, mut found) = (Vec::new(), Vec::new());
    for chunk in stream.chunks(usize::from(*length).max(1)) {
        buffer.extend_from_slice(chunk);
        found.extend(take_events(&mut buffer));
    }
    assert_eq!((found, buffer), (expected, whole));
}

/// IDs: an accepted one is a file name and a segment of a path.
pub fn infra_ids(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(id) = VolumeId::new(text.as_ref()) {
        let file = format!("{id}.raw");
        let name = std::path::Path::new(&file).file_name();
        assert_eq!(name.and_then(|name| name.to_str()), Some(&*file));
        assert!(file.len() <= 255 && !file.starts_with('.') && id.as_str() == text);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn infra_bodies() {
        fuzz_kit::replay("infra_bodies", super::infra_bodies);
    }

    #[test]
    fn infra_events() {
        fuzz_kit::replay("infra_events", super::infra_events);
    }

    #[test]
    fn infra_ids() {
        fuzz_kit::replay("infra_ids", super::infra_ids);
    }
}
