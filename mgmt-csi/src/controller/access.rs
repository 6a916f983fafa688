//! Supported access modes.

use crds::names::{MANAGEMENT_DRIVER, PARAMETER_SHAREABLE};
use csi::capability::{Access, Capability, Mode};

/// Whether several VMs are to write to the volume at once.
pub(super) fn is_shared(capabilities: &[Capability]) -> bool {
    capabilities.iter().any(|capability| capability.mode == Mode::MultiNodeMultiWriter)
}

/// Why a volume cannot have these capabilities, given whether it is `shareable`; None if it can.
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
            "access mode ReadWriteMany: the StorageClass does not allow several VMs to write to a volume; use a class of \
             {MANAGEMENT_DRIVER} with the parameter {PARAMETER_SHAREABLE}: \"true\", or ReadWriteOnce"
        )),
        (Mode::MultiNodeMultiWriter, Access::Mount { .. }) => Some(
            "access mode ReadWriteMany with a filesystem: several VMs that write to one filesystem corrupt it; use \
             volumeMode Block with software that supports shared disks, or ReadWriteOnce, or ReadOnlyMany"
                .to_owned(),
        ),
        (Mode::MultiNodeSingleWriter, _) => Some(
            "access mode MULTI_NODE_SINGLE_WRITER is not supported by the storage infra; use ReadWriteOnce, ReadOnlyMany, or \
             ReadWriteMany with volumeMode Block"
                .to_owned(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_writers_need_a_raw_volume_of_a_shareable_class() {
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
