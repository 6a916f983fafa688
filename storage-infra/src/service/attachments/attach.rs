//! Attach: admission, intent, effect and result.

use infra_api::{AttachmentId, AttachmentState, Change, EventKind, NodeRef, ProblemCode};

use uuid::Uuid;

use super::operations::Trigger;
use super::{AttachmentContext, Progress, describe};
use crate::audit;
use crate::catalog::{AttachmentRow, Blank, Tx};
use crate::engine::Object;
use crate::hypervisor::{DetachOutcome, HypervisorError};
use crate::service::admission::{Admission, AttachRequest, admit_and_write};
use crate::service::{Failure, Result, Service, seconds};

/// Failure of an attach, by the state of the disk.
enum AttachError {
    /// The disk is confirmed not attached.
    NotAttached(Failure),
    /// The disk may be attached.
    Unknown(Failure),
}

impl Service {
    pub(super) async fn do_attach(&self, id: &AttachmentId, trigger: Trigger) -> Result<Progress> {
        // Admission comes before the volume's lock, so that a refused client does not wait for operations on the
        // volume. From here on the row excludes others.
        let by_catalog = matches!(trigger, Trigger::Catalog);
        if let Trigger::Request(spec, _) = &trigger {
            self.refuse_unexpected_disk(&spec.volume, Some(spec.node)).await?;
        }
        let key = id.clone();
        let admitted = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                Ok(match trigger {
                    Trigger::Request(spec, replaces) => {
                        let request = AttachRequest { id: &key, spec: &spec, replaces: replaces.as_ref() };
                        Some(admit_and_write(tx, request)?)
                    }
                    Trigger::Catalog => tx.attachment(&key)?.map(Admission::Exists),
                })
            })
            .await?;
        let Some(admission) = admitted else { return Ok(Progress::Gone) };
        match &admission {
            Admission::Exists(_) => {}
            Admission::New(_) => self.emit(EventKind::Attachment, id, Change::Created),
            Admission::Replaces { of, .. } => {
                tracing::info!(attachment = %id, earlier = %of, "replaced an earlier attachment and took over its disk");
                self.clear_disk_lost(of);
                self.emit(EventKind::Attachment, of, Change::Deleted);
                self.emit(EventKind::Attachment, id, Change::Created);
            }
        }
        let is_new = matches!(admission, Admission::New(_));
        let row = admission.row();
        let _lock = self.0.locks.lock(row.volume.as_str()).await;
        let key = id.clone();
        let current = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.attachment(&key)?.map(|row| AttachmentContext::of(tx, row)).transpose()
            })
            .await?;
        let Some(mut context) = current else { return Ok(Progress::Gone) };
        if context.row.state == AttachmentState::Detaching {
            return Ok(Progress::InProgress(context.to_attachment()));
        }
        if by_catalog && context.row.state == AttachmentState::Attached {
            self.log_if_lost(&context.row).await;
        }
        match self.attach_disk(&mut context, is_new).await {
            Ok(()) => {
                if context.row.state != AttachmentState::Attached || context.row.message.is_some() {
                    self.set_state(id, AttachmentState::Attached, None).await?;
                    tracing::info!(attachment = %id, volume = %context.row.volume, node = %context.row.node, "attached");
                }
                self.clear_disk_lost(id);
                self.has_run(context.row.node);
                context.row.state = AttachmentState::Attached;
                context.row.message = None;
                Ok(Progress::Attached(context.to_attachment()))
            }
            Err(AttachError::NotAttached(failure)) if context.row.state == AttachmentState::Attaching => {
                // Confirmed not attached: roll back.
                let key = id.clone();
                self.0
                    .catalog
                    .run(move |tx| -> Result<_> { Ok(tx.refuse_attachment(&key, seconds())?) })
                    .await?;
                audit::log_removal(format!("attachment {id}"), "its disk was not attached");
                self.clear_disk_lost(id);
                self.0.retries.forget(id);
                self.emit(EventKind::Attachment, id, Change::Deleted);
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

    /// Checks again whether a VM lost a disk, under the volume's lock, which excludes a detach.
    async fn log_if_lost(&self, row: &AttachmentRow) {
        match self.missing_disks(row.node, vec![row.clone()]).await {
            Ok((_, missing)) if missing.is_empty() => {}
            Ok((name, _)) => {
                let node = NodeRef { uuid: row.node, name };
                if self.set_disk_lost(row, &node) {
                    tracing::info!(attachment = %row.id, volume = %row.volume, %node, "the disk disappeared from the running VM; attaching it again");
                    self.0.metrics.repaired();
                }
            }
            Err(failure) => {
                tracing::debug!(node = %row.node, %failure, "cannot check whether the VM has the disk");
            }
        }
    }

    async fn attach_disk(&self, context: &mut AttachmentContext, is_new: bool) -> Result<(), AttachError> {
        let name = Object::Volume(context.volume.id.clone());
        let source = self
            .engine::<_, Failure, _>(self.engine_of(&context.pool), move |engine| Ok(engine.locate(&name)?))
            .await
            .map_err(AttachError::Unknown)?;
        let hypervisor = self.hypervisor(&context.node.spec.hypervisor).map_err(AttachError::Unknown)?;
        self.record_holder(context, is_new).await?;
        if context.row.blank == Blank::Undecided {
            context.row.blank = self.attest(context).await.map_err(AttachError::Unknown)?;
        }
        let disk = context.disk(source);
        let Err(error) = hypervisor.attach(context.row.node, &disk).await else { return Ok(()) };
        let not_attached = match &error {
            // An earlier attach may have succeeded before the VM was migrated or saved.
            HypervisorError::NotRunning(_) => {
                is_new || matches!(self.prove_detached(context, &disk).await, Ok(DetachOutcome::Detached))
            }
            HypervisorError::Refused(_) | HypervisorError::Full(_) => true,
            HypervisorError::Unreachable(_) | HypervisorError::Uncertain(_) => false,
        };
        let failure = describe(error, context);
        Err(if not_attached { AttachError::NotAttached(failure) } else { AttachError::Unknown(failure) })
    }

    /// Decides whether the disk is blank, by the record that was just written: once it is attached, the node may
    /// write to it. A copied volume is never blank.
    async fn attest(&self, context: &AttachmentContext) -> Result<Blank> {
        let (id, volume) = (context.row.id.clone(), context.volume.id.clone());
        let decide = move |tx: &Tx<'_>| -> Result<Blank> {
            let is_blank = tx.volume(&volume)?.is_some_and(|row| !row.written && row.spec.source.is_none());
            let blank = if is_blank { Blank::Attested(Uuid::new_v4()) } else { Blank::No };
            tx.set_attachment_blank(&id, blank)?;
            Ok(blank)
        };
        self.0.catalog.run(decide).await
    }

    /// Updates the volume's on-disk record with this node as holder, before the disk is attached.
    async fn record_holder(&self, context: &AttachmentContext, is_new: bool) -> Result<(), AttachError> {
        let recorded = if context.row.read_only {
            // Several readers are safe: they do not wait for a filesystem that blocks writes.
            let known = self.refuse_stale_catalog(&context.volume.id).await;
            known.inspect(|()| self.update_record_soon(&context.volume.id))
        } else {
            self.update_record(&context.volume.id).await
        };
        match recorded {
            Ok(()) => Ok(()),
            // An existing attachment may have been attached already, unknown to the catalog.
            Err(failure) if is_new && failure.code() == ProblemCode::InUse => {
                Err(AttachError::NotAttached(failure))
            }
            Err(failure) => Err(AttachError::Unknown(failure)),
        }
    }
}
