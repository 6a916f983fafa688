//! Work on attachments that callers can join: one after the other for each id.

use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use infra_api::{AttachmentId, AttachmentSpec, AttachmentState, ProblemCode};

use super::Progress;
use crate::audit;
use crate::catalog::AttachmentRow;
use crate::service::{Failure, Result, Service};

/// How soon at most a caller hears that work ended unfinished, where it is willing to wait.
const UNFINISHED_ANSWER: Duration = Duration::from_secs(1);

pub(super) type Work = Shared<BoxFuture<'static, Result<Progress>>>;

/// Work on an attachment that somebody may join.
#[derive(Clone)]
pub(in crate::service) struct Operation {
    number: u64,
    pub(super) kind: Kind,
    pub(super) work: Work,
}

/// What work on an attachment is for.
#[derive(Clone)]
pub(super) enum Kind {
    /// A caller wants this attachment.
    Attach(AttachmentSpec),
    /// The catalog wants it.
    Resume,
    /// It is to go.
    Detach,
}

/// Who wants the attachment.
pub(super) enum Wanted {
    /// A caller: make it, where it is not there, or let it take an earlier one's place.
    ByCaller(AttachmentSpec, Option<AttachmentId>),
    /// Start-up or repair: only where its row is still there and was not told to go.
    ByCatalog,
}

impl Service {
    /// Waits for work, at most so long. Work that ended unfinished is answered late: whoever hears that it is under way
    /// asks again at once.
    pub(super) async fn within(&self, wait: Duration, work: Work, id: &AttachmentId) -> Result<Progress> {
        let begun = tokio::time::Instant::now();
        match tokio::time::timeout(wait, work).await {
            Ok(Ok(Progress::UnderWay(attachment))) => {
                tokio::time::sleep_until(begun + wait.min(UNFINISHED_ANSWER)).await;
                Ok(Progress::UnderWay(attachment))
            }
            Ok(result) => result,
            Err(_) => self.progress(id).await,
        }
    }

    pub(super) fn operation(&self, id: &AttachmentId) -> Option<Operation> {
        self.lock_operations().get(id).cloned()
    }

    fn lock_operations(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::HashMap<AttachmentId, Operation>> {
        self.0.operations.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Registers work under an attachment's id, after the work that is registered there now.
    fn start<F>(&self, id: AttachmentId, kind: Kind, work: F) -> Work
    where
        F: Future<Output = Result<Progress>> + Send + 'static,
    {
        static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut operations = self.lock_operations();
        let before = operations.get(&id).map(|operation| operation.work.clone());
        let (service, key) = (self.clone(), id.clone());
        let task = self.0.tasks.spawn(audit::acting(audit::actor(), async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let result = work.await;
            let mut operations = service.lock_operations();
            if operations.get(&key).is_some_and(|operation| operation.number == number) {
                operations.remove(&key);
            }
            result
        }));
        let broke = |error| Failure::new(ProblemCode::Internal, format!("the work broke off: {error}"));
        let work = async move { task.await.unwrap_or_else(|error| Err(broke(error))) }.boxed().shared();
        operations.insert(id, Operation { number, kind, work: work.clone() });
        work
    }

    pub(super) fn start_attach(&self, id: AttachmentId, wanted: Wanted) -> Work {
        let kind = match &wanted {
            Wanted::ByCaller(spec, _) => Kind::Attach(spec.clone()),
            Wanted::ByCatalog => Kind::Resume,
        };
        let (service, key) = (self.clone(), id.clone());
        self.start(id, kind, async move { service.do_attach(&key, wanted).await })
    }

    pub(super) fn start_detach(&self, id: AttachmentId) -> Work {
        let (service, key) = (self.clone(), id.clone());
        self.start(id, Kind::Detach, async move { service.do_detach(&key).await })
    }

    /// Finishes or repairs what the catalog says about an attachment, unless someone is at it.
    pub(in crate::service) async fn resume(&self, row: &AttachmentRow) {
        if self.operation(&row.id).is_some() {
            return;
        }
        // A disk that is to leave is waited for by somebody.
        if row.state != AttachmentState::Detaching && !self.0.retries.is_due(&row.id, Instant::now()) {
            return;
        }
        let work = match row.state {
            AttachmentState::Attaching | AttachmentState::Attached => {
                self.start_attach(row.id.clone(), Wanted::ByCatalog)
            }
            AttachmentState::Detaching => self.start_detach(row.id.clone()),
        };
        match work.await {
            Ok(_) => self.0.retries.forget(&row.id),
            Err(failure)
                if self.0.retries.failed(&row.id, &row.volume, &failure.0.detail, Instant::now()) =>
            {
                tracing::warn!(attachment = %row.id, volume = %row.volume, node = %row.node, %failure, "not finished; will be tried again");
            }
            Err(failure) => tracing::debug!(attachment = %row.id, %failure, "not finished, as before"),
        }
    }
}
