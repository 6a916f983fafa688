//! External commands (mkfs, fsck, mount): run without a shell, with a time limit, and with their stderr in the error.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

/// Maximum number of bytes of a command's stderr in an error. The end is kept because it usually states the cause.
const MAX_STDERR: usize = 1500;

/// Result of a command.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    /// Exit code.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error: its last [`MAX_STDERR`] bytes, trimmed.
    pub(crate) stderr: String,
}

/// Failure of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The command could not be started.
    #[error("failed to run {program}: {source}; check that the driver's image contains its package")]
    Start {
        /// Program name.
        program: &'static str,
        /// OS error.
        source: std::io::Error,
    },
    /// The command exceeded its time limit and was killed.
    #[error("{program} did not finish within {} s and was killed", limit.as_secs())]
    TimedOut {
        /// Program name.
        program: &'static str,
        /// Time limit.
        limit: Duration,
    },
    /// The command was killed by a signal.
    #[error("{program} was killed by a signal: {stderr}")]
    Killed {
        /// Program name.
        program: &'static str,
        /// Standard error.
        stderr: String,
    },
    /// The command returned a nonzero exit code.
    #[error("{program} failed with exit code {code}: {stderr}")]
    Failed {
        /// Program name.
        program: &'static str,
        /// Exit code.
        code: i32,
        /// Standard error, or standard output if stderr is empty.
        stderr: String,
    },
}

/// Runs a command and returns its result for any exit code.
pub(crate) async fn run(
    program: &'static str,
    args: &[&OsStr],
    limit: Duration,
) -> Result<Output, CommandError> {
    // Three fail points, because a command that was started continues when the driver dies.
    fail_point::pass(|| format!("node.{program}.before"));
    let child = tokio::process::Command::new(program)
        .args(args)
        // Error messages are for operators; the driver parses blkid's output.
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
    let stderr = stderr_tail(&output.stderr);
    let code =
        output.status.code().ok_or_else(|| CommandError::Killed { program, stderr: stderr.clone() })?;
    Ok(Output { code, stdout: String::from_utf8_lossy(&output.stdout).into_owned(), stderr })
}

/// Runs a command; every exit code other than 0 is an error.
pub(crate) async fn run_checked(
    program: &'static str,
    args: &[&OsStr],
    limit: Duration,
) -> Result<(), CommandError> {
    let Output { code, stdout, stderr } = run(program, args, limit).await?;
    let message = if stderr.is_empty() { stderr_tail(stdout.as_bytes()) } else { stderr };
    if code == 0 { Ok(()) } else { Err(CommandError::Failed { program, code, stderr: message }) }
}

fn stderr_tail(stderr: &[u8]) -> String {
    let end = &stderr[stderr.len().saturating_sub(MAX_STDERR)..];
    let lines: Vec<_> = String::from_utf8_lossy(end).lines().map(|line| line.trim().to_owned()).collect();
    lines.iter().filter(|line| !line.is_empty()).cloned().collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_contains_the_commands_stderr() {
        let args = ["-c".as_ref(), "echo oh; echo no >&2; exit 3".as_ref()];
        let error = run_checked("sh", &args, Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(error.to_string(), "sh failed with exit code 3: no");
    }

    #[tokio::test]
    async fn a_command_that_exceeds_its_time_limit_is_killed() {
        let error = run("sleep", &["60".as_ref()], Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, CommandError::TimedOut { .. }), "{error}");
    }
}
