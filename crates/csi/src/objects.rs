//! The objects that a request names, for the span of its call. Only names: requests may contain secrets.

use std::any::Any;

use tracing::Span;

use crate::proto;
use crate::request::MAX_NAME;

/// Parameters with the claim of a new volume (csi-provisioner, `--extra-create-metadata`).
const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
const CLAIM_NAME: &str = "csi.storage.k8s.io/pvc/name";

/// Names in a request; empty if it has none.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NamedObjects<'a> {
    volume: &'a str,
    node: &'a str,
    snapshot: &'a str,
    name: &'a str,
    claim: String,
}

/// The value of the first of these fields whose message type is that of the message.
macro_rules! field {
    ($message:expr, $($request:ident.$field:ident),+ $(,)?) => {
        None$(.or_else(|| Some($message.downcast_ref::<proto::$request>()?.$field.as_str())))+.unwrap_or_default()
    };
}

impl<'a> NamedObjects<'a> {
    /// The names in a message.
    pub(crate) fn of(message: &'a dyn Any) -> Self {
        Self {
            volume: field!(
                message,
                DeleteVolumeRequest.volume_id,
                ControllerPublishVolumeRequest.volume_id,
                ControllerUnpublishVolumeRequest.volume_id,
                ValidateVolumeCapabilitiesRequest.volume_id,
                ControllerGetVolumeRequest.volume_id,
                ControllerModifyVolumeRequest.volume_id,
                ControllerExpandVolumeRequest.volume_id,
                CreateSnapshotRequest.source_volume_id,
                ListSnapshotsRequest.source_volume_id,
                NodeStageVolumeRequest.volume_id,
                NodeUnstageVolumeRequest.volume_id,
                NodePublishVolumeRequest.volume_id,
                NodeUnpublishVolumeRequest.volume_id,
                NodeGetVolumeStatsRequest.volume_id,
                NodeExpandVolumeRequest.volume_id,
            ),
            node: field!(
                message,
                ControllerPublishVolumeRequest.node_id,
                ControllerUnpublishVolumeRequest.node_id
            ),
            snapshot: field!(
                message,
                DeleteSnapshotRequest.snapshot_id,
                GetSnapshotRequest.snapshot_id,
                ListSnapshotsRequest.snapshot_id,
            ),
            name: field!(message, CreateVolumeRequest.name, CreateSnapshotRequest.name),
            claim: message.downcast_ref().map(claim).unwrap_or_default(),
        }
    }

    /// Records the names in the fields of a [span of a call](crate::metrics).
    pub(crate) fn record(&self, span: &Span) {
        let fields = [
            ("volume", self.volume),
            ("node", self.node),
            ("snapshot", self.snapshot),
            ("name", self.name),
            ("claim", &self.claim),
        ];
        for (field, value) in fields.into_iter().filter(|(_, value)| !value.is_empty()) {
            span.record(field, start_of(value));
        }
    }
}

/// Claim of a new volume as `namespace/name`, if csi-provisioner passes it on.
fn claim(request: &proto::CreateVolumeRequest) -> String {
    match (request.parameters.get(CLAIM_NAMESPACE), request.parameters.get(CLAIM_NAME)) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        _ => String::new(),
    }
}

/// At most as many characters as a valid name has: the request is not validated yet.
fn start_of(value: &str) -> &str {
    value.char_indices().nth(MAX_NAME).map_or(value, |(end, _)| &value[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_of_a_request_are_found_and_secrets_are_not() {
        let attach = proto::ControllerPublishVolumeRequest {
            volume_id: "pvc-1".to_owned(),
            node_id: "vm-1".to_owned(),
            secrets: [("password".to_owned(), "hidden".to_owned())].into(),
            ..Default::default()
        };
        let found = NamedObjects::of(&attach);
        assert_eq!(found, NamedObjects { volume: "pvc-1", node: "vm-1", ..Default::default() });
        let parameter = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let create = proto::CreateVolumeRequest {
            name: "pvc-2".to_owned(),
            parameters: [parameter(CLAIM_NAMESPACE, "team"), parameter(CLAIM_NAME, "data")].into(),
            ..Default::default()
        };
        let found = NamedObjects::of(&create);
        assert_eq!((found.name, found.claim.as_str(), found.volume), ("pvc-2", "team/data", ""));
        assert_eq!(NamedObjects::of(&proto::ProbeRequest {}), NamedObjects::default());
    }

    #[test]
    fn a_long_value_is_cut_at_a_character() {
        assert_eq!(start_of("pvc"), "pvc");
        assert_eq!(start_of(&"ü".repeat(MAX_NAME + 1)), "ü".repeat(MAX_NAME));
    }
}
