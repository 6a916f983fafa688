//! Admission of attachments: at most one writer, except on shareable volumes. The decision is pure and runs in the
//! transaction that writes the row; the protocol model (crate `model`) uses the same function.

use infra_api::{
    Access, AttachmentId, AttachmentSpec, AttachmentState, NodeRef, ObjectKind, Problem, ProblemCode,
    VolumeState,
};

use crate::catalog::{AttachmentRow, Blank, Hold, NodeRow, Tx, VolumeRow};
use crate::clock::now;
use crate::placement::Hosts;
use crate::safety::Check;
use crate::service::lookups::{node_refs, pool_of};
use crate::service::problems::{Failure, Result};
use crate::service::reach;

/// A request for an attachment.
#[derive(Debug, Clone, Copy)]
pub struct AttachRequest<'a> {
    /// Requested ID.
    pub id: &'a AttachmentId,
    /// Requested spec.
    pub spec: &'a AttachmentSpec,
    /// An earlier attachment that is no longer needed; the new one may take over its disk.
    pub replaces: Option<&'a AttachmentId>,
}

/// Catalog state that the decision depends on.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The attachment with the requested ID.
    pub row: Option<AttachmentRow>,
    /// Whether an attachment with this ID was ended.
    pub ended: bool,
    /// The volume.
    pub volume: Option<VolumeRow>,
    /// The node.
    pub node: Option<NodeRow>,
    /// Why the host of the node does not reach the pool of the volume.
    pub unreached: Option<String>,
    /// Objects that are being copied block by block from the volume.
    pub copies: Vec<String>,
    /// The operation that holds the volume.
    pub hold: Option<Hold>,
    /// Other attachments of the volume.
    pub others: Vec<AttachmentRow>,
    /// Their nodes, in the same order.
    pub other_nodes: Vec<NodeRef>,
}

/// Outcome of an admitted request.
#[derive(Debug, Clone)]
pub enum Admission {
    /// The attachment exists already.
    Exists(AttachmentRow),
    /// The attachment is created.
    New(AttachmentRow),
    /// The attachment replaces an earlier one and takes over its disk.
    Replaces {
        /// ID of the earlier attachment, which ends.
        of: AttachmentId,
        /// The new attachment's row.
        row: AttachmentRow,
    },
}

impl Admission {
    /// The row of the admitted attachment.
    pub fn row(&self) -> &AttachmentRow {
        match self {
            Self::Exists(row) | Self::New(row) | Self::Replaces { row, .. } => row,
        }
    }
}

/// Decides on a request. `now` is RFC 3339.
pub fn admit(request: AttachRequest<'_>, facts: &Facts, now: &str) -> Result<Admission> {
    let AttachRequest { id, spec, replaces } = request;
    let problem = |code, detail: String| Problem::new(code, detail).about(ObjectKind::Attachment, id);
    if let Some(row) = &facts.row {
        if row.spec() != *spec {
            let detail = format!(
                "the attachment {id} exists and is of volume {} to node {} ({}{})",
                row.volume,
                row.node,
                row.access,
                if row.read_only { ", read-only" } else { "" }
            );
            return Err(problem(ProblemCode::Exists, detail).into());
        }
        if row.state == AttachmentState::Detaching {
            let detail = format!("the attachment {id} is being detached; its ID is not reused");
            return Err(problem(ProblemCode::Unavailable, detail).into());
        }
        return Ok(Admission::Exists(row.clone()));
    }
    if facts.ended && Check::EndedIds.applies() {
        let detail = format!(
            "the attachment {id} was deleted and its ID is not reused: the request is outdated, or needs a new ID"
        );
        return Err(problem(ProblemCode::Ended, detail).into());
    }
    let earlier = replaces.and_then(|earlier| facts.others.iter().find(|other| other.id == *earlier));
    if let Some(earlier) = earlier
        && earlier.spec() == *spec
        && earlier.state != AttachmentState::Detaching
    {
        let row = AttachmentRow { id: id.clone(), ..earlier.clone() };
        return Ok(Admission::Replaces { of: earlier.id.clone(), row });
    }
    if spec.access == Access::MultiNodeReadOnly && !spec.read_only {
        let detail = format!("the attachment {id} is multi-node-read-only and must set readOnly");
        return Err(problem(ProblemCode::Invalid, detail).into());
    }
    let volume = facts.volume.as_ref().ok_or_else(|| Failure::not_found(ObjectKind::Volume, &spec.volume))?;
    facts.node.as_ref().ok_or_else(|| Failure::not_found(ObjectKind::Node, spec.node))?;
    let about_volume = |code, detail| Problem::new(code, detail).about(ObjectKind::Volume, &spec.volume);
    match volume.state {
        VolumeState::Ready => {}
        VolumeState::Creating => {
            let detail = format!("the volume {} is not ready yet; retry later", volume.id);
            return Err(about_volume(ProblemCode::Unavailable, detail).into());
        }
        VolumeState::Deleting => {
            let detail = format!("the volume {} is being deleted", volume.id);
            return Err(about_volume(ProblemCode::NotFound, detail).into());
        }
    }
    if spec.access == Access::MultiNode && !volume.spec.shareable {
        let detail = format!(
            "the volume {} is not shareable, so only one node may write to it: attach it single-node, or create a volume with \
             shareable: true for software that coordinates its writes to a shared disk",
            volume.id
        );
        return Err(problem(ProblemCode::Invalid, detail).into());
    }
    if let Some(why) = &facts.unreached {
        return Err(reach::problem(&spec.volume, why.clone()).into());
    }
    if let Some(hold) = facts.hold.as_ref().filter(|hold| !hold.allows_attaching(spec.read_only)) {
        let detail = format!("the volume {} {hold}", volume.id);
        return Err(about_volume(hold.code(ProblemCode::Unavailable), detail).into());
    }
    // A block-by-block copy is consistent only without writes.
    if !spec.read_only && !facts.copies.is_empty() {
        let detail = format!(
            "the volume {} is being copied to {} and must not be written meanwhile; retry after the copy, or delete its \
             target",
            volume.id,
            facts.copies.join(", ")
        );
        return Err(about_volume(ProblemCode::Unavailable, detail).into());
    }
    // Read-only attachments may be shared with each other, and so may multi-writer attachments.
    let shared = spec.access != Access::SingleNode
        && facts.others.iter().all(|other| other.access == spec.access && other.node != spec.node);
    if !facts.others.is_empty() && !shared && Check::SingleWriter.applies() {
        let places: Vec<String> = facts
            .others
            .iter()
            .zip(&facts.other_nodes)
            .map(|(other, node)| format!("{node} as {} ({})", other.id, other.access))
            .collect();
        let detail = format!(
            "the volume {} is attached to {}; detach it there before it is attached {} to {}",
            spec.volume,
            places.join(", "),
            spec.access,
            spec.node
        );
        let nodes = facts.other_nodes.clone();
        return Err(about_volume(ProblemCode::InUse, detail).used_by(nodes).into());
    }
    Ok(Admission::New(AttachmentRow {
        id: id.clone(),
        volume: spec.volume.clone(),
        node: spec.node,
        read_only: spec.read_only,
        access: spec.access,
        state: AttachmentState::Attaching,
        message: None,
        created_at: now.to_owned(),
        blank: if spec.is_sole_writer() { Blank::Undecided } else { Blank::No },
    }))
}

/// Decides on a request and writes the outcome.
pub(super) fn admit_and_write(tx: &Tx<'_>, hosts: &Hosts, request: AttachRequest<'_>) -> Result<Admission> {
    let AttachRequest { id, spec, .. } = request;
    let mut others = tx.attachments(None, Some(&spec.volume))?;
    others.retain(|other| other.id != *id);
    let (volume, node) = (tx.volume(&spec.volume)?, tx.node(spec.node)?);
    let unreached = match volume.as_ref().zip(node.as_ref()) {
        Some((volume, node)) => reach::unreached(hosts, &volume.id, &pool_of(tx, volume)?, node),
        None => None,
    };
    let facts = Facts {
        row: tx.attachment(id)?,
        ended: tx.is_attachment_ended(id)?,
        volume,
        node,
        unreached,
        copies: if spec.read_only { Vec::new() } else { tx.copies_of(&spec.volume)? },
        hold: tx.hold(&spec.volume)?,
        other_nodes: node_refs(tx, &others)?,
        others,
    };
    let admission = admit(request, &facts, &now())?;
    match &admission {
        Admission::Exists(_) => {}
        Admission::New(row) => {
            // The copy of the detached volume is given up: an attach does not wait for it.
            tx.interrupt_copy(&row.volume)?;
            tx.insert_attachment(row)?;
        }
        Admission::Replaces { of, row } => tx.rename_attachment(of, &row.id)?,
    }
    Ok(admission)
}
