//! Both databases for the catalog's tests.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use test_postgres::Cluster;

use super::lead::{Lead, Seen};
use super::{Target, outside_the_runtime, schema};
use crate::catalog::db::{Db, FromValue, Params};
use crate::catalog::{Catalog, Result, Tx};

/// One server for all tests of the process; it ends with the process.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(Cluster::start);

/// Which database a test uses.
#[derive(Debug, Clone)]
pub(in crate::catalog) enum Backend {
    Sqlite,
    Postgres(Box<Target>),
}

impl Backend {
    /// SQLite, and a new database of PostgreSQL.
    pub(in crate::catalog) fn each() -> [Self; 2] {
        [Self::Sqlite, Self::Postgres(database().into())]
    }

    /// Opens the catalog, if possible at once.
    pub(in crate::catalog) fn open(&self, data_dir: &Path) -> Result<Catalog> {
        match self {
            Self::Sqlite => Catalog::open(data_dir, Duration::ZERO),
            Self::Postgres(target) => Catalog::open_led(data_dir, Duration::ZERO, &lead(target)),
        }
    }

    /// Runs a test on an empty catalog, outside of any transaction.
    pub(in crate::catalog) fn scratch(&self, test: impl Fn(&Scratch<'_>) + Sync) {
        match self {
            Self::Sqlite => {
                let mut connection = rusqlite::Connection::open_in_memory().unwrap();
                connection.pragma_update(None, "foreign_keys", true).unwrap();
                crate::catalog::schema::migrate(&mut connection).unwrap();
                test(&Scratch(Db::Sqlite(&connection)));
            }
            Self::Postgres(target) => {
                let work = || {
                    let session = target.connect()?;
                    schema::migrate(&session)?;
                    test(&Scratch(Db::Postgres(&session)));
                    Ok(())
                };
                outside_the_runtime(work).unwrap();
            }
        }
    }
}

/// A new database.
pub(in crate::catalog) fn database() -> Target {
    Target::new(&CLUSTER.database(), None, None).unwrap()
}

/// The lead of a database. Waits for that of a server before.
pub(in crate::catalog) fn lead(target: &Target) -> Arc<Lead> {
    let wait = || {
        let (_running, stop) = channel();
        let see = |seen| assert!(!matches!(seen, Seen::Unreachable(_)), "{seen:?}");
        Ok(Lead::wait(target, "a test", &stop, see))
    };
    Arc::new(outside_the_runtime(wait).unwrap().unwrap())
}

/// An empty catalog.
pub(in crate::catalog) struct Scratch<'a>(Db<'a>);

impl<'a> Scratch<'a> {
    pub(in crate::catalog) fn run(&self, sql: &str) {
        match self.0 {
            Db::Sqlite(connection) => connection.execute_batch(sql).unwrap(),
            Db::Postgres(session) => session.run(sql).unwrap(),
        }
    }

    pub(in crate::catalog) fn execute(&self, sql: &str, parameters: impl Params) -> Result<usize, String> {
        let mut statement = self.0.prepare_cached(sql).unwrap();
        statement.execute(parameters).map_err(|error| error.to_string())
    }

    pub(in crate::catalog) fn value<T: FromValue>(&self, sql: &str, parameters: impl Params) -> T {
        self.0.prepare_cached(sql).unwrap().query_row(parameters, |row| row.get(0)).unwrap()
    }

    pub(in crate::catalog) fn tx(&self) -> Tx<'a> {
        Tx(self.0)
    }
}
