//! PostgreSQL for the catalog of several storage-infra servers: Debian's programs, without root, on a Unix socket.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;

/// The component.
pub const COMPONENT: &str = "catalog-database";
/// Where Debian's packages put the programs of each version.
const VERSIONS: &str = "/usr/lib/postgresql";
/// Runs a program as nobody: PostgreSQL refuses to run as root.
const AS_NOBODY: [&str; 4] = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"];

/// Starts a server with an empty database, and returns the database's URL.
pub(crate) async fn start(run: &Run) -> Result<String> {
    let (programs, socket) = (programs()?, run.socket_dir().join("database"));
    // Not in the run's folder, whose parents nobody may not enter.
    let data = socket.join("data");
    fs::create_dir_all(&socket).with_context(|| format!("cannot make {}", socket.display()))?;
    run_helper(command("chown", ["nobody:nogroup"]).arg(&socket)).await?;
    let mut make = command(AS_NOBODY[0], &AS_NOBODY[1..]);
    make.arg(programs.join("initdb")).arg("--pgdata").arg(&data);
    make.args(["--auth=trust", "--username=nestor", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]);
    run_helper(make.current_dir("/")).await.context("cannot make a PostgreSQL database")?;
    let mut argv: Vec<String> =
        ["env", "--chdir=/"].into_iter().chain(AS_NOBODY).map(str::to_owned).collect();
    argv.push(programs.join("postgres").display().to_string());
    argv.extend([format!("-D{}", data.display()), format!("-k{}", socket.display())]);
    // The data of a lab need not survive a crash of the host, only of the process.
    argv.extend(["-clisten_addresses=", "-cfsync=off", "-cmax_connections=200"].map(str::to_owned));
    let component = Component {
        argv,
        env: Default::default(),
        ready: Ready::Socket(socket.join(".s.PGSQL.5432")),
        http: None,
        grace: 3,
        driver: None,
    };
    run.launch(COMPONENT, component).await?;
    Ok(format!("postgresql://nestor@/postgres?host={}", socket.display()))
}

/// The programs of the newest version.
fn programs() -> Result<PathBuf> {
    let found = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let newest = found.max_by_key(|entry| entry.file_name().to_string_lossy().parse::<u32>().unwrap_or(0));
    let newest =
        newest.with_context(|| format!("no PostgreSQL in {VERSIONS}: apt-get install postgresql"))?;
    Ok(Path::new(&newest.path()).join("bin"))
}
