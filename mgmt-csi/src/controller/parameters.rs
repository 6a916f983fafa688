//! StorageClass parameters as types. A parameter that nobody knows is refused: a typing error must not
//! silently place volumes elsewhere.

use std::collections::HashMap;

use crds::names::{MANAGEMENT_DRIVER, PARAMETER_SHAREABLE};
use infra_api::{Labels, Placement, PoolName};
use kube_kit::informer::Key;
use tonic::Status;

/// Names one pool.
const POOL: &str = "pool";
/// Before the key of a label that the pool must have.
const POOL_LABEL: &str = "pool.";
/// What csi-provisioner adds by itself.
const PROVISIONER: &str = "csi.storage.k8s.io/";

/// What the parameters of a request say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Where the volume goes.
    pub(crate) placement: Placement,
    /// Whether several machines may write to raw volumes at once.
    pub(super) shareable: bool,
    /// The claim that it is for, as far as csi-provisioner says so.
    pub(super) claim: Option<Key>,
    /// Who it is for, as far as csi-provisioner says so (`--extra-create-metadata`).
    pub(super) labels: Labels,
}

impl Parameters {
    pub(crate) fn read(parameters: &HashMap<String, String>) -> Result<Self, Status> {
        let mut read = Self::default();
        for (key, value) in parameters {
            if let Some(own) = key.strip_prefix(PROVISIONER) {
                let label = match own {
                    "pvc/name" => "pvc",
                    "pvc/namespace" => "namespace",
                    "pv/name" => "pv",
                    _ => continue,
                };
                read.labels.insert(label.to_owned(), value.clone());
            } else if key == POOL {
                let pool = PoolName::new(value.as_str())
                    .map_err(|invalid| Status::invalid_argument(format!("parameter {POOL:?}: {invalid}")))?;
                read.placement.pool = Some(pool);
            } else if key == PARAMETER_SHAREABLE {
                read.shareable = value.parse().map_err(|_| {
                    Status::invalid_argument(format!(
                        "parameter {PARAMETER_SHAREABLE:?} is {value:?}: give \"true\" or \"false\""
                    ))
                })?;
            } else if let Some(label) = key.strip_prefix(POOL_LABEL).filter(|label| !label.is_empty()) {
                read.placement.pool_labels.insert(label.to_owned(), value.clone());
            } else {
                return Err(Status::invalid_argument(format!(
                    "parameter {key:?} is not known: a StorageClass of {MANAGEMENT_DRIVER} takes {POOL:?} (a pool's \
                     name), \"{POOL_LABEL}<label>\" (a label that the pool must have) and {PARAMETER_SHAREABLE:?} (true: \
                     several machines may write to raw volumes at once)"
                )));
            }
        }
        let own =
            |key: &str| parameters.get(&format!("{PROVISIONER}{key}")).filter(|value| !value.is_empty());
        read.claim =
            own("pvc/namespace").zip(own("pvc/name")).map(|(namespace, name)| Key::new(namespace, name));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Parameters, Status> {
        Parameters::read(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn a_class_names_a_pool_or_its_labels() {
        let read = read(&[
            ("pool", "fast"),
            ("pool.topology.kubernetes.io/zone", "a"),
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "guest"),
            ("shareable", "true"),
        ])
        .unwrap();
        assert_eq!(read.placement.pool.unwrap().as_str(), "fast");
        assert_eq!(read.placement.pool_labels["topology.kubernetes.io/zone"], "a");
        assert_eq!(read.labels["pvc"], "data");
        assert_eq!((read.shareable, read.claim), (true, Some(Key::new("guest", "data"))));
    }

    #[test]
    fn an_unknown_or_illegal_parameter_is_refused_by_name() {
        for (key, value) in
            [("Pool", "fast"), ("pool.", "x"), ("replicas", "3"), ("pool", "../etc"), ("shareable", "yes")]
        {
            let status = read(&[(key, value)]).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(key), "{status}");
        }
    }
}
