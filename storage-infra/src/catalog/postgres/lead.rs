//! Which of several servers on one database is the active one.
//!
//! Table `lease` names the active server and the epoch of its lead; the server counts up a beat while it lives. A server
//! whose beat stays the same for longer than a lease, by the clock of the one that waits, is replaced: the epoch rises.
//! Each transaction of the catalog requires that the epoch is still that of its server, and locks the row of table `lead`
//! that a replacement changes. So a replaced server commits nothing.
//!
//! A server acts on disks only during its [`Lease`], which begins before each beat is sent. When another server sees the
//! same beat for longer than that, the lease has ended.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::connection::Target;
use super::session::Session;
use crate::catalog::db::{Db, OptionalExtension, Row, params};
use crate::catalog::{CatalogError, Result};
use crate::lease::{Lease, clock};

/// Length of the lease.
pub const LEASE: Duration = Duration::from_secs(2);
/// Time between beats.
const BEAT: Duration = Duration::from_millis(500);
/// Time between looks at the beat of another server.
const LOOK: Duration = Duration::from_millis(200);
/// The clocks of two servers may run at different speeds: this is 5 % of the lease.
const MARGIN: Duration = Duration::from_millis(100);

/// Locked in the database while the schema is created or migrated.
pub(super) const SCHEMA_LOCK: &str =
    "SELECT pg_advisory_xact_lock(hashtext('nestor'), hashtext(current_schema()))";

const TABLES: &str = "
CREATE TABLE IF NOT EXISTS lead (
    single   INTEGER PRIMARY KEY CHECK (single = 0),
    epoch    BIGINT NOT NULL,
    -- Commits of this epoch: whether a commit without an answer took place.
    commits  BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS lease (
    single  INTEGER PRIMARY KEY CHECK (single = 0),
    epoch   BIGINT NOT NULL,
    beat    BIGINT NOT NULL,
    -- The active server; NULL if it gave up its lead.
    holder  TEXT
);
INSERT INTO lead VALUES (0, 0, 0) ON CONFLICT DO NOTHING;
INSERT INTO lease VALUES (0, 0, 0, NULL) ON CONFLICT DO NOTHING;
";

/// What a waiting server sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Another server is active.
    Active(String),
    /// The database cannot be reached.
    Unreachable(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Beat {
    epoch: i64,
    beat: i64,
    holder: Option<String>,
}

/// The lead of this server. Dropped, it stops the beats; another server becomes active when the lease has ended.
pub struct Lead {
    target: Target,
    epoch: i64,
    lease: Lease,
    /// Dropped to stop the beats; a message requests that the lead is given up.
    stop: Mutex<Option<Sender<()>>>,
    /// Never receives a message; disconnected when the beats have ended.
    ended: Mutex<Receiver<()>>,
}

impl Lead {
    /// Waits for the lead of a database under this server's name. None if `stop` is dropped before. Not for threads of the
    /// async runtime.
    pub fn wait(
        target: &Target,
        holder: &str,
        stop: &Receiver<()>,
        mut see: impl FnMut(Seen),
    ) -> Option<Self> {
        let mut waiting = Waiting { session: None, beat: None, since: clock() };
        loop {
            match waiting.look(target, holder) {
                Ok(Some((epoch, since))) => return Some(Self::start(target, epoch, since)),
                Ok(None) => {
                    let holder = waiting.beat.as_ref().and_then(|beat| beat.holder.clone());
                    see(Seen::Active(holder.unwrap_or_default()));
                }
                Err(error) => {
                    // Beats were missed meanwhile, so the time of the last one counts again.
                    (waiting.session, waiting.beat) = (None, None);
                    see(Seen::Unreachable(error.to_string()));
                }
            }
            if stop.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
                return None;
            }
        }
    }

    fn start(target: &Target, epoch: i64, since: Duration) -> Self {
        let lease = Lease::ended();
        lease.extend(since, LEASE);
        let ((stop, stopped), (running, ended)) = (channel(), channel());
        let beats = Beats { target: target.clone(), epoch, lease: lease.clone(), session: None };
        let work = move || {
            beats.run(&stopped);
            drop(running);
        };
        if let Err(error) = std::thread::Builder::new().name("catalog-lead".to_owned()).spawn(work) {
            tracing::error!(%error, "cannot start the thread of the lease: it ends, and another server becomes active");
        }
        Self { target: target.clone(), epoch, lease, stop: Mutex::new(Some(stop)), ended: Mutex::new(ended) }
    }

    /// The database.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The lease.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Number of this lead.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Gives up the lead: another server may be active at once. Only when nothing acts on disks any more.
    pub fn give_up(&self) {
        self.lease.lose();
        if let Some(stop) = self.stop.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // An error means that the thread has ended, because the lead is lost.
            let _ = stop.send(());
        }
        // Without an answer of the database, another server becomes active when the lease has ended.
        let _ = self.ended.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LEASE);
    }
}

/// A server that waits for the lead.
struct Waiting {
    session: Option<Session>,
    /// The last beat, and when it was first seen.
    beat: Option<Beat>,
    since: Duration,
}

impl Waiting {
    /// Looks at the beat of the active server, and replaces that server if its lease has ended. Returns the epoch, and a time
    /// before which the lease of this server began.
    fn look(&mut self, target: &Target, holder: &str) -> Result<Option<(i64, Duration)>> {
        let session = match self.session.take() {
            Some(session) => session,
            None => connect(target)?,
        };
        let now = clock();
        let beat = read(&session)?;
        if self.beat.as_ref() != Some(&beat) {
            // The clock was read before the beat: it was sent even earlier or meanwhile.
            self.since = clock();
        }
        let has_ended = beat.holder.is_none() || now > self.since + LEASE + MARGIN;
        let begin = clock();
        let epoch = if has_ended { replace(&session, &beat, holder)? } else { None };
        (self.session, self.beat) = (Some(session), Some(beat));
        Ok(epoch.map(|epoch| (epoch, begin)))
    }
}

fn connect(target: &Target) -> Result<Session> {
    let session = target.connect()?;
    session.run(&format!("BEGIN; {SCHEMA_LOCK}; {TABLES} COMMIT"))?;
    Ok(session)
}

fn read(session: &Session) -> Result<Beat> {
    let read = |row: &Row<'_>| Ok(Beat { epoch: row.get(0)?, beat: row.get(1)?, holder: row.get(2)? });
    let mut select = Db::Postgres(session).prepare_cached("SELECT epoch, beat, holder FROM lease")?;
    Ok(select.query_row([], read)?)
}

/// Makes this server the active one, unless the other one has beaten or was replaced. Waits for a running transaction of
/// the other one.
fn replace(session: &Session, beat: &Beat, holder: &str) -> Result<Option<i64>> {
    let db = Db::Postgres(session);
    let epoch = beat.epoch + 1;
    session.run("BEGIN")?;
    let taken = db
        .prepare_cached("UPDATE lease SET epoch = ?1, beat = 0, holder = ?2 WHERE epoch = ?3 AND beat = ?4")?
        .execute(params![epoch, holder, beat.epoch, beat.beat])?;
    if taken == 0 {
        session.run("ROLLBACK")?;
        return Ok(None);
    }
    db.prepare_cached("UPDATE lead SET epoch = ?1, commits = 0")?.execute([epoch])?;
    session.run("COMMIT")?;
    Ok(Some(epoch))
}

/// The beats of the active server.
struct Beats {
    target: Target,
    epoch: i64,
    lease: Lease,
    session: Option<Session>,
}

impl Beats {
    /// Beats until stopped or replaced; gives up the lead at a message.
    fn run(mut self, stop: &Receiver<()>) {
        loop {
            match self.beat() {
                Ok(true) => {}
                Ok(false) => return self.lease.lose(),
                Err(error) => {
                    self.session = None;
                    tracing::warn!(%error, "cannot renew the lease of the active server");
                }
            }
            match stop.recv_timeout(BEAT) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(()) => return self.give_up(),
            }
        }
    }

    /// Renews the lease. False if another server is active.
    fn beat(&mut self) -> Result<bool> {
        let session = match self.session.take() {
            Some(session) => session,
            None => self.target.connect()?,
        };
        let since = clock();
        let update = "UPDATE lease SET beat = beat + 1 WHERE epoch = ?1";
        let is_active = Db::Postgres(&session).prepare_cached(update)?.execute([self.epoch])? > 0;
        self.session = Some(session);
        if is_active {
            self.lease.extend(since, LEASE);
        }
        Ok(is_active)
    }

    fn give_up(&mut self) {
        let Some(session) = &self.session else { return };
        let update = "UPDATE lease SET holder = NULL WHERE epoch = ?1";
        let given_up =
            || Ok::<_, CatalogError>(Db::Postgres(session).prepare_cached(update)?.execute([self.epoch])?);
        if let Err(error) = given_up() {
            tracing::warn!(%error, "cannot give up the lead; another server becomes active when the lease has ended");
        }
    }
}

/// Begins a transaction's claim to the lead: fails if another server is active. Returns the number of the commit.
pub(super) fn claim(session: &Session, epoch: i64) -> Result<Option<i64>> {
    let update = "UPDATE lead SET commits = commits + 1 WHERE epoch = ?1 RETURNING commits";
    let mut update = Db::Postgres(session).prepare_cached(update)?;
    Ok(update.query_row([epoch], |row| row.get(0)).optional()?)
}

/// Whether the commit of this number took place. None if another server is active. Waits for the transaction if it still
/// runs.
pub(super) fn has_committed(session: &Session, epoch: i64, number: i64) -> Result<Option<bool>> {
    let select = "SELECT commits FROM lead WHERE epoch = ?1 FOR UPDATE";
    let mut select = Db::Postgres(session).prepare_cached(select)?;
    let commits: Option<i64> = select.query_row([epoch], |row| row.get(0)).optional()?;
    Ok(commits.map(|commits| commits >= number))
}
