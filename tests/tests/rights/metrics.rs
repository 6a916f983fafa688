//! `/metrics` with `--metrics-auth token`.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use tests::own_namespace::OwnNamespace;
use tests::program::{Running, binary, management_cluster};
use tests::{PATIENCE, Scenario, chart, eventually, run, unique};

/// An account with a token.
async fn account(s: &Scenario, namespace: &OwnNamespace, name: &str) -> Result<String> {
    let api: Api<ServiceAccount> = Api::namespaced(s.management.clone(), &namespace.name);
    api.create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": name}}))?).await?;
    let request = TokenRequest { spec: Some(TokenRequestSpec::default()), ..Default::default() };
    let issued = api.create_token_request(name, &PostParams::default(), &request).await?;
    issued.status.and_then(|status| status.token).context("no token was issued")
}

/// The roles of the chart with another name, bound to the console and to the account `reader`.
fn rights(name: &str, namespace: &str) -> Vec<Value> {
    let group = "rbac.authorization.k8s.io";
    let role = |name: &str, rules: Value| json!({"apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules});
    let bound = |name: &str, account: &str, namespace: &str| {
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        })
    };
    let (checks, reads) = (format!("{name}-auth"), format!("{name}-reader"));
    vec![
        role(
            &checks,
            json!([
                {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
                {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
            ]),
        ),
        bound(&checks, "nestor-console", "nestor-system"),
        role(&reads, json!([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}])),
        bound(&reads, "reader", namespace),
    ]
}

async fn is_checked(s: &Scenario, reader: &str, other: &str) -> Result<()> {
    let kubeconfig = management_cluster(s)?.kubeconfig_of("nestor-console");
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let page = tokio::net::TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let listen = format!("--listen={page}");
    let words = [&*kubeconfig, &*listen, "--metrics-auth=token"];
    let console = Running::start(&binary(&s.lab, "nestor-console"), &words).await?;
    eventually("the permitted account reads the metrics", PATIENCE, || async {
        Ok(match console.get_with_token("/metrics", reader).await {
            Ok((200, text)) => Ok(ensure_metrics(&text)),
            other => Err(format!("{other:?}; log: {}", console.log())),
        })
    })
    .await??;
    for (answer, expected) in [
        (console.get_with_token("/metrics", other).await?, 403),
        (console.get_with_token("/metrics", "invalid").await?, 401),
        (console.get("/metrics").await?, 401),
        // Probes have no credentials.
        (console.get("/healthz").await?, 200),
    ] {
        ensure!(answer.0 == expected, "{answer:?}, not {expected}");
        ensure!(expected == 200 || !answer.1.contains("nestor_"), "{answer:?}");
    }
    console.stop().await.map(drop)
}

fn ensure_metrics(text: &str) -> Result<()> {
    ensure!(text.contains("nestor_console_build_info"), "{text}");
    Ok(())
}

#[tokio::test]
async fn metrics_are_served_only_with_a_token_of_a_permitted_account() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let (reader, other) =
            (account(&s, &namespace, "reader").await?, account(&s, &namespace, "other").await?);
        let rights = rights(&unique("metrics"), &namespace.name);
        for object in &rights {
            chart::apply(&s.management, object, false).await?;
        }
        let outcome = is_checked(&s, &reader, &other).await;
        for object in &rights {
            chart::delete(&s.management, object).await?;
        }
        outcome
    })
    .await
}
