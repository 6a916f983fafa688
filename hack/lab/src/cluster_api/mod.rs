//! Cluster API in a lab: its core controllers, from their Go module, and an infrastructure provider of the lab's own, which
//! makes the VMs of guest g1. No VM exists before Cluster API asks for it.

mod controllers;
mod guest;
mod provider;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use crate::cache::{self, BaseImage};
use crate::cluster::ControlPlane;
use crate::ports;
use crate::run::Run;
use crate::state::{ClusterApi, Guest};
use crate::ui::Ui;

pub use guest::{CLUSTER, MACHINE_DEPLOYMENT};
pub use provider::{ProviderOptions, provide};

/// VMs that can exist at the same time: a rollout has one more than wanted.
const VMS: usize = 6;
/// How long controllers and VMs may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(900);

/// What is built for it.
pub(crate) struct Built {
    controllers: PathBuf,
    manifests: PathBuf,
}

/// Builds or finds the controllers and their manifests.
pub(crate) async fn prepare(ui: &Ui) -> Result<Built> {
    let (controllers, manifests) =
        futures::try_join!(cache::cluster_api(ui), cache::cluster_api_manifests())?;
    Ok(Built { controllers, manifests })
}

/// Records what VMs are made from, and keeps the key that signs their certificates.
pub(crate) fn plan(
    run: &Run,
    guest: &ControlPlane,
    image: &BaseImage,
    accelerator: &str,
) -> Result<ClusterApi> {
    guest.keep_key()?;
    let planned = ClusterApi {
        kubelet_ports: ports::free(VMS)?,
        accelerator: accelerator.to_owned(),
        image: image.clone(),
    };
    run.update(|state| state.cluster_api = Some(planned.clone()))?;
    Ok(planned)
}

/// Applies the definitions and starts the controllers.
pub(crate) async fn start_controllers(ui: &Ui, run: &Run, built: &Built) -> Result<()> {
    let step = ui.step("controllers of Cluster API");
    controllers::start(run, built).await?;
    step.done();
    Ok(())
}

/// Starts the provider, and creates the guest's Cluster with so many workers. Returns when they have joined.
pub(crate) async fn start_workers(ui: &Ui, run: &Run, guest: &Guest, workers: u32) -> Result<()> {
    provider::start(run).await?;
    create_cluster(ui, run, guest, workers).await
}

/// Creates the guest's Cluster with so many workers. Returns when they have joined.
pub async fn create_cluster(ui: &Ui, run: &Run, guest: &Guest, workers: u32) -> Result<()> {
    guest::create(run, guest, workers).await?;
    let step = ui.step(format!("{workers} workers of Cluster API"));
    guest::wait_for_workers(run, guest, workers).await?;
    step.done();
    Ok(())
}
