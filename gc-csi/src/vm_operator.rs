//! VM Operator capabilities: which access modes it supports for a claim's disk. vm-operator-shim supports all; the
//! admission of the upstream VM Operator refuses some, which gc-csi refuses before it creates anything.

use csi::Status;
use csi::capability::{Access, Capability, Mode};
use kube::Client;
use kube_kit::api_versions::{self, Served};
use kube_kit::health::Health;
use tokio_util::sync::CancellationToken;

use crate::management::ServedVmApi;
use crate::vm_volumes::kubevirt;

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
    /// KubeVirt.
    KubeVirt,
}

/// API of VMs selected by flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VmApiArg {
    /// The one that the management cluster serves.
    Auto,
    /// `VirtualMachine` of `vmoperator.vmware.com`.
    VmOperator,
    /// `VirtualMachine` of `kubevirt.io`.
    Kubevirt,
}

/// The API of VMs among the groups that a management cluster serves, or why there is none.
pub(crate) fn choose_api(named: VmApiArg, served: &Served) -> Result<ServedVmApi, String> {
    let versions = |group: &str| served.get(group).map(Vec::as_slice).unwrap_or_default();
    let operator = crds::newest_virtual_machine_version(versions(crds::VIRTUAL_MACHINE_GROUP));
    let kubevirt = versions(kubevirt::GROUP).iter().any(|version| version == kubevirt::VERSION);
    let missing = |group: &str| {
        let versions = versions(group);
        format!(
            "the management cluster serves no supported version of {group}, only {versions:?}: install its CustomResourceDefinitions"
        )
    };
    match (named, operator, kubevirt) {
        (VmApiArg::Auto, Some(_), true) => Err(format!(
            "the management cluster serves both {} and {}: select the API of this guest's VMs with --vm-api",
            crds::VIRTUAL_MACHINE_GROUP,
            kubevirt::GROUP
        )),
        (VmApiArg::Auto, None, false) => Err(format!(
            "the management cluster serves neither a supported version of {} nor {}/{}: install a VM Operator or KubeVirt",
            crds::VIRTUAL_MACHINE_GROUP,
            kubevirt::GROUP,
            kubevirt::VERSION
        )),
        (VmApiArg::Auto | VmApiArg::VmOperator, Some(version), _) => Ok(ServedVmApi::VmOperator(version)),
        (VmApiArg::Auto | VmApiArg::Kubevirt, _, true) => Ok(ServedVmApi::KubeVirt),
        (VmApiArg::VmOperator, None, _) => Err(missing(crds::VIRTUAL_MACHINE_GROUP)),
        (VmApiArg::Kubevirt, _, false) => Err(missing(kubevirt::GROUP)),
    }
}

impl VmOperator {
    /// The selected or detected VM Operator of a cluster with this API of VMs; detected once, at start-up. None when stopped.
    pub(crate) async fn detect(
        named: VmOperatorArg,
        api: ServedVmApi,
        client: &Client,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Option<Self> {
        let ServedVmApi::VmOperator(version) = api else { return Some(Self::KubeVirt) };
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
        self.refuses_read_only().is_none()
    }

    /// Why it does not attach disks read-only.
    pub(crate) fn refuses_read_only(self) -> Option<&'static str> {
        match self {
            Self::Shim => None,
            Self::Upstream { .. } => Some(READ_ONLY_UNSUPPORTED),
            Self::KubeVirt => Some(KUBEVIRT_READ_ONLY),
        }
    }

    /// Whether the entry of a claim with these access modes must request multi-writer sharing.
    pub(crate) fn needs_multi_writer(self, modes: &[String]) -> bool {
        matches!(self, Self::Upstream { .. }) && modes.iter().any(|mode| mode == "ReadWriteMany")
    }

    /// Refuses capabilities that this driver or the VM Operator does not support.
    pub(crate) fn supports(self, requested: &[Capability]) -> Result<(), Status> {
        let refusal = requested.iter().find_map(unsupported).or_else(|| match self {
            Self::Shim => None,
            Self::Upstream { has_sharing } => refused_upstream(requested, has_sharing),
            Self::KubeVirt => refused_kubevirt(requested),
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
const READ_ONLY_UNSUPPORTED: &str = "the VM Operator of the management cluster does not attach disks \
    read-only: its admission refuses readOnly for a claim; use ReadWriteOnce, and set readOnly in the pods that must \
    not write";

/// Why gc-csi does not attach a disk read-only through KubeVirt.
const KUBEVIRT_READ_ONLY: &str = "gc-csi attaches disks of KubeVirt to VMs that may write to them; use ReadWriteOnce, or ReadWriteMany with \
    volumeMode Block, and set readOnly in the pods that must not write";

/// Why gc-csi does not attach disks with these capabilities through KubeVirt.
fn refused_kubevirt(requested: &[Capability]) -> Option<&'static str> {
    requested.iter().any(|one| one.mode.is_read_only()).then_some(KUBEVIRT_READ_ONLY)
}

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
    fn the_api_of_vms_is_the_served_one_unless_several_are_or_a_flag_selects_it() {
        let served = |groups: &[(&str, &str)]| -> Served {
            groups.iter().map(|(group, version)| ((*group).to_owned(), vec![(*version).to_owned()])).collect()
        };
        let (operator, kubevirt) = (("vmoperator.vmware.com", "v1alpha5"), ("kubevirt.io", "v1"));
        let chosen =
            |named, groups: &[(&str, &str)]| choose_api(named, &served(groups)).map(|api| format!("{api:?}"));
        let of_operator = Ok("VmOperator(\"v1alpha5\")".to_owned());
        let of_kubevirt = Ok("KubeVirt".to_owned());
        assert_eq!(chosen(VmApiArg::Auto, &[operator]), of_operator);
        assert_eq!(chosen(VmApiArg::Auto, &[kubevirt]), of_kubevirt);
        assert_eq!(chosen(VmApiArg::VmOperator, &[operator, kubevirt]), of_operator);
        assert_eq!(chosen(VmApiArg::Kubevirt, &[operator, kubevirt]), of_kubevirt);
        for (named, groups, text) in [
            (VmApiArg::Auto, vec![operator, kubevirt], "--vm-api"),
            (VmApiArg::Auto, vec![], "neither"),
            (VmApiArg::VmOperator, vec![kubevirt], "no supported version of vmoperator.vmware.com"),
            (VmApiArg::Kubevirt, vec![operator], "no supported version of kubevirt.io"),
        ] {
            assert!(chosen(named, &groups).is_err_and(|why| why.contains(text)), "{text}");
        }
    }

    #[test]
    fn disks_of_kubevirt_are_attached_to_vms_that_may_write() {
        for one in [(Mode::SingleNodeWriter, MOUNT()), (Mode::MultiNodeMultiWriter, Access::Block)] {
            assert_eq!(refusal(VmOperator::KubeVirt, &[one]), None);
        }
        for (mode, text) in
            [(Mode::MultiNodeReaderOnly, "may write"), (Mode::MultiNodeMultiWriter, "filesystem")]
        {
            assert!(refusal(VmOperator::KubeVirt, &[(mode, MOUNT())]).is_some_and(|why| why.contains(text)));
        }
        assert!(!VmOperator::KubeVirt.needs_multi_writer(&["ReadWriteMany".to_owned()]));
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
