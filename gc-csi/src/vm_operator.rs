//! VM Operator capabilities: which access modes it supports for a claim's disk. vm-operator-shim supports all; the
//! admission of the upstream VM Operator refuses some, which gc-csi refuses before it creates anything.

use csi::Status;
use csi::capability::{Access, Capability, Mode};
use kube::Client;
use kube_kit::api_versions;
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;

/// First version of `VirtualMachine` that defines `sharingMode` and `diskMode` of an entry.
const FIRST_WITH_SHARING: &str = "v1alpha6";

/// VM Operator selected by flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VmOperatorArg {
    /// The shim if the management cluster serves `volumeattachments.nestor.dev`, upstream otherwise.
    Auto,
    /// vm-operator-shim.
    Shim,
    /// The VM Operator of vmware-tanzu.
    Upstream,
}

/// VM Operator of a management cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmOperator {
    /// vm-operator-shim.
    Shim,
    /// The VM Operator of vmware-tanzu.
    Upstream {
        /// Whether it serves a version with multi-writer disks.
        has_sharing: bool,
    },
}

impl VmOperator {
    /// The selected or detected VM Operator of a cluster that serves `version` of `VirtualMachine`; detected once, at
    /// start-up. None when stopped.
    pub(crate) async fn detect(
        named: VmOperatorArg,
        version: &str,
        client: &Client,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Option<Self> {
        let upstream = Self::Upstream { has_sharing: version == FIRST_WITH_SHARING };
        let is_shim = match named {
            VmOperatorArg::Shim => true,
            VmOperatorArg::Upstream => false,
            VmOperatorArg::Auto => {
                let check = ready.check("VM Operator", "not checked yet");
                api_versions::is_served(client, "nestor.dev/v1alpha1", "volumeattachments", &check, stop)
                    .await?
            }
        };
        Some(if is_shim { Self::Shim } else { upstream })
    }

    /// Whether it attaches disks read-only.
    pub(crate) fn supports_read_only(self) -> bool {
        self == Self::Shim
    }

    /// Whether the entry of a claim with these access modes must request multi-writer sharing.
    pub(crate) fn needs_multi_writer(self, modes: &[String]) -> bool {
        self != Self::Shim && modes.iter().any(|mode| mode == "ReadWriteMany")
    }

    /// Refuses capabilities that this driver or the VM Operator does not support.
    pub(crate) fn supports(self, requested: &[Capability]) -> Result<(), Status> {
        let refusal = requested.iter().find_map(unsupported).or_else(|| match self {
            Self::Shim => None,
            Self::Upstream { has_sharing } => refused_upstream(requested, has_sharing),
        });
        refusal.map_or(Ok(()), |why| Err(Status::invalid_argument(why)))
    }
}

/// Why this driver supports a capability for no volume.
fn unsupported(requested: &Capability) -> Option<&'static str> {
    match (requested.mode, &requested.access) {
        (Mode::MultiNodeMultiWriter, Access::Mount { .. }) => Some(
            "access mode ReadWriteMany is not supported for a filesystem, because several nodes that write to it at \
             once would corrupt it; use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany, or volumeMode Block",
        ),
        (Mode::MultiNodeSingleWriter, _) => Some(
            "access mode MULTI_NODE_SINGLE_WRITER is not supported: other nodes can't read a disk while one writes \
             to it; use ReadWriteOnce, ReadOnlyMany, or ReadWriteMany with volumeMode Block",
        ),
        _ => None,
    }
}

/// Why the upstream VM Operator does not attach a disk read-only.
pub(crate) const READ_ONLY_UNSUPPORTED: &str = "the VM Operator of the management cluster does not attach disks \
    read-only: its admission refuses readOnly for a claim; use ReadWriteOnce, and set readOnly in the pods that must \
    not write";

/// Why the upstream VM Operator would refuse these capabilities.
fn refused_upstream(requested: &[Capability], has_sharing: bool) -> Option<&'static str> {
    let is_shared = |one: &Capability| one.mode == Mode::MultiNodeMultiWriter;
    if requested.iter().any(|one| one.mode.is_read_only()) {
        return Some(READ_ONLY_UNSUPPORTED);
    }
    if !requested.iter().any(is_shared) {
        return None;
    }
    if !has_sharing {
        return Some(
            "access mode ReadWriteMany needs a VM Operator that serves VirtualMachine v1alpha6: earlier versions have \
             no multi-writer disks; use ReadWriteOnce",
        );
    }
    (!requested.iter().all(is_shared)).then_some(
        "access mode ReadWriteMany can't be combined with others: the VM Operator of the management cluster attaches a \
         claim that also has ReadWriteOnce to one VM only; request only one of them",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNT: fn() -> Access = || Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None };

    fn refusal(operator: VmOperator, requested: &[(Mode, Access)]) -> Option<String> {
        let requested: Vec<Capability> = requested
            .iter()
            .map(|(mode, access)| Capability { mode: *mode, access: access.clone() })
            .collect();
        operator.supports(&requested).err().map(|status| status.message().to_owned())
    }

    #[test]
    fn the_shim_supports_everything_that_the_driver_supports() {
        for one in [
            (Mode::SingleNodeWriter, MOUNT()),
            (Mode::MultiNodeReaderOnly, MOUNT()),
            (Mode::MultiNodeMultiWriter, Access::Block),
        ] {
            assert_eq!(refusal(VmOperator::Shim, &[one]), None);
        }
        let refused = refusal(VmOperator::Shim, &[(Mode::MultiNodeMultiWriter, MOUNT())]);
        assert!(refused.is_some_and(|why| why.contains("filesystem")));
        assert!(!VmOperator::Shim.needs_multi_writer(&["ReadWriteMany".to_owned()]));
    }

    #[test]
    fn capabilities_that_the_upstream_operator_refuses_are_refused_first() {
        let (new, old) =
            (VmOperator::Upstream { has_sharing: true }, VmOperator::Upstream { has_sharing: false });
        let shared = || (Mode::MultiNodeMultiWriter, Access::Block);
        let says =
            |refused: Option<String>, text: &str| assert!(refused.is_some_and(|why| why.contains(text)));
        for mode in [Mode::MultiNodeReaderOnly, Mode::SingleNodeReaderOnly] {
            says(refusal(new, &[(mode, MOUNT())]), "read-only");
            says(refusal(new, &[(Mode::SingleNodeWriter, MOUNT()), (mode, MOUNT())]), "read-only");
        }
        assert_eq!(refusal(old, &[(Mode::SingleNodeWriter, MOUNT())]), None);
        assert_eq!(refusal(new, &[shared()]), None);
        says(refusal(old, &[shared()]), "v1alpha6");
        says(refusal(new, &[shared(), (Mode::SingleNodeWriter, Access::Block)]), "combined");
        assert!(new.needs_multi_writer(&["ReadWriteMany".to_owned()]));
        assert!(!new.needs_multi_writer(&["ReadWriteOnce".to_owned()]));
    }
}
