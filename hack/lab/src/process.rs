//! Processes that outlive the command that started them, identified by PID and start time.
//!
//! A PID alone can be reused; a PID with the start time cannot. The child writes both into its PID file before it
//! executes the program, so a crash of the lab leaves no program running without a PID file.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

use crate::wait::until;

/// A process: its PID and start time (clock ticks after boot, field 22 of `/proc/PID/stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The process ID.
    pub pid: i32,
    /// Start time.
    pub start: u64,
}

/// Writes the shell's own stat line into `$1`, then executes the remaining arguments with the same PID.
const LAUNCHER: &str = r#"IFS= read -r stat < /proc/$$/stat && printf '%s\n' "$stat" > "$1.new" && mv "$1.new" "$1" && shift && exec "$@""#;

/// Starts a program in a new session, with its output appended to `log` and its identity written to `pid_file`.
pub fn spawn(
    argv: &[String],
    env: &BTreeMap<String, String>,
    dir: &Path,
    log: &Path,
    pid_file: &Path,
) -> Result<()> {
    let output = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write the log {}", log.display()))?;
    let _ = fs::remove_file(pid_file);
    let mut child = Command::new("setsid")
        .arg("/bin/sh")
        .args(["-c", LAUNCHER, "sh"])
        .arg(pid_file)
        .args(argv)
        .envs(env)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cannot share the log")?)
        .stderr(output)
        .spawn()
        .context("cannot start setsid (Debian package util-linux)")?;
    // Reap the child, so that an exited component does not stay a zombie while this process runs.
    std::thread::spawn(move || child.wait());
    Ok(())
}

impl Process {
    /// The process in a PID file, whether it runs or not. `None` if the file does not exist.
    pub fn from_pid_file(path: &Path) -> Option<Self> {
        let (process, _) = parse_stat(&fs::read_to_string(path).ok()?)?;
        Some(process)
    }

    /// The process that has this PID now. When this is `None`, its ports, files and locks are free.
    pub fn current(pid: i32) -> Option<Self> {
        let (process, running) = parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        running.then_some(process)
    }

    /// Whether this process still runs.
    pub fn alive(&self) -> bool {
        Self::current(self.pid) == Some(*self)
    }

    /// Sends a signal to this process; does nothing if it has exited.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let Some(pid) = Pid::from_raw(self.pid) else { bail!("{} is not a PID", self.pid) };
        // The pidfd is opened before the check, so that it cannot refer to another process.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
        if self.alive() {
            match pidfd_send_signal(handle, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot signal process {}", self.pid));
                }
            }
        }
        Ok(())
    }

    /// Sends SIGTERM (unless `grace` is zero), then SIGKILL after `grace`, and waits until the process has exited.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        if !grace.is_zero() {
            self.signal(Signal::TERM)?;
            if until(grace, || (!self.alive()).then_some(())).await.is_some() {
                return Ok(());
            }
        }
        self.signal(Signal::KILL)?;
        let patience = Duration::from_secs(120);
        until(patience, || (!self.alive()).then_some(()))
            .await
            .with_context(|| format!("process {} is still there {patience:?} after SIGKILL", self.pid))
    }
}

/// Parses the identity from a stat line, and whether any thread runs: if the first thread is a zombie, others may still
/// hold the files of the process open. The command name may contain spaces and parentheses, so fields are counted from
/// the last `)`.
fn parse_stat(line: &str) -> Option<(Process, bool)> {
    let (head, tail) = line.rsplit_once(')')?;
    let pid = head.split_whitespace().next()?.parse().ok()?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let ended = matches!(*fields.first()?, "Z" | "X");
    let threads: u32 = fields.get(17)?.parse().ok()?;
    Some((Process { pid, start: fields.get(19)?.parse().ok()? }, !ended || threads > 1))
}

/// The ID of the current boot: processes recorded in an earlier boot cannot run.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Length at which a line is truncated.
const LINE: usize = 400;

/// The last lines of a log, with long lines truncated.
pub fn tail(log: &Path, lines: usize) -> String {
    use std::io::{Read, Seek, SeekFrom};
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(64 * 1024)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    let cut = |line: &&str| match line.char_indices().nth(LINE) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => (*line).to_owned(),
    };
    all[all.len().saturating_sub(lines)..].iter().map(cut).collect::<Vec<_>>().join("\n")
}

/// Lines of error output that an error holds.
pub(crate) const SHOWN: usize = 20;

/// Runs a program until it exits and returns its standard output. An error holds the command and the end of its error
/// output.
pub async fn run(command: &mut tokio::process::Command) -> Result<String> {
    run_watched(command, SHOWN, |_| {}).await
}

/// The same, with the last `shown` lines of its error output, and `on_line` is called with each of them as it comes.
pub(crate) async fn run_watched(
    command: &mut tokio::process::Command,
    shown: usize,
    mut on_line: impl FnMut(&str),
) -> Result<String> {
    let text = words(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("cannot run `{text}`"))?;
    let pipes = child.stdout.take().zip(child.stderr.take());
    let (mut stdout, stderr) = pipes.context("a child without pipes")?;
    let reported = async {
        let (mut lines, mut all) = (BufReader::new(stderr).split(b'\n'), Vec::new());
        while let Some(line) = lines.next_segment().await? {
            let line = String::from_utf8_lossy(&line).into_owned();
            on_line(&line);
            all.push(line);
        }
        std::io::Result::Ok(all)
    };
    let mut output = Vec::new();
    let (reported, _) = futures::try_join!(reported, stdout.read_to_end(&mut output))
        .with_context(|| format!("cannot read the output of `{text}`"))?;
    let status = child.wait().await?;
    if !status.success() {
        bail!(
            "`{text}` failed ({status}): {}",
            reported[reported.len().saturating_sub(shown)..].join("\n").trim()
        );
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

fn words(command: &tokio::process::Command) -> String {
    let command = command.as_std();
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

/// A command with arguments.
pub fn command<S: AsRef<std::ffi::OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
    command.args(args);
    // Ctrl-C at the terminal goes to the lab only, which then stops its helpers.
    command.as_std_mut().process_group(0);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_parentheses_does_not_shift_the_fields() {
        let line = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 777 9";
        assert_eq!(parse_stat(line), Some((Process { pid: 42, start: 777 }, true)));
    }

    #[test]
    fn a_process_has_exited_when_its_last_thread_has() {
        let running = |state: &str, threads: u32| {
            let line = format!("42 (a) {state} 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 {threads} 0 777 9");
            parse_stat(&line).unwrap().1
        };
        assert!(running("S", 1));
        assert!(running("Z", 2));
        assert!(!running("Z", 1));
        assert!(!running("X", 0));
    }

    #[tokio::test]
    async fn a_spawned_process_is_found_by_its_pid_file_and_stops() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let argv = ["sleep".to_owned(), "1000".to_owned()];
        spawn(&argv, &BTreeMap::new(), dir.path(), &dir.path().join("log"), &pid_file).unwrap();
        let process = until(Duration::from_secs(60), || Process::from_pid_file(&pid_file)).await.unwrap();
        assert!(process.alive());
        assert!(!Process { start: process.start + 1, ..process }.alive());
        process.stop(Duration::from_secs(5)).await.unwrap();
        assert!(!process.alive());
    }
}
