//! Who may attach what: one writer at most, save on volumes made to be shared; decided in the transaction that makes the
//! row, by a rule that is pure, so that the model of the protocol (crate `model`) runs the same one.

use infra_api::{
    Access, AttachmentId, AttachmentSpec, AttachmentState, NodeRef, Problem, ProblemCode, VolumeState, What,
};

use super::nodes::node_refs;
use super::{Failure, Result, now};
use crate::catalog::{AttachmentRow, Blank, NodeRow, Tx, VolumeRow};

/// A wish for an attachment.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// The id it is to have.
    pub id: &'a AttachmentId,
    /// What it is to be.
    pub spec: &'a AttachmentSpec,
    /// The attachment whose disk it may take over, since nobody wants that one any more.
    pub replaces: Option<&'a AttachmentId>,
}

/// What the catalog says that matters to a wish.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The attachment of the wish's id.
    pub row: Option<AttachmentRow>,
    /// Whether an attachment of that id was ended.
    pub ended: bool,
    /// The volume.
    pub volume: Option<VolumeRow>,
    /// The node.
    pub node: Option<NodeRow>,
    /// What is being copied from the volume piece by piece.
    pub copies: Vec<String>,
    /// The other attachments of the volume.
    pub others: Vec<AttachmentRow>,
    /// The nodes of those, in their order.
    pub other_nodes: Vec<NodeRef>,
}

/// What becomes of a wish that is granted.
#[derive(Debug, Clone)]
pub enum Admission {
    /// The attachment is there already.
    There(AttachmentRow),
    /// It is to be made.
    New(AttachmentRow),
    /// An earlier one becomes it.
    Instead {
        /// The earlier one, which is over then.
        of: AttachmentId,
        /// The attachment as it is then.
        row: AttachmentRow,
    },
}

impl Admission {
    /// The row that stands for the wish.
    pub fn row(&self) -> &AttachmentRow {
        match self {
            Self::There(row) | Self::New(row) | Self::Instead { row, .. } => row,
        }
    }
}

/// Judges a wish by the facts. `now` is RFC 3339.
pub fn admit(wish: Wish<'_>, facts: &Facts, now: &str) -> Result<Admission> {
    let Wish { id, spec, replaces } = wish;
    let problem = |code, detail: String| Problem::new(code, detail).about(What::Attachment, id);
    if let Some(row) = &facts.row {
        if row.spec() != *spec {
            let detail = format!(
                "the attachment {id} is of volume {} to node {} ({}{})",
                row.volume,
                row.node,
                row.access,
                if row.read_only { ", read-only" } else { "" }
            );
            return Err(problem(ProblemCode::Exists, detail).into());
        }
        if row.state == AttachmentState::Detaching {
            let detail = format!("the attachment {id} is being detached, and won't come back under this id");
            return Err(problem(ProblemCode::Unavailable, detail).into());
        }
        return Ok(Admission::There(row.clone()));
    }
    if facts.ended {
        let detail = format!(
            "the attachment {id} was ended, and its id is not used again: a wish for it comes too late, and a new one \
             needs a new id"
        );
        return Err(problem(ProblemCode::Ended, detail).into());
    }
    let earlier = replaces.and_then(|earlier| facts.others.iter().find(|other| other.id == *earlier));
    if let Some(earlier) = earlier
        && earlier.spec() == *spec
        && earlier.state != AttachmentState::Detaching
    {
        let row = AttachmentRow { id: id.clone(), ..earlier.clone() };
        return Ok(Admission::Instead { of: earlier.id.clone(), row });
    }
    if spec.access == Access::MultiNodeReadOnly && !spec.read_only {
        let detail = format!("the attachment {id} is multi-node-read-only and must be readOnly");
        return Err(problem(ProblemCode::Invalid, detail).into());
    }
    let volume = facts.volume.as_ref().ok_or_else(|| Failure::not_found(What::Volume, &spec.volume))?;
    facts.node.as_ref().ok_or_else(|| Failure::not_found(What::Node, spec.node))?;
    let about_volume = |code, detail| Problem::new(code, detail).about(What::Volume, &spec.volume);
    match volume.state {
        VolumeState::Ready => {}
        VolumeState::Creating => {
            let detail = format!("the volume {} is not ready yet; repeat later", volume.id);
            return Err(about_volume(ProblemCode::Unavailable, detail).into());
        }
        VolumeState::Deleting => {
            let detail = format!("the volume {} is being deleted", volume.id);
            return Err(about_volume(ProblemCode::NotFound, detail).into());
        }
    }
    if spec.access == Access::MultiNode && !volume.spec.shareable {
        let detail = format!(
            "the volume {} is not shareable, so only one node may write to it: attach it single-node, or make a volume \
             with shareable: true for software that knows how to share a disk",
            volume.id
        );
        return Err(problem(ProblemCode::Invalid, detail).into());
    }
    // A copy is of one moment only while nobody writes.
    if !spec.read_only && !facts.copies.is_empty() {
        let detail = format!(
            "the volume {} is being copied to {}, and nobody may write to it meanwhile; repeat when that is done, or \
             delete what it is copied to",
            volume.id,
            facts.copies.join(", ")
        );
        return Err(about_volume(ProblemCode::Unavailable, detail).into());
    }
    // Readers among readers, writers among those who know of each other.
    let shared = spec.access != Access::SingleNode
        && facts.others.iter().all(|other| other.access == spec.access && other.node != spec.node);
    if !facts.others.is_empty() && !shared {
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

/// Judges a wish and writes down what is granted.
pub(super) fn enter(tx: &Tx<'_>, wish: Wish<'_>) -> Result<Admission> {
    let Wish { id, spec, .. } = wish;
    let mut others = tx.attachments(None, Some(&spec.volume))?;
    others.retain(|other| other.id != *id);
    let facts = Facts {
        row: tx.attachment(id)?,
        ended: tx.is_attachment_ended(id)?,
        volume: tx.volume(&spec.volume)?,
        node: tx.node(spec.node)?,
        copies: if spec.read_only { Vec::new() } else { tx.copies_of(&spec.volume)? },
        other_nodes: node_refs(tx, &others)?,
        others,
    };
    let admission = admit(wish, &facts, &now())?;
    match &admission {
        Admission::There(_) => {}
        Admission::New(row) => tx.insert_attachment(row)?,
        Admission::Instead { of, row } => tx.hand_over_attachment(of, &row.id, super::seconds())?,
    }
    Ok(admission)
}
