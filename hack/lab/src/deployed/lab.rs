//! Changes to a running lab whose Nestor runs in pods.

use anyhow::{Context, Result};

use super::{Deployment, Release, Version};
use crate::lab::Lab;
use crate::ui::Ui;

const INFRA: &str = "storage-infra";

impl Lab {
    /// What the lab is deployed with; fails if its Nestor does not run in pods.
    pub fn deployment(&self) -> Result<&Deployment> {
        let deployment = self.state().deployment.as_ref();
        deployment
            .context("Nestor does not run in pods in this lab: start one with `cargo lab up --deployed`")
    }

    /// The release in the management cluster.
    pub fn management_release(&self) -> Result<Release> {
        super::management_release(self.run())
    }

    /// The release in a guest.
    pub fn guest_release(&self, guest: &str) -> Result<Release> {
        super::guest_release(self.run(), guest)
    }

    /// Installs the management chart with its Secret; returns when all its pods are ready.
    pub async fn install_management(&self, version: &Version) -> Result<()> {
        super::install_management(&Ui::default(), self.run(), version).await
    }

    /// Installs a guest's chart with its Secret; returns when all its pods are ready.
    pub async fn install_guest(&self, guest: &str, version: &Version) -> Result<()> {
        super::install_guest(&Ui::default(), self.run(), guest, version).await
    }

    /// Restarts storage-infra with another version of its program, and the same arguments.
    pub async fn replace_infra(&self, version: &Version) -> Result<()> {
        let mut component = self.component(INFRA)?;
        component.argv[0] = version.binaries.join(INFRA).display().to_string();
        self.run().stop(INFRA).await?;
        self.run().launch(INFRA, component).await
    }
}
