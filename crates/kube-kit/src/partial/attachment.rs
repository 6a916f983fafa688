//! Partial VolumeAttachment of `storage.k8s.io`.

use k8s_openapi::api::storage::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::{CsiSource, metadata};

/// A VolumeAttachment of `storage.k8s.io`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VolumeAttachment {
    /// Metadata without managed fields.
    pub metadata: ObjectMeta,
    /// `spec.nodeName`: target node.
    pub node_name: String,
    /// `spec.source`: volume.
    pub source: AttachmentSource,
    /// `status.attached`.
    pub attached: bool,
}

super::resource!(VolumeAttachment, v1::VolumeAttachment);

/// Volume of an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachmentSource {
    /// Name of a PersistentVolume.
    pub persistent_volume_name: Option<String>,
    /// `inlineVolumeSpec.csi`: volume without a PersistentVolume.
    pub inline: Option<CsiSource>,
}

impl<'de> Deserialize<'de> for VolumeAttachment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Whole {
            #[serde(default, deserialize_with = "metadata::read")]
            metadata: ObjectMeta,
            spec: Spec,
            status: Option<Status>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Spec {
            node_name: String,
            source: Source,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Source {
            persistent_volume_name: Option<String>,
            inline_volume_spec: Option<Inline>,
        }
        #[derive(Deserialize)]
        struct Inline {
            csi: Option<CsiSource>,
        }
        #[derive(Deserialize)]
        struct Status {
            attached: bool,
        }
        let Whole { metadata, spec: Spec { node_name, source }, status } = Whole::deserialize(deserializer)?;
        let source = AttachmentSource {
            persistent_volume_name: source.persistent_volume_name,
            inline: source.inline_volume_spec.and_then(|spec| spec.csi),
        };
        Ok(Self { metadata, node_name, source, attached: status.is_some_and(|status| status.attached) })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_is_decoded() {
        let read = |source: serde_json::Value, status: serde_json::Value| {
            serde_json::from_value::<VolumeAttachment>(json!({
                "metadata": {"name": "csi-1"}, "status": status,
                "spec": {"attacher": "d", "nodeName": "vm", "source": source},
            }))
            .unwrap()
        };
        let named = read(json!({"persistentVolumeName": "pv"}), json!({"attached": true}));
        assert_eq!(named.source.persistent_volume_name.as_deref(), Some("pv"));
        assert!(named.attached && named.node_name == "vm");
        let csi = json!({"driver": "d", "volumeHandle": "h", "readOnly": true});
        let inline = read(json!({"inlineVolumeSpec": {"csi": csi}}), json!(null));
        assert!(inline.source.inline.unwrap().read_only && !inline.attached);
        assert!(serde_json::from_value::<VolumeAttachment>(json!({"metadata": {"name": "x"}})).is_err());
    }
}
