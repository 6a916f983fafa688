//! CSI Node service over local block devices: what the node plugins of both tiers have in common. It formats, mounts and
//! expands disks that something else attached to this node.
//!
//! A driver gives the [`Plugin`] where names of disks are and how a device proves that it is the disk ([`DiskNames`],
//! [`Identity`]), and what NodeGetInfo reports ([`Node`], [`Topology`]).
//!
//! | Modules | Content |
//! | --- | --- |
//! | `plugin`, `service`, `request`, `status`, `driver_endpoints` | gRPC services, request validation, status codes, sockets and registration |
//! | `stage`, `publish`, `expand`, `stats` | NodeStageVolume, NodePublishVolume, NodeExpandVolume, NodeGetVolumeStats |
//! | `disk` | disk lookup by UUID |
//! | `content` | disk content: blkid, blank disk attestations, formatting |
//! | `duplicate_uuids`, `filesystem`, `superblock` | btrfs with duplicate UUIDs, filesystem tools, superblocks |
//! | `bind`, `mount_table`, `mount_users` | mounts and the processes that use them |
//! | `replaced` | disks that were replaced under their mounts |
//! | `volume_condition`, `lost_writes` | volume health, writes that did not reach the disk |
//! | `kubelet` | kubelet's directory layout |
//! | `health` | self-checks |

mod bind;
mod blocking;
mod command;
mod content;
mod disk;
mod driver_endpoints;
mod duplicate_uuids;
mod expand;
mod filesystem;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod health;
mod kubelet;
mod lost_writes;
mod mount_options;
pub mod mount_table;
mod mount_users;
mod plugin;
mod publish;
mod replaced;
mod request;
mod service;
mod stage;
mod stats;
mod status;
mod superblock;
mod volume_condition;

pub use content::UsedAttestations;
pub use disk::{DiskNames, Identity, sysfs};
pub use driver_endpoints::DriverEndpoint;
pub use kubelet::Kubelet;
pub use plugin::Plugin;
pub use service::{Node, Topology};
