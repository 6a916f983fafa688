//! Container images of the lab, built from the host's static busybox: the VMs cannot pull images.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use crate::oci::Layout;
use crate::process::{command, run};

/// Image names and their default commands.
const IMAGES: [(&str, &[&str]); 2] =
    [("localhost/busybox:1", &["/bin/sh"]), ("localhost/pause:1", &["/bin/sleep", "infinity"])];

/// Writes an OCI archive with the images to `archive`. `work` is an empty folder to use.
pub(super) async fn write_images(busybox: &Path, work: &Path, archive: &Path) -> Result<()> {
    let root = work.join("root");
    for folder in ["bin", "etc", "tmp", "proc", "sys", "dev", "root"] {
        fs::create_dir_all(root.join(folder))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))
        .with_context(|| format!("cannot copy {}", busybox.display()))?;
    let applets = run(&mut command("busybox", ["--list"])).await?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    fs::write(root.join("etc/group"), "root:x:0:\nnobody:x:65534:\n")?;

    let mut layout = Layout::create(work.join("layout"))?;
    let layer = layout.layer(&root).await?;
    for (name, entrypoint) in IMAGES {
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Cmd": entrypoint, "Env": ["PATH=/bin"], "WorkingDir": "/"},
        });
        layout.image(name, config, std::slice::from_ref(&layer))?;
    }
    layout.archive(archive).await
}
