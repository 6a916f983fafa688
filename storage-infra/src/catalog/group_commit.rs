//! Group commit of catalog transactions. Syncing the log takes far longer than the rest of a transaction, so
//! transactions that arrive during a commit share the next one.
//!
//! One thread writes. It takes all waiting transactions, runs each in a savepoint of one SQLite transaction, commits
//! once, and then answers. Each transaction sees the changes of those before it, none is answered before the commit
//! is durable, and a transaction that fails or panics is rolled back alone. If the commit fails, all of the group
//! fail with its error, including those that had failed before: their failure may have depended on changes that were
//! rolled back.
//!
//! The catalog has threads of its own for writing and for reading: stalled operations elsewhere cannot block it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::Builder;
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior, ffi};
use tokio::sync::oneshot;

use super::{CatalogError, Result, Tx};

#[cfg(test)]
pub(super) mod inline;

/// Number of reader threads.
const READERS: usize = 2;
/// Time to wait for the threads to end.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers the caller of a transaction after the commit has succeeded or failed.
pub(super) type Answer = Box<dyn FnOnce(Result<()>) + Send>;

/// Work of a transaction, or the error if no transaction could be started. The flag says that it failed and must be
/// rolled back.
pub(super) type Work = Box<dyn FnOnce(Result<&Tx<'_>>) -> (Answer, bool) + Send>;

/// A queued write transaction.
pub(super) struct Write {
    pub(super) work: Work,
    /// Name of its fail points.
    pub(super) place: fn() -> String,
    /// It may be answered before it is durable.
    pub(super) unsynced: bool,
}

/// Runs, commits and answers waiting transactions, and counts commits that changed rows.
type WriteGroup = Box<dyn FnMut(VecDeque<Write>, &AtomicU64) + Send>;
/// Runs a read transaction.
type RunRead = Box<dyn FnMut(Read) + Send>;

/// A queued read transaction.
pub(super) type Read = Box<dyn FnOnce(Result<&Tx<'_>>) + Send>;

/// A closable queue for some threads.
struct Queue<T> {
    state: Mutex<(VecDeque<T>, bool)>,
    changed: Condvar,
}

impl<T> Queue<T> {
    fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new((VecDeque::new(), true)), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, (VecDeque<T>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, one: T) {
        self.state().0.push_back(one);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.state().1 = false;
        self.changed.notify_all();
    }

    /// Waits for items and takes at most `most` of them. None when the queue is closed and empty.
    fn take(&self, most: usize) -> Option<VecDeque<T>> {
        let idle = |state: &mut (VecDeque<T>, bool)| state.0.is_empty() && state.1;
        let mut state = self.changed.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner);
        let count = state.0.len().min(most);
        (count > 0).then(|| state.0.drain(..count).collect())
    }
}

/// Threads of an open catalog. Dropping this closes the queues; the threads complete queued work, then close their
/// connections.
pub(super) struct Threads {
    writes: Arc<Queue<Write>>,
    reads: Arc<Queue<Read>>,
    /// Number of commits that changed rows.
    changes: Arc<AtomicU64>,
    /// Never receives a message; disconnected when all threads have ended.
    ended: Mutex<mpsc::Receiver<()>>,
    /// Instead of threads, the caller's thread runs transactions on this connection.
    #[cfg(test)]
    inline: Option<inline::Inline>,
}

impl Threads {
    /// Starts one writer thread and several reader threads. The lock is held until all have ended.
    pub(super) fn start(
        lock: File,
        mut writer: WriteGroup,
        reader: impl Fn() -> Result<RunRead>,
    ) -> Result<Self> {
        let (running, ended) = mpsc::channel();
        let (writes, reads, changes) = (Queue::new(), Queue::new(), Arc::default());
        let threads = Self {
            writes,
            reads,
            changes,
            ended: Mutex::new(ended),
            #[cfg(test)]
            inline: None,
        };
        let lock = Arc::new(lock);
        // Dropped before `threads`, whose drop waits for it, also if a thread fails to start.
        let running = running;
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let (lock, running) = (lock.clone(), running.clone());
            let thread = Builder::new().name(name.to_owned()).spawn(move || {
                work();
                // The lock is released before the end is reported.
                drop((lock, running));
            });
            let failed =
                |error| CatalogError::Unusable(format!("cannot start a thread of the catalog: {error}"));
            thread.map(drop).map_err(failed)
        };
        for _ in 0..READERS {
            let (mut run, reads) = (reader()?, threads.reads.clone());
            let work = move || {
                while let Some(waiting) = reads.take(1) {
                    waiting.into_iter().for_each(&mut run);
                }
            };
            start("catalog-read", Box::new(work))?;
        }
        let (writes, changes) = (threads.writes.clone(), threads.changes.clone());
        let work = move || {
            while let Some(waiting) = writes.take(usize::MAX) {
                writer(waiting, &changes);
            }
        };
        start("catalog-write", Box::new(work))?;
        Ok(threads)
    }

    /// Number of commits so far that changed rows. Counted after the commit: a read that starts after this shows every
    /// change that is counted, and a change that it does not show is counted later.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Queues a write transaction and waits for its result.
    pub(super) async fn write<T, E, F>(&self, unsynced: bool, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        let (answer, response) = oneshot::channel();
        let work = move |tx: Result<&Tx<'_>>| {
            let done = tx.map_err(E::from).and_then(work);
            let has_failed = done.is_err();
            let when = move |ended: Result<()>| {
                // An error means that the caller has gone away.
                let _ = answer.send(ended.map_err(E::from).and(done));
            };
            (Box::new(when) as Answer, has_failed)
        };
        let write = Write { work: Box::new(work), place: fail_point::function_of::<F>, unsynced };
        #[cfg(test)]
        if let Some(inline) = &self.inline {
            inline.write(write, &self.changes).await;
            return wait(response).await;
        }
        self.writes.push(write);
        wait(response).await
    }

    /// Queues a read transaction and waits for its result.
    pub(super) async fn read<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        let (answer, response) = oneshot::channel();
        let read: Read = Box::new(move |tx| {
            let _ = answer.send(tx.map_err(E::from).and_then(work));
        });
        #[cfg(test)]
        if let Some(inline) = &self.inline {
            inline.read(read).await;
            return wait(response).await;
        }
        self.reads.push(read);
        wait(response).await
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.writes.close();
        self.reads.close();
        // A stalled disk must not prevent the process from exiting.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(TIMEOUT);
    }
}

async fn wait<T, E: From<CatalogError>>(response: oneshot::Receiver<Result<T, E>>) -> Result<T, E> {
    // A panicked transaction drops its sender.
    let broke = |_| Err(CatalogError::Unusable("a catalog transaction panicked".to_owned()).into());
    response.await.unwrap_or_else(broke)
}

/// Writes to SQLite.
pub(super) fn writer(mut connection: Connection) -> WriteGroup {
    Box::new(move |waiting, changes| commit_group(&mut connection, waiting, changes))
}

/// Reads from SQLite.
pub(super) fn reader(mut connection: Connection) -> RunRead {
    Box::new(move |read| run_read(&mut connection, read))
}

fn run_read(connection: &mut Connection, read: Read) {
    match connection.transaction() {
        // Rolled back at the end: nothing was changed.
        Ok(tx) => drop(catch_unwind(AssertUnwindSafe(|| read(Ok(&Tx::of(&tx)))))),
        Err(error) => read(Err(error.into())),
    }
}

thread_local! {
    /// Last SQLite error on this thread. Some errors make SQLite roll back the whole transaction, and only the
    /// failing call returns the reason.
    static LAST_ERROR: Cell<Option<ffi::Error>> = const { Cell::new(None) };
}

/// Remembers a SQLite error for the rest of its group.
pub(super) fn remember_error(error: &rusqlite::Error) {
    if let Some(code) = error.sqlite_error() {
        LAST_ERROR.set(Some(*code));
    }
}

/// Copies an error.
fn same(error: &rusqlite::Error) -> CatalogError {
    match error {
        rusqlite::Error::SqliteFailure(code, text) => rusqlite::Error::SqliteFailure(*code, text.clone()),
        other => rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_ERROR), Some(other.to_string())),
    }
    .into()
}

/// Runs and commits all waiting transactions and answers them.
fn commit_group(connection: &mut Connection, waiting: VecDeque<Write>, changes: &AtomicU64) {
    answer_groups(waiting, same, |waiting, answers| run_and_commit(connection, waiting, answers, changes));
}

/// Commits all waiting transactions with `run_and_commit`, in one group or several, and answers them. `same` copies an error.
pub(super) fn answer_groups<E>(
    mut waiting: VecDeque<Write>,
    same: fn(&E) -> CatalogError,
    mut run_and_commit: impl FnMut(&mut VecDeque<Write>, &mut Vec<Answer>) -> Result<(), E>,
) {
    while !waiting.is_empty() {
        let (mut answers, count) = (Vec::new(), waiting.len());
        let outcome = run_and_commit(&mut waiting, &mut answers);
        if let (Err(error), true) = (&outcome, waiting.len() == count) {
            // Not even the first transaction could be started.
            for write in waiting.drain(..) {
                let (answer, _) = (write.work)(Err(same(error)));
                answer(Err(same(error)));
            }
        }
        for answer in answers {
            answer(outcome.as_ref().copied().map_err(same));
        }
    }
}

/// Runs waiting transactions, commits them together, and collects the answers that depend on the commit.
fn run_and_commit(
    connection: &mut Connection,
    waiting: &mut VecDeque<Write>,
    answers: &mut Vec<Answer>,
    changes: &AtomicU64,
) -> rusqlite::Result<()> {
    // The WAL is one file: the next durable commit also syncs earlier unsynced ones.
    let level = if waiting.iter().all(|write| write.unsynced) { "normal" } else { "full" };
    connection.pragma_update(None, "synchronous", level)?;
    let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut places = Vec::new();
    while !waiting.is_empty() {
        let before = tx.total_changes();
        let mut savepoint = tx.savepoint()?;
        let Some(write) = waiting.pop_front() else { break };
        LAST_ERROR.set(None);
        let done = catch_unwind(AssertUnwindSafe(|| (write.work)(Ok(&Tx::of(&savepoint)))));
        let is_fine = matches!(done, Ok((_, false)));
        answers.extend(done.ok().map(|(answer, _)| answer));
        // After some errors, such as a full disk, SQLite rolls back the whole transaction.
        if savepoint.is_autocommit() {
            let why = LAST_ERROR.take().unwrap_or(ffi::Error::new(ffi::SQLITE_ABORT_ROLLBACK));
            let undone =
                format!("rolled back with the whole commit group, because one transaction failed: {why}");
            return Err(rusqlite::Error::SqliteFailure(why, Some(undone)));
        }
        if !is_fine {
            savepoint.rollback()?;
        }
        savepoint.commit()?;
        places.extend((is_fine && tx.total_changes() != before).then_some(write.place));
    }
    let pass = |when: &str| {
        places.iter().for_each(|place| fail_point::pass(|| format!("catalog.{}.{when}", place())));
    };
    let must_fail =
        |how: &str| places.iter().any(|place| fail_point::must_fail(|| format!("catalog.{}.{how}", place())));
    pass("before");
    if must_fail("undone") {
        return Err(requested("undone"));
    }
    let committed = tx.commit();
    if !places.is_empty() {
        changes.fetch_add(1, Ordering::SeqCst);
    }
    pass("after");
    // As when the WAL was written and its sync reports an error: the next start may find what was committed.
    if must_fail("done") { committed.and(Err(requested("done"))) } else { committed }
}

/// The error of a commit that a test requests.
fn requested(how: &str) -> rusqlite::Error {
    let text = format!("requested by a test, {how}");
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_IOERR), Some(text))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::Pin;

    use futures::FutureExt;
    use infra_api::AttachmentId;

    use super::super::Catalog;
    use super::super::db::Db;
    use super::super::postgres::testing::Backend;
    use super::*;

    type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

    fn id(text: &str) -> AttachmentId {
        AttachmentId::new(text).unwrap()
    }

    fn sqlite<'a>(tx: &Tx<'a>) -> &'a Connection {
        let Db::Sqlite(connection) = tx.0 else { panic!("another database") };
        connection
    }

    fn open(dir: &Path) -> Catalog {
        Catalog::open(dir, Duration::ZERO).unwrap()
    }

    async fn is_ended(catalog: &Catalog, text: &str) -> bool {
        let id = id(text);
        catalog.read::<_, CatalogError, _>(move |tx| tx.is_attachment_ended(&id)).await.unwrap()
    }

    /// Starts a transaction that ends an attachment and then runs `then`. It is queued when this returns.
    async fn begun(
        catalog: &Catalog,
        text: &str,
        then: impl FnOnce(&Tx<'_>) -> Result<()> + Send + 'static,
    ) -> Running {
        let (catalog, id) = (catalog.clone(), id(text));
        let mut running: Running = Box::pin(async move {
            let work = move |tx: &Tx<'_>| tx.end_attachment(&id).and_then(|()| then(tx));
            catalog.run(work).await
        });
        assert!((&mut running).now_or_never().is_none());
        running
    }

    /// Starts a transaction that blocks until a message is sent.
    async fn blocked(catalog: &Catalog, text: &str) -> (Running, mpsc::Sender<()>, mpsc::Receiver<()>) {
        let (unblock, unblocked) = mpsc::channel();
        let (arrive, arrived) = mpsc::channel();
        let block = move |_: &Tx<'_>| {
            arrive.send(()).unwrap();
            unblocked.recv().unwrap();
            Ok(())
        };
        (begun(catalog, text, block).await, unblock, arrived)
    }

    #[tokio::test]
    async fn waiting_transactions_share_a_commit_and_a_failed_one_is_rolled_back_alone() {
        for backend in Backend::each() {
            share(&backend).await;
        }
    }

    async fn share(backend: &Backend) {
        let dir = tempfile::tempdir().unwrap();
        let catalog = backend.open(dir.path()).unwrap();
        let (first, unblock, arrived) = blocked(&catalog, "first").await;
        arrived.recv().unwrap();
        let mut fine = begun(&catalog, "fine", |_| Ok(())).await;
        let failing = begun(&catalog, "failing", |_| Err(CatalogError::Corrupt("stop".into()))).await;
        let panicking = begun(&catalog, "panicking", |_| panic!("a test's own")).await;
        let dependent = begun(&catalog, "dependent", |tx| {
            assert!(tx.is_attachment_ended(&id("fine"))? && !tx.is_attachment_ended(&id("panicking"))?);
            Ok(())
        });
        let dependent = dependent.await;
        let (last, end, arrived) = blocked(&catalog, "last").await;
        unblock.send(()).unwrap();
        first.await.unwrap();
        arrived.recv().unwrap();
        // It has run and is not committed: its caller has no answer and readers do not see it.
        assert!((&mut fine).now_or_never().is_none() && !is_ended(&catalog, "fine").await);
        assert!(is_ended(&catalog, "first").await);
        assert!(panicking.await.unwrap_err().to_string().contains("panicked"));
        end.send(()).unwrap();
        assert!(failing.await.unwrap_err().to_string().contains("stop"));
        for running in [fine, dependent, last] {
            running.await.unwrap();
        }
        for (text, expected) in
            [("fine", true), ("dependent", true), ("failing", false), ("panicking", false)]
        {
            assert_eq!(is_ended(&catalog, text).await, expected, "{text}");
        }
    }

    #[tokio::test]
    async fn a_commit_that_fails_fails_all_that_share_it_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let (first, unblock, arrived) = blocked(&catalog, "first").await;
        arrived.recv().unwrap();
        let fine = begun(&catalog, "fine", |_| Ok(())).await;
        let unfit = begun(&catalog, "unfit", |tx| {
            let sql = "PRAGMA defer_foreign_keys = ON; INSERT INTO attachments VALUES \
                       ('a', 'no such volume', 'no such node', 0, 'single-node', 'attached', NULL, 'now', NULL)";
            Ok(sqlite(tx).execute_batch(sql)?)
        });
        let unfit = unfit.await;
        // It failed because of a change that was rolled back.
        let failing = begun(&catalog, "failing", |_| Err(CatalogError::Corrupt("stop".into()))).await;
        unblock.send(()).unwrap();
        first.await.unwrap();
        let (one, other) = (fine.await.unwrap_err().to_string(), unfit.await.unwrap_err().to_string());
        assert!(one == other && one.contains("FOREIGN KEY"), "{one}; {other}");
        assert_eq!(failing.await.unwrap_err().to_string(), one);
        begun(&catalog, "after", |_| Ok(())).await.await.unwrap();
        assert!(!is_ended(&catalog, "fine").await && is_ended(&catalog, "after").await);
    }

    #[tokio::test]
    async fn transactions_that_sqlite_rolls_back_with_another_fail_with_its_error() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let (first, unblock, arrived) = blocked(&catalog, "first").await;
        arrived.recv().unwrap();
        let fine = begun(&catalog, "fine", |_| Ok(())).await;
        let broken = begun(&catalog, "broken", |tx| {
            let (handle, (end, ended)) = (sqlite(tx).get_interrupt_handle(), mpsc::channel::<()>());
            let again = move || {
                while ended.recv_timeout(Duration::from_millis(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
                    handle.interrupt();
                }
            };
            let thread = std::thread::spawn(again);
            let endless = "CREATE TABLE numbers (number INTEGER); INSERT INTO numbers WITH RECURSIVE n(i) AS \
                           (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n";
            let result = sqlite(tx).execute_batch(endless);
            drop(end);
            thread.join().unwrap();
            Ok(result?)
        });
        let broken = broken.await;
        unblock.send(()).unwrap();
        first.await.unwrap();
        let (one, other) = (fine.await.unwrap_err(), broken.await.unwrap_err());
        for error in [one, other] {
            let CatalogError::Sqlite(error) = error else { panic!("{error}") };
            assert_eq!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::OperationInterrupted), "{error}");
        }
        begun(&catalog, "after", |_| Ok(())).await.await.unwrap();
        assert!(!is_ended(&catalog, "fine").await && is_ended(&catalog, "after").await);
    }

    #[test]
    fn a_failed_start_of_the_threads_does_not_wait() {
        let start = std::time::Instant::now();
        let no_reader = || Err(CatalogError::Unusable("no reader".into()));
        let connection = Connection::open_in_memory().unwrap();
        let failed = Threads::start(tempfile::tempfile().unwrap(), writer(connection), no_reader);
        assert!(failed.is_err() && start.elapsed() < TIMEOUT);
    }

    #[tokio::test]
    async fn readers_cannot_write_and_unsynced_writes_are_visible() {
        for backend in Backend::each() {
            read_only(&backend).await;
        }
    }

    async fn read_only(backend: &Backend) {
        let dir = tempfile::tempdir().unwrap();
        let catalog = backend.open(dir.path()).unwrap();
        let write = |tx: &Tx<'_>| tx.end_attachment(&id("a"));
        catalog.read::<_, CatalogError, _>(write).await.unwrap_err();
        assert!(!is_ended(&catalog, "a").await);
        catalog.run_unsynced::<_, CatalogError, _>(write).await.unwrap();
        assert!(is_ended(&catalog, "a").await);
        drop(catalog);
        assert!(is_ended(&backend.open(dir.path()).unwrap(), "a").await);
    }
}
