//! A PostgreSQL server for tests: Debian's programs, as an unprivileged user, on a Unix socket, with its data in a temporary
//! directory. It ends with the test's process, however that ends: a shell waits for the end of its input.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where Debian's packages put the programs of each version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// Makes a cluster, starts it, and says where; ends it at the end of the input. `$1` is the directory of the programs.
const RUN: &str = r#"
set -e
directory=$(mktemp --directory --tmpdir nestor-postgres.XXXXXX)
chmod 755 "$directory"
trap '"$1/pg_ctl" -s -D "$directory/data" -m immediate stop 2>/dev/null; rm -rf "$directory"' EXIT
"$1/initdb" --pgdata "$directory/data" --auth-local trust --auth-host scram-sha-256 --username nestor --encoding UTF8 --locale C.UTF-8 --no-sync > "$directory/log" 2>&1 ||
    { cat "$directory/log" >&2; exit 1; }
cat >> "$directory/data/postgresql.conf" <<END
listen_addresses = ''
unix_socket_directories = '$directory'
max_connections = 300
# A killed server loses nothing by this; only a power failure would.
fsync = off
END
"$1/pg_ctl" -s -w -D "$directory/data" -l "$directory/log" start || { cat "$directory/log" >&2; exit 1; }
echo "$directory"
cat > /dev/null
"#;

/// A running PostgreSQL server.
pub struct Cluster {
    programs: PathBuf,
    directory: PathBuf,
    port: u16,
    databases: AtomicUsize,
    shell: Child,
}

impl Cluster {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If Debian's package `postgresql` is not installed, or the server does not start.
    pub fn start() -> Self {
        let programs = programs();
        let mut shell = unprivileged("setsid")
            .args(["sh", "-c", RUN, "sh"])
            .arg(&programs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start PostgreSQL: {error}"));
        let mut line = String::new();
        let output = shell.stdout.take().map(BufReader::new);
        let read = output.map(|mut output| output.read_line(&mut line));
        assert!(matches!(read, Some(Ok(1..))), "PostgreSQL did not start");
        Self {
            programs,
            directory: line.trim_end().into(),
            port: 5432,
            databases: AtomicUsize::new(0),
            shell,
        }
    }

    /// The directory of its socket.
    pub fn socket(&self) -> &Path {
        &self.directory
    }

    /// URL of a new, empty database.
    pub fn database(&self) -> String {
        let name = format!("catalog{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.query("postgres", &format!("CREATE DATABASE {name}"));
        format!("postgresql://nestor@/{name}?host={}&port={}", self.directory.display(), self.port)
    }

    /// Runs SQL in a database by its name or URL; returns the rows, one per line.
    pub fn query(&self, database: &str, sql: &str) -> String {
        let mut command = Command::new(self.programs.join("psql"));
        command.args(["-p", &self.port.to_string(), "-U", "nestor", "-h"]).arg(&self.directory).args([
            "-qAtX",
            "-v",
            "ON_ERROR_STOP=1",
        ]);
        let output = command.args(["-d", database, "-c", sql]).output();
        let output = output.unwrap_or_else(|error| panic!("cannot run psql: {error}"));
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Restarts the server with TLS on a port of the loopback address, where it asks for a password. Returns the port.
    ///
    /// # Panics
    ///
    /// If the server does not start.
    pub fn serve_tls(&mut self, certificate: &str, key: &str) -> u16 {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        self.crash();
        self.port = port.unwrap_or_else(|error| panic!("no free port: {error}")).port();
        let settings = format!("listen_addresses = '127.0.0.1'\nport = {}\nssl = on\n", self.port);
        for (name, text) in
            [("server.crt", certificate), ("server.key", key), ("postgresql.auto.conf", settings.as_str())]
        {
            self.write(name, text);
        }
        self.start_again();
        self.port
    }

    /// Writes a file of the server as its user.
    fn write(&self, name: &str, text: &str) {
        let mut command = unprivileged("sh");
        command.args(["-c", r#"umask 077; cat > "$0""#]).arg(self.directory.join("data").join(name));
        let shell = command.stdin(Stdio::piped()).spawn();
        let mut shell = shell.unwrap_or_else(|error| panic!("cannot write {name}: {error}"));
        let written = shell.stdin.take().map(|mut input| input.write_all(text.as_bytes()));
        let ended = shell.wait();
        assert!(
            matches!((written, ended), (Some(Ok(())), Ok(status)) if status.success()),
            "cannot write {name}"
        );
    }

    /// Stops the server at once, without a checkpoint, as a crash does.
    pub fn crash(&self) {
        self.control(&["-m", "immediate", "stop"]);
    }

    /// Starts it again.
    pub fn start_again(&self) {
        let log = self.directory.join("log");
        self.control(&["-w", "-l", &log.display().to_string(), "start"]);
    }

    fn control(&self, arguments: &[&str]) {
        let mut command = unprivileged("env");
        command.arg(self.programs.join("pg_ctl")).args(["-s", "-D"]).arg(self.directory.join("data"));
        let status = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).status();
        assert!(status.is_ok_and(|status| status.success()), "pg_ctl {arguments:?} failed");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // The test is over in any case.
        let _ = self.shell.wait();
    }
}

/// The programs of the newest version.
fn programs() -> PathBuf {
    let found = std::fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let newest = found.max_by_key(|entry| entry.file_name().to_string_lossy().parse::<u32>().unwrap_or(0));
    let newest = newest.unwrap_or_else(|| panic!("no PostgreSQL in {VERSIONS}: apt-get install postgresql"));
    newest.path().join("bin")
}

/// A command that root runs as nobody: PostgreSQL refuses to run as root.
fn unprivileged(program: &str) -> Command {
    let is_root =
        std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    if !is_root {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups", program]);
    command.current_dir("/");
    command
}
