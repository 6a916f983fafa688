//! Storage infra: the [trait](StorageInfra) through which this driver uses one, and its implementation for the REST API.

mod certificates;
mod condition;
mod error;
mod events;
mod monitor;
mod names;
mod rest;
mod storage_infra;

pub use certificates::Certificates;
pub use condition::condition_message;
pub use error::{
    AttachError, BudgetError, CreateError, DeleteError, DetachError, ExpandError, Indeterminate, LimitError,
    Message, ReadError, RegisterError, SnapshotError,
};
pub use events::{InfraEvent, subscribe};
pub use monitor::monitor;
pub use names::{
    ParsedId, attachment_id, has_same_name, host_attachment_id, is_host_attachment, namespace_of,
    parse_attachment_id, snapshot_id, volume_id,
};
pub use rest::Rest;
pub use storage_infra::{AttachedDisk, StorageInfra};
