//! Transactions in PostgreSQL: the same group commit as with SQLite, for the active server only.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::connection::Target;
use super::lead::{self, Lead};
use super::session::Session;
use crate::catalog::db::Db;
use crate::catalog::group_commit::{Answer, Read, Write, answer_groups};
use crate::catalog::{CatalogError, Result, Tx};
use crate::lease::NotActive;

/// Time between questions whether a commit took place.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Copies an error.
fn same(error: &CatalogError) -> CatalogError {
    match error {
        CatalogError::Unreachable(why) => CatalogError::Unreachable(why.clone()),
        CatalogError::NotActive(why) => CatalogError::NotActive(*why),
        other => CatalogError::Postgres(other.to_string()),
    }
}

/// A session that is opened when it is needed, and again when it has ended.
struct Lazy {
    target: Target,
    session: Option<Session>,
}

impl Lazy {
    /// Begins a transaction. A session that has ended is opened again: nothing was begun in it.
    fn begin(&mut self, begin: &str) -> Result<&Session> {
        if let Some(session) = self.session.take().filter(|session| !session.is_closed()) {
            match session.run(begin) {
                Ok(()) => return Ok(self.session.insert(session)),
                Err(error) if !session.is_closed() => return Err(error.into()),
                Err(_) => {}
            }
        }
        let session = self.target.connect()?;
        session.run(begin)?;
        Ok(self.session.insert(session))
    }

    /// Ends a transaction without a commit. Without an answer, the session is not used again.
    fn roll_back(&mut self) {
        self.session = self.session.take().filter(|session| session.run("ROLLBACK").is_ok());
    }
}

/// Runs read transactions.
pub(in crate::catalog) struct Reader(Lazy);

impl Reader {
    pub(in crate::catalog) fn new(target: Target) -> Self {
        Self(Lazy { target, session: None })
    }

    pub(in crate::catalog) fn run(&mut self, read: Read) {
        match self.0.begin("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY") {
            Ok(session) => {
                let tx = Tx(Db::Postgres(session));
                drop(catch_unwind(AssertUnwindSafe(|| read(Ok(&tx)))));
                self.0.roll_back();
            }
            Err(error) => read(Err(error)),
        }
    }
}

/// Runs write transactions.
pub(in crate::catalog) struct Writer {
    lazy: Lazy,
    lead: Arc<Lead>,
}

/// What became of a group.
enum Outcome {
    Committed,
    /// Nothing was committed.
    Failed(CatalogError),
    /// The connection ended during the commit of this number.
    Unknown(i64),
}

impl Writer {
    pub(in crate::catalog) fn new(lead: Arc<Lead>) -> Self {
        Self { lazy: Lazy { target: lead.target().clone(), session: None }, lead }
    }

    /// Runs and commits all waiting transactions and answers them.
    pub(in crate::catalog) fn commit_group(&mut self, waiting: VecDeque<Write>, changes: &AtomicU64) {
        answer_groups(waiting, same, |waiting, answers| self.run_and_commit(waiting, answers, changes));
    }

    fn run_and_commit(
        &mut self,
        waiting: &mut VecDeque<Write>,
        answers: &mut Vec<Answer>,
        changes: &AtomicU64,
    ) -> Result<()> {
        let unsynced = waiting.iter().all(|write| write.unsynced);
        let begin = if unsynced { "BEGIN; SET LOCAL synchronous_commit = off" } else { "BEGIN" };
        let session = self.lazy.begin(begin)?;
        let outcome = match run_group(session, self.lead.epoch(), waiting, answers, changes) {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Failed(error),
        };
        match outcome {
            Outcome::Committed => Ok(()),
            Outcome::Failed(error) => {
                self.lazy.roll_back();
                if matches!(error, CatalogError::NotActive(_)) {
                    self.lead.lease().lose();
                }
                Err(error)
            }
            Outcome::Unknown(number) => self.ask(number),
        }
    }

    /// Finds out whether a commit took place whose answer was lost. Nothing else is committed until that is known.
    fn ask(&mut self, number: i64) -> Result<()> {
        self.lazy.session = None;
        loop {
            let answer = self.lazy.target.connect().and_then(|session| {
                let committed = lead::has_committed(&session, self.lead.epoch(), number)?;
                self.lazy.session = Some(session);
                Ok(committed)
            });
            match answer {
                Ok(Some(true)) => return Ok(()),
                Ok(Some(false)) => {
                    let why = "the connection ended before the commit; nothing was changed";
                    return Err(CatalogError::Unreachable(why.to_owned()));
                }
                // The next start finds in the catalog what was committed.
                Ok(None) => self.lead.lease().lose(),
                Err(error) => tracing::warn!(%error, "cannot find out yet whether a commit took place"),
            }
            if self.lead.lease().is_lost() {
                return Err(NotActive.into());
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }
}

/// Runs the waiting transactions, commits them together, and collects the answers that depend on the commit.
fn run_group(
    session: &Session,
    epoch: i64,
    waiting: &mut VecDeque<Write>,
    answers: &mut Vec<Answer>,
    changes: &AtomicU64,
) -> Result<Outcome> {
    let number = lead::claim(session, epoch)?.ok_or(NotActive)?;
    let mut places = Vec::new();
    while !waiting.is_empty() {
        let before = session.changed();
        session.run("SAVEPOINT work")?;
        let Some(write) = waiting.pop_front() else { break };
        let done = catch_unwind(AssertUnwindSafe(|| (write.work)(Ok(&Tx(Db::Postgres(session))))));
        let is_fine = matches!(done, Ok((_, false)));
        answers.extend(done.ok().map(|(answer, _)| answer));
        let end = if is_fine { "RELEASE SAVEPOINT work" } else { "ROLLBACK TO work; RELEASE SAVEPOINT work" };
        session.run(end)?;
        places.extend((is_fine && session.changed() != before).then_some(write.place));
    }
    let pass = |when: &str| {
        places.iter().for_each(|place| fail_point::pass(|| format!("catalog.{}.{when}", place())));
    };
    pass("before");
    let committed = session.run("COMMIT");
    if !places.is_empty() {
        changes.fetch_add(1, Ordering::SeqCst);
    }
    pass("after");
    Ok(match committed {
        Ok(()) => Outcome::Committed,
        // PostgreSQL ends a transaction whose commit it refuses.
        Err(error) if !session.is_closed() => Outcome::Failed(error.into()),
        Err(_) => Outcome::Unknown(number),
    })
}
