//! Runs the system's tools: with a time limit, without a shell, and with what they said kept for the
//! error.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

/// Longest part of a tool's complaint that goes into an error, in bytes: its end says what went wrong.
const MAX_COMPLAINT: usize = 1500;

/// What a tool left.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    /// Exit code.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error, trimmed, and cut to its end.
    pub(crate) stderr: String,
}

/// Why a tool did not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// It could not be started.
    #[error("cannot run {program}: {source}; is its package installed in the driver's image?")]
    Start {
        /// The tool.
        program: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// It took longer than it may; it was killed.
    #[error("{program} did not end within {} s and was stopped", limit.as_secs())]
    TimedOut {
        /// The tool.
        program: &'static str,
        /// Its limit.
        limit: Duration,
    },
    /// It was killed by a signal.
    #[error("{program} was killed by a signal: {stderr}")]
    Killed {
        /// The tool.
        program: &'static str,
        /// What it had said.
        stderr: String,
    },
    /// It failed.
    #[error("{program} failed with exit code {code}: {stderr}")]
    Failed {
        /// The tool.
        program: &'static str,
        /// Its exit code.
        code: i32,
        /// What it said.
        stderr: String,
    },
}

/// Runs a tool to its end, whatever its exit code.
pub(crate) async fn run(
    program: &'static str,
    args: &[&OsStr],
    limit: Duration,
) -> Result<Output, CommandError> {
    // Three points for tests to let the driver die at, since a tool that was begun goes on without it.
    fail_point::pass(|| format!("node.{program}.before"));
    let child = tokio::process::Command::new(program)
        .args(args)
        // Messages are looked at by people and, for blkid, by this program.
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| CommandError::Start { program, source })?;
    fail_point::pass(|| format!("node.{program}.begun"));
    let output = tokio::time::timeout(limit, child.wait_with_output()).await;
    fail_point::pass(|| format!("node.{program}.after"));
    let output = output
        .map_err(|_| CommandError::TimedOut { program, limit })?
        .map_err(|source| CommandError::Start { program, source })?;
    let stderr = complaint(&output.stderr);
    let code =
        output.status.code().ok_or_else(|| CommandError::Killed { program, stderr: stderr.clone() })?;
    Ok(Output { code, stdout: String::from_utf8_lossy(&output.stdout).into_owned(), stderr })
}

/// Runs a tool whose every exit code but 0 is a failure.
pub(crate) async fn succeed(
    program: &'static str,
    args: &[&OsStr],
    limit: Duration,
) -> Result<(), CommandError> {
    let Output { code, stdout, stderr } = run(program, args, limit).await?;
    let said = if stderr.is_empty() { complaint(stdout.as_bytes()) } else { stderr };
    if code == 0 { Ok(()) } else { Err(CommandError::Failed { program, code, stderr: said }) }
}

fn complaint(stderr: &[u8]) -> String {
    let end = &stderr[stderr.len().saturating_sub(MAX_COMPLAINT)..];
    let lines: Vec<_> = String::from_utf8_lossy(end).lines().map(|line| line.trim().to_owned()).collect();
    lines.iter().filter(|line| !line.is_empty()).cloned().collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failure_carries_what_the_tool_said() {
        let args = ["-c".as_ref(), "echo oh; echo no >&2; exit 3".as_ref()];
        let error = succeed("sh", &args, Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(error.to_string(), "sh failed with exit code 3: no");
    }

    #[tokio::test]
    async fn a_tool_that_hangs_is_stopped() {
        let error = run("sleep", &["60".as_ref()], Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, CommandError::TimedOut { .. }), "{error}");
    }
}
