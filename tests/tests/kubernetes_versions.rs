//! Another version of Kubernetes in both tiers. Needs `cargo lab up --kubernetes MINOR`.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use lab::sanity::{Tier, sanity};
use lab::ui::Ui;
use lab::{Lab, demo};

#[tokio::test]
async fn demo_and_csi_sanity_pass_with_this_version() -> Result<()> {
    let (ui, lab) = (Ui::default(), Lab::from_env()?);
    all_parts_have_this_version(&lab).await?;
    demo(&ui, &lab).await?;
    for tier in [Tier::Guest, Tier::Mgmt] {
        let counts = sanity(&ui, &lab, tier).await?;
        println!("{counts}");
        ensure!(counts.success(), "{counts}");
    }
    Ok(())
}

async fn all_parts_have_this_version(lab: &Lab) -> Result<()> {
    let (management, guest) = (lab.management().await?, lab.guest("g1").await?);
    let mut versions = Vec::new();
    for client in [&management, &guest] {
        versions.push(client.apiserver_version().await?.git_version);
    }
    for node in Api::<Node>::all(guest).list(&ListParams::default()).await? {
        let info = node.status.and_then(|status| status.node_info);
        versions.extend(info.map(|info| info.kubelet_version));
    }
    println!("API servers and kubelets: {}", versions.join(", "));
    let expected = format!("v{}.", lab.state().kubernetes);
    ensure!(versions.len() == 4, "two API servers and two kubelets expected: {versions:?}");
    ensure!(versions.iter().all(|version| version.starts_with(&expected)), "not {expected}: {versions:?}");
    Ok(())
}
