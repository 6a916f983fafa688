//! Nestor in pods, installed with helm. Needs `cargo lab up --deployed`.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams};
use kube::{Client, ResourceExt};
use lab::deployed::NAMESPACE;
use lab::ui::Ui;
use lab::{Lab, demo};
use tests::pods::{self, filesystem};
use tests::undisturbed::Undisturbed;
use tests::{alone, eventually};

/// A pod of a Deployment or DaemonSet is replaced and ready.
const REPLACED: std::time::Duration = std::time::Duration::from_secs(900);

#[tokio::test]
async fn the_scenario_of_the_demo_passes() -> Result<()> {
    let _alone = alone().await;
    demo(&Ui::default(), &Lab::from_env()?).await
}

#[tokio::test]
async fn a_pod_writes_on_while_all_pods_of_nestor_are_replaced() -> Result<()> {
    pods::run_alone(|pods| async move {
        let volume = pods.claim("undisturbed", &filesystem("ext4")).await?;
        let writer = Undisturbed::start(&pods, volume).await?;
        for client in [&pods.scenario().management, &pods.scenario().guest] {
            replace_all(client).await?;
            writer.still_writes().await?;
        }
        writer.finish().await
    })
    .await
}

/// Deletes all pods of Nestor in a cluster, and waits for as many new ones that are ready.
async fn replace_all(client: &Client) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let before: Vec<String> =
        api.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect();
    ensure!(!before.is_empty(), "Nestor has no pods");
    for name in &before {
        api.delete(name, &DeleteParams::default()).await.with_context(|| format!("pod {name}"))?;
    }
    eventually("all pods are replaced and ready", REPLACED, || async {
        let now = api.list(&ListParams::default()).await?.items;
        let is_new = |pod: &Pod| !before.contains(&pod.name_any());
        let ready = now.iter().filter(|pod| is_new(pod) && is_ready(pod)).count();
        let text = format!("{ready} of {} ready, {} pods exist", before.len(), now.len());
        Ok(if ready == before.len() && now.len() == ready { Ok(()) } else { Err(text) })
    })
    .await
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions.unwrap_or_default().iter().any(|one| one.type_ == "Ready" && one.status == "True")
}
