//! The schema in PostgreSQL. Its versions are those of the SQLite schema.

use super::lead::SCHEMA_LOCK;
use super::session::Session;
use crate::catalog::altered::ALTERED_DISKS_POSTGRES;
use crate::catalog::db::{Db, Result as DbResult};
use crate::catalog::{CatalogError, Result};

/// Version of the schema in the file.
pub(in crate::catalog) const FIRST_VERSION: usize = 14;
const FIRST: &str = include_str!("schema.sql");
/// Migrations from there. The SQL of released entries is never changed.
pub(in crate::catalog) const MIGRATIONS: &[&str] = &[ALTERED_DISKS_POSTGRES];

/// Version of the schema in a database; `None` if it has no tables.
pub(in crate::catalog) fn version(session: &Session) -> Result<Option<usize>> {
    let db = Db::Postgres(session);
    let exists = "SELECT to_regclass('schema_version') IS NOT NULL";
    if !db.prepare_cached(exists)?.query_row([], |row| row.get::<bool>(0))? {
        return Ok(None);
    }
    let mut select = db.prepare_cached("SELECT version FROM schema_version")?;
    Ok(Some(select.query_row([], |row| row.get(0))?))
}

/// Creates the schema if there is none, and applies outstanding migrations.
pub(in crate::catalog) fn migrate(session: &Session) -> Result<()> {
    session.run(&format!("BEGIN; {SCHEMA_LOCK}"))?;
    let found = version(session)?;
    let latest = FIRST_VERSION + MIGRATIONS.len();
    match found {
        None => session.run(FIRST)?,
        Some(found) if found > latest || found < FIRST_VERSION => {
            session.run("ROLLBACK")?;
            return Err(CatalogError::Unusable(format!(
                "the catalog has schema version {found}, this program supports {FIRST_VERSION} to {latest}: run the version \
                 that wrote it, or a newer one"
            )));
        }
        Some(_) => {}
    }
    let found = found.unwrap_or(FIRST_VERSION);
    let apply = |sql: &&str| session.run(sql);
    MIGRATIONS.iter().skip(found - FIRST_VERSION).try_for_each(apply)?;
    Db::Postgres(session).prepare_cached("UPDATE schema_version SET version = ?1")?.execute([latest])?;
    let committed: DbResult<()> = session.run("COMMIT");
    Ok(committed?)
}
