//! Control planes of both tiers, and the objects applied to them.

mod backup;
mod control_plane;
pub mod objects;
mod tiers;

pub use backup::{Backup, Revisions};
pub use control_plane::{ControlPlane, ControlPlanePlan, KubeletFiles, SERVER_ADDRESS_FROM_VM, argv};
pub use tiers::{
    GUEST_NAMESPACE, MANAGEMENT_NAMESPACE, apply_cluster_api, apply_snapshot_api, cluster_id,
    create_namespace, prepare_guest, prepare_guest_account, prepare_guest_kubevirt, prepare_guest_namespace,
    prepare_management, remove_guest_account, token_kubeconfig,
};
pub(crate) use tiers::{apply_manifests, prepare_guest_with_classes, prepare_management_for_pods};
