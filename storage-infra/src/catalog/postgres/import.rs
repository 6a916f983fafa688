//! Brings a catalog from SQLite into PostgreSQL.

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

use super::lead::{self, Lead};
use super::session::Session;
use crate::catalog::db::{Db, Result as DbResult, Row, Value};
use crate::catalog::integrity::{self, CATALOG_FILE};
use crate::catalog::{self, CatalogError, DATABASE_SUFFIXES, Result, beside, schema};
use crate::lease::NotActive;

/// All tables, in an order in which each refers to earlier ones only.
const TABLES: [&str; 21] = [
    "pools",
    "volumes",
    "nodes",
    "snapshots",
    "attachments",
    "ended_attachments",
    "refused_attachments",
    "saved_nodes",
    "hypervisor_hosts",
    "revision",
    "budgets",
    "account_usage",
    "exports",
    "imports",
    "adoptions",
    "releases",
    "suspended_volumes",
    "suspended_pools",
    "paused_nodes",
    "moves",
    "altered_disks",
];

/// All tables, in an order in which each refers to earlier ones only.
pub(in crate::catalog) fn tables() -> impl Iterator<Item = &'static str> {
    TABLES.into_iter()
}

/// The ending of an imported file's name.
const IMPORTED: &str = ".imported";

/// Number of rows of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// Name of the table.
    pub table: &'static str,
    /// Number of its rows.
    pub rows: usize,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owned {
    Null,
    Integer(i64),
    Text(String),
    Bytes(Vec<u8>),
}

impl Owned {
    fn of(value: Value<'_>) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Integer(value.into()),
            Value::Integer(value) => Self::Integer(value),
            Value::Text(text) => Self::Text(text.to_owned()),
            Value::Bytes(bytes) => Self::Bytes(bytes.to_owned()),
        }
    }

    fn value(&self) -> Value<'_> {
        match self {
            Self::Null => Value::Null,
            Self::Integer(value) => Value::Integer(*value),
            Self::Text(text) => Value::Text(text),
            Self::Bytes(bytes) => Value::Bytes(bytes),
        }
    }
}

/// Brings the catalog of a data directory, which no server may use, into the database that this process leads. The database
/// must have no rows. The rows are compared before they are committed. The file is renamed then: no server can start with it
/// by mistake.
pub fn import(data_dir: &Path, lead: &Lead) -> Result<Vec<Imported>> {
    let _lock = catalog::lock(data_dir, Duration::ZERO)?;
    let file = data_dir.join(CATALOG_FILE);
    if !file.is_file() {
        return Err(CatalogError::Unusable(format!("there is no catalog at {}", file.display())));
    }
    let imported = super::outside_the_runtime(|| {
        let mut sqlite = catalog::connect(&file)?;
        integrity::refuse_damaged(data_dir, &sqlite)?;
        schema::migrate(&mut sqlite)?;
        let imported = copy_all(&sqlite, lead)?;
        // One file without a WAL beside it, so that it can be renamed.
        sqlite.pragma_update(None, "journal_mode", "delete")?;
        sqlite.close().map_err(|(_, error)| error)?;
        Ok(imported)
    })?;
    for suffix in DATABASE_SUFFIXES {
        let from = beside(&file, suffix);
        if from.exists() {
            std::fs::rename(&from, beside(&file, &format!("{IMPORTED}{suffix}"))).map_err(|error| {
                CatalogError::Unwritable(format!(
                    "the catalog was imported, but {} cannot be renamed: {error}",
                    from.display()
                ))
            })?;
        }
    }
    Ok(imported)
}

fn copy_all(sqlite: &Connection, lead: &Lead) -> Result<Vec<Imported>> {
    let session = lead.target().connect()?;
    super::schema::migrate(&session)?;
    session.run("BEGIN")?;
    lead::claim(&session, lead.epoch())?.ok_or(NotActive)?;
    let (from, to) = (Db::Sqlite(sqlite), Db::Postgres(&session));
    let filled = "SELECT 1 WHERE EXISTS (SELECT 1 FROM pools) OR EXISTS (SELECT 1 FROM nodes)";
    if to.prepare_cached(filled)?.exists([])? {
        return Err(CatalogError::Unusable(format!(
            "{} has a catalog with pools or nodes; import into an empty database",
            lead.target()
        )));
    }
    tables().try_for_each(|table| session.run(&format!("ALTER TABLE {table} DISABLE TRIGGER USER")))?;
    session.run("DELETE FROM revision")?;
    let imported = tables().map(|table| copy(from, to, &session, table)).collect::<Result<_>>()?;
    tables().try_for_each(|table| session.run(&format!("ALTER TABLE {table} ENABLE TRIGGER USER")))?;
    session.run("COMMIT")?;
    Ok(imported)
}

/// Copies a table, and compares the copy.
fn copy(from: Db<'_>, to: Db<'_>, session: &Session, table: &'static str) -> Result<Imported> {
    let columns = columns(session, table)?;
    let rows = rows(from, table, &columns)?;
    let parameters: Vec<String> = (1..=columns.len()).map(|number| format!("?{number}")).collect();
    let sql = format!("INSERT INTO {table} ({}) VALUES ({})", quoted(&columns), parameters.join(", "));
    let mut insert = to.prepare_cached(&sql)?;
    for row in &rows {
        let values: Vec<Value<'_>> = row.iter().map(Owned::value).collect();
        insert.execute(values.as_slice())?;
    }
    if self::rows(to, table, &columns)? != rows {
        return Err(CatalogError::Unusable(format!(
            "the copy of the table {table} differs from the original; nothing was imported"
        )));
    }
    Ok(Imported { table, rows: rows.len() })
}

/// The columns of a table, in order.
pub(in crate::catalog) fn columns(session: &Session, table: &str) -> Result<Vec<String>> {
    let sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?1) AND attnum > 0 AND NOT attisdropped \
               ORDER BY attnum";
    let mut select = Db::Postgres(session).prepare_cached(sql)?;
    Ok(select.query_map([table], |row| row.get(0))?.collect::<DbResult<_>>()?)
}

/// Names of columns in a query; one is a word of PostgreSQL.
fn quoted(columns: &[String]) -> String {
    columns.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// All rows of a table, sorted.
fn rows(db: Db<'_>, table: &str, columns: &[String]) -> Result<Vec<Vec<Owned>>> {
    let read = |row: &Row<'_>| -> DbResult<Vec<Owned>> {
        (0..columns.len()).map(|column| row.value(column).map(Owned::of)).collect()
    };
    let sql = format!("SELECT {} FROM {table}", quoted(columns));
    let mut rows = db.prepare_cached(&sql)?.query_map([], read)?.collect::<DbResult<Vec<_>>>()?;
    rows.sort();
    Ok(rows)
}
