//! Which ways to use a volume there are.

use crds::names::{MANAGEMENT_DRIVER, PARAMETER_SHAREABLE};
use csi::capability::{Access, Capability, Mode};

/// Whether several machines are to write to the volume at once.
pub(super) fn is_shared(capabilities: &[Capability]) -> bool {
    capabilities.iter().any(|capability| capability.mode == Mode::MultiNodeMultiWriter)
}

/// Why a volume that is, or is not, `shareable` can't be used in these ways, if it can't.
pub(super) fn refusal(capabilities: &[Capability], shareable: bool) -> Option<String> {
    capabilities.iter().find_map(|capability| match (capability.mode, &capability.access) {
        (
            Mode::SingleNodeWriter
            | Mode::SingleNodeSingleWriter
            | Mode::SingleNodeMultiWriter
            | Mode::SingleNodeReaderOnly
            | Mode::MultiNodeReaderOnly,
            _,
        ) => None,
        (Mode::MultiNodeMultiWriter, Access::Block) if shareable => None,
        (Mode::MultiNodeMultiWriter, Access::Block) => Some(format!(
            "access mode ReadWriteMany: several machines may write to a volume at once only where its StorageClass \
             allows it; use a class of {MANAGEMENT_DRIVER} with the parameter {PARAMETER_SHAREABLE}: \"true\", or \
             ReadWriteOnce"
        )),
        (Mode::MultiNodeMultiWriter, Access::Mount { .. }) => Some(
            "access mode ReadWriteMany with a filesystem: a disk's filesystem is ruined when several machines mount it \
             to write; use volumeMode Block with software that shares a raw disk, or ReadWriteOnce, or ReadOnlyMany"
                .to_owned(),
        ),
        (Mode::MultiNodeSingleWriter, _) => Some(
            "access mode MULTI_NODE_SINGLE_WRITER: the storage infra can't let others read while one machine writes; \
             use ReadWriteOnce, ReadOnlyMany, or ReadWriteMany with volumeMode Block"
                .to_owned(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_writers_are_had_only_on_raw_volumes_of_shareable_classes() {
        let mount = || Access::Mount { fs_type: String::new(), flags: vec![], group: None };
        let refused = |mode, access, shareable| refusal(&[Capability { access, mode }], shareable);
        assert_eq!(refused(Mode::MultiNodeMultiWriter, Access::Block, true), None);
        assert!(refused(Mode::MultiNodeMultiWriter, Access::Block, false).unwrap().contains("shareable"));
        assert!(refused(Mode::MultiNodeMultiWriter, mount(), true).unwrap().contains("volumeMode Block"));
        assert!(refused(Mode::MultiNodeSingleWriter, Access::Block, true).is_some());
        for mode in [Mode::SingleNodeWriter, Mode::SingleNodeSingleWriter, Mode::MultiNodeReaderOnly] {
            assert_eq!(refused(mode, mount(), false), None);
        }
    }
}
