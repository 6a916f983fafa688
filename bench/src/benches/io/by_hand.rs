//! Disks that are hot-plugged by hand, with virsh: one like a volume's, and one with fio.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use ::tests::Scenario;
use ::tests::pods::{GONE, Volume};
use ::tests::{eventually, unique};
use anyhow::{Context, Result, ensure};
use lab::cache::packages;
use lab::ui::Ui;
use lab::{Lab, vm};

use super::SIZE;

/// First of the SCSI targets of these disks: Nestor uses the lowest free ones.
const TARGET: u32 = 200;

/// Attributes of `<driver>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Driver(Vec<(String, String)>);

impl Driver {
    /// What it adds to the name of a case, if there are several.
    pub(super) fn case(&self, count: usize) -> String {
        if count < 2 { String::new() } else { format!(" against {self}") }
    }
}

impl std::fmt::Display for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<String> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&words.join(","))
    }
}

impl FromStr for Driver {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let word =
            |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').filter(|(name, value)| word(name) && word(value))?;
            Some((name.to_owned(), value.to_owned()))
        };
        let pairs: Option<Vec<_>> = text.split(',').map(pair).collect();
        pairs.map(Self).ok_or_else(|| "must be NAME=VALUE,..., as in cache=none,io=native".to_owned())
    }
}

/// A hot-plugged disk.
pub(super) struct ByHand<'a> {
    lab: &'a Lab,
    vm: &'a str,
    pub(super) serial: String,
    xml: PathBuf,
    storage: Storage,
}

enum Storage {
    File(PathBuf),
    /// Name of an RBD image.
    Image(String),
}

impl<'a> ByHand<'a> {
    /// A disk with the same storage as a volume that is attached to the VM.
    pub(super) async fn like(s: &'a Scenario, vm: &'a str, volume: &Volume, driver: &Driver) -> Result<Self> {
        let live = vm::virsh(s.lab.run(), ["dumpxml", vm]).await?;
        let disk = live
            .split("<disk ")
            .find(|disk| disk.contains(&volume.disk))
            .with_context(|| format!("VM {vm} does not have disk {}", volume.disk))?;
        let name = unique("by-hand");
        let (kind, source, storage) = if disk.contains("protocol='rbd'") {
            let infra = s.infra_volume(&volume.handle).await?;
            let image = format!("{}/{name}", infra.pool);
            s.lab.ceph()?.rbd(&["create", "--size", SIZE, &image]).await?;
            (
                "network",
                of_image(disk, &format!("{}/{}", infra.pool, infra.id), &image)?,
                Storage::Image(image),
            )
        } else {
            let file = volume.file.with_file_name(&name);
            let bytes = s.infra_volume(&volume.handle).await?.capacity_bytes;
            std::fs::File::create_new(&file)?.set_len(bytes)?;
            ("file", format!("<source file='{}'/>", file.display()), Storage::File(file))
        };
        let attributes = driver.0.iter().fold(String::new(), |mut all, (name, value)| {
            let _ = write!(all, " {name}='{value}'");
            all
        });
        Self::attach(
            &s.lab,
            vm,
            &name,
            kind,
            &format!("<driver name='qemu' type='raw'{attributes}/>{source}"),
            storage,
        )
        .await
    }

    /// A read-only disk with an ext4 filesystem that has fio and its libraries.
    pub(super) async fn with_fio(s: &'a Scenario, vm: &'a str) -> Result<Self> {
        packages::ensure_fio(&Ui::default()).await?;
        let name = unique("fio");
        let file = s.lab.dir().join(&name);
        let made = file.clone();
        tokio::task::spawn_blocking(move || make_fio_disk(&made)).await??;
        let inner = format!("<driver name='qemu' type='raw'/><source file='{}'/><readonly/>", file.display());
        Self::attach(&s.lab, vm, &name, "file", &inner, Storage::File(file)).await
    }

    async fn attach(
        lab: &'a Lab,
        vm: &'a str,
        serial: &str,
        kind: &str,
        inner: &str,
        storage: Storage,
    ) -> Result<Self> {
        let used = vm::virsh(lab.run(), ["dumpxml", vm]).await?;
        let target =
            (TARGET..).find(|target| !used.contains(&format!("target='{target}'"))).unwrap_or(TARGET);
        let xml = format!(
            "<disk type='{kind}' device='disk'>{inner}<target dev='sdy{}' bus='scsi'/><serial>{serial}</serial>\
             <address type='drive' controller='0' bus='0' target='{target}' unit='0'/></disk>",
            char::from(b'a' + u8::try_from(target - TARGET).unwrap_or_default()),
        );
        let file = lab.dir().join(format!("{serial}.xml"));
        std::fs::write(&file, xml)?;
        let disk = Self { lab, vm, serial: serial.to_owned(), xml: file, storage };
        disk.virsh("attach-device").await?;
        Ok(disk)
    }

    async fn virsh(&self, verb: &str) -> Result<()> {
        let file = self.xml.display().to_string();
        vm::virsh(self.lab.run(), [verb, self.vm, &file, "--live"]).await.map(drop)
    }

    /// Detaches the disk and removes its storage.
    pub(super) async fn detach(&self) -> Result<()> {
        self.virsh("detach-device").await?;
        eventually(&format!("disk {} is detached", self.serial), GONE, || async {
            let disks = self.lab.libvirt_disks(self.vm).await?;
            Ok(if disks.contains(&self.serial) { Err(disks.join(", ")) } else { Ok(()) })
        })
        .await?;
        std::fs::remove_file(&self.xml)?;
        match &self.storage {
            Storage::File(file) => Ok(std::fs::remove_file(file)?),
            Storage::Image(image) => self.lab.ceph()?.rbd(&["rm", "--no-progress", image]).await.map(drop),
        }
    }
}

/// `<auth>` and `<source>` of a live disk, with another image.
fn of_image(disk: &str, image: &str, other: &str) -> Result<String> {
    let element = |name: &str| {
        let rest = &disk[disk.find(&format!("<{name} "))?..];
        let end = format!("</{name}>");
        Some(&rest[..rest.find(&end)? + end.len()])
    };
    let (auth, source) =
        element("auth").zip(element("source")).context("the disk has no <auth> or <source>")?;
    let renamed = source.replace(&format!("name='{image}'"), &format!("name='{other}'"));
    ensure!(renamed != source, "the disk is not image {image}: {source}");
    let (before, index) = renamed.split_once(" index='").context("the live <source> has no index")?;
    let after = index.split_once('\'').map(|(_, after)| after).context("the index does not end")?;
    Ok(format!("{auth}{before}{after}"))
}

/// Makes a disk with the host's fio, its libraries and their loader.
fn make_fio_disk(disk: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let fio = "/usr/bin/fio";
    let libraries = output(Command::new("ldd").arg(fio))?;
    std::fs::copy(fio, folder.path().join("fio"))?;
    for path in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let path = Path::new(path);
        let name = path.file_name().context("a library without a name")?.to_string_lossy();
        let name = if name.starts_with("ld-linux") { "ld.so".into() } else { name };
        std::fs::copy(path, folder.path().join(&*name))?;
    }
    output(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(folder.path()).arg(disk).arg("256M"))?;
    Ok(())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_pairs_of_words() {
        let driver: Driver = "cache=none,io=io_uring".parse().unwrap();
        assert_eq!(driver.to_string(), "cache=none,io=io_uring");
        for text in ["", "cache", "cache=", "cache='none'", "a=b,,"] {
            assert!(text.parse::<Driver>().is_err(), "{text}");
        }
    }

    #[test]
    fn another_image_has_the_key_of_the_volumes_image() {
        let disk = "type='network' device='disk'><driver name='qemu'/><auth username='u'><secret uuid='1'/></auth>\
             <source protocol='rbd' name='p/v' index='3'><config file='/c'/></source></disk>";
        let other = of_image(disk, "p/v", "p/w").unwrap();
        assert_eq!(
            other,
            "<auth username='u'><secret uuid='1'/></auth><source protocol='rbd' name='p/w'><config file='/c'/></source>"
        );
        assert!(of_image(disk, "p/x", "p/w").is_err());
    }
}
