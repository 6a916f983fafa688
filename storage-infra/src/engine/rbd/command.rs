//! Calls of Ceph's programs `rbd` and `ceph`. Their exit codes are errno values, their output is JSON.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use serde::de::DeserializeOwned;

use super::RbdLocation;
use crate::engine::{EngineError, Result};

/// Timeout in seconds of a call that only reads or changes metadata.
pub(super) const QUICK: u64 = 30;
/// Timeout in seconds of a call that moves or removes data.
pub(super) const LONG: u64 = 6 * 3600;
/// Timeout in seconds for the monitors to answer.
const MONITORS: u64 = 5;
/// Exit code of a program that `timeout` killed: 128 + SIGKILL.
const KILLED: i32 = 137;

/// A call that failed.
#[derive(Debug)]
pub(super) struct CallError {
    /// The program and what it was to do.
    what: String,
    /// Exit code.
    code: Option<i32>,
    /// Why.
    why: String,
}

impl CallError {
    /// Whether the program reported this error.
    pub(super) fn is(&self, errno: Errno) -> bool {
        self.code == Some(errno as i32)
    }
}

impl From<CallError> for EngineError {
    fn from(error: CallError) -> Self {
        let text = format!("{}: {}", error.what, error.why);
        match error.code.map(|code| (code, Errno::from_raw(code))) {
            Some((KILLED, _) | (_, Errno::ETIMEDOUT)) => {
                Self::Unhealthy(format!("{text}; the Ceph cluster does not answer"))
            }
            Some((_, Errno::EPERM | Errno::EACCES)) => {
                Self::Unhealthy(format!("{text}; check the capabilities of the cephx user and its keyring"))
            }
            Some((_, Errno::ENOENT)) => Self::Missing(text),
            Some((_, Errno::EBUSY)) => Self::InUse(text),
            Some((_, Errno::ENOSPC | Errno::EDQUOT)) => Self::NoSpace(text),
            Some((_, Errno::EROFS)) => Self::ReadOnly(text),
            _ => Self::Io { what: error.what, source: std::io::Error::other(error.why) },
        }
    }
}

/// Ceph's programs, as the user of a pool.
#[derive(Debug, Clone)]
pub(super) struct Ceph {
    pub(super) location: RbdLocation,
    /// Held while an image gets the name of a deleted one and moves to the trash.
    pub(super) discarding: Arc<Mutex<()>>,
}

impl Ceph {
    pub(super) fn new(location: RbdLocation) -> Self {
        Self { location, discarding: Arc::default() }
    }

    /// Runs `rbd` with these arguments. Returns its output.
    pub(super) fn rbd(&self, seconds: u64, arguments: &[&str]) -> Result<String, CallError> {
        let mut command = self.command("rbd", seconds);
        command.args(arguments);
        finish(&mut command, "rbd", arguments, "")
    }

    /// Runs `rbd` for JSON.
    pub(super) fn rbd_json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, CallError> {
        let output = self.rbd(QUICK, &[arguments, &["--format", "json"]].concat())?;
        decode("rbd", arguments, &output)
    }

    /// Runs `rbd` for JSON about the whole pool or namespace.
    pub(super) fn rbd_here<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, CallError> {
        let place = self.place();
        let place: Vec<&str> = place.iter().map(String::as_str).collect();
        self.rbd_json(&[arguments, &place].concat())
    }

    /// The options that name the pool or namespace.
    pub(super) fn place(&self) -> Vec<String> {
        let mut place = vec!["--pool".to_owned(), self.location.pool.clone()];
        if let Some(namespace) = &self.location.namespace {
            place.extend(["--namespace".to_owned(), namespace.clone()]);
        }
        place
    }

    /// Runs commands in one call of `ceph`, which takes most of its time to start. Returns its output.
    pub(super) fn ceph(&self, commands: &[String]) -> Result<String, CallError> {
        let mut command = self.command("ceph", QUICK);
        command.args(["--connect-timeout", &MONITORS.to_string(), "--format", "json"]);
        let lines: String = commands.iter().map(|one| format!("{one}\n")).collect();
        finish(&mut command, "ceph", &[&commands.join(", ")], &lines)
    }

    fn command(&self, program: &str, seconds: u64) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal", "KILL", &seconds.to_string(), program]);
        let RbdLocation { conf, user, keyring, .. } = &self.location;
        command.arg("--conf").arg(conf).arg("--keyring").arg(keyring).args(["--id", user]);
        command
            .args(["client_mount_timeout", "rados_mon_op_timeout"].map(|one| format!("--{one}={MONITORS}")));
        command.env("LC_ALL", "C").env("TZ", "UTC").env_remove("CEPH_ARGS").env_remove("CEPH_CONF");
        command
    }
}

fn finish(
    command: &mut Command,
    program: &str,
    arguments: &[&str],
    input: &str,
) -> Result<String, CallError> {
    let what = || format!("{program} {}", shown(arguments));
    let not_run = |error: std::io::Error| CallError {
        what: what(),
        code: None,
        why: format!("cannot run it (package ceph-common): {error}"),
    };
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(not_run)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ended early reports why.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(not_run)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let why = reason(&String::from_utf8_lossy(&output.stderr)).unwrap_or_else(|| output.status.to_string());
    Err(CallError { what: what(), code: output.status.code(), why })
}

/// Arguments for a message: a long one is a record.
fn shown(arguments: &[&str]) -> String {
    let short = |one: &&str| if one.len() > 200 { "…".to_owned() } else { (*one).to_owned() };
    arguments.iter().map(short).collect::<Vec<_>>().join(" ")
}

/// The last line of a program's errors: the lines before it are details.
fn reason(errors: &str) -> Option<String> {
    let line = errors.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.trim_start_matches("rbd: ").to_owned())
}

fn decode<T: DeserializeOwned>(program: &str, arguments: &[&str], output: &str) -> Result<T, CallError> {
    serde_json::from_str(output).map_err(|error| CallError {
        what: format!("{program} {}", shown(arguments)),
        code: None,
        why: format!("its output is not as expected: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(code: Option<i32>) -> EngineError {
        CallError { what: "rbd info vms/v".into(), code, why: "because".into() }.into()
    }

    #[test]
    fn the_exit_code_decides_what_is_known() {
        assert!(matches!(failed(Some(2)), EngineError::Missing(_)));
        assert!(matches!(failed(Some(16)), EngineError::InUse(_)));
        assert!(matches!(failed(Some(122)), EngineError::NoSpace(_)));
        for code in [1, 13, 110, KILLED] {
            assert!(matches!(failed(Some(code)), EngineError::Unhealthy(_)), "{code}");
        }
        for code in [None, Some(5), Some(22)] {
            assert!(matches!(failed(code), EngineError::Io { .. }), "{code:?}");
        }
    }

    #[test]
    fn a_message_has_the_last_line_and_no_record() {
        let errors = "2026 7ff -1 librbd: details\n\nrbd: error opening image none: (2) No such file\n\n";
        assert_eq!(reason(errors).unwrap(), "error opening image none: (2) No such file");
        assert_eq!(reason(" \n"), None);
        assert_eq!(shown(&["image-meta", "set", &"x".repeat(500)]), "image-meta set …");
    }
}
