//! Disks with the folder of a containerd that has imported the images, one for each tier. Each VM writes to an overlay.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{MANAGEMENT, Version};
use crate::containerd::Containerd;
use crate::images::{self, Programs, Sidecar};
use crate::run::Run;
use crate::ui::Ui;
use crate::vm;

/// Sidecars: the key in a chart's `sidecars` value, and the program.
const SIDECARS: [(&str, &str); 5] = [
    ("provisioner", "csi-provisioner"),
    ("attacher", "csi-attacher"),
    ("resizer", "csi-resizer"),
    ("snapshotter", "csi-snapshotter"),
    ("snapshotController", "snapshot-controller"),
];
/// Free space for the containers of a VM.
const SPARE_MEGABYTES: u64 = 1024;
const MANAGEMENT_IMAGES: [&str; 2] = ["mgmt-csi", "vm-operator-shim"];
const GUEST_IMAGES: [&str; 2] = ["gc-csi", "gc-csi-node"];

/// The disks of a lab.
#[derive(Debug)]
pub(crate) struct Disks {
    management: PathBuf,
    guest: PathBuf,
}

impl Disks {
    /// The disk for the nodes of a cluster.
    pub(crate) fn of(&self, cluster: &str) -> &Path {
        if cluster == MANAGEMENT { &self.management } else { &self.guest }
    }

    /// Builds the images of all versions and writes them to the disks.
    pub(crate) async fn build(ui: &Ui, run: &Run, tools: &Path, versions: &[Version]) -> Result<Self> {
        Ok(Self {
            management: build(ui, run, tools, versions, "nestor-management", &MANAGEMENT_IMAGES).await?,
            guest: build(ui, run, tools, versions, "nestor-guest", &GUEST_IMAGES).await?,
        })
    }
}

async fn build(
    ui: &Ui,
    run: &Run,
    tools: &Path,
    versions: &[Version],
    chart: &str,
    programs: &[&str],
) -> Result<PathBuf> {
    let folder = run.path("images").join(chart);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut sidecars = Vec::new();
    for version in versions {
        let names: Vec<String> = programs.iter().map(|&name| name.to_owned()).collect();
        images::build(ui, &Programs::in_folder(&version.binaries), &version.tag, &folder, &names).await?;
        sidecars.extend(sidecars_of(&version.charts.join(chart).join("values.yaml"))?);
    }
    sidecars.sort();
    sidecars.dedup();
    let step = ui.step(format!("disk with the images of {chart}"));
    images::write_sidecars(tools, &sidecars, &folder.join("sidecars.tar")).await?;
    let disk = folder.with_extension("raw");
    import(tools, &folder, &disk).await?;
    fs::remove_dir_all(&folder)?;
    step.done();
    Ok(disk)
}

/// Imports all archives of a folder into a containerd of this host, and writes its folder to the disk.
async fn import(tools: &Path, archives: &Path, disk: &Path) -> Result<()> {
    let mut containerd = Containerd::start(tools).await?;
    for entry in fs::read_dir(archives)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "tar") {
            containerd
                .ctr(&["--namespace", "k8s.io", "images", "import", &path.display().to_string()])
                .await?;
        }
    }
    containerd.stop().await?;
    vm::write_disk(&containerd.root(), disk, SPARE_MEGABYTES).await
}

/// The sidecars in the default values of a chart.
fn sidecars_of(values: &Path) -> Result<Vec<Sidecar>> {
    let text = fs::read_to_string(values).with_context(|| format!("cannot read {}", values.display()))?;
    let values: Value = serde_saphyr::from_str(&text)?;
    let all = &values["sidecars"];
    let registry = all["registry"].as_str().context("no sidecars.registry")?;
    let found = SIDECARS.iter().filter_map(|(key, program)| Some((program, all.get(key)?["tag"].as_str()?)));
    Ok(found
        .map(|(program, tag)| Sidecar {
            program: (*program).to_owned(),
            image: format!("{registry}/{program}:{tag}"),
        })
        .collect())
}
