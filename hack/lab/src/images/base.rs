//! Base layer of an image: Debian packages with their dependencies, unpacked without running maintainer scripts.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::files::put;
use crate::architecture::Architecture;
use crate::cache::{self, Key};
use crate::oci::sha256;
use crate::process::{command, run};
use crate::ui::Ui;

/// Libraries that every program is linked to.
const ALWAYS: [&str; 2] = ["libc6", "libgcc-s1"];
/// Dependencies that nothing in an image uses: xfs_scrub_all is in Python, and no package is configured.
const UNUSED: [&str; 6] = ["python3", "libpython3", "dpkg", "tar", "debconf", "media-types"];
/// Folders under /usr/share that a container does not need.
const EXCLUDED: [&str; 6] = ["man", "locale", "info", "lintian", "bash-completion", "doc-base"];

/// A package in an image.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) architecture: String,
    /// Digest of the package file.
    pub(crate) sha256: String,
}

/// A root filesystem.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) root: PathBuf,
    pub(crate) packages: Vec<Package>,
    /// The code name of the Debian release.
    pub(crate) suite: String,
}

impl Base {
    /// The base with these packages; built once and cached.
    pub(crate) async fn of(ui: &Ui, architecture: Architecture, more: &[&str]) -> Result<Self> {
        let suite = cache::debian_suite()?;
        let requested = [&ALWAYS[..], more].concat();
        let key = Key::new("image-base")
            .with("version", &[2])
            .with("architecture", architecture.name().as_bytes())
            .with("suite", suite.as_bytes())
            .with("packages", requested.join(" ").as_bytes())
            .with("unused", UNUSED.join(" ").as_bytes())
            .with("unread", EXCLUDED.join(" ").as_bytes());
        let dir = cache::entry(&format!("image-base-{}", key.hex()), async |out: &Path| {
            let step = ui.step(format!(
                "fetching the Debian packages {} ({})",
                requested.join(", "),
                architecture.name()
            ));
            let work = out.join("work");
            let files = fetch(&requested, architecture, &work).await?;
            let packages = unpack(&files, &out.join("root")).await?;
            if architecture == Architecture::default() {
                library_cache(&out.join("root")).await?;
            }
            fs::write(out.join("packages.json"), serde_json::to_vec_pretty(&packages)?)?;
            fs::remove_dir_all(&work)?;
            step.done();
            Ok(())
        })
        .await?;
        let packages =
            fs::read(dir.join("packages.json")).context("cannot read the package list of the base")?;
        Ok(Self { root: dir.join("root"), packages: serde_json::from_slice(&packages)?, suite })
    }
}

/// Downloads packages with all dependencies from the host's sources, whatever is installed on the host.
async fn fetch(requested: &[&str], architecture: Architecture, work: &Path) -> Result<Vec<PathBuf>> {
    for folder in ["state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(work.join(folder))?;
    }
    fs::write(work.join("status"), "")?;
    let apt = async |args: &[&str]| {
        let mut apt = command("apt-get", ["--quiet", "--yes", "-o", "APT::Sandbox::User=root"]);
        for (option, path) in
            [("Dir::State", "state"), ("Dir::Cache", "cache"), ("Dir::State::status", "status")]
        {
            apt.arg("-o").arg(format!("{option}={}", work.join(path).display()));
        }
        for option in ["APT::Architecture", "APT::Architectures"] {
            apt.arg("-o").arg(format!("{option}={}", architecture.name()));
        }
        run(apt.args(args).env("DEBIAN_FRONTEND", "noninteractive")).await
    };
    apt(&["update"]).await?;
    apt(&[&["install", "--download-only", "--no-install-recommends"], requested].concat()).await?;
    let mut files = Vec::new();
    for entry in fs::read_dir(work.join("cache/archives"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "deb") {
            files.push(path);
        }
    }
    files.sort();
    ensure!(files.len() >= requested.len(), "apt-get fetched only {files:?}");
    Ok(files)
}

/// Unpacks packages into a root, with the metadata that scanners read: package records and licences.
async fn unpack(files: &[PathBuf], root: &Path) -> Result<Vec<Package>> {
    skeleton(root)?;
    let mut packages = Vec::new();
    for file in files {
        let control = run(command("dpkg-deb", ["--field"]).arg(file)).await?;
        let package = describe(&control, &fs::read(file)?)?;
        if UNUSED
            .iter()
            .any(|unused| package.name == *unused || package.name.starts_with(&format!("{unused}.")))
        {
            continue;
        }
        // Debian's /bin is a link to /usr/bin, but some packages have files in /bin.
        let line =
            r#"dpkg-deb --fsys-tarfile "$1" | tar --extract --keep-directory-symlink --directory "$2""#;
        run(command("sh", ["-ec", line, "sh"]).arg(file).arg(root)).await?;
        put(&root.join("var/lib/dpkg/status.d").join(&package.name), control.as_bytes(), 0o644)?;
        packages.push(package);
    }
    prune(root).await?;
    packages.sort();
    Ok(packages)
}

fn skeleton(root: &Path) -> Result<()> {
    for folder in
        ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "run", "tmp", "var"]
    {
        fs::create_dir_all(root.join(folder))?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{name}"), root.join(name))?;
    }
    symlink("/run", root.join("var/run"))?;
    put(&root.join("etc/passwd"), b"root:x:0:0::/:/none\nnonroot:x:65532:65532::/:/none\n", 0o644)?;
    put(&root.join("etc/group"), b"root:x:0:\nnonroot:x:65532:\n", 0o644)?;
    // Without this file, names are looked up in services that do not exist.
    put(&root.join("etc/nsswitch.conf"), b"passwd: files\ngroup: files\nhosts: files dns\n", 0o644)?;
    Ok(())
}

async fn prune(root: &Path) -> Result<()> {
    for excluded in EXCLUDED {
        let folder = root.join("usr/share").join(excluded);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
    }
    let mut find = command("find", [root.join("usr/share/doc")]);
    run(find.args(["-not", "-type", "d", "-not", "-name", "copyright", "-delete"])).await.map(drop)
}

/// Writes the cache of the dynamic linker, which finds the libraries in their usual folders without it too. The host's
/// ldconfig reads only libraries of the host's architecture.
async fn library_cache(root: &Path) -> Result<()> {
    let ld = run(command("ldconfig", ["-r"]).arg(root)).await;
    ld.context("cannot create the library cache")?;
    // The auxiliary cache of ldconfig holds times.
    let auxiliary = root.join("var/cache/ldconfig");
    if auxiliary.exists() {
        fs::remove_dir_all(auxiliary)?;
    }
    Ok(())
}

fn describe(control: &str, file: &[u8]) -> Result<Package> {
    let field = |name: &str| {
        let line = control.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.map(str::to_owned).with_context(|| format!("a package without {name}: {control}"))
    };
    Ok(Package {
        name: field("Package")?,
        version: field("Version")?,
        architecture: field("Architecture")?,
        sha256: sha256(file),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_described_by_its_control_file() {
        let control = "Package: libc6\nSource: glibc\nVersion: 2.36-9\nArchitecture: amd64\nDescription: C\n";
        let package = describe(control, b"").unwrap();
        assert_eq!((package.name.as_str(), package.version.as_str()), ("libc6", "2.36-9"));
        assert!(package.sha256.starts_with("e3b0c442"));
        assert!(describe("Package: x\n", b"").unwrap_err().to_string().contains("without Version"));
    }
}
