//! Compressed archives whose bytes depend on names and contents only.

use std::path::Path;

use anyhow::Result;

use crate::process::{command, run};

/// Packs an entry of a folder.
pub(super) async fn pack(folder: &Path, entry: &str, archive: &Path, date: &str) -> Result<()> {
    let mut tar =
        command("tar", ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=ustar"]);
    // The modes of new folders depend on the umask.
    tar.args(["--mode=u=rwX,go=rX", "--use-compress-program=gzip --no-name --best"]);
    tar.arg(format!("--mtime=@{date}")).arg("--directory").arg(folder);
    run(tar.arg("--create").arg("--file").arg(archive).arg(entry)).await.map(drop)
}
