//! Root filesystem of a Debian host whose init is systemd, for the test of the Debian package.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::image::install_debian;
use super::{Key, debian_suite, entry};
use crate::ui::Ui;

/// What makes it a host that boots.
const INIT: [&str; 3] = ["systemd", "systemd-sysv", "dbus"];

/// Returns the folder with the root filesystem, in which these packages are installed. It must not be modified.
pub(crate) async fn debian_host(ui: &Ui, packages: &[&str]) -> Result<PathBuf> {
    let suite = debian_suite()?;
    let packages = [&INIT[..], packages].concat();
    let key = Key::new("debian-host")
        .with("suite", suite.as_bytes())
        .with("packages", packages.join(" ").as_bytes());
    entry(&format!("debian-host-{}", key.hex()), async |out: &Path| {
        let step = ui.step("installing a Debian host with systemd");
        install_debian(&suite, &packages, &out.join("root")).await?;
        step.done();
        Ok(())
    })
    .await
    .map(|entry| entry.join("root"))
}
