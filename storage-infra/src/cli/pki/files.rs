//! Files of the directory. A file is complete or absent, also after a crash.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::NamedTempFile;

use crate::engine::file::private_dir;

const CA: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
/// Last line of a certificate in PEM.
const END: &str = "-----END CERTIFICATE-----\n";

/// A directory with certificates.
pub(super) struct Directory<'a> {
    path: &'a Path,
    ca_key: PathBuf,
}

impl<'a> Directory<'a> {
    pub(super) fn new(path: &'a Path, ca_key: Option<&Path>) -> Self {
        Self { path, ca_key: ca_key.map_or_else(|| path.join(CA_KEY), Path::to_owned) }
    }

    /// Path of the trusted CA certificates.
    pub(super) fn ca_certificate(&self) -> PathBuf {
        self.path.join(CA)
    }

    /// Creates the directory if it is missing.
    pub(super) fn create(&self) -> anyhow::Result<()> {
        private_dir(self.path).with_context(|| format!("cannot create {}", self.path.display()))
    }

    /// Fails if the CA, or a certificate with one of these names, exists.
    pub(super) fn refuse_existing(&self, names: impl IntoIterator<Item = &'a str>) -> anyhow::Result<()> {
        let pairs = names.into_iter().flat_map(|name| self.pair(name));
        let mut all = [self.ca_certificate(), self.ca_key.clone()].into_iter().chain(pairs);
        match all.find(|path| path.exists()) {
            Some(existing) => anyhow::bail!("{} already exists; nothing was written", existing.display()),
            None => Ok(()),
        }
    }

    /// The paths of a certificate and its key.
    fn pair(&self, name: &str) -> [PathBuf; 2] {
        ["crt", "key"].map(|ending| self.path.join(format!("{name}.{ending}")))
    }

    pub(super) fn ca_key(&self) -> anyhow::Result<String> {
        read(&self.ca_key)
    }

    /// The trusted CA certificates. The first one signs.
    pub(super) fn trusted(&self) -> anyhow::Result<Vec<String>> {
        let all = read(&self.ca_certificate())?;
        Ok(all.split_inclusive(END).filter(|one| one.ends_with(END)).map(str::to_owned).collect())
    }

    /// Certificates other than those of CAs, by path.
    pub(super) fn certificates(&self) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let entries =
            fs::read_dir(self.path).with_context(|| format!("cannot read {}", self.path.display()))?;
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "crt") && path != self.ca_certificate() {
                let text = read(&path)?;
                found.push((path, text));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Writes a new CA.
    pub(super) fn save_authority(&self, key: &str, certificate: &str) -> anyhow::Result<()> {
        write(&self.ca_key, key, 0o600, false)?;
        write(&self.ca_certificate(), certificate, 0o644, false)
    }

    /// Replaces the key of the CA.
    pub(super) fn replace_key(&self, key: &str) -> anyhow::Result<()> {
        write(&self.ca_key, key, 0o600, true)
    }

    /// Replaces the trusted CA certificates.
    pub(super) fn trust(&self, certificates: &[String]) -> anyhow::Result<()> {
        write(&self.ca_certificate(), &certificates.concat(), 0o644, true)
    }

    /// Writes a certificate and its key.
    pub(super) fn save(
        &self,
        name: &str,
        certificate: &str,
        key: &str,
        overwrite: bool,
    ) -> anyhow::Result<()> {
        let [certificate_path, key_path] = self.pair(name);
        if let Some(existing) =
            [&certificate_path, &key_path].into_iter().find(|path| !overwrite && path.exists())
        {
            anyhow::bail!(
                "{} already exists; nothing was written: add --overwrite to replace it, or choose another --name",
                existing.display()
            );
        }
        write(&key_path, key, 0o600, overwrite)?;
        write(&certificate_path, certificate, 0o644, overwrite)
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, text: &str, mode: u32, overwrite: bool) -> anyhow::Result<()> {
    let save = || -> anyhow::Result<()> {
        let mut file = NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
        file.as_file().set_permissions(Permissions::from_mode(mode))?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        match overwrite {
            true => drop(file.persist(path)?),
            false => drop(file.persist_noclobber(path)?),
        }
        Ok(())
    };
    save().with_context(|| format!("cannot write {}", path.display()))
}
