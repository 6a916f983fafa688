//! The catalog in PostgreSQL: sessions, schema, commits, and which of several servers is the active one.

pub(super) mod commit;
mod connection;
pub mod import;
pub mod lead;
pub(super) mod schema;
pub(super) mod session;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

pub use connection::Target;

use std::path::Path;

use ::postgres::error::SqlState;

use super::db::{Db, describe};
use super::integrity::{self, Registered};
use super::{CatalogError, Result, Tx};

/// Runs work of the synchronous client, which has a runtime of its own.
pub(super) fn outside_the_runtime<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let panicked = |_| Err(CatalogError::Unusable("the work on the database panicked".to_owned()));
    std::thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(panicked))
}

/// Creates or migrates the schema, and reads every row once. Returns the registered objects and the revision.
pub(super) fn prepare(data_dir: &Path, target: &Target) -> Result<(Registered, u64)> {
    let session = target.connect()?;
    if schema::version(&session)?.is_none() {
        integrity::refuse_lost_database(data_dir, target)?;
    }
    schema::migrate(&session)?;
    let tx = Tx(Db::Postgres(&session));
    let known = integrity::read_all(&tx)?;
    Ok((known, tx.revision()?))
}

/// What an error of PostgreSQL means.
pub(super) fn error(error: &::postgres::Error) -> CatalogError {
    // Classes of states: connection, resources, operator, system; and a database that became a standby.
    let passes = |state: &SqlState| {
        ["08", "53", "57", "58"].iter().any(|class| state.code().starts_with(class))
            || *state == SqlState::READ_ONLY_SQL_TRANSACTION
            || *state == SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT
    };
    match error.code() {
        Some(state) if !passes(state) => CatalogError::Postgres(describe(error)),
        _ => CatalogError::Unreachable(describe(error)),
    }
}
