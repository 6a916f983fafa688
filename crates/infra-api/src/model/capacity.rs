//! Capacity available to new volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::labels::Labels;
use crate::ids::PoolName;

/// Capacity available to new volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// Free bytes, summed over the matching pools that are healthy and not cordoned.
    pub free_bytes: u64,
    /// Size of the largest volume that fits into one of these pools.
    pub max_volume_bytes: u64,
}

/// Filter of `GET /v1/capacity`: the pools to count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CapacityQuery {
    /// Only this pool.
    pub pool: Option<PoolName>,
    /// Only pools that are reachable from this zone.
    pub zone: Option<String>,
    /// Only pools with all of these labels.
    pub labels: Labels,
}
