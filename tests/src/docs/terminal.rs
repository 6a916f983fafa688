//! Shell in which the commands of a page run, as a reader would type them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kube::config::{Kubeconfig, NamedContext};
use tempfile::TempDir;
use tokio::process::Command;

use super::{Block, Directive, Page};
use crate::Scenario;

/// Timeout of a block: pods start slowly on emulated VMs.
const PATIENCE: Duration = Duration::from_secs(900);

/// The namespace of the guest in the pages' management cluster.
const NAMESPACE_IN_PAGES: &str = "guest-g1";

/// Runs a block, with the variables of the blocks before it.
const SHELL: &str = r#"[ ! -e .variables ] || . ./.variables
set -ae
. ./.block
export -p > .variables"#;

/// `cargo lab` of the running lab. Commands for the guest act in the namespace of the test.
const CARGO: &str = r#"#!/bin/sh -e
[ "$1" = lab ] || { echo "only cargo lab is run in tests" >&2; exit 2; }
shift
if [ "$1 $2" = "kubectl guest" ]; then
    shift 2
    set -- kubectl guest --namespace "$TEST_NAMESPACE" "$@"
fi
exec "$TEST_LAB" "$@"
"#;

/// A shell with the programs and clusters of the lab. kubectl has the contexts `guest`, which is the current one, in the
/// namespace of the scenario, and `management`, in the guest's namespace.
pub struct Terminal {
    folder: TempDir,
    namespace: String,
    environment: Vec<(String, String)>,
}

impl Terminal {
    /// A shell in an empty folder.
    pub fn open(s: &Scenario) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        write_program(&folder.path().join("bin"), "cargo", CARGO)?;
        let config = serde_json::to_string(&kubeconfig(s)?)?;
        fs::write(folder.path().join("kubeconfig"), config)?;
        let management = s.lab.state().management.as_ref().context("no management cluster")?;
        fs::copy(&management.kubeconfig, folder.path().join("admin.kubeconfig"))?;
        let environment = environment(s, folder.path())?;
        Ok(Self { folder, namespace: s.namespace.clone(), environment })
    }

    /// Runs all commands of a page in order; then its cleanup, also after a failure. Returns the number of blocks that ran.
    pub async fn run(&self, page: &Page) -> Result<usize> {
        let (cleanups, blocks): (Vec<&Block>, Vec<&Block>) =
            page.blocks.iter().partition(|block| block.directive == Some(Directive::Cleanup));
        let outcome = self.run_all(page, &blocks).await;
        for block in cleanups {
            self.shell(&block.text).await.with_context(|| place(page, block))?;
        }
        outcome
    }

    async fn run_all(&self, page: &Page, blocks: &[&Block]) -> Result<usize> {
        let mut ran = 0;
        for block in blocks {
            ran += usize::from(self.run_block(block).await.with_context(|| place(page, block))?);
        }
        Ok(ran)
    }

    /// Runs a block, if it has something to run.
    async fn run_block(&self, block: &Block) -> Result<bool> {
        match (&block.directive, block.language.as_str()) {
            (Some(Directive::NoRun(_)), _) => return Ok(false),
            (Some(Directive::Apply(context)), _) => self.apply(context, "none", &block.text).await?,
            (Some(Directive::DryRun(context)), _) => self.apply(context, "server", &block.text).await?,
            (_, "sh") => drop(self.shell(&block.text).await?),
            (directive, "console") => {
                let (commands, expected) = split(&block.text);
                let output = self.shell(&commands).await?;
                if *directive != Some(Directive::Example) {
                    compare(&expected, &output)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    async fn apply(&self, context: &str, dry_run: &str, yaml: &str) -> Result<()> {
        fs::write(self.folder.path().join("object.yaml"), self.here(yaml))?;
        let line = format!("kubectl --context {context} apply --dry-run={dry_run} -f object.yaml");
        self.shell(&line).await.map(drop)
    }

    /// Runs commands and returns their output.
    async fn shell(&self, commands: &str) -> Result<String> {
        let folder = self.folder.path();
        fs::write(folder.join(".block"), self.here(commands))?;
        let mut shell = Command::new("bash");
        shell.args(["-c", SHELL]).current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
        shell.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = tokio::time::timeout(PATIENCE, shell.output()).await;
        let output = output.with_context(|| format!("not finished after {PATIENCE:?}: {commands}"))??;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, errors) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "{}\n{commands}\n{out}{errors}", output.status);
        Ok(out)
    }

    /// A text with the names of this lab.
    fn here(&self, text: &str) -> String {
        text.replace(NAMESPACE_IN_PAGES, &self.namespace)
    }
}

fn place(page: &Page, block: &Block) -> String {
    format!("{}:{}", page.path, block.line)
}

/// Splits a console block into its commands, which begin with `$`, and the expected output.
fn split(text: &str) -> (String, Vec<String>) {
    let (mut commands, mut expected) = (String::new(), Vec::new());
    for line in text.lines() {
        match line.strip_prefix("$ ") {
            Some(command) => commands.push_str(&format!("{command}\n")),
            None if commands.ends_with("\\\n") => commands.push_str(&format!("{line}\n")),
            None => expected.push(line.to_owned()),
        }
    }
    (commands, expected)
}

/// Checks that the output has the expected lines in this order; other lines may be between them. `…` stands for anything,
/// and the width of columns does not matter.
fn compare(expected: &[String], output: &str) -> Result<()> {
    let mut lines = output.lines();
    for line in expected.iter().filter(|line| !line.trim().is_empty()) {
        if !lines.any(|found| is_like(line, found)) {
            bail!("expected {line:?} in\n{output}");
        }
    }
    Ok(())
}

fn is_like(expected: &str, found: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (expected, found) = (words(expected), words(found));
    let mut parts = expected.split('…');
    let first = parts.next().unwrap_or_default().trim_end();
    let Some(mut rest) = found.strip_prefix(first) else { return false };
    for part in parts.map(str::trim) {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.is_empty() || expected.ends_with('…')
}

/// Both clusters in one kubeconfig.
fn kubeconfig(s: &Scenario) -> Result<Kubeconfig> {
    let state = s.lab.state();
    let guest = &state.guests.get(crate::scenario::GUEST).context("no guest")?.cluster.kubeconfig;
    let management = &state.management.as_ref().context("no management cluster")?.kubeconfig;
    let mut all = named(guest, "guest", &s.name)?;
    let other = named(management, "management", &s.namespace)?;
    all.clusters.extend(other.clusters);
    all.auth_infos.extend(other.auth_infos);
    all.contexts.extend(other.contexts);
    Ok(all)
}

/// A kubeconfig of the lab with another name of its cluster, user and context.
fn named(path: &Path, name: &str, namespace: &str) -> Result<Kubeconfig> {
    let mut config = Kubeconfig::read_from(path)?;
    config.clusters.iter_mut().for_each(|cluster| cluster.name = name.to_owned());
    config.auth_infos.iter_mut().for_each(|user| user.name = name.to_owned());
    let context = kube::config::Context {
        cluster: name.to_owned(),
        user: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        ..Default::default()
    };
    config.contexts =
        vec![NamedContext { name: name.to_owned(), context: Some(context), ..Default::default() }];
    config.current_context = Some(name.to_owned());
    Ok(config)
}

fn write_program(folder: &Path, name: &str, text: &str) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join(name), text)?;
    Ok(fs::set_permissions(folder.join(name), Permissions::from_mode(0o755))?)
}

/// Variables: programs of the lab, clusters, and the client certificate of the storage infra.
fn environment(s: &Scenario, folder: &Path) -> Result<Vec<(String, String)>> {
    let state = s.lab.state();
    let infra = state.infra.as_ref().context("no storage infra")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let programs = [folder.join("bin"), state.binaries.clone(), state.tools.clone(), PathBuf::from(path)];
    let programs: Vec<String> = programs.iter().map(|folder| folder.display().to_string()).collect();
    let file = |name: &str| infra.pki.join(name).display().to_string();
    let variables = [
        ("PATH", programs.join(":")),
        ("HOME", folder.display().to_string()),
        ("KUBECONFIG", folder.join("kubeconfig").display().to_string()),
        ("NESTOR_LAB_NAME", s.lab.run().name()),
        ("TEST_LAB", lab_program()?.display().to_string()),
        ("TEST_NAMESPACE", s.name.clone()),
        ("CLUSTER_ID", s.cluster_id.clone()),
        ("NESTOR_INFRA_URL", infra.url.clone()),
        ("NESTOR_INFRA_CA", file("ca.crt")),
        ("NESTOR_INFRA_CERT", file("operator.crt")),
        ("NESTOR_INFRA_KEY", file("operator.key")),
    ];
    Ok(variables.map(|(name, value)| (name.to_owned(), value)).into())
}

/// The program of `cargo lab`, which was built with this test.
fn lab_program() -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name("../lab");
    program.canonicalize().with_context(|| format!("no {}: run `cargo lab test`", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_block_is_split_into_commands_and_output() {
        let (commands, expected) = split("$ a \\\n  b\nout\n$ c\nmore\n");
        assert_eq!(commands, "a \\\n  b\nc\n");
        assert_eq!(expected, ["out", "more"]);
    }

    #[test]
    fn output_is_compared_without_widths_and_with_gaps() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let output = "NAME   STATUS\nx  Bound   pvc-1   1Gi\nend";
        assert!(compare(&lines("NAME STATUS\nx Bound … 1Gi\n"), output).is_ok());
        assert!(compare(&lines("…\nend"), output).is_ok());
        assert!(compare(&lines("x Bound"), output).is_err());
        assert!(compare(&lines("end\nNAME STATUS"), output).is_err());
    }
}
