//! Requests to a Ceph cluster: through sessions for what a creation or an attach waits for, through the program `rbd` for
//! what moves data or may take long. Exit codes of `rbd` are errno values, its output is JSON.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use nix::errno::Errno;
use serde::de::DeserializeOwned;

use super::RbdLocation;
use super::session::{Call, Opens, Sessions};
use crate::clock::Clock;
use crate::engine::{EngineError, Result};
use crate::lease::{Lease, NotActive};

/// Timeout in seconds of a call that only reads or changes metadata.
pub(super) const QUICK: u64 = 30;
/// Timeout in seconds of a call that moves or removes data.
pub(super) const LONG: u64 = 6 * 3600;
/// Timeout in seconds for the monitors to answer.
pub(super) const MONITORS: u64 = 5;
/// Sessions for images. A request that hangs delays only those that find no other session.
const IMAGE_SESSIONS: usize = 4;
/// Exit code of a program that `timeout` killed: 128 + SIGKILL.
const KILLED: i32 = 137;

/// Why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The program cannot be run.
    NotRun,
    /// There was no answer in time.
    Timeout,
    /// Another server may be active.
    NotActive,
    /// Ceph reported this error.
    Errno(Errno),
    /// Anything else.
    Unknown,
}

/// A call that failed.
#[derive(Debug)]
pub(super) struct CallError {
    /// What was to be done.
    pub(super) what: String,
    pub(super) cause: Cause,
    /// Details.
    pub(super) why: String,
}

impl CallError {
    /// Another server may be active: nothing was done.
    pub(super) fn not_active(what: String, why: NotActive) -> Self {
        Self { what, cause: Cause::NotActive, why: why.to_string() }
    }

    /// Whether Ceph reported this error.
    pub(super) fn is(&self, errno: Errno) -> bool {
        self.cause == Cause::Errno(errno)
    }
}

impl From<CallError> for EngineError {
    fn from(error: CallError) -> Self {
        let text = format!("{}: {}", error.what, error.why);
        match error.cause {
            Cause::NotActive => Self::NotActive(NotActive),
            Cause::Timeout | Cause::Errno(Errno::ETIMEDOUT) => {
                Self::Unhealthy(format!("{text}; the Ceph cluster does not answer"))
            }
            Cause::Errno(Errno::EPERM | Errno::EACCES) => {
                Self::Unhealthy(format!("{text}; check the capabilities of the cephx user and its keyring"))
            }
            Cause::Errno(Errno::ENOENT) => Self::Missing(text),
            Cause::Errno(Errno::EBUSY) => Self::InUse(text),
            Cause::Errno(Errno::ENOSPC | Errno::EDQUOT) => Self::NoSpace(text),
            Cause::Errno(Errno::EROFS) => Self::ReadOnly(text),
            Cause::Errno(_) | Cause::NotRun | Cause::Unknown => {
                Self::Io { what: error.what, source: std::io::Error::other(error.why) }
            }
        }
    }
}

/// The cluster, as the user of a pool.
#[derive(Debug, Clone)]
pub(super) struct Ceph {
    pub(super) location: RbdLocation,
    /// Of the server that uses the pool.
    pub(super) lease: Lease,
    images: Arc<Sessions>,
    /// A session of its own: the monitors answer also when requests to images hang.
    monitors: Arc<Sessions>,
    /// Held for reading while a session has an image open for writing, and for writing while the watchers of one are asked for:
    /// a session is no other client.
    opened: Arc<RwLock<()>>,
    /// Held while an image gets the name of a deleted one and moves to the trash.
    pub(super) discarding: Arc<Mutex<()>>,
    pub(super) clock: Clock,
}

impl Ceph {
    pub(super) fn new(location: RbdLocation, lease: Lease, clock: Clock) -> Self {
        let sessions = |most| Arc::new(Sessions::new(location.clone(), lease.clone(), most));
        let (images, monitors) = (sessions(IMAGE_SESSIONS), sessions(1));
        Self { location, lease, images, monitors, opened: Arc::default(), discarding: Arc::default(), clock }
    }

    /// Makes a request in a session.
    pub(super) fn call<T: DeserializeOwned>(&self, call: &Call<'_>) -> Result<T, CallError> {
        match call.opens() {
            Opens::Nothing => self.monitors.call(call),
            Opens::ToRead => self.images.call(call),
            Opens::ToWrite => {
                let _opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
                self.images.call(call)
            }
            Opens::ToAskForClients => {
                let _closed = self.opened.write().unwrap_or_else(PoisonError::into_inner);
                self.images.call(call)
            }
        }
    }

    /// Runs `rbd` with these arguments, which change something. Returns its output.
    pub(super) fn rbd(&self, seconds: u64, arguments: &[&str]) -> Result<String, CallError> {
        let what = || format!("rbd {}", shown(arguments));
        self.lease.check().map_err(|why| CallError::not_active(what(), why))?;
        self.run(seconds, arguments)
    }

    fn run(&self, seconds: u64, arguments: &[&str]) -> Result<String, CallError> {
        let mut command = self.command(seconds);
        command.args(arguments);
        finish(&mut command, arguments)
    }

    /// Runs `rbd` for JSON. It changes nothing.
    pub(super) fn rbd_json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, CallError> {
        let output = self.run(QUICK, &[arguments, &["--format", "json"]].concat())?;
        decode(arguments, &output)
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

    fn command(&self, seconds: u64) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal", "KILL", &seconds.to_string(), "rbd"]);
        let RbdLocation { conf, user, keyring, .. } = &self.location;
        command.arg("--conf").arg(conf).arg("--keyring").arg(keyring).args(["--id", user]);
        command
            .args(["client_mount_timeout", "rados_mon_op_timeout"].map(|one| format!("--{one}={MONITORS}")));
        command.env("LC_ALL", "C").env("TZ", "UTC").env_remove("CEPH_ARGS").env_remove("CEPH_CONF");
        command
    }
}

fn finish(command: &mut Command, arguments: &[&str]) -> Result<String, CallError> {
    let what = || format!("rbd {}", shown(arguments));
    let output = command.stdin(Stdio::null()).output().map_err(|error| CallError {
        what: what(),
        cause: Cause::NotRun,
        why: format!("cannot run it (package ceph-common): {error}"),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let why = reason(&String::from_utf8_lossy(&output.stderr)).unwrap_or_else(|| output.status.to_string());
    Err(CallError { what: what(), cause: cause(output.status.code()), why })
}

fn cause(code: Option<i32>) -> Cause {
    match code {
        Some(KILLED) => Cause::Timeout,
        Some(code) => Cause::Errno(Errno::from_raw(code)),
        None => Cause::Unknown,
    }
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

fn decode<T: DeserializeOwned>(arguments: &[&str], output: &str) -> Result<T, CallError> {
    serde_json::from_str(output).map_err(|error| CallError {
        what: format!("rbd {}", shown(arguments)),
        cause: Cause::Unknown,
        why: format!("its output is not as expected: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(code: Option<i32>) -> EngineError {
        CallError { what: "rbd info vms/v".into(), cause: cause(code), why: "because".into() }.into()
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
