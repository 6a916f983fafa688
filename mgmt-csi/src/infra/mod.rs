//! Storage infra: the [trait](StorageInfra) through which this driver uses one, and its implementation for the REST API.

mod error;
mod events;
mod monitor;
mod names;
mod rest;
mod storage_infra;

pub use error::{
    AttachError, CreateError, DeleteError, DetachError, ExpandError, Indeterminate, LimitError, ReadError,
    SnapshotError,
};
pub use events::{InfraEvent, subscribe};
pub use monitor::monitor;
pub use names::{
    ParsedId, attachment_id, has_same_name, namespace_of, parse_attachment_id, snapshot_id, volume_id,
};
pub use rest::Rest;
pub use storage_infra::{AttachedDisk, StorageInfra};
