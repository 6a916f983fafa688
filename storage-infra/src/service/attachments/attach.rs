//! Attach: admission, intent, effect and result.

use infra_api::{
    AttachmentId, AttachmentState, Change, EventKind, MovePhase, NodeRef, ObjectKind, Problem, ProblemCode,
    VolumeId,
};

use super::admission::{Admission, AttachRequest, admit_and_write};
use super::operations::Trigger;
use super::{Attachments, Progress};
use crate::audit;
use crate::catalog::{AttachmentRow, Hold, Tx};
use crate::service::disks::{AttachError, AttachmentContext};
use crate::service::problems::{Failure, Result};

/// What holds a volume whose writes went elsewhere than to its data.
fn diverted(tx: &Tx<'_>, volume: &VolumeId) -> Result<Option<Hold>> {
    Ok(tx.altered_disks(volume)?.into_iter().find(|disk| disk.diverted).map(Hold::Altered))
}

impl Attachments {
    pub(super) async fn do_attach(&self, id: &AttachmentId, trigger: Trigger) -> Result<Progress> {
        // Admission comes before the volume's lock, so that a refused client does not wait for operations on the
        // volume. From here on the row excludes others.
        let by_catalog = matches!(trigger, Trigger::Catalog);
        if let Trigger::Request(spec, _) = &trigger {
            self.unexpected_disks.refuse(&spec.volume, Some(spec.node)).await?;
        }
        let (key, hosts) = (id.clone(), self.core.hosts().clone());
        let admitted = self
            .core
            .catalog()
            .run(move |tx| -> Result<_> {
                Ok(match trigger {
                    Trigger::Request(spec, replaces) => {
                        let request = AttachRequest { id: &key, spec: &spec, replaces: replaces.as_ref() };
                        Some(admit_and_write(tx, &hosts, request)?)
                    }
                    Trigger::Catalog => tx.attachment(&key)?.map(Admission::Exists),
                })
            })
            .await?;
        let Some(admission) = admitted else { return Ok(Progress::Gone) };
        match &admission {
            Admission::Exists(_) => {}
            Admission::New(_) => self.core.emit(EventKind::Attachment, id, Change::Created),
            Admission::Replaces { of, .. } => {
                tracing::info!(attachment = %id, earlier = %of, "replaced an earlier attachment and took over its disk");
                self.conditions.clear_disk_lost(of);
                self.core.emit(EventKind::Attachment, of, Change::Deleted);
                self.core.emit(EventKind::Attachment, id, Change::Created);
            }
        }
        let is_new = matches!(admission, Admission::New(_));
        let row = admission.row();
        let _lock = self.core.lock_volume(&row.volume).await;
        // The volume may get another file by that.
        let settled = self.moves.settle(&row.volume, false).await;
        let key = id.clone();
        let current = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.attachment(&key)? else { return Ok(None) };
                let moving = tx.volume_move(&row.volume)?;
                let is_mirrored = moving.is_some_and(|moving| moving.phase == MovePhase::Mirroring);
                let hold = match tx.suspended_hold(&row.volume)? {
                    Some(hold) => Some(hold),
                    None => diverted(tx, &row.volume)?,
                };
                Ok(Some((AttachmentContext::of(tx, row)?, hold, is_mirrored)))
            })
            .await?;
        let Some((mut context, hold, is_mirrored)) = current else { return Ok(Progress::Gone) };
        if context.row.state == AttachmentState::Detaching {
            return Ok(Progress::InProgress(context.to_attachment()));
        }
        if by_catalog && context.row.state == AttachmentState::Attached {
            self.log_if_lost(&context.row).await;
        }
        let attached = match (settled, self.refuse_held(&context.row, hold, is_new).await) {
            (Err(failure), _) if is_new => Err(AttachError::NotAttached(failure)),
            (Err(failure), _) => Err(AttachError::Unknown(failure)),
            (Ok(()), Err(refused)) => Err(refused),
            (Ok(()), Ok(())) if is_mirrored => self.keep_mirrored(&context.row).await,
            (Ok(()), Ok(())) => self.disks.attach(&mut context, is_new).await,
        };
        match attached {
            Ok(()) => {
                if context.row.state != AttachmentState::Attached || context.row.message.is_some() {
                    self.set_state(id, AttachmentState::Attached, None).await?;
                    tracing::info!(attachment = %id, volume = %context.row.volume, node = %context.row.node, "attached");
                }
                self.conditions.clear_disk_lost(id);
                self.power.has_run(context.row.node);
                context.row.state = AttachmentState::Attached;
                context.row.message = None;
                Ok(Progress::Attached(context.to_attachment()))
            }
            Err(AttachError::NotAttached(failure)) if context.row.state == AttachmentState::Attaching => {
                // Confirmed not attached: roll back.
                let key = id.clone();
                self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.refuse_attachment(&key)?) }).await?;
                audit::log_removal(format!("attachment {id}"), "its disk was not attached");
                self.conditions.clear_disk_lost(id);
                self.retries.forget(id);
                self.core.emit(EventKind::Attachment, id, Change::Deleted);
                Err(failure)
            }
            Err(AttachError::NotAttached(failure) | AttachError::Unknown(failure)) => {
                if context.row.message.as_ref() != Some(&failure.0.detail) {
                    self.set_state(id, context.row.state, Some(failure.0.detail.clone())).await?;
                }
                Err(failure)
            }
        }
    }

    /// Refuses to attach the disk of a volume that is suspended, or whose content is elsewhere, also a disk that the VM lost.
    /// The disk of an existing attachment stays.
    async fn refuse_held(
        &self,
        row: &AttachmentRow,
        hold: Option<Hold>,
        is_new: bool,
    ) -> std::result::Result<(), AttachError> {
        let Some(hold) = hold else { return Ok(()) };
        let refuse = |code, state: &str| {
            let detail = format!("the volume {} {hold}; {state}", row.volume);
            Failure::from(Problem::new(code, detail).about(ObjectKind::Volume, &row.volume))
        };
        if is_new {
            let code = hold.code(ProblemCode::InUse);
            return Err(AttachError::NotAttached(refuse(code, "it was not attached")));
        }
        match self.disks.missing(row.node, vec![row.clone()]).await {
            Ok((_, missing)) if missing.is_empty() => Ok(()),
            Ok(_) => Err(AttachError::Unknown(refuse(ProblemCode::Unavailable, "the VM lost its disk"))),
            Err(failure) => Err(AttachError::Unknown(failure)),
        }
    }

    /// While its disk is copied, a VM has it. One that lost it in this moment gets none before it is known which file it used.
    async fn keep_mirrored(&self, row: &AttachmentRow) -> std::result::Result<(), AttachError> {
        match self.disks.missing(row.node, vec![row.clone()]).await {
            Ok((_, missing)) if missing.is_empty() => Ok(()),
            Ok(_) => {
                let detail =
                    format!("the VM lost the disk of volume {} while it was copied; retry", row.volume);
                let problem = Problem::new(ProblemCode::Unavailable, detail);
                Err(AttachError::Unknown(problem.about(ObjectKind::Volume, &row.volume).into()))
            }
            Err(failure) => Err(AttachError::Unknown(failure)),
        }
    }

    /// Checks again whether a VM lost a disk, under the volume's lock, which excludes a detach.
    async fn log_if_lost(&self, row: &AttachmentRow) {
        match self.disks.missing(row.node, vec![row.clone()]).await {
            Ok((_, missing)) if missing.is_empty() => {}
            Ok((name, _)) => {
                let node = NodeRef { uuid: row.node, name };
                if self.conditions.set_disk_lost(row, &node) {
                    tracing::info!(attachment = %row.id, volume = %row.volume, %node, "the disk disappeared from the running VM; attaching it again");
                    self.core.metrics().repaired();
                }
            }
            Err(failure) => {
                tracing::debug!(node = %row.node, %failure, "cannot check whether the VM has the disk");
            }
        }
    }
}
