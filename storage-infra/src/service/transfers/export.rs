//! Exports: the content of a detached volume, or of a snapshot, as a stream. A volume is held by a row in the catalog
//! until all of its data is read, so that nothing writes to it.

use std::sync::Arc;
use std::time::Duration;

use infra_api::stream::{Encoder, Header, MAX_EXTENT};
use infra_api::{ObjectKind, Problem, ProblemCode, ResumePoint, VolumeSource};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{STALLED, Transfers};
use crate::audit;
use crate::blocking::run_blocking;
use crate::catalog::{PoolRow, Tx};
use crate::engine::{EngineError, Object, SourceFile, is_zero};
use crate::random;
use crate::service::core::Core;
use crate::service::lookups::{refuse_held, refuse_writers};
use crate::service::problems::{Failure, Result};
use crate::service::ticker::Ticker;
use crate::service::volumes::Source;

/// Time between attempts to record that an export has ended.
const AGAIN: Duration = Duration::from_secs(1);
/// Parts of a stream that wait for a slow client.
const PARTS_AHEAD: usize = 4;

/// A part of a stream, or why the stream ends early.
pub type Part = Result<Vec<u8>, Failure>;

/// What is exported.
struct Origin {
    pool: PoolRow,
    object: Object,
    size: u64,
    identity: Uuid,
    /// Tells states of the source apart, with the time of the file's last change.
    state: String,
    /// Whether nodes have it attached read-only.
    has_readers: bool,
}

/// Holds a volume in the catalog until it is dropped.
struct Held {
    core: Arc<Core>,
    id: Option<Uuid>,
    stop: CancellationToken,
}

impl Held {
    /// Ends the hold.
    async fn release(mut self) -> Result<()> {
        delete(&self.core, self.id).await?;
        self.id = None;
        Ok(())
    }
}

async fn delete(core: &Core, id: Option<Uuid>) -> Result<()> {
    let Some(id) = id else { return Ok(()) };
    core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_export(id)?) }).await
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let (core, stop) = (self.core.clone(), self.stop.clone());
        self.core.spawn(async move {
            let mut ticker = Ticker::every(AGAIN, stop);
            // Until then, the volume can be neither attached nor deleted. The next start releases all.
            while ticker.tick().await {
                match delete(&core, Some(id)).await {
                    Ok(()) => return,
                    Err(failure) => {
                        tracing::warn!(%failure, "cannot record yet that an export has ended; will retry");
                    }
                }
            }
        });
    }
}

impl Transfers {
    /// Starts an export. Its stream ends without an end mark if the source changes or the server stops.
    pub async fn export(
        self: &Arc<Self>,
        source: VolumeSource,
        resume: Option<ResumePoint>,
    ) -> Result<ReceiverStream<Part>> {
        let transfers = self.clone();
        self.core.run_to_completion(async move { transfers.start_export(source, resume).await }).await
    }

    async fn start_export(
        self: &Arc<Self>,
        source: VolumeSource,
        resume: Option<ResumePoint>,
    ) -> Result<ReceiverStream<Part>> {
        if let VolumeSource::Volume(id) = &source {
            self.unexpected_disks.refuse(id, None).await?;
        }
        let id = random::uuid();
        let of = source.clone();
        // Before the commit: its error does not tell that the volume is not held.
        let held = Held {
            core: self.core.clone(),
            id: matches!(source, VolumeSource::Volume(_)).then_some(id),
            stop: self.stop.clone(),
        };
        let origin = self.core.catalog().run(move |tx| begin(tx, &of, id)).await?;
        let (file, modified) = self.open(&origin).await?;
        let header = Header {
            size: origin.size,
            identity: origin.identity,
            generation: generation(&format!("{} {modified}", origin.state)),
        };
        let (encoder, first) = match resume {
            None => Encoder::start(&header),
            Some(ResumePoint { header: earlier, .. }) if earlier != header.checksum() => {
                return Err(changed(&origin.object));
            }
            Some(ResumePoint { after, .. }) if after.offset > header.size => {
                let detail = format!("offset {} is beyond the size of {} bytes", after.offset, header.size);
                return Err(Failure::new(ProblemCode::Invalid, detail));
            }
            Some(ResumePoint { after, .. }) => Encoder::resume(&header, after),
        };
        tracing::info!(object = %origin.object, bytes = origin.size, from = encoder.offset(), who = %audit::actor(), "export started");
        let (parts, receiver) = mpsc::channel(PARTS_AHEAD);
        let transfers = self.clone();
        self.core.spawn(async move {
            let sent = tokio::select! {
                () = transfers.stop.cancelled() => Err(ended("the server stops")),
                sent = pump(file, modified, (encoder, first), held, &parts) => sent,
            };
            match sent {
                Ok(bytes) => tracing::info!(object = %origin.object, bytes, "export completed"),
                Err(failure) => {
                    tracing::warn!(object = %origin.object, %failure, "export ended early");
                    let _ = parts.try_send(Err(failure));
                }
            }
        });
        Ok(ReceiverStream::new(receiver))
    }

    /// Opens the file of what is exported, and reads the time of its last change. A file that is open elsewhere without an
    /// attachment is refused.
    async fn open(&self, origin: &Origin) -> Result<(SourceFile, i128)> {
        let (object, size, has_readers) = (origin.object.clone(), origin.size, origin.has_readers);
        let open = move |engine: &dyn crate::engine::Engine| {
            let open = engine.files(&object)?.open.filter(|_| !has_readers);
            match open {
                Some(holder) => Err(EngineError::InUse(format!(
                    "the file of {object} is in use by {holder}; stop that first"
                ))),
                None => {
                    let file = SourceFile::open(&engine.locate(&object)?, size)?;
                    let modified = file.modified()?;
                    Ok((file, modified))
                }
            }
        };
        Ok(self.engines.run::<_, EngineError, _>(&origin.pool, open).await?)
    }
}

/// Reads what is exported, and records that it is.
fn begin(tx: &Tx<'_>, source: &VolumeSource, export: Uuid) -> Result<Origin> {
    let Source { pool, object, capacity, .. } = Source::of(tx, source)?;
    match source {
        VolumeSource::Volume(id) => {
            let row = tx.volume(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))?;
            refuse_held(tx, id, true)?;
            // The export would be inconsistent.
            refuse_writers(tx, id, |nodes| {
                format!(
                    "the volume {id} is attached to {nodes} and may change during an export; take a snapshot and export that, \
                     or detach the volume first"
                )
            })?;
            if row.grow_to.is_some() {
                let detail = format!("the volume {id} is being expanded; retry after that");
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(ObjectKind::Volume, id)
                    .into());
            }
            tx.insert_export(export, id)?;
            let revision = tx.volume_revision(id)?.unwrap_or(0);
            let has_readers = !tx.attachments(None, Some(id))?.is_empty();
            let state = format!("{object} {revision}");
            Ok(Origin { pool, object, size: capacity, identity: row.disk_uuid, state, has_readers })
        }
        VolumeSource::Snapshot(id) => {
            let row = tx.snapshot(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Snapshot, id))?;
            let state = format!("{object} {}", row.created_at);
            Ok(Origin { pool, object, size: capacity, identity: row.family, state, has_readers: false })
        }
    }
}

/// A number that differs between texts.
fn generation(state: &str) -> u64 {
    Uuid::new_v5(&Uuid::NAMESPACE_OID, state.as_bytes()).as_u64_pair().0
}

fn changed(object: &Object) -> Failure {
    let detail = format!(
        "the {object} is not the one, or not in the state, that the earlier export began with; start a new export"
    );
    let (kind, id) = match object {
        Object::Volume(id) => (ObjectKind::Volume, id.to_string()),
        Object::Snapshot(id) => (ObjectKind::Snapshot, id.to_string()),
    };
    Problem::new(ProblemCode::Exists, detail).about(kind, id).into()
}

fn ended(why: &str) -> Failure {
    Failure::new(ProblemCode::Unavailable, format!("the export ended early: {why}; resume it"))
}

/// Reads and sends everything. The end is sent after the hold is released, so that a client that has a complete stream
/// can use the volume at once. Returns the number of bytes sent.
async fn pump(
    file: SourceFile,
    modified: i128,
    (mut encoder, first): (Encoder, Vec<u8>),
    held: Held,
    parts: &mpsc::Sender<Part>,
) -> Result<u64> {
    let file = Arc::new(file);
    let mut sent = first.len() as u64;
    send(parts, first).await?;
    let mut at = encoder.offset();
    loop {
        let reader = file.clone();
        let read = move || -> Result<_> {
            let Some((offset, data)) = reader.next(at, MAX_EXTENT)? else { return Ok((encoder, None)) };
            let end = offset + data.len() as u64;
            let part = (!is_zero(&data)).then(|| encoder.extent(offset, &data));
            Ok((encoder, Some((end, part))))
        };
        let (next, found) = blocking(read).await?;
        encoder = next;
        let Some((end, part)) = found else { break };
        at = end;
        match part {
            Some(part) => {
                sent += part.len() as u64;
                send(parts, part).await?;
            }
            None if parts.is_closed() => return Err(ended("the client disconnected")),
            None => {}
        }
    }
    if blocking(move || Ok(file.modified()?)).await? != modified {
        return Err(ended("its file was changed meanwhile by a program other than this server"));
    }
    held.release().await?;
    let end = encoder.end();
    sent += end.len() as u64;
    send(parts, end).await?;
    Ok(sent)
}

async fn send(parts: &mpsc::Sender<Part>, part: Vec<u8>) -> Result<()> {
    match tokio::time::timeout(STALLED, parts.send(Ok(part))).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(ended("the client disconnected")),
        Err(_) => Err(ended("the client takes no data")),
    }
}

/// Runs blocking I/O.
pub(in crate::service) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    run_blocking(work).await.unwrap_or_else(|error| {
        Err(Failure::new(ProblemCode::Internal, format!("the transfer panicked: {error}")))
    })
}
