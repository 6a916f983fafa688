//! Plugs a disk in: admission, intent, effect, and what came of it.

use infra_api::{AttachmentId, AttachmentState, Change, EventKind, NodeRef, ProblemCode};

use uuid::Uuid;

use super::operations::Wanted;
use super::{Parts, Progress, describe};
use crate::audit;
use crate::catalog::{AttachmentRow, Blank, Tx};
use crate::engine::Object;
use crate::hypervisor::{HypervisorError, Unplugged};
use crate::service::admission::{Admission, Wish, enter};
use crate::service::{Failure, Result, Service, seconds};

/// Why a plug did not end well, by what it leaves.
enum PlugError {
    /// The disk is not in the virtual machine, confirmed.
    NotPlugged(Failure),
    /// The disk may be there.
    Unknown(Failure),
}

impl Service {
    pub(super) async fn do_attach(&self, id: &AttachmentId, wanted: Wanted) -> Result<Progress> {
        // Admitted before the lock is had: whoever cannot have the volume is told so at once, and does not wait for
        // what is done to it. From here on the row keeps others out.
        let by_catalog = matches!(wanted, Wanted::ByCatalog);
        if let Wanted::ByCaller(spec, _) = &wanted {
            self.refuse_unwanted(&spec.volume, Some(spec.node)).await?;
        }
        let key = id.clone();
        let admitted = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                Ok(match wanted {
                    Wanted::ByCaller(spec, replaces) => {
                        let wish = Wish { id: &key, spec: &spec, replaces: replaces.as_ref() };
                        Some(enter(tx, wish)?)
                    }
                    Wanted::ByCatalog => tx.attachment(&key)?.map(Admission::There),
                })
            })
            .await?;
        let Some(admission) = admitted else { return Ok(Progress::Gone) };
        match &admission {
            Admission::There(_) => {}
            Admission::New(_) => self.emit(EventKind::Attachment, id, Change::Created),
            Admission::Instead { of, .. } => {
                tracing::info!(attachment = %id, earlier = %of, "took over the disk of an earlier attachment");
                self.disk_is_not_lost(of);
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
            .read(move |tx| -> Result<_> { tx.attachment(&key)?.map(|row| Parts::of(tx, row)).transpose() })
            .await?;
        let Some(mut parts) = current else { return Ok(Progress::Gone) };
        if parts.row.state == AttachmentState::Detaching {
            return Ok(Progress::UnderWay(parts.to_attachment()));
        }
        if by_catalog && parts.row.state == AttachmentState::Attached {
            self.tell_if_lost(&parts.row).await;
        }
        match self.plug(&mut parts, is_new).await {
            Ok(()) => {
                if parts.row.state != AttachmentState::Attached || parts.row.message.is_some() {
                    self.set_state(id, AttachmentState::Attached, None).await?;
                    tracing::info!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, "attached");
                }
                self.disk_is_not_lost(id);
                self.has_run(parts.row.node);
                parts.row.state = AttachmentState::Attached;
                parts.row.message = None;
                Ok(Progress::Plugged(parts.to_attachment()))
            }
            Err(PlugError::NotPlugged(failure)) if parts.row.state == AttachmentState::Attaching => {
                // Nothing is plugged, so nothing is left behind.
                let key = id.clone();
                self.0
                    .catalog
                    .run(move |tx| -> Result<_> { Ok(tx.refuse_attachment(&key, seconds())?) })
                    .await?;
                audit::forgot(format!("attachment {id}"), "its disk was not plugged");
                self.disk_is_not_lost(id);
                self.0.retries.forget(id);
                self.emit(EventKind::Attachment, id, Change::Deleted);
                Err(failure)
            }
            Err(PlugError::NotPlugged(failure) | PlugError::Unknown(failure)) => {
                if parts.row.message.as_ref() != Some(&failure.0.detail) {
                    self.set_state(id, parts.row.state, Some(failure.0.detail.clone())).await?;
                }
                Err(failure)
            }
        }
    }

    /// Looks again whether a machine lost a disk, while the volume's lock keeps everybody from unplugging it.
    async fn tell_if_lost(&self, row: &AttachmentRow) {
        match self.missing(row.node, vec![row.clone()]).await {
            Ok((_, missing)) if missing.is_empty() => {}
            Ok((name, _)) => {
                let node = NodeRef { uuid: row.node, name };
                if self.disk_is_lost(row, &node) {
                    tracing::info!(attachment = %row.id, volume = %row.volume, %node, "the disk is gone from the running VM; plugging it again");
                    self.0.metrics.repaired();
                }
            }
            Err(failure) => tracing::debug!(node = %row.node, %failure, "could not look for the disk"),
        }
    }

    async fn plug(&self, parts: &mut Parts, is_new: bool) -> Result<(), PlugError> {
        let name = Object::Volume(parts.volume.id.clone());
        let source = self
            .engine::<_, Failure, _>(self.engine_of(&parts.pool), move |engine| Ok(engine.locate(&name)?))
            .await
            .map_err(PlugError::Unknown)?;
        let hypervisor = self.hypervisor(&parts.node.spec.hypervisor).map_err(PlugError::Unknown)?;
        self.note_plug(parts, is_new).await?;
        if parts.row.blank == Blank::Undecided {
            parts.row.blank = self.attest(parts).await.map_err(PlugError::Unknown)?;
        }
        let disk = parts.disk(source);
        let Err(error) = hypervisor.plug(parts.row.node, &disk).await else { return Ok(()) };
        let nothing = match &error {
            // An earlier plug may have worked before the VM was moved or saved.
            HypervisorError::NotRunning(_) => {
                is_new || matches!(self.prove_unplugged(parts, &disk).await, Ok(Unplugged::Gone))
            }
            HypervisorError::Refused(_) | HypervisorError::Full(_) => true,
            HypervisorError::Unreachable(_) | HypervisorError::Uncertain(_) => false,
        };
        let failure = describe(error, parts);
        Err(if nothing { PlugError::NotPlugged(failure) } else { PlugError::Unknown(failure) })
    }

    /// Decides whether the disk is blank, by what was just noted of its bytes: while it is plugged the node may write, and
    /// nobody can tell any more. What began with other bytes never is.
    async fn attest(&self, parts: &Parts) -> Result<Blank> {
        let (id, volume) = (parts.row.id.clone(), parts.volume.id.clone());
        let decide = move |tx: &Tx<'_>| -> Result<Blank> {
            let is_blank = tx.volume(&volume)?.is_some_and(|row| !row.written && row.spec.source.is_none());
            let blank = if is_blank { Blank::Attested(Uuid::new_v4()) } else { Blank::No };
            tx.set_attachment_blank(&id, blank)?;
            Ok(blank)
        };
        self.0.catalog.run(decide).await
    }

    /// Notes with the volume's bytes that this node may have it: whoever is noted there must be known to the catalog.
    async fn note_plug(&self, parts: &Parts, is_new: bool) -> Result<(), PlugError> {
        let noted = if parts.row.read_only {
            // Two who read do no harm: they need not wait for a filesystem that takes no writes.
            let known = self.refuse_behind(&parts.volume.id).await;
            known.inspect(|()| self.note_soon(&parts.volume.id))
        } else {
            self.note_volume(&parts.volume.id).await
        };
        match noted {
            Ok(()) => Ok(()),
            // An older one may have been plugged in a past that the catalog does not know.
            Err(failure) if is_new && failure.code() == ProblemCode::InUse => {
                Err(PlugError::NotPlugged(failure))
            }
            Err(failure) => Err(PlugError::Unknown(failure)),
        }
    }
}
