//! Container images: for each program, its Debian packages and the program on top, as an OCI archive that
//! `ctr images import` and `skopeo copy oci-archive:` accept. The same inputs give the same digests.

mod base;
pub(crate) mod files;
pub(crate) mod sbom;
mod sidecars;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::architecture::Architecture;
use crate::cache;
use crate::oci::Layout;
use crate::process::{command, run};
use crate::run::{repository, target_dir};
use crate::ui::{Ui, say, table};
pub(crate) use base::Base;
use files::{put, strip};
pub(crate) use sidecars::{Sidecar, write as write_sidecars};

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// User and group of programs that do not need root.
const NOBODY: &str = "65532:65532";

/// An image.
#[derive(Debug)]
pub(crate) struct Image {
    name: &'static str,
    /// The program, which is also the name of its crate.
    program: &'static str,
    description: &'static str,
    /// Debian packages in addition to those of every image.
    packages: &'static [&'static str],
    user: &'static str,
}

const IMAGES: [Image; 7] = [
    Image {
        name: "gc-csi",
        program: "gc-csi",
        description: "Nestor's CSI driver for guest clusters: controller",
        packages: &[],
        user: NOBODY,
    },
    Image {
        name: "gc-csi-node",
        program: "gc-csi-node",
        description: "Nestor's CSI driver for guest clusters: node plugin with the filesystem tools",
        packages: &["e2fsprogs", "xfsprogs", "btrfs-progs", "util-linux", "mount", "kmod"],
        // It mounts and opens disks.
        user: "0:0",
    },
    Image {
        name: "mgmt-csi",
        program: "mgmt-csi",
        description: "Nestor's CSI driver for the management cluster",
        packages: &[],
        user: NOBODY,
    },
    Image {
        name: "mgmt-csi-node",
        program: "mgmt-csi-node",
        description: "Nestor's CSI driver for the management cluster: node plugin with the filesystem tools",
        packages: &["e2fsprogs", "xfsprogs", "btrfs-progs", "util-linux", "mount", "kmod"],
        // It mounts and opens disks.
        user: "0:0",
    },
    Image {
        name: "vm-operator-shim",
        program: "vm-operator-shim",
        description: "VirtualMachine.spec.volumes to VolumeAttachment, where no VM Operator is installed",
        packages: &[],
        user: NOBODY,
    },
    Image {
        name: "nestor-console",
        program: "nestor-console",
        description: "Nestor's read-only web page for the platform team",
        packages: &[],
        user: NOBODY,
    },
    Image {
        name: "storage-infra",
        program: "storage-infra",
        description: "Nestor's storage infra: volumes as files in pools, and disks of libvirt VMs",
        // The last has losetup.
        packages: &["libvirt0", "libvirt-clients", "util-linux", "mount"],
        // The QEMU processes of libvirt open its files; their user differs between hosts.
        user: "0:0",
    },
];

/// Which images to build, and from which binaries.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Build only these images.
    names: Vec<String>,
    /// Use the binaries of the debug profile.
    #[arg(long)]
    debug: bool,
    /// CPU architecture of the images. Programs for another one than the host's are cross-compiled.
    #[arg(long, value_name = "ARCH", default_value = "amd64")]
    arch: Architecture,
    /// Output folder. [default: target/images]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// An image that was written.
#[derive(Debug, Clone)]
pub struct Built {
    /// Its name with its tag.
    pub name: String,
    /// The archive.
    pub archive: PathBuf,
    /// Its content (SBOM, CycloneDX).
    pub sbom: PathBuf,
    /// Digest of its manifest.
    pub digest: String,
}

/// `cargo lab images`.
pub async fn images(ui: &Ui, options: &Options) -> Result<()> {
    cache::packages::ensure(ui).await?;
    let programs = Programs::build(ui, !options.debug, options.arch).await?;
    let out = match &options.out {
        Some(out) => out.clone(),
        None => target_dir()?.join("images"),
    };
    let built = build(ui, &programs, VERSION, &out, &options.names).await?;
    let rows: Vec<Vec<String>> = built
        .iter()
        .map(|image| {
            let size = fs::metadata(&image.archive)?.len() as f64 / 1e6;
            Ok(vec![image.name.clone(), format!("{size:.1} MB"), image.digest.clone()])
        })
        .collect::<Result<_>>()?;
    for line in table(&["IMAGE", "SIZE", "DIGEST"], &rows) {
        say(line);
    }
    say(format!("archives and SBOMs are in {}", out.display()));
    Ok(())
}

/// A folder of our programs, and the architecture that they were built for.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The folder.
    pub folder: PathBuf,
    /// Their architecture.
    pub architecture: Architecture,
}

impl Programs {
    /// Programs of the host's architecture in a folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), architecture: Architecture::default() }
    }

    /// Builds the programs.
    pub async fn build(ui: &Ui, release: bool, architecture: Architecture) -> Result<Self> {
        let folder = cache::cargo::build_for(ui, release, architecture).await?;
        Ok(Self { folder, architecture })
    }

    /// Copies a program to another folder, without its debug information.
    pub(crate) async fn copy(&self, program: &str, folder: &Path) -> Result<()> {
        strip(self.architecture, &self.folder.join(program), &folder.join(program)).await
    }
}

/// Builds images from our programs, tagged with a version: those in `names`, or all.
pub async fn build(
    ui: &Ui,
    programs: &Programs,
    version: &str,
    out: &Path,
    names: &[String],
) -> Result<Vec<Built>> {
    for name in names {
        let known: Vec<&str> = IMAGES.iter().map(|image| image.name).collect();
        anyhow::ensure!(known.contains(&name.as_str()), "no image {name:?}; there are: {}", known.join(", "));
    }
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let commit = Commit::of(&repository()).await?;
    let mut built = Vec::new();
    for image in IMAGES.iter().filter(|image| names.is_empty() || names.iter().any(|name| name == image.name))
    {
        built.push(image.write(ui, programs, version, out, &commit).await.with_context(|| image.name)?);
    }
    Ok(built)
}

/// The commit that the images are built from.
struct Commit {
    id: String,
    /// Commit date, as in 2026-01-02T03:04:05+00:00.
    date: String,
}

impl Commit {
    async fn of(repository: &Path) -> Result<Self> {
        let git = async |args: &[&str]| run(command("git", args).current_dir(repository)).await;
        let shown = git(&["log", "--max-count=1", "--format=%H %cI"]).await?;
        let (id, date) = shown.trim().split_once(' ').context("git shows no commit")?;
        let is_clean = git(&["status", "--porcelain"]).await?.trim().is_empty();
        let id = if is_clean { id.to_owned() } else { format!("{id}-dirty") };
        Ok(Self { id, date: date.to_owned() })
    }
}

impl Image {
    async fn write(
        &self,
        ui: &Ui,
        programs: &Programs,
        version: &str,
        out: &Path,
        commit: &Commit,
    ) -> Result<Built> {
        let base = Base::of(ui, programs.architecture, self.packages).await?;
        let step = ui.step(format!("building the image {}", self.name));
        let work = tempfile::tempdir_in(out)?;
        let sbom = sbom::write("container", self.name, self.program, version, &base.packages).await?;
        let top = work.path().join("top");
        programs.copy(self.program, &top.join("usr/local/bin")).await?;
        put(&top.join("usr/share/nestor/sbom.cdx.json"), &sbom, 0o644)?;
        let mut layout = Layout::create(work.path().join("layout"))?;
        let layers = [layout.layer(&base.root).await?, layout.layer(&top).await?];
        let name = format!("localhost/nestor/{}:{version}", self.name);
        let digest =
            layout.image(&name, self.config(version, commit, &base, programs.architecture), &layers)?;
        let file = |ending: &str| {
            out.join(format!("{}-{version}-{}.{ending}", self.name, programs.architecture.name()))
        };
        let built = Built { name, archive: file("tar"), sbom: file("cdx.json"), digest };
        layout.archive(&built.archive).await?;
        fs::write(&built.sbom, &sbom)?;
        step.done();
        Ok(built)
    }

    fn config(&self, version: &str, commit: &Commit, base: &Base, architecture: Architecture) -> Value {
        json!({
            "architecture": architecture.name(),
            "os": "linux",
            "created": commit.date,
            "config": {
                "Entrypoint": [format!("/usr/local/bin/{}", self.program)],
                "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "User": self.user,
                "WorkingDir": "/",
                "Labels": {
                    "org.opencontainers.image.title": self.name,
                    "org.opencontainers.image.description": self.description,
                    "org.opencontainers.image.version": version,
                    "org.opencontainers.image.revision": commit.id,
                    "org.opencontainers.image.created": commit.date,
                    "org.opencontainers.image.licenses": "Apache-2.0",
                    "org.opencontainers.image.base.name": format!("debian:{}", base.suite),
                },
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_containerfile_builds_the_image_of_its_name() {
        for image in &IMAGES {
            let path = repository().join("hack/images").join(format!("{}.Containerfile", image.name));
            let text =
                fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let mut lines = vec![
                format!("RUN cargo build --release --locked --package {}", image.program),
                format!("COPY --from=build /src/target/release/{0} /usr/local/bin/{0}", image.program),
                format!("USER {}", image.user),
                format!("ENTRYPOINT [\"/usr/local/bin/{}\"]", image.program),
            ];
            if !image.packages.is_empty() {
                let packages = image.packages.join(" ");
                lines.push(format!(" && apt-get install --yes --no-install-recommends {packages} \\"));
            }
            for line in lines {
                assert!(text.lines().any(|found| found == line), "{}: no line {line:?}", path.display());
            }
        }
    }
}
