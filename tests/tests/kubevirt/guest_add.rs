//! `kubectl nestor guest add` in a management cluster that serves KubeVirt.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::kubectl_plugin::{Answer, execute};
use tests::program::binary;
use tests::unique;

use super::Clusters;

async fn add(clusters: &Clusters, name: &str, more: &[&str]) -> Result<Answer> {
    let management = clusters.lab.state().management.as_ref().context("no management cluster")?;
    let kubeconfig = management.kubeconfig.display().to_string();
    let words = ["guest", "add", name, "--management-kubeconfig", &kubeconfig, "--dry-run", "-o", "yaml"];
    execute(&binary(&clusters.lab, "kubectl-nestor"), &[&words[..], more].concat()).await
}

/// Names of the objects that are printed, with their kinds.
async fn printed(clusters: &Clusters, name: &str, more: &[&str]) -> Result<Vec<String>> {
    let answer = add(clusters, name, more).await?;
    answer.expect(0, &[]);
    let objects: Vec<Value> = serde_saphyr::from_multiple(&answer.out)?;
    let title = |object: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
    };
    Ok(objects.iter().map(title).collect())
}

#[tokio::test]
async fn a_guest_is_added_with_the_rights_and_policies_of_kubevirt() -> Result<()> {
    let clusters = Clusters::open().await?;
    let name = unique("shop");
    let detected = printed(&clusters, &name, &[]).await?;
    let policy =
        |subject: &str| format!("ValidatingAdmissionPolicyBinding {subject}.{name}.guest-{name}.nestor.dev");
    for subject in guest_manifests::KUBEVIRT_POLICIES {
        ensure!(detected.contains(&policy(subject)), "{subject}: {detected:?}");
    }
    let role = format!("RoleBinding {name}-kubevirt");
    ensure!(detected.contains(&role), "{detected:?}");
    ensure!(printed(&clusters, &name, &["--vm-api", "kubevirt"]).await? == detected);
    let without = printed(&clusters, &name, &["--vm-api", "vm-operator"]).await?;
    ensure!(!without.iter().any(|title| title.contains("kubevirt")), "{without:?}");
    Ok(())
}
