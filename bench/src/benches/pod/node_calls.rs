//! Durations of the node plugin's calls, from its log.

use std::time::Duration;

use ::tests::{PATIENCE, Scenario, eventually};
use anyhow::{Context, Result};

/// Durations of the calls that made a volume usable on a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeCalls {
    pub(super) stage: Duration,
    pub(super) publish: Duration,
}

/// A position in the log of a VM's node plugin.
pub(super) struct NodeLog {
    file: std::path::PathBuf,
    from: usize,
}

impl NodeLog {
    /// The current end of the log.
    pub(super) fn mark(s: &Scenario, node: &str) -> Result<Self> {
        let file = s.lab.run().log(&format!("{node}-gc-csi-node"));
        let from = read(&file)?.len();
        Ok(Self { file, from })
    }

    /// Waits for the calls for a volume after the mark. The virtual machine writes the log with a delay.
    pub(super) async fn calls(&self, volume: &str) -> Result<NodeCalls> {
        eventually(&format!("the node plugin has staged and published {volume}"), PATIENCE, || async {
            let log = read(&self.file)?;
            let new = log.get(self.from..).unwrap_or_default();
            let call = |method| duration(new, method, volume);
            let both = call("NodeStageVolume").zip(call("NodePublishVolume"));
            Ok(both.map(|(stage, publish)| NodeCalls { stage, publish }).ok_or_else(|| new.to_owned()))
        })
        .await
    }
}

fn read(file: &std::path::Path) -> Result<String> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The duration of the last successful call of a method for a volume.
fn duration(log: &str, method: &str, volume: &str) -> Option<Duration> {
    let (method, volume) = (format!("method=\"{method}\""), format!("volume=\"{volume}\""));
    let is_it = |line: &&str| line.contains("call done") && line.contains(&method) && line.contains(&volume);
    let seconds = log.lines().rev().find(is_it)?.split_once("duration_seconds=")?.1;
    seconds.split_whitespace().next()?.parse().ok().map(Duration::from_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_of_a_volume_counts() {
        let log = r#"
x INFO csi{method="NodeStageVolume" request_id="1" volume="a"}: csi::metrics: call done duration_seconds=1.5
x INFO csi{method="NodeStageVolume" request_id="2" volume="b"}: csi::metrics: call done duration_seconds=2.5
x INFO csi{method="NodeStageVolume" request_id="3" volume="a"}: csi::metrics: call done duration_seconds=0.25
x WARN csi{method="NodeStageVolume" request_id="4" volume="a"}: csi::metrics: call failed duration_seconds=9
"#;
        assert_eq!(duration(log, "NodeStageVolume", "a"), Some(Duration::from_millis(250)));
        assert_eq!(duration(log, "NodePublishVolume", "a"), None);
        assert_eq!(duration(log, "NodeStageVolume", "c"), None);
    }
}
