//! Mounts: options by list, and shared volumes without set-user-ID programs and devices.

use anyhow::{Result, ensure};
use crds::names;
use serde_json::json;
use tests::pods::{self, ClaimOptions, Script, filesystem};
use tests::run;

#[tokio::test]
async fn the_publish_context_of_a_shared_volume_says_so() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let share = format!("{}another", names::LABEL_SHARE_PREFIX);
        let labels = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str()), (&share, "ro")];
        let (own, shared) = (s.volume().await?, s.management_claim(&labels, json!({})).await?);
        for (claim, expected) in [(&own, None), (&shared, Some("true"))] {
            let context = s.driver.publish_context(claim, &node.name).await?;
            ensure!(
                context.get(names::CONTEXT_SHARED).map(String::as_str) == expected,
                "{claim}: {context:?}"
            );
            s.driver.unpublish(claim, &node.name).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_shared_volume_is_mounted_without_set_user_id_programs_and_devices() -> Result<()> {
    pods::run(|pods| async move {
        let ask = ClaimOptions { options: &["suid", "dev"], ..filesystem("ext4") };
        let script = "grep ' /data ' /proc/mounts | cut -d' ' -f4";
        let (own, shared) = (pods.claim("own", &ask).await?, pods.claim("shared", &ask).await?);
        let share = format!("{}another", names::LABEL_SHARE_PREFIX);
        pods.scenario().label_volume(&shared.handle, &json!({share: "ro"})).await?;
        for (name, volume, is_shared) in [("own-pod", &own, false), ("shared-pod", &shared, true)] {
            let output = pods.run(Script::new(name, &pods.first_node, script).mount(volume, "/data")).await?;
            let has = |option: &str| output.trim().split(',').any(|one| one == option);
            ensure!(has("nosuid") == is_shared && has("nodev") == is_shared, "{name}: {output}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_mount_option_that_is_not_in_the_list_is_refused_with_the_list() -> Result<()> {
    pods::run(|pods| async move {
        let ask = ClaimOptions { options: &["journal_path=/dev/null"], ..filesystem("ext4") };
        let volume = pods.claim("data", &ask).await?;
        let pod =
            pods.start(Script::new("pod", &pods.first_node, "ls /data").mount(&volume, "/data")).await?;
        pods.mount_failure(&pod, &["journal_path", "is not allowed", "errors="]).await?;
        pods.remove(&pod).await
    })
    .await
}
