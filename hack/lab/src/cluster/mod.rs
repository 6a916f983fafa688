//! The two tiers' control planes and what is applied to them.

mod control_plane;
pub mod objects;
mod tiers;

pub use control_plane::{ControlPlane, ControlPlanePlan, KubeletFiles, SERVER_SEEN_FROM_VM, argv};
pub use tiers::{prepare_guest, prepare_guest_namespace, prepare_management};
