//! Transactions that share their commit. A commit is durable once the log is synced, which takes far longer than anything
//! else that a transaction does; so those that wait while one is under way go into the next one together.
//!
//! One thread writes. It takes all that wait, runs each in a savepoint of one transaction, commits once, and only then
//! answers. So each is seen by those after it, none is answered before it is on the disk, and one that fails or panics is
//! undone alone. Where the commit fails, all of them fail with its error: also one that failed by itself, which may have
//! done so by what others wrote before it.
//!
//! The thread is the catalog's own, as are those that read: what hangs elsewhere must not keep anybody from the catalog.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::Builder;
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior, ffi};
use tokio::sync::oneshot;

use super::{CatalogError, Result, Tx};

/// How many read at the same time.
const READERS: usize = 2;
/// How long the end of the threads is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers whoever waits for a transaction, once it is known how its commit ended.
type Answer = Box<dyn FnOnce(Result<()>) + Send>;

/// What is done in a transaction, or without one, where none can be begun. Says also whether it failed, and is to be
/// undone.
type Work = Box<dyn FnOnce(Result<&Tx<'_>>) -> (Answer, bool) + Send>;

/// A transaction that is waited for.
struct Write {
    work: Work,
    /// The name of its fail points.
    place: fn() -> String,
    /// It need not be on the disk when it is answered.
    is_note: bool,
}

/// A look at what is committed.
type Read = Box<dyn FnOnce(Result<&Tx<'_>>) + Send>;

/// What waits for some threads, until they are to end.
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

    /// Waits until there is something, and takes so many. None at the end, when nothing is left.
    fn take(&self, most: usize) -> Option<VecDeque<T>> {
        let idle = |state: &mut (VecDeque<T>, bool)| state.0.is_empty() && state.1;
        let mut state = self.changed.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner);
        let count = state.0.len().min(most);
        (count > 0).then(|| state.0.drain(..count).collect())
    }
}

/// The threads of an open catalog. They end with what waits for them when this is dropped, and so do their connections.
pub(super) struct Threads {
    writes: Arc<Queue<Write>>,
    reads: Arc<Queue<Read>>,
    /// Nobody sends; it is disconnected when all have ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Threads {
    /// One that writes by this connection, and some that read by others. The lock is held until all have ended.
    pub(super) fn start(
        lock: File,
        mut writer: Connection,
        reader: impl Fn() -> Result<Connection>,
    ) -> Result<Self> {
        let (running, ended) = mpsc::channel();
        let threads = Self { writes: Queue::new(), reads: Queue::new(), ended: Mutex::new(ended) };
        let lock = Arc::new(lock);
        // Dropped before what waits for all of them, also where not all can be started.
        let running = running;
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let (lock, running) = (lock.clone(), running.clone());
            let thread = Builder::new().name(name.to_owned()).spawn(move || {
                work();
                // In this order.
                drop((lock, running));
            });
            let failed =
                |error| CatalogError::Unusable(format!("cannot start a thread of the catalog: {error}"));
            thread.map(drop).map_err(failed)
        };
        for _ in 0..READERS {
            let (mut connection, reads) = (reader()?, threads.reads.clone());
            let work = move || {
                while let Some(waiting) = reads.take(1) {
                    waiting.into_iter().for_each(|read| look(&mut connection, read));
                }
            };
            start("catalog-read", Box::new(work))?;
        }
        let writes = threads.writes.clone();
        let work = move || {
            while let Some(waiting) = writes.take(usize::MAX) {
                commit_together(&mut writer, waiting);
            }
        };
        start("catalog-write", Box::new(work))?;
        Ok(threads)
    }

    /// Waits for a transaction.
    pub(super) async fn write<T, E, F>(&self, is_note: bool, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let work = move |tx: Result<&Tx<'_>>| {
            let done = tx.map_err(E::from).and_then(work);
            let has_failed = done.is_err();
            let when = move |ended: Result<()>| {
                // An error means that nobody waits any more.
                let _ = answer.send(ended.map_err(E::from).and(done));
            };
            (Box::new(when) as Answer, has_failed)
        };
        self.writes.push(Write { work: Box::new(work), place: fail_point::place_of::<F>, is_note });
        wait(answered).await
    }

    /// Waits for a look at what is committed.
    pub(super) async fn read<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        self.reads.push(Box::new(move |tx| {
            let _ = answer.send(tx.map_err(E::from).and_then(work));
        }));
        wait(answered).await
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.writes.close();
        self.reads.close();
        // A disk that hangs must not keep the process from ending.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(PATIENCE);
    }
}

async fn wait<T, E: From<CatalogError>>(answered: oneshot::Receiver<Result<T, E>>) -> Result<T, E> {
    // Nobody answers for one that panicked.
    let broke = |_| Err(CatalogError::Unusable("a catalog transaction broke off".to_owned()).into());
    answered.await.unwrap_or_else(broke)
}

fn look(connection: &mut Connection, read: Read) {
    match connection.transaction() {
        // Undone at the end, since nothing was changed.
        Ok(tx) => drop(catch_unwind(AssertUnwindSafe(|| read(Ok(&Tx(&tx)))))),
        Err(error) => read(Err(error.into())),
    }
}

thread_local! {
    /// What SQLite last failed with on this thread. It undoes by itself what others wrote, too, and tells nobody but the
    /// one who called it why.
    static LAST_ERROR: Cell<Option<ffi::Error>> = const { Cell::new(None) };
}

/// Notes what SQLite failed with.
pub(super) fn note_error(error: &rusqlite::Error) {
    if let Some(code) = error.sqlite_error() {
        LAST_ERROR.set(Some(*code));
    }
}

/// The same error once more.
fn same(error: &rusqlite::Error) -> CatalogError {
    match error {
        rusqlite::Error::SqliteFailure(code, text) => rusqlite::Error::SqliteFailure(*code, text.clone()),
        other => rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_ERROR), Some(other.to_string())),
    }
    .into()
}

/// Runs and commits what waited, and answers.
fn commit_together(connection: &mut Connection, mut waiting: VecDeque<Write>) {
    while !waiting.is_empty() {
        let mut answers = Vec::new();
        let count = waiting.len();
        let outcome = run_and_commit(connection, &mut waiting, &mut answers);
        if let (Err(error), true) = (&outcome, waiting.len() == count) {
            // Not even the first could be begun.
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

/// Takes what can be committed together, and commits it. Adds the answers of those that hang on that.
fn run_and_commit(
    connection: &mut Connection,
    waiting: &mut VecDeque<Write>,
    answers: &mut Vec<Answer>,
) -> rusqlite::Result<()> {
    // The log is one file: whoever syncs it next has the notes in it synced too.
    let level = if waiting.iter().all(|write| write.is_note) { "normal" } else { "full" };
    connection.pragma_update(None, "synchronous", level)?;
    let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut places = Vec::new();
    while !waiting.is_empty() {
        let before = tx.total_changes();
        let mut savepoint = tx.savepoint()?;
        let Some(write) = waiting.pop_front() else { break };
        LAST_ERROR.set(None);
        let done = catch_unwind(AssertUnwindSafe(|| (write.work)(Ok(&Tx(&savepoint)))));
        let is_fine = matches!(done, Ok((_, false)));
        answers.extend(done.ok().map(|(answer, _)| answer));
        // After some errors, such as that of a full disk, SQLite undoes all that was not committed.
        if savepoint.is_autocommit() {
            let why = LAST_ERROR.take().unwrap_or(ffi::Error::new(ffi::SQLITE_ABORT_ROLLBACK));
            let undone = format!("undone, with all changes of that moment, since one failed: {why}");
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
    pass("before");
    let committed = tx.commit();
    pass("after");
    committed
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::Pin;

    use futures::FutureExt;
    use infra_api::AttachmentId;

    use super::super::Catalog;
    use super::*;

    type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

    fn id(text: &str) -> AttachmentId {
        AttachmentId::new(text).unwrap()
    }

    fn open(dir: &Path) -> Catalog {
        Catalog::open(dir, Duration::ZERO).unwrap()
    }

    async fn is_ended(catalog: &Catalog, text: &str) -> bool {
        let id = id(text);
        catalog.read::<_, CatalogError, _>(move |tx| tx.is_attachment_ended(&id)).await.unwrap()
    }

    /// A transaction that ends an attachment and then does this; it waits for its turn when this returns.
    async fn begun(
        catalog: &Catalog,
        text: &str,
        then: impl FnOnce(&Tx<'_>) -> Result<()> + Send + 'static,
    ) -> Running {
        let (catalog, id) = (catalog.clone(), id(text));
        let mut running: Running = Box::pin(async move {
            let work = move |tx: &Tx<'_>| tx.end_attachment(&id, 1).and_then(|()| then(tx));
            catalog.run(work).await
        });
        assert!((&mut running).now_or_never().is_none());
        running
    }

    /// A transaction that has begun, and stands still until something is sent.
    async fn standing(catalog: &Catalog, text: &str) -> (Running, mpsc::Sender<()>, mpsc::Receiver<()>) {
        let (go_on, may_go_on) = mpsc::channel();
        let (arrive, arrived) = mpsc::channel();
        let stand = move |_: &Tx<'_>| {
            arrive.send(()).unwrap();
            may_go_on.recv().unwrap();
            Ok(())
        };
        (begun(catalog, text, stand).await, go_on, arrived)
    }

    #[tokio::test]
    async fn those_that_wait_are_committed_together_and_who_fails_or_panics_is_undone_alone() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let (first, go_on, arrived) = standing(&catalog, "first").await;
        arrived.recv().unwrap();
        let mut fine = begun(&catalog, "fine", |_| Ok(())).await;
        let failing = begun(&catalog, "failing", |_| Err(CatalogError::Corrupt("stop".into()))).await;
        let panicking = begun(&catalog, "panicking", |_| panic!("a test's own")).await;
        let seeing = begun(&catalog, "seeing", |tx| {
            assert!(tx.is_attachment_ended(&id("fine"))? && !tx.is_attachment_ended(&id("panicking"))?);
            Ok(())
        });
        let seeing = seeing.await;
        let (last, end, arrived) = standing(&catalog, "last").await;
        go_on.send(()).unwrap();
        first.await.unwrap();
        arrived.recv().unwrap();
        // It has run, and is not on the disk: nobody is told, and nobody sees it.
        assert!((&mut fine).now_or_never().is_none() && !is_ended(&catalog, "fine").await);
        assert!(is_ended(&catalog, "first").await);
        assert!(panicking.await.unwrap_err().to_string().contains("broke off"));
        end.send(()).unwrap();
        assert!(failing.await.unwrap_err().to_string().contains("stop"));
        for running in [fine, seeing, last] {
            running.await.unwrap();
        }
        for (text, expected) in [("fine", true), ("seeing", true), ("failing", false), ("panicking", false)] {
            assert_eq!(is_ended(&catalog, text).await, expected, "{text}");
        }
    }

    #[tokio::test]
    async fn a_commit_that_fails_fails_all_that_share_it_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let (first, go_on, arrived) = standing(&catalog, "first").await;
        arrived.recv().unwrap();
        let fine = begun(&catalog, "fine", |_| Ok(())).await;
        let unfit = begun(&catalog, "unfit", |tx| {
            let sql = "PRAGMA defer_foreign_keys = ON; INSERT INTO attachments VALUES \
                       ('a', 'no such volume', 'no such node', 0, 'single-node', 'attached', NULL, 'now', NULL)";
            Ok(tx.0.execute_batch(sql)?)
        });
        let unfit = unfit.await;
        // By what is not there in the end.
        let failing = begun(&catalog, "failing", |_| Err(CatalogError::Corrupt("stop".into()))).await;
        go_on.send(()).unwrap();
        first.await.unwrap();
        let (one, other) = (fine.await.unwrap_err().to_string(), unfit.await.unwrap_err().to_string());
        assert!(one == other && one.contains("FOREIGN KEY"), "{one}; {other}");
        assert_eq!(failing.await.unwrap_err().to_string(), one);
        begun(&catalog, "after", |_| Ok(())).await.await.unwrap();
        assert!(!is_ended(&catalog, "fine").await && is_ended(&catalog, "after").await);
    }

    #[tokio::test]
    async fn what_sqlite_undoes_with_another_change_fails_for_the_same_reason() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let (first, go_on, arrived) = standing(&catalog, "first").await;
        arrived.recv().unwrap();
        let fine = begun(&catalog, "fine", |_| Ok(())).await;
        let broken = begun(&catalog, "broken", |tx| {
            let (handle, (end, ended)) = (tx.0.get_interrupt_handle(), mpsc::channel::<()>());
            let again = move || {
                while ended.recv_timeout(Duration::from_millis(1)) == Err(mpsc::RecvTimeoutError::Timeout) {
                    handle.interrupt();
                }
            };
            let thread = std::thread::spawn(again);
            let endless = "CREATE TABLE numbers (number INTEGER); INSERT INTO numbers WITH RECURSIVE n(i) AS \
                           (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n";
            let result = tx.0.execute_batch(endless);
            drop(end);
            thread.join().unwrap();
            Ok(result?)
        });
        let broken = broken.await;
        go_on.send(()).unwrap();
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
    fn where_not_all_threads_can_be_started_nothing_is_waited_for() {
        let start = std::time::Instant::now();
        let no_reader = || Err(CatalogError::Unusable("no reader".into()));
        let connection = Connection::open_in_memory().unwrap();
        let failed = Threads::start(tempfile::tempfile().unwrap(), connection, no_reader);
        assert!(failed.is_err() && start.elapsed() < PATIENCE);
    }

    #[tokio::test]
    async fn who_reads_can_change_nothing_and_a_note_is_seen_like_any_change() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = open(dir.path());
        let write = |tx: &Tx<'_>| tx.end_attachment(&id("a"), 1);
        catalog.read::<_, CatalogError, _>(write).await.unwrap_err();
        assert!(!is_ended(&catalog, "a").await);
        catalog.note::<_, CatalogError, _>(write).await.unwrap();
        assert!(is_ended(&catalog, "a").await);
        drop(catalog);
        assert!(is_ended(&open(dir.path()), "a").await);
    }
}
