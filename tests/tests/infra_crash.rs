//! Loss of storage-infra's catalog while a VM writes: the recovered server continues with every record and a single
//! writer.

use anyhow::{Result, ensure};
use tests::bytes::device;
use tests::crash::call_until_final;
use tests::infra_data::{data_dir, recover};
use tests::records::Records;
use tests::{MIB, PATIENCE, eventually, run_alone};

const COMPONENT: &str = "storage-infra";

#[tokio::test]
async fn a_lost_catalog_is_recovered_under_a_writer_and_attach_and_detach_succeed() -> Result<()> {
    run_alone(|s| async move {
        let (here, there, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &here.name).await?;
        let path = device(&here, &disk);
        let writer = Records::begin(&path, MIB as u64)?.append_in_background();
        let volumes = s.infra.list_volumes(None, None).await?.items;
        let mut attachments = s.infra.list_attachments(None, None).await?;
        // A rebuilt catalog has no blank attestations: later writes are unknown.
        attachments.iter_mut().for_each(|one| one.blank_attestation = None);

        s.kill_component(COMPONENT).await?;
        let catalog = data_dir(&s).join("catalog.sqlite");
        let length = std::fs::metadata(&catalog)?.len();
        std::fs::File::options().write(true).open(&catalog)?.set_len(length / 2)?;
        for beside in ["-wal", "-shm"] {
            let _ = std::fs::remove_file(data_dir(&s).join(format!("catalog.sqlite{beside}")));
        }
        let planned = recover(&s, &[]).await?;
        ensure!(planned.contains("the catalog was not changed"), "{planned}");
        recover(&s, &["--dry-run=false"]).await?;
        s.start_component(COMPONENT).await?;

        let found = s.infra.list_volumes(None, None).await?.items;
        ensure!(found == volumes, "{found:?} instead of {volumes:?}");
        let found = s.infra.list_attachments(None, None).await?;
        ensure!(found == attachments, "{found:?} instead of {attachments:?}");
        let second = s.driver.publish(&handle, &there.name).await.unwrap_err();
        ensure!(second.code() == tonic::Code::FailedPrecondition, "{second}");
        let records = writer.stop()?;
        call_until_final("an attach to the same VM", || s.driver.publish(&handle, &here.name)).await?;
        records.log().verify(&path)?;
        let log = records.close();
        call_until_final("a detach", || s.driver.unpublish(&handle, &here.name)).await?;
        eventually("an attach elsewhere", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &there.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        log.verify(&device(&there, &disk))
    })
    .await
}
