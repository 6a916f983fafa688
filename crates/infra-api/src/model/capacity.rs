//! What new volumes can have.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Labels;
use crate::PoolName;

/// What new volumes can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// The sum over the pools that match, are healthy and not cordoned.
    pub free_bytes: u64,
    /// The largest volume that fits into one of them.
    pub max_volume_bytes: u64,
}

/// Which pools `GET /v1/capacity` counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CapacityQuery {
    /// Only this pool.
    pub pool: Option<PoolName>,
    /// Only pools that can be reached from this zone.
    pub zone: Option<String>,
    /// Only pools with all of these labels.
    pub labels: Labels,
}
