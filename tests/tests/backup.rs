//! Restore drill: the catalog of storage-infra is lost while VMs write, and restored from a backup. No data and no
//! attachment is lost, whether or not volumes changed after the backup.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use infra_api::{Attachment, Volume};
use lab::LoopNode;
use tests::bytes::device;
use tests::crash::call_until_final;
use tests::infra_data::{lose_catalog, recover, run_on_data};
use tests::records::{Log, Records, Writer};
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone};

const COMPONENT: &str = "storage-infra";

/// Backs up the catalog of the running server; returns what was printed.
async fn back_up(s: &Scenario, file: &Path) -> Result<serde_json::Value> {
    let file = file.to_str().context("the path is not text")?;
    Ok(serde_json::from_str(&run_on_data(s, "backup", &["--to", file, "-o", "json"]).await?)?)
}

async fn restore(s: &Scenario, file: &Path) -> Result<String> {
    run_on_data(s, "restore", &["--from", file.to_str().context("the path is not text")?]).await
}

/// A volume that a VM writes to.
struct Written {
    handle: String,
    disk: String,
    writer: Writer,
}

impl Written {
    /// Creates a volume, and attaches it to a VM that writes from now on.
    async fn new(s: &Scenario, node: &LoopNode) -> Result<Self> {
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &node.name).await?;
        let writer = Records::begin(&device(node, &disk), MIB as u64)?.append_in_background();
        Ok(Self { handle, disk, writer })
    }

    /// Detaches the disk and attaches it to another VM, which continues to write.
    async fn moved(self, s: &Scenario, from: &LoopNode, to: &LoopNode) -> Result<Self> {
        let log = self.writer.stop()?.close();
        call_until_final("a detach", || s.driver.unpublish(&self.handle, &from.name)).await?;
        let disk = call_until_final("an attach", || s.driver.publish(&self.handle, &to.name)).await?;
        let writer = log.resume(&device(to, &disk))?.append_in_background();
        Ok(Self { writer, disk, ..self })
    }

    /// Waits for the next record, and verifies all at the end of the writer.
    async fn finish(self, node: &LoopNode) -> Result<(String, Log)> {
        let (log, before) = (self.writer.log(), self.writer.log().acknowledged());
        eventually("the VM writes", PATIENCE, || async {
            Ok(if log.acknowledged() > before { Ok(()) } else { Err(format!("{before} records")) })
        })
        .await?;
        let log = self.writer.stop()?.close();
        log.verify(&device(node, &self.disk))?;
        Ok((self.handle, log))
    }
}

/// Detaches a volume from one VM, attaches it to another, and verifies its records there.
async fn verify_elsewhere(
    s: &Scenario,
    (handle, log): (String, Log),
    from: &LoopNode,
    to: &LoopNode,
) -> Result<()> {
    call_until_final("a detach", || s.driver.unpublish(&handle, &from.name)).await?;
    let disk = call_until_final("an attach", || s.driver.publish(&handle, &to.name)).await?;
    log.verify(&device(to, &disk))?;
    call_until_final("a detach", || s.driver.unpublish(&handle, &to.name)).await
}

async fn known(s: &Scenario) -> Result<(Vec<Volume>, Vec<Attachment>)> {
    Ok((s.infra.list_volumes(None, None).await?.items, s.infra.list_attachments(None, None).await?))
}

#[tokio::test]
async fn a_backup_under_writers_restores_a_lost_catalog() -> Result<()> {
    run_alone(|s| async move {
        let (here, there) = (s.node().await?, s.node().await?);
        let (one, other) = (Written::new(&s, &here).await?, Written::new(&s, &there).await?);
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("backup");
        // mgmt-csi is paused, so that the backup is current.
        let frozen = s.pause_component("mgmt-csi")?;
        let before = known(&s).await?;
        let made = back_up(&s, &file).await?;
        ensure!(made["volumes"] == before.0.len() && made["attachments"] == before.1.len(), "{made}");
        s.kill_component(COMPONENT).await?;
        lose_catalog(&s)?;
        let said = restore(&s, &file).await?;
        ensure!(said.contains("next: start the server"), "{said}");
        s.start_component(COMPONENT).await?;
        let now = known(&s).await?;
        ensure!(now == before, "{now:?} instead of {before:?}");
        drop(frozen);
        let (one, other) = (one.finish(&here).await?, other.finish(&there).await?);
        verify_elsewhere(&s, one, &here, &there).await?;
        verify_elsewhere(&s, other, &there, &here).await
    })
    .await
}

#[tokio::test]
async fn an_older_backup_and_a_recovery_lose_nothing_that_changed_since() -> Result<()> {
    run_alone(|s| async move {
        let (here, there) = (s.node().await?, s.node().await?);
        let (stays, moved) = (Written::new(&s, &here).await?, Written::new(&s, &here).await?);
        let deleted = s.volume().await?;
        let deleted_id = s.infra_volume(&deleted).await?.id;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("backup");
        back_up(&s, &file).await?;

        let moved = moved.moved(&s, &here, &there).await?;
        let new = Written::new(&s, &there).await?;
        call_until_final("a deletion", || s.driver.delete(&deleted)).await?;
        eventually("the volume is deleted", PATIENCE, || async {
            let left = s.infra.get_volume(&deleted_id).await?;
            Ok(left.map_or(Ok(()), |left| Err(left.state.to_string())))
        })
        .await?;
        let frozen = s.pause_component("mgmt-csi")?;
        let (volumes, mut attachments) = known(&s).await?;
        // A rebuilt catalog has no blank attestations: later writes are unknown.
        attachments.iter_mut().for_each(|one| one.blank_attestation = None);
        s.kill_component(COMPONENT).await?;
        lose_catalog(&s)?;
        let said = restore(&s, &file).await?;
        for part in [
            "is not in the backup; its disk",
            "was changed after the backup: it is attached to",
            "storage-infra recover",
        ] {
            ensure!(said.contains(part), "{part}: {said}");
        }

        // The older catalog changes nothing in the pools, and moves no disk.
        s.start_component(COMPONENT).await?;
        for (node, disk) in [(&here, &stays.disk), (&there, &moved.disk), (&there, &new.disk)] {
            ensure!(device(node, disk).exists(), "{disk} was detached");
        }
        s.kill_component(COMPONENT).await?;
        recover(&s, &["--dry-run=false"]).await?;
        s.start_component(COMPONENT).await?;
        let now = known(&s).await?;
        ensure!(now == (volumes, attachments), "{now:?}");
        drop(frozen);

        let stays = stays.finish(&here).await?;
        let (moved, new) = (moved.finish(&there).await?, new.finish(&there).await?);
        verify_elsewhere(&s, stays, &here, &there).await?;
        verify_elsewhere(&s, moved, &there, &here).await?;
        verify_elsewhere(&s, new, &there, &here).await
    })
    .await
}
