//! Supervision: a panic in a background task ends the process with an error, so that it is restarted.

use std::path::Path;

use anyhow::{Result, ensure};
use crds::names;
use serde_json::json;
use tests::program::Controller;
use tests::{run, unique};

#[tokio::test]
async fn a_panic_in_the_batcher_of_a_vm_ends_the_process_and_another_replica_attaches() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let (node, handle) = (s.simulated_node().await?, s.bound_claim("data").await?);
        let broken = Controller::start_with_fail_points(&s, &s.cluster_id, &[], folder.path()).await?;
        panic_at(folder.path(), "kube.management.patch.virtualmachines.before")?;
        ensure!(broken.driver.publish(&handle, &node.name).await.is_err(), "the batcher did not panic");
        ends_with_an_error(broken, "batcher of VM").await?;

        let other = Controller::start(&s, &[]).await?;
        other.driver.publish(&handle, &node.name).await?;
        other.driver.unpublish(&handle, &node.name).await?;
        other.stop().await
    })
    .await
}

#[tokio::test]
async fn a_panic_in_the_reconcilers_ends_the_process() -> Result<()> {
    run(|s| async move {
        let (folder, id) = (tempfile::tempdir()?, unique(&s.name));
        let broken = Controller::start_with_fail_points(&s, &id, &[], folder.path()).await?;
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id)], json!({})).await?;
        // The reconcilers write the names of the guest's objects on the claim.
        panic_at(folder.path(), "kube.management.patch.persistentvolumeclaims.before")?;
        s.static_claim("data", &claim, json!({})).await?;
        ends_with_an_error(broken, "reconcilers").await
    })
    .await
}

/// Makes the task panic that passes a fail point next.
fn panic_at(folder: &Path, point: &str) -> Result<()> {
    Ok(std::fs::write(folder.join("panic"), point)?)
}

/// Waits until the process has ended because of a background task.
async fn ends_with_an_error(controller: Controller, task: &str) -> Result<()> {
    let status = controller.process.wait_for_exit().await?;
    let log = controller.process.log();
    assert_eq!(status.code(), Some(1), "{log}");
    let reason = log.lines().rfind(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(reason.contains(task) && reason.contains("panicked: fail point"), "{log}");
    Ok(())
}
