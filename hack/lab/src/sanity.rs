//! csi-sanity, the CSI conformance tests, against a driver of a lab.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::cluster::argv;
use crate::drivers::endpoint;
use crate::lab::Lab;
use crate::loop_nodes::NodePlugin;
use crate::ui::Ui;

/// The driver to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Tier {
    /// gc-csi: its controller, and a node plugin on this host.
    Guest,
    /// mgmt-csi: its controller, and a node plugin on this host.
    Mgmt,
}

/// Results of csi-sanity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Which driver.
    pub tier: Tier,
    /// Tests that passed.
    pub passed: u32,
    /// Tests that failed.
    pub failed: u32,
    /// Tests of services and capabilities that the driver does not have.
    pub skipped: u32,
}

impl Counts {
    /// Whether tests ran and all passed.
    pub fn success(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// The numbers as a text.
    pub fn numbers(&self) -> String {
        let Self { passed, failed, skipped, .. } = self;
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let driver = match self.tier {
            Tier::Guest => "guest",
            Tier::Mgmt => "mgmt",
        };
        write!(f, "csi-sanity {driver}: {}", self.numbers())
    }
}

/// One run of csi-sanity.
struct Session<'a> {
    /// Name of its log and report.
    name: &'static str,
    /// The socket of the node service, or of all services.
    endpoint: &'a Path,
    /// The socket of the controller service, if it is another.
    controller: Option<&'a Path>,
    /// Run only tests whose names match.
    focus: Option<&'static str>,
    /// Parameters of the classes, as the sidecars pass them.
    parameters: Parameters,
}

/// Parameters of a StorageClass, a VolumeSnapshotClass and a VolumeAttributesClass.
#[derive(Clone)]
struct Parameters {
    volume: Value,
    snapshot: Value,
    attributes: Value,
}

impl Parameters {
    fn of(tier: Tier) -> Self {
        match tier {
            Tier::Guest => Self {
                volume: json!({names::PARAMETER_MANAGEMENT_CLASS: "nestor"}),
                snapshot: json!({names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS: "nestor"}),
                attributes: json!({names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS: "gold"}),
            },
            Tier::Mgmt => Self {
                volume: json!({}),
                snapshot: json!({}),
                attributes: json!({"iops": "2000", "bytesPerSecond": "80Mi"}),
            },
        }
    }
}

/// Runs csi-sanity against a driver, with a loop node or with this host as node.
pub async fn sanity(ui: &Ui, lab: &Lab, tier: Tier) -> Result<Counts> {
    match tier {
        Tier::Guest => guest(ui, lab).await,
        Tier::Mgmt => lab.with_host_node(|host| async move { management(ui, lab, &host.plugin).await }).await,
    }
}

async fn guest(ui: &Ui, lab: &Lab) -> Result<Counts> {
    let name = format!("sanity-{}", &Uuid::new_v4().simple().to_string()[..8]);
    let node = lab.add_loop_node(&name).await?;
    let plugin = lab.spawn_node_plugin(&node).await?;
    let controller = lab.controller_socket("g1")?;
    let session = Session {
        name: "csi-sanity-guest",
        endpoint: &plugin.socket,
        controller: Some(&controller),
        focus: None,
        parameters: Parameters::of(Tier::Guest),
    };
    let counts = run(ui, lab, Tier::Guest, &session).await?;
    lab.remove_node_plugin(&plugin).await?;
    lab.remove_loop_node(&name).await?;
    Ok(counts)
}

async fn management(ui: &Ui, lab: &Lab, plugin: &NodePlugin) -> Result<Counts> {
    let controller = lab.mgmt_socket()?;
    let parameters = Parameters::of(Tier::Mgmt);
    let identity = Session {
        name: "csi-sanity-mgmt-identity",
        endpoint: &controller,
        controller: None,
        focus: Some("Identity Service"),
        parameters: parameters.clone(),
    };
    let all = Session {
        name: "csi-sanity-mgmt",
        endpoint: &plugin.socket,
        controller: Some(&controller),
        focus: None,
        parameters,
    };
    let identity = run(ui, lab, Tier::Mgmt, &identity).await?;
    let all = run(ui, lab, Tier::Mgmt, &all).await?;
    Ok(Counts { passed: identity.passed + all.passed, failed: identity.failed + all.failed, ..all })
}

async fn run(ui: &Ui, lab: &Lab, tier: Tier, session: &Session<'_>) -> Result<Counts> {
    let (name, dir) = (session.name, lab.run().path("sanity").join(session.name));
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let report = dir.join("report.xml");
    let _ = fs::remove_file(&report);
    let text = |path: PathBuf| path.display().to_string();
    let mut flags = vec![
        ("csi.endpoint", endpoint(session.endpoint)),
        ("csi.mountdir", text(dir.join("mount"))),
        ("csi.stagingdir", text(dir.join("staging"))),
        ("csi.testvolumesize", (64_u64 << 20).to_string()),
        ("csi.testvolumeexpandsize", (128_u64 << 20).to_string()),
        ("ginkgo.junit-report", text(report.clone())),
        ("ginkgo.no-color", "true".to_owned()),
        ("ginkgo.v", "true".to_owned()),
    ];
    for (flag, value) in [
        ("csi.testvolumeparameters", &session.parameters.volume),
        ("csi.testsnapshotparameters", &session.parameters.snapshot),
        ("csi.testvolumemutableparameters", &session.parameters.attributes),
    ] {
        let file = dir.join(format!("{flag}.json"));
        fs::write(&file, value.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
        flags.push((flag, text(file)));
    }
    flags.extend(session.controller.map(|socket| ("csi.controllerendpoint", endpoint(socket))));
    flags.extend(session.focus.map(|focus| ("ginkgo.focus", focus.to_owned())));
    let words = argv(&lab.state().tools, "csi-sanity", &flags);
    let log = lab.run().log(name);
    let output = fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut step = ui.step(name);
    step.message(format!("see {}", log.display()));
    let mut command = tokio::process::Command::new(&words[0]);
    command.args(&words[1..]).stdout(output.try_clone()?).stderr(output).kill_on_drop(true);
    command.status().await.context("cannot run csi-sanity")?;
    let xml = fs::read_to_string(&report).with_context(|| lab.run().explain(name, "it wrote no report"))?;
    let counts = counts(tier, &xml).with_context(|| format!("{} is not a JUnit report", report.display()))?;
    step.done();
    if !counts.success() {
        for failure in failures(&xml) {
            ui.line(format!("failed: {failure}"));
        }
        ui.line(format!("the output of csi-sanity is in {}", log.display()));
    }
    Ok(counts)
}

fn counts(tier: Tier, xml: &str) -> Option<Counts> {
    let suite = xml.split("<testsuite ").nth(1)?.split('>').next()?;
    let number =
        |name: &str| suite.split(&format!(" {name}=\"")).nth(1)?.split('"').next()?.parse::<u32>().ok();
    let (all, failed, errors) = (number("tests")?, number("failures")?, number("errors")?);
    let skipped = number("skipped")? + number("disabled").unwrap_or_default();
    Some(Counts {
        tier,
        passed: all.checked_sub(failed + errors + skipped)?,
        failed: failed + errors,
        skipped,
    })
}

/// The failed tests with their messages.
fn failures(xml: &str) -> Vec<String> {
    let cases = xml.split("<testcase ").skip(1);
    let failed =
        cases.filter(|case| case.contains("status=\"failed\"") || case.contains("status=\"panicked\""));
    let quoted = |text: &str, before: &str| {
        let value = text.split(before).nth(1)?.split('"').next()?;
        Some(value.replace("&#xA;", "\n").replace("&#34;", "\"").replace("&lt;", "<").replace("&gt;", ">"))
    };
    failed
        .filter_map(|case| {
            let why = case.split("<failure ").nth(1).and_then(|failure| quoted(failure, "message=\""));
            Some(format!("{}: {}", quoted(case, "name=\"")?, why.unwrap_or_else(|| "no message".into())))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_from_the_suite_element() {
        let xml = r#"<testsuites tests="9" errors="0" failures="0"><testsuite name="CSI" package="/" tests="90" disabled="2" skipped="30" errors="1" failures="2" time="1">
            <testcase name="[It] a" status="passed"></testcase><testcase name="[It] b" status="failed"><failure message="code = Unavailable&#xA;desc = &lt;no room&gt;" type="failed"></failure></testcase></testsuite>"#;
        let expected = Counts { tier: Tier::Mgmt, passed: 55, failed: 3, skipped: 32 };
        assert_eq!(counts(Tier::Mgmt, xml), Some(expected));
        assert_eq!(failures(xml), ["[It] b: code = Unavailable\ndesc = <no room>"]);
    }
}
