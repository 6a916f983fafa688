//! Exports, imports, adoptions and releases with the program `storage-infra`, and volumes made by them in VMs and pods.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_ADOPT_FILE, ANNOTATION_ADOPTED_FILE};
use infra_api::{Adoption, Owner, PoolName, ProblemCode, Qos, Release, Volume, VolumeId};
use kube::ResourceExt;
use lab::process::{command, run as run_program};
use serde_json::json;
use tests::bytes::{checksum, device, noise, read, write};
use tests::infra_cli::storage_infra;
use tests::pods::{self, PodScenario, Script};
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// Longer than a copy of these volumes takes.
const DEADLINE: Duration = Duration::from_secs(120);
const BYTES: usize = 3 << 20;

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("the path is not text")
}

fn id(s: &Scenario) -> Result<VolumeId> {
    Ok(VolumeId::new(unique(&s.name))?)
}

async fn found(s: &Scenario, id: &VolumeId) -> Result<Volume> {
    s.infra.get_volume(id).await?.with_context(|| format!("no volume {id}"))
}

/// The pool of a management claim's volume, and its directory.
async fn pool(s: &Scenario, claim: &str) -> Result<(PoolName, PathBuf)> {
    let pool = s.infra_volume(claim).await?.pool;
    let path = s.infra.get_pool(&pool).await?.context("no pool")?.path;
    Ok((pool, path.into()))
}

#[tokio::test]
async fn an_export_becomes_another_volume_with_the_same_content() -> Result<()> {
    run(|s| async move {
        let (here, there) = (s.node().await?, s.node().await?);
        let handle = s.volume().await?;
        let volume = s.infra_volume(&handle).await?.id;
        let bytes = noise(11, BYTES);
        let disk = s.driver.publish(&handle, &here.name).await?;
        write(&device(&here, &disk), &bytes)?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("volume.export");
        let export = ["volume", "export", volume.as_str(), "--to", text(&file)?];
        let refused = storage_infra(&s, &export).await.err().context("an attached volume was exported")?;
        ensure!(format!("{refused:#}").contains("take a snapshot"), "{refused:#}");
        std::fs::remove_file(&file)?;
        s.driver.unpublish(&handle, &here.name).await?;
        storage_infra(&s, &export).await?;

        let imported = id(&s)?;
        storage_infra(&s, &["volume", "import", imported.as_str(), "--from", text(&file)?]).await?;
        let claim = s.claim_of_volume(&found(&s, &imported).await?).await?;
        let disk = s.driver.publish(&claim, &there.name).await?;
        ensure!(read(&device(&there, &disk), BYTES)? == bytes, "the import has other bytes");
        s.driver.unpublish(&claim, &there.name).await?;
        Ok(())
    })
    .await
}

/// Creates a file with an ext4 filesystem that has one file; returns that file's checksum.
async fn filesystem(at: &Path) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let kept = folder.path().join("kept");
    std::fs::write(&kept, noise(12, 1 << 20))?;
    std::fs::File::create(at)?.set_len(32 << 20)?;
    let make = ["-q".as_ref(), "-F".as_ref(), "-d".as_ref(), folder.path().as_os_str(), at.as_os_str()];
    run_program(&mut command("mkfs.ext4", make)).await?;
    checksum(&kept).await
}

/// Reads the kept file of an adopted volume in a pod of the guest.
async fn kept(pods: &PodScenario, name: &str, volume: &Volume) -> Result<String> {
    let s = pods.scenario();
    let claim = s.claim_of_volume(volume).await?;
    s.static_claim(name, &claim, json!({"capacity": {"storage": "32Mi"}})).await?;
    let bound = pods.bound_volume(name).await?;
    let pod = Script::new(name, &pods.first_node, "sha256sum < /files/kept").mount(&bound, "/files");
    let output = pods.run(pod).await?;
    pods.detached(&bound).await?;
    Ok(output.split_whitespace().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn adopted_files_are_mounted_by_pods_and_nothing_is_formatted() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let claim = s.volume().await?;
        let (pool, dir) = pool(s, &claim).await?;
        let (raw, image) = (dir.join(format!("{}.img", s.name)), dir.join(format!("{}.qcow2", s.name)));
        let expected = filesystem(&raw).await?;
        let convert = ["convert", "-f", "raw", "-O", "qcow2", text(&raw)?, text(&image)?];
        run_program(&mut command("qemu-img", convert)).await?;

        let (first, second) = (id(s)?, id(s)?);
        let adopt = ["volume", "adopt", first.as_str(), "--file", text(&raw)?];
        storage_infra(s, &adopt).await?;
        ensure!(!raw.exists(), "the raw file was copied");
        let adopt = ["volume", "adopt", second.as_str(), "--file", text(&image)?, "--pool", pool.as_str()];
        storage_infra(s, &adopt).await?;
        std::fs::remove_file(&image)?;
        for (name, volume) in [("raw", &first), ("image", &second)] {
            let there = kept(&pods, name, &found(s, volume).await?).await?;
            ensure!(there == expected, "{name}: written {expected}, read {there}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_persistent_volume_adopts_a_file() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let (_, dir) = pool(&s, &s.volume().await?).await?;
        let (volume, file) = (id(&s)?, dir.join(format!("{}.img", s.name)));
        let annotations = json!({ANNOTATION_ADOPT_FILE: text(&file)?});
        // The file is not there yet: nothing happens but an event, until it is.
        let claim = s.claim_of(&volume, 8 << 20, &annotations).await?;
        let is_about = |text: &str| format!("{} {text}", file.display());
        s.wait_for_management_reason_of("PersistentVolume", &claim, "AdoptionFailed", &[text(&file)?])
            .await?;
        let bytes = noise(14, BYTES);
        let unfinished = file.with_extension("new");
        std::fs::File::create(&unfinished)?.set_len(4 << 20)?;
        write(&unfinished, &bytes)?;
        std::fs::rename(&unfinished, &file)?;
        eventually("the file is adopted", PATIENCE, || async {
            let found = s.volumes().get(&claim).await?.annotations().get(ANNOTATION_ADOPTED_FILE).cloned();
            Ok(if found.as_deref() == file.to_str() { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .await?;
        s.wait_for_management_reason_of(
            "PersistentVolume",
            &claim,
            "VolumeAdopted",
            &[&is_about("is volume")],
        )
        .await?;
        s.wait_for_management_reason_of(
            "PersistentVolume",
            &claim,
            "AdoptedSizeDiffers",
            &["8388608", "4194304"],
        )
        .await?;
        let adopted = found(&s, &volume).await?;
        ensure!(adopted.owner.account.as_str() == s.cluster_id, "{:?}", adopted.owner);
        let disk = s.driver.publish(&claim, &node.name).await?;
        ensure!(read(&device(&node, &disk), BYTES)? == bytes, "the volume has other bytes");
        s.driver.unpublish(&claim, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_released_volume_is_a_file_that_can_be_adopted_again() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let claim = s.volume().await?;
        let (pool, dir) = pool(&s, &claim).await?;
        let (first, second) = (id(&s)?, id(&s)?);
        let file = dir.join(format!("{}.img", s.name));
        let bytes = noise(13, BYTES);
        std::fs::File::create(&file)?.set_len(4 << 20)?;
        write(&file, &bytes)?;
        let adoption = |path: &str| Adoption {
            path: path.to_owned(),
            pool: Some(pool.clone()),
            qos: Qos::default(),
            shareable: false,
            owner: Owner::default(),
        };
        s.infra.adopt(&first, &adoption(text(&file)?), DEADLINE).await?;
        let released = s.infra.release(&first, &Release::default()).await?;
        ensure!(s.infra.get_volume(&first).await?.is_none(), "the volume is still there");
        ensure!(read(Path::new(&released.path), BYTES)? == bytes, "the released file has other bytes");
        let again = s.infra.adopt(&second, &adoption(&released.path), DEADLINE).await?;
        ensure!(again.pool == pool, "{again:?}");
        let claim = s.claim_of_volume(&again).await?;
        let disk = s.driver.publish(&claim, &node.name).await?;
        ensure!(read(&device(&node, &disk), BYTES)? == bytes, "the volume has other bytes");
        let refused = s.infra.release(&second, &Release::default()).await.err().context("released")?;
        ensure!(refused.code() == Some(ProblemCode::InUse), "{refused}");
        s.driver.unpublish(&claim, &node.name).await?;
        Ok(())
    })
    .await
}
