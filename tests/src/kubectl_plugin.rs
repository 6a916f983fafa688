//! Runs of the kubectl plugin.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use tokio::process::Command;

use crate::program::{binary, management_cluster};
use crate::{PATIENCE, Scenario};

/// What the plugin answered.
#[derive(Debug)]
pub struct Answer {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Answer {
    /// Checks the exit code and that the output contains all texts.
    pub fn expect(&self, code: i32, texts: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for text in texts {
            assert!(self.out.contains(text), "{text:?} is missing: {self:#?}");
        }
        self
    }

    /// Checks that the command was refused with all texts.
    pub fn expect_refusal(&self, texts: &[&str]) -> &Self {
        assert_eq!(self.code, Some(2), "{self:#?}");
        for text in texts {
            assert!(self.err.contains(text), "{text:?} is missing: {self:#?}");
        }
        self
    }
}

/// Runs the plugin with the platform team's kubeconfig, for claims of the scenario's management namespace.
pub async fn on_management(s: &Scenario, words: &[&str]) -> Result<Answer> {
    let kubeconfig = management_cluster(s)?.kubeconfig.display().to_string();
    let cluster = ["--management-kubeconfig", &kubeconfig, "--namespace", &s.namespace];
    execute(&binary(&s.lab, "kubectl-nestor"), &[words, &cluster].concat()).await
}

/// Runs a program without a configuration of kubectl or the plugin.
pub async fn execute(program: &Path, words: &[&str]) -> Result<Answer> {
    let home = tempfile::tempdir()?;
    let mut command = Command::new(program);
    command.args(words).env("XDG_CONFIG_HOME", home.path()).env_remove("KUBECONFIG").kill_on_drop(true);
    command.stdin(Stdio::null());
    let output = tokio::time::timeout(PATIENCE, command.output()).await.context("it did not exit")??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Answer { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) })
}
