//! Parameters of guest classes: the name of the management class, and the anti-affinity of a StorageClass.

use std::collections::HashMap;

use crds::anti_affinity::ClassParameters;
use crds::names::{
    PARAMETER_ANTI_AFFINITY, PARAMETER_ANTI_AFFINITY_GROUP, PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS,
    PARAMETER_MANAGEMENT_CLASS, PARAMETER_MANAGEMENT_SNAPSHOT_CLASS,
};
use csi::Status;

/// Prefix of the keys that the sidecars add to the parameters.
pub(super) const EXTRA_PREFIX: &str = "csi.storage.k8s.io/";

/// Kind of a guest class.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Storage,
    VolumeSnapshot,
    VolumeAttributes,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Storage => "StorageClass",
            Self::VolumeSnapshot => "VolumeSnapshotClass",
            Self::VolumeAttributes => "VolumeAttributesClass",
        }
    }

    /// Its parameters. The first one names the management class.
    fn known(self) -> &'static [&'static str] {
        match self {
            Self::Storage => {
                &[PARAMETER_MANAGEMENT_CLASS, PARAMETER_ANTI_AFFINITY, PARAMETER_ANTI_AFFINITY_GROUP]
            }
            Self::VolumeSnapshot => &[PARAMETER_MANAGEMENT_SNAPSHOT_CLASS],
            Self::VolumeAttributes => &[PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS],
        }
    }
}

/// The management class that a guest class of this kind names. Unknown parameters are refused, because they would have no
/// effect.
pub(super) fn management_class(kind: Kind, parameters: &HashMap<String, String>) -> Result<&str, Status> {
    let (name, accepted) = (kind.name(), kind.known());
    let mut unknown: Vec<&str> = parameters
        .keys()
        .map(String::as_str)
        .filter(|key| !accepted.contains(key) && !key.starts_with(EXTRA_PREFIX))
        .collect();
    unknown.sort_unstable();
    if !unknown.is_empty() {
        return Err(Status::invalid_argument(format!(
            "unknown {name} parameter {}: the guest's class accepts only {}",
            unknown.join(", "),
            accepted.join(", ")
        )));
    }
    let known = accepted[0];
    parameters.get(known).map(String::as_str).filter(|class| !class.is_empty()).ok_or_else(|| {
        Status::invalid_argument(format!(
            "{name} parameter {known} is missing: set it to the name of a {name} of the management cluster"
        ))
    })
}

/// The value that a sidecar added under this key.
pub(super) fn extra(parameters: &HashMap<String, String>, key: &str) -> Option<String> {
    parameters.get(&format!("{EXTRA_PREFIX}{key}")).cloned()
}

/// The anti-affinity that a StorageClass requests.
pub(super) fn anti_affinity(parameters: &HashMap<String, String>) -> Result<Option<ClassParameters>, Status> {
    let get = |key| parameters.get(key).map(String::as_str);
    ClassParameters::read(get(PARAMETER_ANTI_AFFINITY), get(PARAMETER_ANTI_AFFINITY_GROUP))
        .map_err(Status::invalid_argument)
}
