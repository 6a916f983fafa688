//! Pool locks of storage-infra: one server per pool, and a server with a catalog older than its pools deletes, attaches
//! and detaches nothing.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use infra_api::{AttachmentId, VolumeId};
use tests::bytes::device;
use tests::crash::call_until_final;
use tests::infra_data::{DataCopy, recover, start_second_server};
use tests::records::Records;
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone};

const COMPONENT: &str = "storage-infra";
const SHORT: Duration = Duration::from_secs(2);

/// The storage infra's volume and attachment of a disk.
async fn attached(s: &Scenario, disk: &str) -> Result<(VolumeId, AttachmentId)> {
    let found = s.infra.list_attachments(None, None).await?;
    let found = found.into_iter().find(|one| one.disk_uuid.to_string() == disk);
    found.map(|one| (one.volume, one.id)).context("the disk has no attachment")
}

async fn pools_are(client: &infra_api::Client, healthy: bool) -> Result<()> {
    eventually(&format!("all pools are healthy: {healthy}"), PATIENCE, || async {
        let pools = client.list_pools().await?;
        Ok(if pools.iter().all(|pool| pool.healthy == healthy) { Ok(()) } else { Err(format!("{pools:?}")) })
    })
    .await
}

#[tokio::test]
async fn a_second_server_does_not_use_the_labs_pools_until_the_first_is_killed() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &node.name).await?;
        let (volume, attachment) = attached(&s, &disk).await?;
        let writer = Records::begin(&device(&node, &disk), MIB as u64)?.append_in_background();
        s.kill_component(COMPONENT).await?;
        let copied = DataCopy::take(&s).await?;
        s.start_component(COMPONENT).await?;

        let (server, client) = start_second_server(&s, &copied.path()).await?;
        pools_are(&client, false).await?;
        for pool in client.list_pools().await? {
            let message = pool.message.unwrap_or_default();
            ensure!(message.contains("another server (process"), "{message}");
        }
        let refused = client.detach(&attachment, SHORT).await.unwrap_err();
        ensure!(refused.to_string().contains("another server"), "{refused}");
        ensure!(client.delete_volume(&volume).await.is_err(), "it deleted a volume of another server");
        ensure!(device(&node, &disk).exists(), "the disk was detached");
        pools_are(&s.infra, true).await?;

        s.kill_component(COMPONENT).await?;
        pools_are(&client, true).await?;
        ensure!(server.stop().await?.success(), "the second server failed");
        s.start_component(COMPONENT).await?;
        pools_are(&s.infra, true).await?;
        writer.stop()?.close().verify(&device(&node, &disk))?;
        call_until_final("a detach", || s.driver.unpublish(&handle, &node.name)).await
    })
    .await
}

#[tokio::test]
async fn a_server_with_a_restored_old_catalog_deletes_and_detaches_nothing() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.kill_component(COMPONENT).await?;
        let older = DataCopy::take(&s).await?;
        s.start_component(COMPONENT).await?;
        let disk = s.driver.publish(&handle, &node.name).await?;
        let (volume, _) = attached(&s, &disk).await?;
        let path = device(&node, &disk);
        let writer = Records::begin(&path, MIB as u64)?.append_in_background();

        // mgmt-csi is paused, so that only this test sends requests.
        let frozen = s.pause_component("mgmt-csi")?;
        s.kill_component(COMPONENT).await?;
        older.restore(&s).await?;
        s.start_component(COMPONENT).await?;
        let refused = s.infra.delete_volume(&volume).await.unwrap_err();
        ensure!(refused.to_string().contains("older than the pool"), "{refused}");
        // The attached disks were compared with the catalog.
        eventually("the disk without an attachment is reported", PATIENCE, || async {
            let found = s.infra.get_volume(&volume).await?.context("the volume is gone")?;
            let message = found.condition.message.unwrap_or_default();
            Ok(if message.contains("without an attachment") { Ok(()) } else { Err(message) })
        })
        .await?;
        ensure!(path.exists(), "the disk was detached");
        s.kill_component(COMPONENT).await?;
        recover(&s, &["--dry-run=false"]).await?;
        s.start_component(COMPONENT).await?;
        drop(frozen);

        writer.stop()?.close().verify(&path)?;
        call_until_final("a detach", || s.driver.unpublish(&handle, &node.name)).await
    })
    .await
}
