//! StorageClass parameters. Unknown ones are refused, so that a typing error does not silently place volumes elsewhere.

use std::collections::HashMap;

use crds::anti_affinity::ClassParameters;
use crds::names::{
    MANAGEMENT_DRIVER, PARAMETER_ANTI_AFFINITY, PARAMETER_ANTI_AFFINITY_GROUP, PARAMETER_SHAREABLE,
};
use infra_api::{DiskOptions, Labels, Placement, PoolName};
use kube_kit::informer::Key;
use tonic::Status;

/// Parameter: name of the pool.
const POOL: &str = "pool";
/// Parameter prefix: key of a label that the pool must have.
const POOL_LABEL: &str = "pool.";
/// Parameters: options of the disk.
const DISK: [&str; 4] = ["diskIo", "diskCache", "diskDiscard", "diskDetectZeroes"];
/// Prefix of the parameters that csi-provisioner adds.
const PROVISIONER: &str = "csi.storage.k8s.io/";

/// Parameters of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Placement of the volume.
    pub(crate) placement: Placement,
    /// Anti-affinity of volumes whose claims request none.
    pub(super) anti_affinity: Option<ClassParameters>,
    /// Whether several VMs may write to raw volumes at once.
    pub(super) shareable: bool,
    /// How the hypervisor reads and writes the disk.
    pub(super) disk: DiskOptions,
    /// The claim of the volume, if csi-provisioner passes it.
    pub(super) claim: Option<Key>,
    /// Labels that name the claim and the PV, if csi-provisioner passes them (`--extra-create-metadata`).
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
                        "invalid parameter {PARAMETER_SHAREABLE:?}: {value:?} is neither \"true\" nor \"false\""
                    ))
                })?;
            } else if DISK.contains(&key.as_str()) {
                set_option(&mut read.disk, key, value).map_err(|why| {
                    Status::invalid_argument(format!("invalid parameter {key:?}: {value:?} {why}"))
                })?;
            } else if let Some(label) = key.strip_prefix(POOL_LABEL).filter(|label| !label.is_empty()) {
                read.placement.pool_labels.insert(label.to_owned(), value.clone());
            } else if key != PARAMETER_ANTI_AFFINITY && key != PARAMETER_ANTI_AFFINITY_GROUP {
                return Err(Status::invalid_argument(format!(
                    "unknown parameter {key:?}: a StorageClass of {MANAGEMENT_DRIVER} can have {POOL:?} (name of a pool), \
                     \"{POOL_LABEL}<label>\" (label that the pool must have), {PARAMETER_ANTI_AFFINITY:?} (\"preferred\" or \
                     \"required\": volumes of a group are placed in different pools), {PARAMETER_ANTI_AFFINITY_GROUP:?} (the \
                     group), {PARAMETER_SHAREABLE:?} (\"true\": several VMs may write to raw volumes at once) and {} (how the \
                     hypervisor reads and writes the disk)",
                    DISK.map(|option| format!("{option:?}")).join(", ")
                )));
            }
        }
        let get = |key| parameters.get(key).map(String::as_str);
        read.anti_affinity =
            ClassParameters::read(get(PARAMETER_ANTI_AFFINITY), get(PARAMETER_ANTI_AFFINITY_GROUP))
                .map_err(Status::invalid_argument)?;
        let own =
            |key: &str| parameters.get(&format!("{PROVISIONER}{key}")).filter(|value| !value.is_empty());
        read.claim =
            own("pvc/namespace").zip(own("pvc/name")).map(|(namespace, name)| Key::new(namespace, name));
        Ok(read)
    }
}

fn set_option(disk: &mut DiskOptions, key: &str, value: &str) -> Result<(), String> {
    let [io, cache, discard, _] = DISK;
    match key {
        _ if key == io => disk.io = Some(value.parse()?),
        _ if key == cache => disk.cache = Some(value.parse()?),
        _ if key == discard => disk.discard = Some(value.parse()?),
        _ => disk.detect_zeroes = Some(value.parse()?),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use infra_api::{DetectZeroes, DiskCache, DiskDiscard, DiskIo};
    use tonic::Code;

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Parameters, Status> {
        Parameters::read(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn parameters_select_a_pool_or_its_labels() {
        let read = read(&[
            ("pool", "fast"),
            ("pool.topology.kubernetes.io/zone", "a"),
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "guest"),
            ("shareable", "true"),
            ("antiAffinity", "required"),
        ])
        .unwrap();
        assert_eq!(read.placement.pool.unwrap().as_str(), "fast");
        assert_eq!(read.placement.pool_labels["topology.kubernetes.io/zone"], "a");
        assert_eq!(read.labels["pvc"], "data");
        assert!(read.anti_affinity.is_some());
        assert_eq!((read.shareable, read.claim), (true, Some(Key::new("guest", "data"))));
    }

    #[test]
    fn options_of_the_disk_have_the_words_of_libvirt() {
        let read = read(&[
            ("diskIo", "io_uring"),
            ("diskCache", "writeback"),
            ("diskDiscard", "ignore"),
            ("diskDetectZeroes", "unmap"),
        ])
        .unwrap();
        let disk = DiskOptions {
            io: Some(DiskIo::IoUring),
            cache: Some(DiskCache::Writeback),
            discard: Some(DiskDiscard::Ignore),
            detect_zeroes: Some(DetectZeroes::Unmap),
        };
        assert_eq!(read.disk, disk);
    }

    #[test]
    fn an_error_names_the_unknown_or_invalid_parameter() {
        for (key, value) in [
            ("Pool", "fast"),
            ("pool.", "x"),
            ("replicas", "3"),
            ("pool", "../etc"),
            ("shareable", "yes"),
            ("antiAffinity", "yes"),
            ("diskIo", "fast"),
            ("diskCache", "unsafe"),
            ("diskQueues", "4"),
        ] {
            let status = read(&[(key, value)]).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains(key), "{status}");
        }
    }
}
