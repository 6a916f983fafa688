//! Sessions: processes that keep a connection to the cluster and answer requests with Ceph's Python bindings. An answer
//! takes milliseconds; a program that connects anew takes a hundred times as long.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RbdLocation;
use super::command::{CallError, Cause, MONITORS, QUICK};
use crate::hypervisor::RbdImage;
use crate::lease::Lease;

/// The interpreter that Ceph's packages install their bindings for.
const PYTHON: &str = "/usr/bin/python3";
const PROGRAM: &str = include_str!("session.py");
/// Idle time after which a session ends.
const IDLE: Duration = Duration::from_secs(60);

/// A request to the cluster.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(super) enum Call<'a> {
    /// Commands for the monitors.
    Monitors { commands: &'a [Value] },
    /// Names of all images.
    Names { pool: &'a str, namespace: &'a str },
    /// Size in bytes.
    Size { image: Image<'a> },
    /// Clients that have the image open for writing.
    Watchers { image: Image<'a> },
    /// The value of image metadata.
    Metadata { image: Image<'a>, key: &'a str },
    /// Sets image metadata.
    SetMetadata { image: Image<'a>, key: &'a str, value: &'a str },
    /// Removes image metadata.
    RemoveMetadata { image: Image<'a>, key: &'a str },
    /// Creates an empty image.
    Create { image: Image<'a>, bytes: u64 },
    /// Expands an image.
    Resize { image: Image<'a>, bytes: u64 },
    /// Removes the data of an image from an offset on.
    Cut { image: Image<'a>, keep: u64, bytes: u64 },
    /// Renames an image.
    Rename { image: Image<'a>, to: &'a str },
    /// What tells whether an image can become a volume.
    Examine { image: Image<'a> },
    /// Time of the last change of the data, in seconds. Like the following, it keeps the image open until `Close`.
    Modified { image: Image<'a> },
    /// The parts of a range that hold data.
    Extents { image: Image<'a>, offset: u64, length: u64 },
    /// Reads data, which follows the answer.
    Read { image: Image<'a>, offset: u64, length: usize },
    /// Writes data, which follows the request.
    Write { image: Image<'a>, offset: u64, length: usize },
    /// Makes all written data durable.
    Flush { image: Image<'a> },
    /// Closes the images that were kept open.
    Close,
}

/// How a request opens an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opens {
    /// It is for the monitors.
    Nothing,
    /// Nobody sees it.
    ToRead,
    /// The session is a client that has the image open meanwhile.
    ToWrite,
    /// To ask which clients have it open.
    ToAskForClients,
}

impl Call<'_> {
    /// Whether only the active server may make it. Commands for the monitors also only ask: who gives one that changes something
    /// checks the lease.
    fn changes(&self) -> bool {
        match self {
            Self::SetMetadata { .. }
            | Self::RemoveMetadata { .. }
            | Self::Create { .. }
            | Self::Resize { .. }
            | Self::Cut { .. }
            | Self::Rename { .. }
            | Self::Write { .. } => true,
            Self::Monitors { .. }
            | Self::Names { .. }
            | Self::Size { .. }
            | Self::Watchers { .. }
            | Self::Metadata { .. }
            | Self::Examine { .. }
            | Self::Modified { .. }
            | Self::Extents { .. }
            | Self::Read { .. }
            | Self::Flush { .. }
            | Self::Close => false,
        }
    }

    pub(super) fn opens(&self) -> Opens {
        match self {
            Self::Monitors { .. } => Opens::Nothing,
            Self::Watchers { .. } => Opens::ToAskForClients,
            Self::SetMetadata { .. }
            | Self::RemoveMetadata { .. }
            | Self::Resize { .. }
            | Self::Cut { .. }
            | Self::Write { .. }
            | Self::Flush { .. } => Opens::ToWrite,
            Self::Names { .. }
            | Self::Size { .. }
            | Self::Metadata { .. }
            | Self::Create { .. }
            | Self::Rename { .. }
            | Self::Examine { .. }
            | Self::Modified { .. }
            | Self::Extents { .. }
            | Self::Read { .. }
            | Self::Close => Opens::ToRead,
        }
    }
}

/// An image in a request.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Image<'a> {
    pool: &'a str,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> From<&'a RbdImage> for Image<'a> {
    fn from(image: &'a RbdImage) -> Self {
        Self {
            pool: &image.pool,
            namespace: image.namespace.as_deref().unwrap_or_default(),
            name: &image.name,
        }
    }
}

impl fmt::Display for Image<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slash = if self.namespace.is_empty() { "" } else { "/" };
        write!(f, "{}/{}{slash}{}", self.pool, self.namespace, self.name)
    }
}

/// What was to be done, for messages.
impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Monitors { .. } => write!(f, "ask the monitors for the state of the cluster"),
            Self::Names { pool, namespace: "" } => write!(f, "list the images of {pool}"),
            Self::Names { pool, namespace } => write!(f, "list the images of {pool}/{namespace}"),
            Self::Size { image } => write!(f, "get the size of the image {image}"),
            Self::Watchers { image } => write!(f, "get the watchers of the image {image}"),
            Self::Metadata { image, key } => write!(f, "get the metadata {key} of the image {image}"),
            Self::SetMetadata { image, key, .. } => write!(f, "set the metadata {key} of the image {image}"),
            Self::RemoveMetadata { image, key } => {
                write!(f, "remove the metadata {key} of the image {image}")
            }
            Self::Create { image, bytes } => write!(f, "create the image {image} of {bytes} bytes"),
            Self::Resize { image, bytes } => write!(f, "expand the image {image} to {bytes} bytes"),
            Self::Cut { image, keep, .. } => write!(f, "cut the image {image} off after {keep} bytes"),
            Self::Rename { image, to } => write!(f, "rename the image {image} to {to}"),
            Self::Examine { image } => write!(f, "examine the image {image}"),
            Self::Modified { image } => write!(f, "get the time of the last change of the image {image}"),
            Self::Extents { image, offset, .. } => {
                write!(f, "find the data of the image {image} from byte {offset} on")
            }
            Self::Read { image, offset, length } => {
                write!(f, "read {length} bytes of the image {image} from byte {offset} on")
            }
            Self::Write { image, offset, length } => {
                write!(f, "write {length} bytes to the image {image} from byte {offset} on")
            }
            Self::Flush { image } => write!(f, "make the data of the image {image} durable"),
            Self::Close => write!(f, "close the image"),
        }
    }
}

/// An answer of a session.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Answer {
    Failed { errno: Option<i32>, why: String },
    Value { value: Value },
}

/// Sessions with the cluster of a pool, started when needed.
#[derive(Debug)]
pub(super) struct Sessions {
    location: RbdLocation,
    lease: Lease,
    /// Greatest number of sessions at the same time.
    most: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Sessions that nobody uses, the last used one at the end.
    idle: Vec<Session>,
    /// Number of sessions in use.
    used: usize,
}

impl Sessions {
    pub(super) fn new(location: RbdLocation, lease: Lease, most: usize) -> Self {
        Self { location, lease, most, state: Mutex::default(), returned: Condvar::new() }
    }

    /// Makes a request. A session that did not answer it is not used again.
    pub(super) fn call<T: DeserializeOwned>(&self, call: &Call<'_>) -> Result<T, CallError> {
        let session = self.take();
        let session = session.map_or_else(|| Session::start(&self.location), Ok);
        // After the wait for a session, and right before the request.
        if call.changes()
            && let Err(why) = self.lease.check()
        {
            self.give_back(session.ok());
            return Err(CallError::not_active(call.to_string(), why));
        }
        let (session, answer) = match session {
            Ok(mut session) => {
                let answer = session.request(call, &[]);
                (answer.is_ok().then_some(session), answer)
            }
            Err(why) => (None, Err(Ended { cause: Cause::NotRun, why })),
        };
        self.give_back(session);
        decode(call, answer)
    }

    /// An idle session; `None` if a new one is needed. Waits while there are as many as there may be.
    fn take(&self) -> Option<Session> {
        let is_full = |state: &mut State| state.used >= self.most;
        let mut state =
            self.returned.wait_while(self.state(), is_full).unwrap_or_else(PoisonError::into_inner);
        state.used += 1;
        state.idle.pop()
    }

    fn give_back(&self, session: Option<Session>) {
        let mut state = self.state();
        state.used -= 1;
        let (ended, mut idle): (Vec<Session>, Vec<Session>) =
            state.idle.drain(..).partition(|session| session.last_used.elapsed() > IDLE);
        idle.extend(session);
        state.idle = idle;
        drop(state);
        self.returned.notify_one();
        drop(ended);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the value of an answer.
fn decode<T: DeserializeOwned>(call: &Call<'_>, answer: Result<Answer, Ended>) -> Result<T, CallError> {
    let failed = |cause, why| CallError { what: call.to_string(), cause, why };
    match answer {
        Ok(Answer::Value { value }) => serde_json::from_value(value)
            .map_err(|error| failed(Cause::Unknown, format!("the answer is not as expected: {error}"))),
        Ok(Answer::Failed { errno, why }) => {
            Err(failed(errno.map_or(Cause::Unknown, |code| Cause::Errno(Errno::from_raw(code))), why))
        }
        Err(Ended { cause, why }) => Err(failed(cause, why)),
    }
}

/// A session ended without an answer.
struct Ended {
    cause: Cause,
    why: String,
}

/// A process with a connection to the cluster.
#[derive(Debug)]
pub(super) struct Session {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    last_used: Instant,
}

impl Session {
    fn start(location: &RbdLocation) -> Result<Self, String> {
        let not_run =
            |why: String| format!("cannot run {PYTHON} with Ceph's bindings (package python3-rbd): {why}");
        let mut command = Command::new(PYTHON);
        command.args(["-I", "-c", PROGRAM]).arg(&location.conf).arg(&location.keyring).arg(&location.user);
        command.args([MONITORS, QUICK].map(|seconds| seconds.to_string()));
        command.env_remove("CEPH_ARGS").env_remove("CEPH_CONF");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| not_run(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (requests, answers) = pipes.ok_or_else(|| not_run("it has no pipes".into()))?;
        Ok(Self { child, requests, answers: BufReader::new(answers), last_used: Instant::now() })
    }

    /// Starts a session for the data of images.
    pub(super) fn for_data(location: &RbdLocation) -> Result<Self, CallError> {
        let failed = |why| CallError { what: "start a session".into(), cause: Cause::NotRun, why };
        Self::start(location).map_err(failed)
    }

    /// Makes a request that this data follows.
    pub(super) fn call<T: DeserializeOwned>(&mut self, call: &Call<'_>, data: &[u8]) -> Result<T, CallError> {
        let answer = self.request(call, data);
        decode(call, answer)
    }

    /// Makes a request whose answer this much data follows at most.
    pub(super) fn read(&mut self, call: &Call<'_>, most: usize) -> Result<Vec<u8>, CallError> {
        let length: usize = self.call(call, &[])?;
        let mut data = vec![0; length.min(most)];
        match self.answers.read_exact(&mut data) {
            Ok(()) => Ok(data),
            Err(error) => decode(call, Err(self.ended(error.to_string()))),
        }
    }

    fn request(&mut self, call: &Call<'_>, data: &[u8]) -> Result<Answer, Ended> {
        let answer = self.exchange(call, data).map_err(|error| error.to_string());
        match answer.and_then(|line| serde_json::from_str(&line).map_err(|error| error.to_string())) {
            Ok(answer) => {
                self.last_used = Instant::now();
                Ok(answer)
            }
            Err(why) => Err(self.ended(why)),
        }
    }

    fn exchange(&mut self, call: &Call<'_>, data: &[u8]) -> std::io::Result<String> {
        let mut line = serde_json::to_vec(call)?;
        line.push(b'\n');
        self.requests.write_all(&line)?;
        self.requests.write_all(data)?;
        let mut answer = String::new();
        match self.answers.read_line(&mut answer)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(answer),
        }
    }

    /// Why the process gave no answer.
    fn ended(&mut self, why: String) -> Ended {
        use std::os::unix::process::ExitStatusExt;
        // A process that still runs has written what is no answer.
        let _ = self.child.kill();
        let status = self.child.wait().ok();
        if status.and_then(|status| status.signal()) == Some(nix::sys::signal::Signal::SIGALRM as i32) {
            return Ended { cause: Cause::Timeout, why: format!("no answer within {QUICK} s") };
        }
        let mut errors = String::new();
        let _ = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut errors));
        let why = errors.lines().rev().find(|line| !line.is_empty()).map_or(why, str::to_owned);
        Ended { cause: Cause::Unknown, why: format!("the session ended: {why}") }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(line: &str) -> Result<u64, CallError> {
        let image = RbdImage::parse("vms/a/v").unwrap();
        decode(&Call::Size { image: (&image).into() }, Ok(serde_json::from_str(line).unwrap()))
    }

    #[test]
    fn an_answer_is_a_value_or_says_which_request_failed_and_why() {
        assert_eq!(answer(r#"{"value":7}"#).unwrap(), 7);
        let missing = answer(r#"{"errno":2,"why":"no such image"}"#).unwrap_err();
        assert!(missing.is(Errno::ENOENT) && missing.what == "get the size of the image vms/a/v");
        let unknown = answer(r#"{"errno":null,"why":"KeyError"}"#).unwrap_err();
        assert!(unknown.cause == Cause::Unknown && unknown.why == "KeyError");
        assert!(answer(r#"{"value":"seven"}"#).unwrap_err().why.contains("not as expected"));
    }

    #[test]
    fn a_request_is_one_object() {
        let image = RbdImage::parse("vms/v").unwrap();
        let call = Call::Rename { image: (&image).into(), to: "w" };
        let expected = serde_json::json!({
            "call": "rename", "image": {"pool": "vms", "namespace": "", "name": "v"}, "to": "w",
        });
        assert_eq!(serde_json::to_value(&call).unwrap(), expected);
        assert_eq!(call.to_string(), "rename the image vms/v to w");
    }
}
