//! csi-sanity, the CSI community's conformance tests, against a driver of a lab.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use uuid::Uuid;

use crate::cluster::argv;
use crate::drivers::endpoint;
use crate::lab::Lab;
use crate::ui::Ui;

/// A driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Tier {
    /// gc-csi: its controller, and a node plugin on this host.
    Guest,
    /// mgmt-csi: its controller.
    Mgmt,
}

/// How many of csi-sanity's tests ran, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Which driver.
    pub tier: Tier,
    /// Tests that held.
    pub passed: u32,
    /// Tests that did not.
    pub failed: u32,
    /// Tests of capabilities that the driver does not have.
    pub skipped: u32,
}

impl Counts {
    /// Whether tests ran and all held.
    pub fn good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tier, passed, failed, skipped } = self;
        let driver = match tier {
            Tier::Guest => "guest",
            Tier::Mgmt => "mgmt",
        };
        write!(f, "csi-sanity {driver}: {passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs csi-sanity against a driver.
pub async fn sanity(ui: &Ui, lab: &Lab, tier: Tier) -> Result<Counts> {
    let dir = lab.run().path("sanity");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    match tier {
        Tier::Mgmt => {
            let socket = lab.mgmt_socket()?;
            // mgmt-csi has no node part: its disks go to virtual machines by VolumeAttachments.
            run(ui, lab, tier, &dir, &[("csi.endpoint", endpoint(&socket)), ("ginkgo.skip", "Node Service".to_owned())])
                .await
        }
        Tier::Guest => {
            let name = format!("sanity-{}", &Uuid::new_v4().simple().to_string()[..8]);
            let node = lab.add_loop_node(&name).await?;
            let plugin = lab.spawn_node_plugin(&node).await?;
            let parameters = dir.join("parameters.json");
            fs::write(&parameters, json!({"managementStorageClass": "nestor"}).to_string())?;
            let flags = [
                ("csi.endpoint", endpoint(&plugin.socket)),
                ("csi.controllerendpoint", endpoint(&lab.controller_socket("g1")?)),
                ("csi.testvolumeparameters", parameters.display().to_string()),
            ];
            let counts = run(ui, lab, tier, &dir, &flags).await?;
            lab.remove_node_plugin(&plugin).await?;
            lab.remove_loop_node(&name).await?;
            Ok(counts)
        }
    }
}

async fn run(ui: &Ui, lab: &Lab, tier: Tier, dir: &Path, more: &[(&str, String)]) -> Result<Counts> {
    let name = format!("csi-sanity-{}", if tier == Tier::Guest { "guest" } else { "mgmt" });
    let report: PathBuf = dir.join(format!("{name}.xml"));
    let _ = fs::remove_file(&report);
    let text = |path: PathBuf| path.display().to_string();
    let mut flags = vec![
        ("csi.mountdir", text(dir.join("mount"))),
        ("csi.stagingdir", text(dir.join("staging"))),
        ("csi.testvolumesize", (64_u64 << 20).to_string()),
        ("ginkgo.junit-report", text(report.clone())),
        ("ginkgo.no-color", "true".to_owned()),
        ("ginkgo.v", "true".to_owned()),
    ];
    flags.extend(more.iter().map(|(flag, value)| (*flag, value.clone())));
    let words = argv(&lab.state().tools, "csi-sanity", &flags);
    let log = lab.run().log(&name);
    let output = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut step = ui.step(format!("csi-sanity {}", if tier == Tier::Guest { "guest" } else { "mgmt" }));
    step.message(format!("see {}", log.display()));
    let mut command = tokio::process::Command::new(&words[0]);
    command.args(&words[1..]).stdout(output.try_clone()?).stderr(output).kill_on_drop(true);
    command.status().await.context("cannot run csi-sanity")?;
    let xml = fs::read_to_string(&report).with_context(|| lab.run().explain(&name, "it left no report"))?;
    let counts = counts(tier, &xml).with_context(|| format!("{} is no report", report.display()))?;
    step.done();
    if !counts.good() {
        for failure in failures(&xml) {
            ui.line(format!("failed: {failure}"));
        }
        ui.line(format!("csi-sanity's own words are in {}", log.display()));
    }
    Ok(counts)
}

fn counts(tier: Tier, xml: &str) -> Option<Counts> {
    let suite = xml.split("<testsuite ").nth(1)?.split('>').next()?;
    let number = |name: &str| suite.split(&format!(" {name}=\"")).nth(1)?.split('"').next()?.parse::<u32>().ok();
    let (all, failed, errors) = (number("tests")?, number("failures")?, number("errors")?);
    let skipped = number("skipped")? + number("disabled").unwrap_or_default();
    Some(Counts { tier, passed: all.checked_sub(failed + errors + skipped)?, failed: failed + errors, skipped })
}

/// Names of the tests that failed.
fn failures(xml: &str) -> Vec<&str> {
    let cases = xml.split("<testcase ").skip(1);
    let failed = cases.filter(|case| case.contains("status=\"failed\"") || case.contains("status=\"panicked\""));
    failed.filter_map(|case| case.split("name=\"").nth(1)?.split('"').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_from_the_suite_and_not_from_the_whole() {
        let xml = r#"<testsuites tests="9" errors="0" failures="0"><testsuite name="CSI" package="/" tests="90" disabled="2" skipped="30" errors="1" failures="2" time="1">
            <testcase name="[It] a" status="passed"></testcase><testcase name="[It] b" status="failed"></testcase></testsuite>"#;
        let expected = Counts { tier: Tier::Mgmt, passed: 55, failed: 3, skipped: 32 };
        assert_eq!(counts(Tier::Mgmt, xml), Some(expected));
        assert_eq!(failures(xml), ["[It] b"]);
    }
}
