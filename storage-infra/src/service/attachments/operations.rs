//! Attachment operations. Callers can join a running operation; operations on one ID run one after the other.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use infra_api::{AttachmentId, AttachmentSpec, AttachmentState, ProblemCode};
use tokio::time::Instant;

use super::{Attachments, Progress};
use crate::audit;
use crate::catalog::AttachmentRow;
use crate::service::problems::{Failure, Result};

/// Earliest response to a caller that is willing to wait, if the operation ended without completing.
const INCOMPLETE_RESPONSE_DELAY: Duration = Duration::from_secs(1);

pub(super) type Work = Shared<BoxFuture<'static, Result<Progress>>>;

/// A running operation on an attachment.
#[derive(Clone)]
pub(super) struct Operation {
    number: u64,
    pub(super) kind: Kind,
    pub(super) work: Work,
}

/// Kind of an operation.
#[derive(Clone)]
pub(super) enum Kind {
    /// Requested by a client.
    Attach(AttachmentSpec),
    /// Resumed from the catalog.
    Resume,
    /// Detach.
    Detach,
}

/// Trigger of an attach.
pub(super) enum Trigger {
    /// A client: create the attachment if necessary, or replace an earlier one.
    Request(AttachmentSpec, Option<AttachmentId>),
    /// Start-up or repair: only if the row exists and is not being detached.
    Catalog,
}

impl Attachments {
    /// Waits for an operation at most `wait`. If it ended without completing, the response is delayed: the client
    /// retries at once.
    pub(super) async fn await_operation(
        &self,
        wait: Duration,
        work: Work,
        id: &AttachmentId,
    ) -> Result<Progress> {
        let started = Instant::now();
        match tokio::time::timeout(wait, work).await {
            Ok(Ok(Progress::InProgress(attachment))) => {
                tokio::time::sleep_until(started + wait.min(INCOMPLETE_RESPONSE_DELAY)).await;
                Ok(Progress::InProgress(attachment))
            }
            Ok(result) => result,
            Err(_) => self.progress(id).await,
        }
    }

    pub(super) fn operation(&self, id: &AttachmentId) -> Option<Operation> {
        self.lock_operations().get(id).cloned()
    }

    fn lock_operations(&self) -> MutexGuard<'_, HashMap<AttachmentId, Operation>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an operation behind the last one with the same ID.
    fn start<F>(self: &Arc<Self>, id: AttachmentId, kind: Kind, work: F) -> Work
    where
        F: Future<Output = Result<Progress>> + Send + 'static,
    {
        static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut operations = self.lock_operations();
        let before = operations.get(&id).map(|operation| operation.work.clone());
        let (attachments, key) = (self.clone(), id.clone());
        let task = self.core.spawn(audit::with_actor(audit::actor(), async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let result = work.await;
            let mut operations = attachments.lock_operations();
            if operations.get(&key).is_some_and(|operation| operation.number == number) {
                operations.remove(&key);
            }
            result
        }));
        let panicked =
            |error| Failure::new(ProblemCode::Internal, format!("the operation panicked: {error}"));
        let work = async move { task.await.unwrap_or_else(|error| Err(panicked(error))) }.boxed().shared();
        operations.insert(id, Operation { number, kind, work: work.clone() });
        work
    }

    pub(super) fn start_attach(self: &Arc<Self>, id: AttachmentId, trigger: Trigger) -> Work {
        let kind = match &trigger {
            Trigger::Request(spec, _) => Kind::Attach(spec.clone()),
            Trigger::Catalog => Kind::Resume,
        };
        let (attachments, key) = (self.clone(), id.clone());
        self.start(id, kind, async move { attachments.do_attach(&key, trigger).await })
    }

    pub(super) fn start_detach(self: &Arc<Self>, id: AttachmentId) -> Work {
        let (attachments, key) = (self.clone(), id.clone());
        self.start(id, Kind::Detach, async move { attachments.do_detach(&key).await })
    }

    /// Completes or repairs an attachment by its row, unless an operation is running.
    pub(in crate::service) async fn resume(self: &Arc<Self>, row: &AttachmentRow) {
        if self.operation(&row.id).is_some() {
            return;
        }
        // Detaches have no backoff: a client waits for them.
        if row.state != AttachmentState::Detaching && !self.retries.is_due(&row.id, Instant::now()) {
            return;
        }
        let work = match row.state {
            AttachmentState::Attaching | AttachmentState::Attached => {
                self.start_attach(row.id.clone(), Trigger::Catalog)
            }
            AttachmentState::Detaching => self.start_detach(row.id.clone()),
        };
        match work.await {
            Ok(_) => self.retries.forget(&row.id),
            Err(failure) if self.retries.failed(&row.id, &row.volume, &failure.0.detail, Instant::now()) => {
                tracing::warn!(attachment = %row.id, volume = %row.volume, node = %row.node, %failure, "could not complete the attachment's operation; will retry");
            }
            Err(failure) => {
                tracing::debug!(attachment = %row.id, %failure, "could not complete the attachment's operation; same error as before");
            }
        }
    }
}
