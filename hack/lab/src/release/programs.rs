//! Programs that people run on their hosts, each in an archive with the licence, and with an SBOM beside it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::archive;
use crate::images::{Programs, VERSION, sbom};
use crate::run::repository;

const PROGRAMS: [&str; 2] = ["kubectl-nestor", "storage-infra"];

/// Packs the programs.
pub(super) async fn pack(programs: &Programs, out: &Path, date: &str) -> Result<()> {
    for program in PROGRAMS {
        pack_one(programs, program, out, date).await.with_context(|| program)?;
    }
    Ok(())
}

async fn pack_one(programs: &Programs, program: &str, out: &Path, date: &str) -> Result<()> {
    let work = tempfile::tempdir()?;
    let name = format!("{program}-{VERSION}-linux-{}", programs.architecture.name());
    let folder = work.path().join(&name);
    programs.copy(program, &folder).await?;
    fs::copy(repository().join("LICENSE"), folder.join("LICENSE")).context("LICENSE")?;
    archive::pack(work.path(), &name, &out.join(format!("{name}.tar.gz")), date).await?;
    let sbom = sbom::write("application", program, program, VERSION, &[]).await?;
    Ok(fs::write(out.join(format!("{name}.cdx.json")), sbom)?)
}
