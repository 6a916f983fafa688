//! What the VM Operator of the management cluster can do with a claim's disk. Ours (vm-operator-shim) plugs it as the
//! claim says; the upstream one refuses, at admission, what is refused here before anything is made.

use csi::Status;
use csi::capability::{Access, Capability, Mode};
use kube::Client;
use kube_kit::health::Health;
use kube_kit::versions;
use tokio_util::sync::CancellationToken;

/// The first version of `VirtualMachine` whose entries have `sharingMode` and `diskMode` in their place for good.
const FIRST_WITH_SHARING: &str = "v1alpha6";

/// Which VM Operator the flag names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VmOperatorArg {
    /// Ours where the management cluster serves `volumeattachments.nestor.dev`, upstream otherwise.
    Auto,
    /// vm-operator-shim.
    Shim,
    /// The VM Operator of vmware-tanzu.
    Upstream,
}

/// The VM Operator of a management cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmOperator {
    /// vm-operator-shim.
    Shim,
    /// The VM Operator of vmware-tanzu.
    Upstream {
        /// Whether it serves a version in which several writers of a disk can be asked for.
        has_sharing: bool,
    },
}

impl VmOperator {
    /// The one that is named, or else found, in a cluster that serves `version` of `VirtualMachine`. What is installed
    /// later is found at the next start. None when `stop` came first.
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
                let check = ready.check("vm-operator", "not asked yet");
                versions::serves(client, "nestor.dev/v1alpha1", "volumeattachments", &check, stop).await?
            }
        };
        Some(if is_shim { Self::Shim } else { upstream })
    }

    /// Whether it plugs disks read-only.
    pub(crate) fn supports_read_only(self) -> bool {
        self == Self::Shim
    }

    /// Whether an entry for a claim with these access modes must ask for several writers.
    pub(crate) fn needs_multi_writer(self, modes: &[String]) -> bool {
        self != Self::Shim && modes.iter().any(|mode| mode == "ReadWriteMany")
    }

    /// Refuses what no volume can do here.
    pub(crate) fn supports(self, requested: &[Capability]) -> Result<(), Status> {
        let refusal = requested.iter().find_map(unsupported).or_else(|| match self {
            Self::Shim => None,
            Self::Upstream { has_sharing } => refused_upstream(requested, has_sharing),
        });
        refusal.map_or(Ok(()), |why| Err(Status::invalid_argument(why)))
    }
}

/// Why no volume of this driver can do it.
fn unsupported(requested: &Capability) -> Option<&'static str> {
    match (requested.mode, &requested.access) {
        (Mode::MultiNodeMultiWriter, Access::Mount { .. }) => Some(
            "access mode ReadWriteMany is not supported for a filesystem: one that several machines write to at once \
             would be corrupted; use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany, or volumeMode Block",
        ),
        (Mode::MultiNodeSingleWriter, _) => Some(
            "access mode MULTI_NODE_SINGLE_WRITER is not supported: others can't read what one machine writes to; use \
             ReadWriteOnce, ReadOnlyMany, or ReadWriteMany with volumeMode Block",
        ),
        _ => None,
    }
}

/// Why a disk is not plugged read-only by the upstream VM Operator.
pub(crate) const READ_ONLY_UNSUPPORTED: &str = "the VM Operator of the management cluster attaches no disk read-only: its \
    admission refuses readOnly for a claim; use ReadWriteOnce, and readOnly in the pods that shall not write";

/// Why the upstream VM Operator would refuse it.
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
            "access mode ReadWriteMany needs a VM Operator that serves VirtualMachine v1alpha6: earlier versions can't \
             be asked for a disk that several machines write to; use ReadWriteOnce",
        );
    }
    (!requested.iter().all(is_shared)).then_some(
        "access mode ReadWriteMany can't be combined with others: the VM Operator of the management cluster attaches a \
         claim that has ReadWriteOnce, too, to one machine only; ask for one of them",
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
    fn the_shim_does_all_that_the_driver_does() {
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
    fn what_the_upstream_operator_refuses_is_refused_before_anything_is_made() {
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
