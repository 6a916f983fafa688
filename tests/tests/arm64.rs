//! Images for arm64: cross-compiled, and their programs start under emulation.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lab::architecture::Architecture;
use lab::images::{self, Built, Programs, VERSION};
use lab::ui::Ui;
use tests::images::{description, starts, unpack};
use tests::run;
use tokio::process::Command;

/// The emulator of the user mode, which needs no libraries.
const EMULATOR: &str = "/usr/bin/qemu-aarch64-static";

#[tokio::test]
async fn programs_of_all_images_start_on_arm64() -> Result<()> {
    run(|_| async move {
        let ui = Ui::default();
        let programs = Programs::build(&ui, false, Architecture::Arm64).await?;
        let out = tempfile::tempdir()?;
        for image in images::build(&ui, &programs, VERSION, out.path(), &[]).await? {
            ensure!(image.archive.to_string_lossy().ends_with("-arm64.tar"), "{image:?}");
            let (_, config) = description(&image).await?;
            assert_eq!(config["architecture"], "arm64", "{}", image.name);
            all_start(&image, out.path()).await.with_context(|| image.name.clone())?;
        }
        Ok(())
    })
    .await
}

/// Starts the programs in the root filesystem of the image.
async fn all_start(image: &Built, work: &Path) -> Result<()> {
    let root = work.join("root");
    std::fs::create_dir(&root)?;
    unpack(image, &root).await?;
    std::fs::copy(EMULATOR, root.join("emulator")).context(EMULATOR)?;
    for words in starts(image)? {
        is_of_arm64(&root, words[0])?;
        let mut chroot = Command::new("chroot");
        chroot
            .arg(&root)
            .args(["/emulator", "-0", words[0]])
            .arg(in_root(&root, words[0])?)
            .args(&words[1..]);
        let ended = chroot.output().await?;
        let printed = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
        ensure!(
            ended.status.success() && printed.contains(|c: char| c.is_ascii_digit()),
            "{words:?}: {printed}"
        );
    }
    Ok(std::fs::remove_dir_all(&root)?)
}

/// The path of a program in a root filesystem, as the `PATH` of the images finds it.
fn in_root(root: &Path, program: &str) -> Result<String> {
    let folders = ["", "/usr/local/bin/", "/usr/sbin/", "/usr/bin/"];
    let mut paths = folders.iter().map(|folder| format!("{folder}{program}"));
    let exists = |path: &String| path.starts_with('/') && outside(root, path).is_ok_and(|file| file.exists());
    paths.find(exists).with_context(|| format!("no program {program}"))
}

/// The file at a path in a root filesystem, as this host sees it. Links to absolute paths stay in the root filesystem.
fn outside(root: &Path, path: &str) -> Result<PathBuf> {
    let mut file = root.join(path.trim_start_matches('/'));
    for _ in 0..8 {
        match std::fs::read_link(&file) {
            Ok(target) if target.is_absolute() => file = root.join(target.strip_prefix("/")?),
            Ok(target) => file = file.with_file_name(target),
            Err(_) => return Ok(file),
        }
    }
    bail!("{path} is a chain of too many links")
}

/// Checks the machine in the header of an ELF file: 183 is AArch64.
fn is_of_arm64(root: &Path, program: &str) -> Result<()> {
    let path = in_root(root, program)?;
    let bytes = std::fs::read(outside(root, &path)?).context(path)?;
    ensure!(
        bytes.starts_with(b"\x7fELF") && bytes.get(18..20) == Some(&[183, 0]),
        "{program} is not for arm64"
    );
    Ok(())
}
