//! Imports: receives the stream of a volume that is being created. Each part is verified before it is written to the
//! volume's incomplete file. The catalog knows up to where the file is durable; a resumed import continues there.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use infra_api::stream::{Checksum, Decoder, Frame, Header, Position};
use infra_api::{ObjectKind, Problem, ProblemCode, Volume, VolumeId, VolumeState};

use super::export::blocking;
use super::{STALLED, Transfers};
use crate::catalog::{ImportRow, VolumeRow};
use crate::engine::{EngineError, PartFile};
use crate::scope::Scope;
use crate::service::files::Turn;
use crate::service::problems::{Failure, Result};
use crate::service::volumes::imported;

/// Received bytes after which the file is synced and the catalog updated.
const SYNC_EVERY: u64 = 256 << 20;
/// Chunks of a request body that are processed together.
const CHUNKS: usize = 64;

/// A stream that is being received into a volume's incomplete file.
struct Receiver {
    id: VolumeId,
    /// Size of the volume.
    size: u64,
    decoder: Decoder,
    part: PartFile,
    /// Checksum of the header of the earlier stream that this one continues.
    expected: Option<Checksum>,
    header: Option<Checksum>,
    /// What is written, not only verified.
    written: Option<Position>,
    /// Bytes received since the file was synced.
    unsynced: u64,
}

impl Receiver {
    /// Verifies and writes a chunk.
    fn receive(&mut self, chunk: &[u8]) -> Result<()> {
        self.decoder.push(chunk);
        self.unsynced += chunk.len() as u64;
        while let Some(frame) = self.decoder.next_frame().map_err(|error| self.refused(error.to_string()))? {
            match &frame {
                Frame::Header(header) => self.begin(header)?,
                Frame::Extent { offset, .. } => self.part.write(*offset, frame.data())?,
                Frame::End { .. } => {}
            }
            self.written = Some(self.decoder.position());
        }
        Ok(())
    }

    fn begin(&mut self, header: &Header) -> Result<()> {
        if header.size > self.size {
            let detail = format!(
                "the stream has a volume of {} bytes, the volume {} has {}",
                header.size, self.id, self.size
            );
            return Err(self.refused(detail));
        }
        let checksum = header.checksum();
        if self.expected.is_some_and(|expected| expected != checksum) {
            let detail =
                "the stream is of another source, or of another state of it, than the import that it resumes";
            return Err(self.refused(detail.to_owned()));
        }
        self.header = Some(checksum);
        Ok(())
    }

    fn refused(&self, why: String) -> Failure {
        let detail = format!("cannot import the volume {}: {why}", self.id);
        Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Volume, &self.id).into()
    }

    /// Syncs the file. Returns what is durable then.
    fn sync(&mut self) -> Result<Option<(Checksum, Position)>> {
        let received = self.header.zip(self.written);
        if received.is_some() {
            self.part.sync()?;
        }
        self.unsynced = 0;
        Ok(received)
    }
}

impl Transfers {
    /// Receives the stream of an import, from its beginning or, with `resume`, from where the earlier one ended.
    pub async fn import<S, B>(self: &Arc<Self>, id: VolumeId, resume: bool, stream: S) -> Result<Volume>
    where
        S: Stream<Item = Result<B, String>> + Send + Unpin + 'static,
        B: AsRef<[u8]> + Send + 'static,
    {
        let transfers = self.clone();
        self.core
            .run_to_completion(async move {
                let turn = transfers.copies.receivers().begin(&id).await;
                let received = transfers.receive(&id, resume, stream, &turn).await;
                transfers.copies.receivers().forget(&id, &turn);
                received?;
                transfers.volumes.get(&Scope::All, &id).await
            })
            .await
    }

    async fn receive<S, B>(&self, id: &VolumeId, resume: bool, stream: S, turn: &Turn) -> Result<()>
    where
        S: Stream<Item = Result<B, String>> + Send + Unpin,
        B: AsRef<[u8]> + Send + 'static,
    {
        if turn.ended.is_cancelled() {
            return Err(interrupted("a later request resumes it"));
        }
        let Some(receiver) = self.open_receiver(id, resume).await? else { return Ok(()) };
        let (receiver, received) = self.receive_all(receiver, stream, turn).await;
        let Some(receiver) = receiver else { return received };
        let verified = received.is_ok();
        let saved = self.save(receiver, verified).await.map(drop);
        received?;
        saved?;
        let _lock = self.core.lock_volume(id).await;
        let name = id.clone();
        let row = self.core.catalog().read(move |tx| imported(tx, &name)).await?;
        self.volumes.finish_create(row).await
    }

    /// Opens the incomplete file of a volume. `None` if the import is complete already.
    async fn open_receiver(&self, id: &VolumeId, resume: bool) -> Result<Option<Receiver>> {
        let _lock = self.core.lock_volume(id).await;
        let name = id.clone();
        let begin = move |tx: &crate::catalog::Tx<'_>| -> Result<_> {
            let row = imported(tx, &name)?;
            let import = tx.import(&name)?;
            let received = import.and_then(|import| import.received).filter(|_| resume);
            if row.state == VolumeState::Creating && import.is_some_and(|import| !import.verified) {
                // What is beyond is truncated.
                tx.set_import(&name, &ImportRow { received, verified: false })?;
            }
            Ok((row, import.is_some_and(|import| import.verified), received))
        };
        let (row, is_verified, received) = self.core.catalog().run(begin).await?;
        if row.state == VolumeState::Ready {
            return if resume { Ok(None) } else { Err(complete(id)) };
        }
        if is_verified {
            self.volumes.finish_create(row).await?;
            return Ok(None);
        }
        self.open_part(row, received).await.map(Some)
    }

    async fn open_part(&self, row: VolumeRow, received: Option<(Checksum, Position)>) -> Result<Receiver> {
        let (keep, size) = (received.map_or(0, |(_, position)| position.offset), row.capacity);
        let (pool, cleared) = self.volumes.clear(&row).await?;
        let open = move |engine: &dyn crate::engine::Engine| engine.open_part(&cleared, keep, size);
        let part = self.engines.run::<_, EngineError, _>(&pool, open).await.map_err(|error| match error {
            EngineError::Missing(what) => {
                let detail = format!("the data that the import of volume {} received is lost: {what}; import it without resuming", row.id);
                Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Volume, &row.id).into()
            }
            other => Failure::from(other),
        })?;
        let decoder = received.map_or_else(Decoder::default, |(_, position)| Decoder::resume(position));
        let (expected, header, written) = (received.map(|(header, _)| header), None, None);
        Ok(Receiver { id: row.id, size: row.capacity, decoder, part, expected, header, written, unsynced: 0 })
    }

    /// Receives until the end of the stream. Without a receiver in the result, blocking work on it failed for good.
    async fn receive_all<S, B>(
        &self,
        mut receiver: Receiver,
        stream: S,
        turn: &Turn,
    ) -> (Option<Receiver>, Result<()>)
    where
        S: Stream<Item = Result<B, String>> + Send + Unpin,
        B: AsRef<[u8]> + Send + 'static,
    {
        let mut stream = stream.ready_chunks(CHUNKS);
        loop {
            let next = tokio::select! {
                biased;
                () = turn.ended.cancelled() => Err(interrupted("it is resumed, deleted, or the server stops")),
                next = tokio::time::timeout(STALLED, stream.next()) => next.map_err(|_| interrupted("the client sends no data")),
            };
            let chunks = match next {
                Ok(Some(chunks)) => chunks,
                Ok(None) => {
                    let finished =
                        receiver.decoder.finish().map_err(|error| receiver.refused(error.to_string()));
                    return (Some(receiver), finished);
                }
                Err(failure) => return (Some(receiver), Err(failure)),
            };
            let work = move || {
                let received = chunks.into_iter().try_for_each(|chunk| {
                    receiver.receive(chunk.map_err(|error| interrupted(&error))?.as_ref())
                });
                Ok((receiver, received))
            };
            match blocking(work).await {
                Ok((kept, Ok(()))) if kept.unsynced >= SYNC_EVERY => match self.save(kept, false).await {
                    Ok(kept) => receiver = kept,
                    Err(failure) => return (None, Err(failure)),
                },
                Ok((kept, Ok(()))) => receiver = kept,
                Ok((kept, Err(failure))) => return (Some(kept), Err(failure)),
                Err(failure) => return (None, Err(failure)),
            }
        }
    }

    /// Makes what was received durable, and records it.
    async fn save(&self, mut receiver: Receiver, verified: bool) -> Result<Receiver> {
        let (receiver, received) = blocking(move || {
            let received = receiver.sync()?;
            Ok((receiver, received))
        })
        .await?;
        if received.is_some() {
            let (id, row) = (receiver.id.clone(), ImportRow { received, verified });
            self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.set_import(&id, &row)?) }).await?;
        }
        Ok(receiver)
    }
}

fn interrupted(why: &str) -> Failure {
    Failure::new(ProblemCode::Unavailable, format!("the import was interrupted: {why}; resume it"))
}

fn complete(id: &VolumeId) -> Failure {
    let detail = format!("the import of volume {id} is complete; delete the volume to import it again");
    Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Volume, id).into()
}
