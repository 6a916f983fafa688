//! Hostile guests: everything that a guest's credential and root in its VM can be used for against other guests. All
//! attempts are in tables, from which docs/explanation/hostile-guests.md is made. Afterwards, the objects and the data of the
//! other guest must be as they were. `cargo lab bench fairness` measures whether other guests stay fast.

mod attempt;
mod change;
mod copy;
mod covered;
mod delete;
mod flood;
mod forge;
mod image;
mod label;
mod page;
mod pin;
mod read;
mod request;
mod site;
mod sockets;
mod steal;
mod untouched;
mod vm;

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use csi::proto::node_client::NodeClient;
use tests::{Scenario, pods, run, run_alone};

use attempt::{Act, Attempt, SETTINGS, Setting};
use site::Site;

/// A heading, and the attempts under it.
type Topic = (&'static str, fn() -> Vec<Attempt<Act>>);

/// The attempts with a guest's credential.
static TOPICS: [Topic; 9] = [
    ("Read", read::attempts),
    ("Take and share", label::attempts),
    ("Get at a volume", steal::attempts),
    ("Copy", copy::attempts),
    ("Pin, and drop finalizers", pin::attempts),
    ("Delete and detach", delete::attempts),
    ("Change", change::attempts),
    ("Forge", forge::attempts),
    ("Craft and flood", flood::attempts),
];

/// Failures of attempts, reported all at once.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    fn add(&mut self, name: &str, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.0.push(format!("{name}: {error:#}"));
        }
    }

    fn report(self) -> Result<()> {
        ensure!(self.0.is_empty(), "{} attempts:\n{}", self.0.len(), self.0.join("\n"));
        Ok(())
    }
}

/// Makes all attempts with a guest's credential in one setting.
async fn all_are_made(setting: Setting) -> Result<()> {
    run_alone(move |s| async move {
        let site = Site::create(&s, setting).await?;
        let before = site.objects_before().await?;
        let mut failures = Failures::default();
        for attempt in TOPICS.iter().flat_map(|(_, attempts)| attempts()) {
            failures.add(attempt.name, attempt.make(&site).await);
        }
        failures.add("afterwards", site.is_untouched(&before).await);
        failures.add("cleanup", site.clear().await);
        failures.report()
    })
    .await
}

#[tokio::test]
async fn attempts_from_another_namespace_are_stopped_with_policies() -> Result<()> {
    all_are_made(SETTINGS[0]).await
}

#[tokio::test]
async fn attempts_from_another_namespace_are_stopped_without_policies() -> Result<()> {
    all_are_made(SETTINGS[1]).await
}

#[tokio::test]
async fn attempts_in_a_shared_namespace_are_stopped_with_policies() -> Result<()> {
    all_are_made(SETTINGS[2]).await
}

#[tokio::test]
async fn attempts_in_a_shared_namespace_without_policies_are_stopped_as_far_as_documented() -> Result<()> {
    all_are_made(SETTINGS[3]).await
}

#[tokio::test]
async fn attempts_at_the_sockets_of_the_drivers_are_stopped() -> Result<()> {
    run_alone(|s| async move {
        let mut failures = Failures::default();
        for socket in [s.lab.controller_socket("g1")?, s.lab.mgmt_socket()?] {
            for attempt in sockets::at_drivers() {
                let seen = (attempt.act)(&socket).await;
                let checked = seen.and_then(|seen| attempt.expected[0].check(&seen));
                let outcome =
                    checked.and(sockets::serves(&socket).await.context("the driver serves no more"));
                failures.add(&format!("{} to {}", attempt.name, socket.display()), outcome);
            }
        }
        failures.report()
    })
    .await
}

#[tokio::test]
async fn attempts_at_the_port_of_the_storage_infra_are_stopped() -> Result<()> {
    run_alone(|s| async move {
        let mut failures = Failures::default();
        for attempt in sockets::at_the_infra() {
            let seen = (attempt.act)(&s).await;
            let checked = seen.and_then(|seen| attempt.expected[0].check(&seen));
            let health = s.infra.health().await.map(drop).map_err(|error| anyhow!("{error}"));
            failures.add(attempt.name, checked.and(health));
        }
        failures.report()
    })
    .await
}

#[tokio::test]
async fn attempts_from_inside_a_vm_are_stopped() -> Result<()> {
    pods::run(|pods| async move {
        let mut failures = Failures::default();
        for attempt in vm::attempts() {
            let seen = (attempt.act)(&pods).await;
            failures.add(attempt.name, seen.and_then(|seen| attempt.expected[0].check(&seen)));
        }
        failures.report()
    })
    .await
}

#[tokio::test]
async fn crafted_filesystems_are_not_mounted() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let running = s.lab.spawn_node_plugin(&node).await?;
        let outcome = crafted_images(&s, &node, &running).await;
        outcome.and(s.lab.remove_node_plugin(&running).await)
    })
    .await
}

async fn crafted_images(s: &Arc<Scenario>, node: &lab::LoopNode, running: &lab::NodePlugin) -> Result<()> {
    let client = NodeClient::new(csi::client::connect(&running.socket).await?);
    let mut plugin = image::Plugin::new(s, node, client, running.kubelet_dir.join("staging"));
    let mut failures = Failures::default();
    for attempt in image::attempts() {
        failures.add(attempt.name, plugin.make(&attempt).await);
    }
    failures.add("afterwards", plugin.still_works().await);
    failures.report()
}
