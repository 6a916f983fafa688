//! Partial Pod.

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::metadata;

/// A Pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pod {
    /// Metadata without managed fields.
    pub metadata: ObjectMeta,
    /// Items of `spec.volumes` that are claims.
    pub volumes: Vec<PodVolume>,
    /// `status.phase`.
    pub phase: Option<String>,
}

super::resource!(Pod, v1::Pod);

/// A volume of a pod that is a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodVolume {
    /// Name of a claim.
    Claim(String),
    /// Volume name of a generic ephemeral volume.
    Ephemeral(String),
}

impl<'de> Deserialize<'de> for Pod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Whole {
            #[serde(default, deserialize_with = "metadata::read")]
            metadata: ObjectMeta,
            spec: Option<Spec>,
            status: Option<Status>,
        }
        #[derive(Deserialize)]
        struct Spec {
            volumes: Option<Vec<Volume>>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Volume {
            name: String,
            persistent_volume_claim: Option<Source>,
            ephemeral: Option<IgnoredAny>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Source {
            claim_name: String,
        }
        #[derive(Deserialize)]
        struct Status {
            phase: Option<String>,
        }
        let Whole { metadata, spec, status } = Whole::deserialize(deserializer)?;
        let volumes = spec.and_then(|spec| spec.volumes).unwrap_or_default();
        let volumes = volumes.into_iter().filter_map(|volume| match volume {
            Volume { persistent_volume_claim: Some(source), .. } => Some(PodVolume::Claim(source.claim_name)),
            Volume { name, ephemeral: Some(_), .. } => Some(PodVolume::Ephemeral(name)),
            _ => None,
        });
        Ok(Self { metadata, volumes: volumes.collect(), phase: status.and_then(|status| status.phase) })
    }
}
