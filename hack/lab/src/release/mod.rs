//! `cargo lab release`: everything that is published, in one folder.
//!
//! The same commit and binaries give the same bytes: archives are sorted, and their files are owned by root and dated with
//! the commit, or with `SOURCE_DATE_EPOCH`.

mod archive;
mod charts;
mod notes;
mod programs;
mod versions;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::architecture::Architecture;
use crate::cache;
use crate::images::{self, Programs, VERSION};
use crate::oci::sha256;
use crate::process::{command, run};
use crate::run::{repository, target_dir};
use crate::ui::{Ui, say, table};

/// The file with the digests of all others.
pub const SUMS: &str = "SHA256SUMS";

/// What to build a release from, and where to put it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Output folder, which must be empty or not exist. [default: target/dist]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Use the binaries of the debug profile.
    #[arg(long)]
    debug: bool,
    /// CPU architectures of images and programs.
    #[arg(long, value_name = "ARCH", value_delimiter = ',', default_value = "amd64,arm64")]
    arch: Vec<Architecture>,
}

/// Builds the programs and packs a release.
pub async fn release(ui: &Ui, options: &Options) -> Result<()> {
    let out = match &options.out {
        Some(out) => out.clone(),
        None => target_dir()?.join("dist"),
    };
    cache::packages::ensure(ui).await?;
    let mut programs = Vec::new();
    for &architecture in &options.arch {
        programs.push(Programs::build(ui, !options.debug, architecture).await?);
    }
    let files = pack(ui, &programs, &out).await?;
    let rows: Vec<Vec<String>> =
        files.iter().map(|(name, digest)| vec![name.clone(), digest.clone()]).collect();
    table(&["FILE", "SHA-256"], &rows).iter().for_each(say);
    say(format!("release {VERSION} is in {}", out.display()));
    Ok(())
}

/// Packs a release from our programs for each architecture. Returns its files with their digests.
pub async fn pack(ui: &Ui, programs: &[Programs], out: &Path) -> Result<Vec<(String, String)>> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    ensure!(
        fs::read_dir(out)?.next().is_none(),
        "{} is not empty: remove it, or choose another",
        out.display()
    );
    let date = date().await?;
    for of_architecture in programs {
        versions::check_programs(of_architecture).await?;
        images::build(ui, of_architecture, VERSION, out, &[]).await?;
        programs::pack(of_architecture, out, &date).await?;
    }
    versions::check_charts()?;
    let step = ui.step("packing charts and definitions");
    charts::pack(&cache::helm(ui).await?, out, &date).await?;
    fs::write(out.join(format!("nestor-crds-{VERSION}.yaml")), definitions())?;
    let changelog =
        fs::read_to_string(repository().join("CHANGELOG.md")).context("cannot read CHANGELOG.md")?;
    fs::write(out.join("RELEASE_NOTES.md"), notes::of_version(&changelog, VERSION)?)?;
    let sums = sums(out)?;
    step.done();
    Ok(sums)
}

/// Date of the files in archives, in seconds after 1970: `SOURCE_DATE_EPOCH`, or that of the commit.
async fn date() -> Result<String> {
    if let Ok(date) = std::env::var("SOURCE_DATE_EPOCH") {
        date.parse::<u64>()
            .with_context(|| format!("SOURCE_DATE_EPOCH is no number of seconds: {date:?}"))?;
        return Ok(date);
    }
    let mut git = command("git", ["log", "--max-count=1", "--format=%ct"]);
    Ok(run(git.current_dir(repository())).await?.trim().to_owned())
}

/// All CustomResourceDefinitions, for clusters without the charts.
fn definitions() -> String {
    let all: Vec<String> = crds::generate::all().into_iter().map(|(_, yaml)| yaml).collect();
    all.join("---\n")
}

/// Writes the digests of all files in a folder, in the format of `sha256sum`.
fn sums(out: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(out)? {
        let entry = entry?;
        let name = entry.file_name().into_string().ok().context("a file name that is not UTF-8")?;
        files.push((name, sha256(&fs::read(entry.path())?)));
    }
    files.sort();
    let lines: String = files.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
    fs::write(out.join(SUMS), lines)?;
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_sorted_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a"] {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let names: Vec<String> = sums(folder.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
        let text = fs::read_to_string(folder.path().join(SUMS)).unwrap();
        assert!(text.starts_with("ca978112") && text.contains("  a\n3e23e816"), "{text}");
    }

    #[test]
    fn the_definitions_are_separate_documents() {
        let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(&definitions()).unwrap();
        assert_eq!(documents.len(), 4);
    }
}
