//! API errors: RFC 9457 problem details with a machine-readable code.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::ids::PoolName;
use crate::model::{BudgetExcess, NodeRef};

/// Error code: a closed list for programs to decide on. The text of a problem is for humans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemCode {
    /// The request is invalid; do not retry it unchanged. 400.
    Invalid,
    /// The role of the client's certificate does not allow the request. 403.
    Forbidden,
    /// The object named by `what` and `id` does not exist. 404.
    NotFound,
    /// An object with this ID exists and differs from the request. 409.
    Exists,
    /// The attachment with this ID was deleted. Attachment IDs are never reused: choose another. 410.
    Ended,
    /// The object is in use; `nodes` lists the nodes that use it, if any. 409.
    InUse,
    /// No pool can hold the volume; `rejections` gives the reason per pool. 507.
    OutOfSpace,
    /// The budget of the account does not allow it; `excess` has the numbers. 507.
    OverBudget,
    /// The virtual machine is shut off or does not exist, so no disk can be attached. 409.
    NodeNotRunning,
    /// The virtual machine has no free slot for another disk. 409.
    TooManyDisks,
    /// The host of the virtual machine does not reach the pool of the volume, so its disk cannot be attached there. 409.
    NotReachable,
    /// The volume or its pool is suspended: it must not be used until it is resumed. 409.
    Suspended,
    /// A pool or hypervisor cannot be reached or did not finish in time; the operation may have taken effect. Retry.
    /// 503.
    Unavailable,
    /// This server does not lead: another one is active, or will be. It did nothing; send the request to the other. 503.
    NotActive,
    /// The catalog or the pool is read-only. 503.
    ReadOnly,
    /// Internal server error; see the server's log. The operation may have taken effect. 500.
    #[serde(other)]
    Internal,
}

impl ProblemCode {
    /// The HTTP status of the code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Ended => 410,
            Self::Exists
            | Self::InUse
            | Self::NodeNotRunning
            | Self::TooManyDisks
            | Self::NotReachable
            | Self::Suspended => 409,
            Self::OutOfSpace | Self::OverBudget => 507,
            Self::Unavailable | Self::NotActive | Self::ReadOnly => 503,
            Self::Internal => 500,
        }
    }

    /// Whether the operation may have taken effect or may still be running. False only if the server reports that it
    /// did nothing.
    pub fn may_have_taken_effect(self) -> bool {
        match self {
            Self::Unavailable | Self::Internal => true,
            Self::Invalid
            | Self::Forbidden
            | Self::NotFound
            | Self::Exists
            | Self::Ended
            | Self::InUse
            | Self::OutOfSpace
            | Self::OverBudget
            | Self::NodeNotRunning
            | Self::TooManyDisks
            | Self::NotReachable
            | Self::Suspended
            | Self::NotActive
            | Self::ReadOnly => false,
        }
    }

    /// The code in the JSON body.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not-found",
            Self::Exists => "exists",
            Self::Ended => "ended",
            Self::InUse => "in-use",
            Self::OutOfSpace => "out-of-space",
            Self::OverBudget => "over-budget",
            Self::NodeNotRunning => "node-not-running",
            Self::TooManyDisks => "too-many-disks",
            Self::NotReachable => "not-reachable",
            Self::Suspended => "suspended",
            Self::Unavailable => "unavailable",
            Self::NotActive => "not-active",
            Self::ReadOnly => "read-only",
            Self::Internal => "internal",
        }
    }

    /// The RFC 9457 title: constant for each code.
    pub fn title(self) -> &'static str {
        match self {
            Self::Invalid => "The request is not valid",
            Self::Forbidden => "The client's role does not allow the request",
            Self::NotFound => "The object does not exist",
            Self::Exists => "The ID belongs to an object that differs from the request",
            Self::Ended => "The attachment with this ID was deleted",
            Self::InUse => "The object is in use",
            Self::OutOfSpace => "No pool can hold the volume",
            Self::OverBudget => "The budget of the account does not allow it",
            Self::NodeNotRunning => "The virtual machine is not running",
            Self::TooManyDisks => "The virtual machine has no free slot for another disk",
            Self::NotReachable => "The host of the virtual machine does not reach the pool",
            Self::Suspended => "The volume or its pool is suspended",
            Self::Unavailable => "The infrastructure cannot be reached or has not finished",
            Self::NotActive => "The server is not the active one",
            Self::ReadOnly => "The storage is read-only",
            Self::Internal => "Internal server error",
        }
    }
}

impl fmt::Display for ProblemCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Kind of the object that a problem is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ObjectKind {
    /// A pool.
    Pool,
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
    /// A node: a virtual machine.
    Node,
    /// An attachment.
    Attachment,
    /// An account.
    Account,
    /// A hypervisor, by its name in the server's `--hypervisor` flag.
    Hypervisor,
    /// A path that the API does not serve.
    Route,
    /// A kind that this client version does not know.
    #[serde(other)]
    Other,
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pool => "pool",
            Self::Volume => "volume",
            Self::Snapshot => "snapshot",
            Self::Node => "node",
            Self::Attachment => "attachment",
            Self::Account => "account",
            Self::Hypervisor => "hypervisor",
            Self::Route => "route",
            Self::Other => "object",
        })
    }
}

/// Why a pool cannot hold a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Rejection {
    /// The request names another pool.
    NotNamed,
    /// The pool is unhealthy: its directory is missing, not the registered one, or not readable.
    Unhealthy,
    /// An operator cordoned the pool.
    Cordoned,
    /// An operator suspended the pool.
    Suspended,
    /// The pool has too little free space after reservations.
    TooSmall,
    /// The pool lacks a label that the request selects on.
    Labels,
    /// The pool is not reachable from the requested zones.
    Zone,
    /// No configured host reaches the pool.
    NoHost,
    /// The pool holds a volume of the same anti-affinity group.
    AntiAffinity,
    /// A reason that this client version does not know.
    #[serde(other)]
    Other,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotNamed => "not the requested pool",
            Self::Unhealthy => "unhealthy",
            Self::Cordoned => "cordoned",
            Self::Suspended => "suspended",
            Self::TooSmall => "too little free space",
            Self::Labels => "labels do not match",
            Self::Zone => "in another zone",
            Self::NoHost => "reached by no host",
            Self::AntiAffinity => "holds a volume of the same anti-affinity group",
            Self::Other => "another reason",
        })
    }
}

/// A pool and why it cannot hold the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolRejection {
    /// The pool.
    pub pool: PoolName,
    /// The first reason, in the order in which placement checks them.
    pub reason: Rejection,
    /// Bytes available to a new volume in this pool.
    pub free_bytes: u64,
}

/// Error response: an RFC 9457 problem, media type `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// `urn:nestor:infra:<code>`.
    #[serde(rename = "type", default)]
    pub type_: String,
    /// Short summary; constant for each code.
    #[serde(default)]
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What failed, on which object, why, and what to do.
    #[serde(default)]
    pub detail: String,
    /// Machine-readable error code.
    pub code: ProblemCode,
    /// Kind of the object that the problem is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub what: Option<ObjectKind>,
    /// ID of the object that the problem is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// With `in-use`: the nodes that use the object.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeRef>,
    /// With `out-of-space`: each pool and why it was rejected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejections: Vec<PoolRejection>,
    /// With `over-budget`: the limit that the request exceeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess: Option<Box<BudgetExcess>>,
}

impl Problem {
    /// A problem with this code, without extension members.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self {
            type_: format!("urn:nestor:infra:{code}"),
            title: code.title().to_owned(),
            status: code.status(),
            detail: detail.into(),
            code,
            what: None,
            id: None,
            nodes: Vec::new(),
            rejections: Vec::new(),
            excess: None,
        }
    }

    /// Sets the object that the problem is about.
    #[must_use]
    pub fn about(mut self, what: ObjectKind, id: impl fmt::Display) -> Self {
        self.what = Some(what);
        self.id = Some(id.to_string());
        self
    }

    /// Sets the nodes that use the object.
    #[must_use]
    pub fn used_by(mut self, nodes: Vec<NodeRef>) -> Self {
        self.nodes = nodes;
        self
    }

    /// Sets the reason of each rejected pool.
    #[must_use]
    pub fn rejected_by(mut self, rejections: Vec<PoolRejection>) -> Self {
        self.rejections = rejections;
        self
    }

    /// Sets the limit that the request exceeds.
    #[must_use]
    pub fn exceeds(mut self, excess: BudgetExcess) -> Self {
        self.excess = Some(Box::new(excess));
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if self.detail.is_empty() { &self.title } else { &self.detail };
        write!(f, "{text} ({})", self.code)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_the_members_of_rfc_9457_and_round_trips() {
        let problem = Problem::new(ProblemCode::OutOfSpace, "no space")
            .about(ObjectKind::Volume, "v1")
            .rejected_by(vec![PoolRejection {
                pool: PoolName::new("p").unwrap(),
                reason: Rejection::TooSmall,
                free_bytes: 5,
            }]);
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "urn:nestor:infra:out-of-space");
        assert_eq!(json["status"], 507);
        assert_eq!(json["rejections"][0]["reason"], "too-small");
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
    }

    #[test]
    fn an_unknown_code_of_a_newer_server_decodes_as_internal() {
        let problem: Problem = serde_json::from_str(r#"{"status":418,"code":"teapot"}"#).unwrap();
        assert_eq!(problem.code, ProblemCode::Internal);
        assert_eq!(problem.status, 418);
    }
}
