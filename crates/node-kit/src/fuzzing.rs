//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use std::path::{Component, Path};

use csi::{Message, proto};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::mount_table::MountTable;
use crate::request;

pub use crate::content::fuzzing::disk_content;

/// Codes with which a request is refused before anything is done. kubelet shows them, and retries with the same request.
const REFUSALS: [Code; 4] =
    [Code::InvalidArgument, Code::FailedPrecondition, Code::OutOfRange, Code::NotFound];

/// Validation of Node service requests. The first byte selects the message. Accepted paths are absolute, without `..`.
pub fn node_requests(data: &[u8]) {
    let Some((kind, message)) = data.split_first() else { return };
    match kind % 3 {
        0 => of_message(message, |stage: &proto::NodeStageVolumeRequest| {
            request::stage(stage, Instant::now()).map(|accepted| check_path(&accepted.staging))
        }),
        1 => of_message(message, |publish: &proto::NodePublishVolumeRequest| {
            request::publish(publish, Instant::now()).map(|accepted| {
                check_path(&accepted.target);
                accepted.staged.iter().for_each(|staged| check_path(&staged.staging));
            })
        }),
        _ => of_message(message, |expand: &proto::NodeExpandVolumeRequest| {
            request::expand(expand, Instant::now()).map(|accepted| {
                check_path(&accepted.path);
                assert!(accepted.size.admits(accepted.size.required));
            })
        }),
    }
}

fn of_message<M: Message + Default>(bytes: &[u8], validate: impl FnOnce(&M) -> Result<(), Status>) {
    let Ok(message) = M::decode(bytes) else { return };
    if let Err(refusal) = validate(&message) {
        assert!(REFUSALS.contains(&refusal.code()) && !refusal.message().is_empty(), "{refusal}");
    }
}

fn check_path(path: &Path) {
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    assert!(path.is_absolute() && path.components().all(is_plain), "{}", path.display());
}

/// The kernel's mount table.
pub fn mount_table(data: &[u8]) {
    if let Ok(table) = MountTable::parse(data) {
        for mount in table.iter() {
            assert!(table.at(&mount.point).is_some());
            table.became_read_only(mount);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn node_requests() {
        fuzz_kit::replay("node_requests", super::node_requests);
    }

    #[test]
    fn disk_content() {
        fuzz_kit::replay("disk_content", super::disk_content);
    }

    #[test]
    fn mount_table() {
        fuzz_kit::replay("mount_table", super::mount_table);
    }
}
