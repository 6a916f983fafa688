//! Who may attach what: one writer at most, decided in the transaction that makes the row.

use infra_api::{
    Access, AttachmentId, AttachmentSpec, AttachmentState, Problem, ProblemCode, VolumeState, What,
};

use super::nodes::node_refs;
use super::{Failure, Result, now};
use crate::catalog::{AttachmentRow, Tx};

/// Answers with the row that stands for the wish, making it where that is allowed.
pub(super) fn admit(tx: &Tx<'_>, id: &AttachmentId, spec: &AttachmentSpec) -> Result<(AttachmentRow, bool)> {
    let problem = |code, detail: String| Problem::new(code, detail).about(What::Attachment, id);
    if let Some(row) = tx.attachment(id)? {
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
            let detail = format!("the attachment {id} is being detached; repeat when it is gone");
            return Err(problem(ProblemCode::Unavailable, detail).into());
        }
        return Ok((row, false));
    }
    if spec.access == Access::MultiNodeReadOnly && !spec.read_only {
        let detail = format!("the attachment {id} is multi-node-read-only and must be readOnly");
        return Err(problem(ProblemCode::Invalid, detail).into());
    }
    let volume = tx.volume(&spec.volume)?.ok_or_else(|| Failure::not_found(What::Volume, &spec.volume))?;
    tx.node(spec.node)?.ok_or_else(|| Failure::not_found(What::Node, spec.node))?;
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
    let others = tx.attachments(None, Some(&spec.volume))?;
    let shared = spec.access == Access::MultiNodeReadOnly
        && others.iter().all(|other| other.access == Access::MultiNodeReadOnly && other.node != spec.node);
    if !others.is_empty() && !shared {
        let nodes = node_refs(tx, &others)?;
        let places: Vec<String> = others
            .iter()
            .zip(&nodes)
            .map(|(other, node)| format!("{node} as {} ({})", other.id, other.access))
            .collect();
        let detail = format!(
            "the volume {} is attached to {}; detach it there before it is attached {} to {}",
            spec.volume,
            places.join(", "),
            spec.access,
            spec.node
        );
        return Err(about_volume(ProblemCode::InUse, detail).used_by(nodes).into());
    }
    let row = AttachmentRow {
        id: id.clone(),
        volume: spec.volume.clone(),
        node: spec.node,
        read_only: spec.read_only,
        access: spec.access,
        state: AttachmentState::Attaching,
        message: None,
        created_at: now(),
    };
    tx.insert_attachment(&row)?;
    Ok((row, true))
}
