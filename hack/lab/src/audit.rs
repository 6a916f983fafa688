//! Audit log of an API server: one record per request, written before the response is sent.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

/// Block size of the backward search for the last line end.
const CHUNK: u64 = 64 * 1024;

/// A reader over the audit log of a cluster.
#[derive(Debug, Clone)]
pub struct Audit {
    log: PathBuf,
}

/// A position in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

impl Mark {
    /// The start of the log.
    pub const START: Self = Self(0);
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// User agent of the client (`gc-csi/0.1.0`).
    pub user_agent: String,
    /// Authenticated user (`system:serviceaccount:guest-g1:gc-csi-g1`).
    pub user: String,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: String,
    /// Plural resource; empty for requests that are not about objects.
    pub resource: String,
    /// API group; empty for the core.
    pub group: String,
    /// `status` and such; empty for the object itself.
    pub subresource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// Empty for collections.
    pub name: String,
    /// HTTP status of the response; 0 if there was none.
    pub code: u16,
    /// `ResponseComplete`; a long watch writes `ResponseStarted` first.
    pub stage: String,
}

impl Entry {
    /// Whether the request may change an object.
    pub fn is_write(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }
}

impl Audit {
    pub(crate) fn new(log: PathBuf) -> Self {
        Self { log }
    }

    /// The current end of the log, after the last complete line.
    pub fn mark(&self) -> Result<Mark> {
        self.last_line_end().map(Mark).with_context(|| self.unreadable())
    }

    fn last_line_end(&self) -> std::io::Result<u64> {
        let mut file = File::open(&self.log)?;
        let mut end = file.metadata()?.len();
        let mut chunk = Vec::new();
        while end > 0 {
            let from = end.saturating_sub(CHUNK);
            file.seek(SeekFrom::Start(from))?;
            chunk.clear();
            (&file).take(end - from).read_to_end(&mut chunk)?;
            if let Some(at) = chunk.iter().rposition(|byte| *byte == b'\n') {
                return Ok(from + at as u64 + 1);
            }
            end = from;
        }
        Ok(0)
    }

    /// The requests that completed after `mark`, in order of completion.
    pub fn since(&self, mark: Mark) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.visit(mark, |entry| entries.push(entry))?;
        Ok(entries)
    }

    /// Calls `visit` with each of the requests that completed after `mark`: the log of a whole run may exceed the memory.
    pub fn visit(&self, mark: Mark, mut visit: impl FnMut(Entry)) -> Result<()> {
        let mut file = File::open(&self.log).with_context(|| self.unreadable())?;
        file.seek(SeekFrom::Start(mark.0)).with_context(|| self.unreadable())?;
        let mut reader = BufReader::new(file);
        let mut line = String::new();
        loop {
            line.clear();
            let read = reader.read_line(&mut line).with_context(|| self.unreadable())?;
            // An incomplete line belongs to a request that has no response yet.
            if read == 0 || !line.ends_with('\n') {
                return Ok(());
            }
            let event: Event =
                serde_json::from_str(&line).with_context(|| format!("bad line in the audit log: {line}"))?;
            visit(event.into());
        }
    }

    fn unreadable(&self) -> String {
        format!("cannot read the audit log {}", self.log.display())
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    stage: String,
    verb: String,
    #[serde(default)]
    user: User,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: Status,
}

#[derive(Deserialize, Default)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    resource: String,
    namespace: String,
    name: String,
    api_group: String,
    subresource: String,
}

#[derive(Deserialize, Default)]
struct Status {
    #[serde(default)]
    code: u16,
}

impl From<Event> for Entry {
    fn from(event: Event) -> Self {
        Self {
            user_agent: event.user_agent,
            user: event.user.username,
            verb: event.verb,
            resource: event.object_ref.resource,
            group: event.object_ref.api_group,
            subresource: event.object_ref.subresource,
            namespace: event.object_ref.namespace,
            name: event.object_ref.name,
            code: event.response_status.code,
            stage: event.stage,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_complete_lines_after_the_mark_are_read() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let line = |name: &str| {
            format!(
                r#"{{"stage":"ResponseComplete","verb":"patch","userAgent":"gc-csi/1","objectRef":{{"resource":"virtualmachines","name":"{name}"}},"responseStatus":{{"code":200}}}}"#
            )
        };
        writeln!(file, "{}", line("before")).unwrap();
        let audit = Audit::new(file.path().to_owned());
        let mark = audit.mark().unwrap();
        write!(file, "{}\n{}", line("after"), &line("unfinished")[..40]).unwrap();
        let seen = audit.since(mark).unwrap();
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].name.as_str(), seen[0].code, seen[0].is_write()), ("after", 200, true));

        let mark = audit.mark().unwrap();
        writeln!(file, "{}", &line("unfinished")[40..]).unwrap();
        assert_eq!(audit.since(mark).unwrap()[0].name, "unfinished");
        // Lines longer than one block.
        let long = "x".repeat(2 * CHUNK as usize);
        let mark = audit.mark().unwrap();
        write!(file, "{}", &line(&long)[..line(&long).len() - 1]).unwrap();
        assert_eq!(audit.mark().unwrap(), mark);
        writeln!(file, "}}").unwrap();
        assert!(audit.mark().unwrap() > mark);
        assert_eq!(audit.since(mark).unwrap()[0].name, long);
    }
}
