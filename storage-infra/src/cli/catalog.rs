//! `catalog import`, and the flags of a catalog in PostgreSQL.

use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Subcommand};
use process_kit::table;

use super::output::put;
use crate::app::CatalogPlace;
use crate::catalog::postgres::Target;
use crate::catalog::postgres::import;
use crate::catalog::postgres::lead::{LEASE, Lead};

/// How long to wait for a server that ended to give up its lead.
const PATIENCE: Duration = LEASE.saturating_mul(3);

/// Where a catalog in PostgreSQL is.
#[derive(Debug, Clone, Args)]
pub(super) struct DatabaseFlags {
    /// PostgreSQL database of the catalog, such as postgresql://user@host/database. Servers with the same database are one
    /// storage infra; one of them is active. [default: SQLite in the data directory]
    #[arg(long, value_name = "URL")]
    catalog: Option<String>,
    /// File with the password for the database.
    #[arg(long, value_name = "FILE", requires = "catalog")]
    catalog_password_file: Option<PathBuf>,
    /// CA certificate of the database, PEM. Required unless the URL names a directory of a Unix socket.
    #[arg(long, value_name = "FILE", requires = "catalog")]
    catalog_ca: Option<PathBuf>,
}

impl DatabaseFlags {
    /// Where the catalog is.
    pub(super) fn place(&self) -> anyhow::Result<CatalogPlace> {
        let Some(url) = &self.catalog else { return Ok(CatalogPlace::DataDir) };
        let password = self.catalog_password_file.as_ref().map(|file| {
            std::fs::read_to_string(file)
                .with_context(|| format!("--catalog-password-file: cannot read {}", file.display()))
        });
        let password = password.transpose()?;
        let password = password.as_deref().map(|text| text.trim_end_matches(['\r', '\n']));
        let target = Target::new(url, password, self.catalog_ca.as_deref())?;
        Ok(CatalogPlace::Database(target.into()))
    }
}

/// Commands about the catalog.
#[derive(Debug, Subcommand)]
pub(super) enum CatalogCommand {
    /// Copy the catalog of a data directory into an empty PostgreSQL database, and compare the copy. No server may use either.
    /// The file is renamed then.
    Import(ImportArgs),
}

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// Data directory of the catalog.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    #[command(flatten)]
    database: DatabaseFlags,
}

/// Runs the command.
pub(super) async fn run(command: CatalogCommand) -> anyhow::Result<()> {
    let CatalogCommand::Import(args) = command;
    let CatalogPlace::Database(target) = args.database.place()? else {
        anyhow::bail!("--catalog is required: the database to import into");
    };
    let work = move || -> anyhow::Result<_> {
        let lead = lead(&target)?;
        let imported = import::import(&args.data_dir, &lead);
        lead.give_up();
        Ok(imported?)
    };
    let imported = tokio::task::spawn_blocking(work).await??;
    let rows = imported.into_iter().map(|one| vec![one.table.to_owned(), one.rows.to_string()]);
    put(&table::format(&["TABLE", "ROWS"], rows))
}

fn lead(target: &Target) -> anyhow::Result<Lead> {
    let (running, stop) = channel();
    let (mut running, start, mut last) = (Some(running), Instant::now(), None);
    let lead = Lead::wait(target, "storage-infra catalog import", &stop, |seen| {
        last = Some(seen);
        if start.elapsed() > PATIENCE {
            running = None;
        }
    });
    lead.with_context(|| format!("cannot lead {target}: {last:?}; stop all servers that use it, then retry"))
}
