//! Upgrades, rollbacks and removal of both charts and of storage-infra, from an earlier commit to this tree and in every
//! order of the tiers, under a pod that writes to its volume. Needs `cargo lab up --deployed --version COMMIT`.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{Api, DeleteParams};
use lab::Lab;
use lab::deployed::{NAMESPACE, Release, Version};
use tests::pods::{self, PodScenario, Script, filesystem};
use tests::undisturbed::Undisturbed;

const GUEST: &str = "g1";

/// Releases and versions of a lab, and the pod that must not notice their changes.
struct Upgrade<'a> {
    pods: &'a PodScenario,
    lab: &'a Lab,
    earlier: &'a Version,
    current: &'a Version,
    management: Release,
    guest: Release,
    writer: Undisturbed<'a>,
}

#[tokio::test]
async fn a_pod_writes_on_while_each_tier_is_upgraded_rolled_back_and_uninstalled() -> Result<()> {
    pods::run(|pods| async move {
        let upgrade = Upgrade::begin(&pods).await?;
        upgrade.guest_first().await?;
        upgrade.management_first().await?;
        upgrade.all().await?;
        upgrade.reinstall().await?;
        upgrade.writer.finish().await
    })
    .await
}

impl<'a> Upgrade<'a> {
    async fn begin(pods: &'a Arc<PodScenario>) -> Result<Self> {
        let lab = &pods.scenario().lab;
        let deployment = lab.deployment()?;
        let (earlier, current) = (&deployment.installed, &deployment.current);
        ensure!(earlier != current, "nothing to upgrade: start the lab with --version COMMIT");
        let volume = pods.claim("undisturbed", &filesystem("ext4")).await?;
        let writer = Undisturbed::start(pods, volume).await?;
        let (management, guest) = (lab.management_release()?, lab.guest_release(GUEST)?);
        let upgrade = Self { pods, lab, earlier, current, management, guest, writer };
        upgrade.check("all parts of the earlier version", earlier, earlier).await?;
        Ok(upgrade)
    }

    /// The guest is newer than the management cluster.
    async fn guest_first(&self) -> Result<()> {
        self.guest.upgrade(self.current).await?;
        self.check("only the guest upgraded", self.earlier, self.current).await?;
        self.guest.roll_back().await?;
        self.check("the guest rolled back", self.earlier, self.earlier).await
    }

    /// The management cluster is newer than the guest; storage-infra is newer than both before.
    async fn management_first(&self) -> Result<()> {
        self.lab.replace_infra(self.current).await?;
        self.check("only storage-infra upgraded, with its catalog", self.earlier, self.earlier).await?;
        self.management.upgrade(self.current).await?;
        self.check("the guest not yet upgraded", self.current, self.earlier).await?;
        self.management.roll_back().await?;
        self.check("the management cluster rolled back", self.earlier, self.earlier).await
    }

    async fn all(&self) -> Result<()> {
        self.management.upgrade(self.current).await?;
        self.guest.upgrade(self.current).await?;
        self.check("all parts upgraded", self.current, self.current).await
    }

    /// Without any part of Nestor the pod writes on. After an installation, its volume can be detached as usual.
    async fn reinstall(&self) -> Result<()> {
        let kept = self.guest.uninstall().await?;
        self.writer.still_writes().await.with_context(|| format!("guest chart uninstalled: {kept}"))?;
        let kept = self.management.uninstall().await?;
        for definition in [
            "volumeattachments.nestor.dev",
            "storagebudgets.nestor.dev",
            "storagepools.nestor.dev",
            "virtualmachines.vmoperator.vmware.com",
        ] {
            ensure!(kept.contains(definition), "helm does not tell that it keeps {definition}: {kept}");
        }
        self.writer.still_writes().await.context("both charts uninstalled")?;
        self.lab.install_management(self.current).await?;
        self.lab.install_guest(GUEST, self.current).await?;
        self.check("both charts installed again", self.current, self.current).await
    }

    /// Checks that these versions run, that the pod has written all the time, and that another volume is created, written
    /// to in another VM and deleted.
    async fn check(&self, what: &str, management: &Version, guest: &Version) -> Result<()> {
        println!("{what}");
        self.versions(management, guest).await.with_context(|| what.to_owned())?;
        self.writer.still_writes().await.with_context(|| what.to_owned())?;
        self.another_volume().await.with_context(|| format!("another volume, {what}"))
    }

    async fn versions(&self, management: &Version, guest: &Version) -> Result<()> {
        let scenario = self.pods.scenario();
        let expected =
            [(&scenario.management, "mgmt-csi", management), (&scenario.guest, "gc-csi-controller", guest)];
        for (client, name, version) in expected {
            let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
            let template = deployments.get(name).await?.spec.context("no spec")?.template;
            let pod = template.spec.context("no pod")?;
            // The driver starts before its sidecars.
            let containers = pod.init_containers.into_iter().flatten().chain(pod.containers);
            let images: Vec<String> = containers.filter_map(|container| container.image).collect();
            let tag = format!(":{}", version.tag);
            ensure!(images.iter().any(|image| image.ends_with(&tag)), "{name} is not {tag}: {images:?}");
        }
        Ok(())
    }

    async fn another_volume(&self) -> Result<()> {
        let volume = self.pods.claim("another", &filesystem("ext4")).await?;
        let script = "echo content > /data/file; sync; cat /data/file";
        let node = if self.writer.node == self.pods.first_node {
            &self.pods.second_node
        } else {
            &self.pods.first_node
        };
        let output = self.pods.run(Script::new("another", node, script).mount(&volume, "/data")).await?;
        ensure!(output == "content", "the pod read {output:?}");
        self.pods.detached(&volume).await?;
        let claims = self.pods.scenario().guest_claims();
        claims.delete(&volume.claim, &DeleteParams::default()).await?;
        self.pods.deleted(&volume).await
    }
}
