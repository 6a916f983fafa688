//! Errors on the wire: RFC 9457 problem details with a code from a closed list.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{NodeRef, PoolName};

/// What went wrong, as a closed list that callers decide on. The text of a problem is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemCode {
    /// The request itself is wrong; repeating it cannot help. 400.
    Invalid,
    /// The pool, volume, node or attachment named by `what` and `id` is not there. 404.
    NotFound,
    /// The id is taken by something that differs from the request. 409.
    Exists,
    /// The attachment of this id was ended, and an id is used once; take another. 410.
    Ended,
    /// The object is in use; `nodes` says where, if by nodes. 409.
    InUse,
    /// No pool can take the volume; `rejections` says why, per pool. 507.
    OutOfSpace,
    /// The virtual machine is off or gone, so no disk can be plugged. 409.
    NodeNotRunning,
    /// The virtual machine has as many disks as its hypervisor can plug. 409.
    TooManyDisks,
    /// Something below cannot be reached or did not finish; the work may have happened. Repeat it. 503.
    Unavailable,
    /// The catalog or the pool is read-only. 503.
    ReadOnly,
    /// A fault of the server; see its log. The work may have happened. 500.
    #[serde(other)]
    Internal,
}

impl ProblemCode {
    /// The HTTP status that goes with the code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::NotFound => 404,
            Self::Ended => 410,
            Self::Exists | Self::InUse | Self::NodeNotRunning | Self::TooManyDisks => 409,
            Self::OutOfSpace => 507,
            Self::Unavailable | Self::ReadOnly => 503,
            Self::Internal => 500,
        }
    }

    /// Whether the work may have happened or may still be under way. False only where the server says that it did nothing.
    pub fn may_have_happened(self) -> bool {
        match self {
            Self::Unavailable | Self::Internal => true,
            Self::Invalid
            | Self::NotFound
            | Self::Exists
            | Self::Ended
            | Self::InUse
            | Self::OutOfSpace
            | Self::NodeNotRunning
            | Self::TooManyDisks
            | Self::ReadOnly => false,
        }
    }

    /// The code as it stands on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not-found",
            Self::Exists => "exists",
            Self::Ended => "ended",
            Self::InUse => "in-use",
            Self::OutOfSpace => "out-of-space",
            Self::NodeNotRunning => "node-not-running",
            Self::TooManyDisks => "too-many-disks",
            Self::Unavailable => "unavailable",
            Self::ReadOnly => "read-only",
            Self::Internal => "internal",
        }
    }

    /// A title that does not change from one occurrence to the next.
    pub fn title(self) -> &'static str {
        match self {
            Self::Invalid => "The request is not valid",
            Self::NotFound => "The object is not there",
            Self::Exists => "The id is taken by something else",
            Self::Ended => "The attachment of this id is over",
            Self::InUse => "The object is in use",
            Self::OutOfSpace => "No pool can take the volume",
            Self::NodeNotRunning => "The virtual machine is not running",
            Self::TooManyDisks => "The virtual machine has no place for another disk",
            Self::Unavailable => "The infrastructure cannot be reached or is not done",
            Self::ReadOnly => "The storage is read-only",
            Self::Internal => "The server failed",
        }
    }
}

impl fmt::Display for ProblemCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The kind of object that a problem is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// A pool.
    Pool,
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
    /// A node, that is a virtual machine.
    Node,
    /// An attachment.
    Attachment,
    /// A hypervisor, named in the server's flags.
    Hypervisor,
    /// A path that this API does not have.
    Route,
    /// A kind that this client does not know yet.
    #[serde(other)]
    Other,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pool => "pool",
            Self::Volume => "volume",
            Self::Snapshot => "snapshot",
            Self::Node => "node",
            Self::Attachment => "attachment",
            Self::Hypervisor => "hypervisor",
            Self::Route => "route",
            Self::Other => "object",
        })
    }
}

/// Why a pool could not take a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Rejection {
    /// The request names another pool.
    NotNamed,
    /// The pool is unhealthy: its directory is gone, foreign or not readable.
    Unhealthy,
    /// The pool is cordoned by its operators.
    Cordoned,
    /// The pool's free space, with reservations counted, is too small.
    TooSmall,
    /// The pool lacks a label that the request asks for.
    Labels,
    /// The pool cannot be reached from the zone that the request asks for.
    Zone,
    /// The pool holds a volume of the same anti-affinity group.
    AntiAffinity,
    /// A reason that this client does not know yet.
    #[serde(other)]
    Other,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotNamed => "not the pool asked for",
            Self::Unhealthy => "unhealthy",
            Self::Cordoned => "cordoned",
            Self::TooSmall => "too little free space",
            Self::Labels => "labels do not match",
            Self::Zone => "in another zone",
            Self::AntiAffinity => "holds a volume of the same anti-affinity group",
            Self::Other => "another reason",
        })
    }
}

/// One pool and why it could not take the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolRejection {
    /// The pool.
    pub pool: PoolName,
    /// The first reason, in the order of placement.
    pub reason: Rejection,
    /// What the pool could still take, in bytes.
    pub free_bytes: u64,
}

/// An RFC 9457 problem, media type `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// `urn:nestor:infra:<code>`.
    #[serde(rename = "type", default)]
    pub type_: String,
    /// The same for all problems of this code.
    #[serde(default)]
    pub title: String,
    /// The HTTP status again.
    pub status: u16,
    /// What happened, to which object, why, and what to do.
    #[serde(default)]
    pub detail: String,
    /// What to decide on.
    pub code: ProblemCode,
    /// The kind of object that the problem is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub what: Option<What>,
    /// The id of the object that the problem is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// With `in-use`: the nodes that use it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeRef>,
    /// With `out-of-space`: each pool and why it was rejected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejections: Vec<PoolRejection>,
}

impl Problem {
    /// A problem of the given code, without members.
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
        }
    }

    /// Says which object the problem is about.
    #[must_use]
    pub fn about(mut self, what: What, id: impl fmt::Display) -> Self {
        self.what = Some(what);
        self.id = Some(id.to_string());
        self
    }

    /// Says which nodes use the object.
    #[must_use]
    pub fn used_by(mut self, nodes: Vec<NodeRef>) -> Self {
        self.nodes = nodes;
        self
    }

    /// Says why each pool was rejected.
    #[must_use]
    pub fn rejected_by(mut self, rejections: Vec<PoolRejection>) -> Self {
        self.rejections = rejections;
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
    fn a_problem_has_the_members_of_rfc_9457_and_reads_back() {
        let problem =
            Problem::new(ProblemCode::OutOfSpace, "no room").about(What::Volume, "v1").rejected_by(vec![
                PoolRejection {
                    pool: PoolName::new("p").unwrap(),
                    reason: Rejection::TooSmall,
                    free_bytes: 5,
                },
            ]);
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "urn:nestor:infra:out-of-space");
        assert_eq!(json["status"], 507);
        assert_eq!(json["rejections"][0]["reason"], "too-small");
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
    }

    #[test]
    fn a_code_of_a_newer_server_is_taken_as_internal() {
        let problem: Problem = serde_json::from_str(r#"{"status":418,"code":"teapot"}"#).unwrap();
        assert_eq!(problem.code, ProblemCode::Internal);
        assert_eq!(problem.status, 418);
    }
}
