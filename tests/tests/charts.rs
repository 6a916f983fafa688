//! Helm charts: their objects are accepted by API servers, and their flags by the programs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use lab::run::repository;
use serde_json::{Value, json};
use tests::chart::{self, Chart, containers, kind_and_name, of_kind, pod_specs, texts};
use tests::http_proxy::HttpProxy;
use tests::local_pod::LocalPod;
use tests::program::run_to_end;
use tests::{PATIENCE, Scenario, eventually, run, unique};

#[tokio::test]
async fn both_charts_pass_helm_lint_and_report_missing_and_unknown_values() -> Result<()> {
    for chart in Chart::both().await? {
        for values in chart.examples()? {
            chart
                .lint(&values)
                .await
                .with_context(|| format!("{} with {}", chart.name(), values.display()))?;
        }
        let smallest = chart.example("smallest");
        let unknown = chart.render("default", &[&smallest], &["replica=3"]).await.unwrap_err().to_string();
        ensure!(unknown.contains("replica"), "{unknown}");
        let bad = chart.render("default", &[&smallest], &["log.format=xml"]).await.unwrap_err().to_string();
        ensure!(bad.contains("/log/format"), "{bad}");
    }
    let [management, guest] = Chart::both().await?;
    for (chart, value, expected) in [
        (&management, "infra.url=", "infra.url is required"),
        (&management, "infra.secret=", "infra.secret is required"),
        (&guest, "clusterId=", "clusterId is required"),
        (&guest, "management.namespace=", "management.namespace is required"),
        (&guest, "management.kubeconfig.secret=", "management.token.secret is required"),
        (&guest, "management.token.secret=other", "set only one of them"),
        (&guest, "controller.onGuestDeletion=Delete", "controller.clusterObject is required"),
        (&guest, "management.vmApi=kubevirt", "set topology.enabled to false"),
        (&guest, "tracing.endpoint=https://c:4317", "tracing.ca.configMap is required"),
        (&management, "tracing.endpoint=http://c:4317,tracing.ca.secret=c", "tracing.ca requires"),
        (&management, "tracing.endpoint=grpc://c:4317", "/tracing/endpoint"),
        (&management, "tracing.ca.secret=c,tracing.ca.configMap=c", "set only one of them"),
    ] {
        let smallest = chart.example("smallest");
        let error = chart.render("default", &[&smallest], &[value]).await;
        let error = error.err().with_context(|| format!("{value} was accepted"))?.to_string();
        ensure!(error.contains(expected), "{value}: {error}");
    }
    Ok(())
}

/// The flags of mgmt-csi as the chart renders them with more values.
async fn flags_of_mgmt_csi(values: &Value) -> Result<Vec<String>> {
    let chart = Chart::management().await?;
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), serde_json::to_vec(values)?)?;
    let objects = chart.render("default", &[&chart.example("smallest"), file.path()], &[]).await?;
    let all = pod_specs(&objects);
    let mut containers = all.iter().flat_map(|(_, spec)| containers(spec));
    let found = containers.find(|container| container["name"] == "mgmt-csi");
    Ok(texts(&found.context("no container mgmt-csi")?["args"]))
}

#[tokio::test]
async fn mgmt_csi_attaches_to_the_vms_that_the_values_name() -> Result<()> {
    let with_node_service = json!({"kubevirt": {"enabled": true}, "nodeService": {"enabled": true}});
    for (values, expected) in [
        (with_node_service, &["--vm-api=auto", "--node-service"][..]),
        (json!({"shim": {"enabled": true}}), &["--vm-api=vm-operator"]),
        (json!({"mgmtCsi": {"vmApi": "none"}}), &["--vm-api=none"]),
    ] {
        let flags = flags_of_mgmt_csi(&values).await?;
        ensure!(expected.iter().all(|flag| flags.iter().any(|one| one == flag)), "{values}: {flags:?}");
    }
    let both = json!({"shim": {"enabled": true}, "mgmtCsi": {"vmApi": "none"}});
    let refused = flags_of_mgmt_csi(&both).await.unwrap_err().to_string();
    ensure!(refused.contains("mgmtCsi.vmApi is none"), "{refused}");
    Ok(())
}

#[tokio::test]
async fn a_guest_without_a_namespace_has_one_of_its_own() -> Result<()> {
    let management = Chart::management().await?;
    let guests = ["guests[0].name=one", "guests[0].clusterId=id-1"];
    let objects = management.render("default", &[&management.example("smallest")], &guests).await?;
    let account = of_kind(&objects, "ServiceAccount").find(|account| account["metadata"]["name"] == "one");
    let metadata = &account.context("no account")?["metadata"];
    ensure!(metadata["namespace"] == "guest-one", "{metadata}");
    ensure!(metadata["labels"]["nestor.dev/cluster-id"] == "id-1", "{metadata}");
    Ok(())
}

/// Renders a chart with each values file that it is tested with, for the namespace of the lab's components.
async fn renderings(chart: &Chart, namespace: &str, set: &[&str]) -> Result<Vec<(String, Vec<Value>)>> {
    let mut all = Vec::new();
    for values in chart.examples()? {
        let name = format!("{} with {}", chart.name(), values.file_stem().unwrap_or_default().display());
        let set = if values == chart.example("everything") { set } else { &[] };
        all.push((name, chart.render(namespace, &[&values], set).await?));
    }
    Ok(all)
}

#[tokio::test]
async fn every_object_of_every_rendering_is_accepted_by_the_api_server() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let tenants: Vec<String> =
            (0..2).map(|guest| format!("guests[{guest}].namespace={}", namespace.name)).collect();
        let tenants: Vec<&str> = tenants.iter().map(String::as_str).collect();
        let tiers = [
            (Chart::management().await?, "nestor-system", &tenants[..], &s.management),
            (Chart::guest().await?, "kube-system", &[], &s.guest),
        ];
        for (chart, namespace, set, client) in tiers {
            chart::apply_monitoring_definitions(client).await?;
            for (name, objects) in renderings(&chart, namespace, set).await? {
                for object in &objects {
                    chart::apply(client, &as_new(object), true).await.with_context(|| name.clone())?;
                }
                pods_are_accepted(client, namespace, &objects).await.with_context(|| name.clone())?;
            }
        }
        Ok(())
    })
    .await
}

/// A CSIDriver under another name: nobody can change `attachRequired` of the one that the lab has.
fn as_new(object: &Value) -> Value {
    let mut object = object.clone();
    if object["kind"] == "CSIDriver" {
        object["metadata"]["name"] = json!("new.csi.nestor.dev");
    }
    object
}

/// Creates the pods as a dry run: admission checks more than their templates (account, priority, Pod Security).
async fn pods_are_accepted(client: &Client, namespace: &str, objects: &[Value]) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    for (owner, spec) in pod_specs(objects) {
        // The lab has no account of what is not enabled by default.
        let account = spec["serviceAccountName"].as_str().unwrap_or("default");
        let account = accounts.get_opt(account).await?.map_or("default", |_| account);
        let mut pod = pod(namespace, spec);
        pod["spec"]["serviceAccountName"] = json!(account);
        chart::apply(client, &pod, true).await.with_context(|| owner)?;
    }
    Ok(())
}

fn pod(namespace: &str, spec: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", "namespace": namespace}, "spec": spec})
}

#[tokio::test]
async fn controllers_are_accepted_in_a_restricted_namespace_and_the_node_plugins_are_not() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        restrict(&s, &namespace.name).await?;
        for chart in Chart::both().await? {
            for (name, objects) in renderings(&chart, &namespace.name, &[]).await? {
                for account in of_kind(&objects, "ServiceAccount")
                    .filter(|a| a["metadata"]["namespace"] == *namespace.name)
                {
                    chart::apply(&s.management, account, false).await?;
                }
                for (owner, spec) in pod_specs(&objects) {
                    let taken = chart::apply(&s.management, &pod(&namespace.name, spec), true).await;
                    match (owner.as_str(), taken) {
                        ("DaemonSet gc-csi-node" | "DaemonSet mgmt-csi-node", Err(error)) => {
                            ensure!(format!("{error:#}").contains("restricted"), "{error:#}");
                        }
                        ("DaemonSet gc-csi-node" | "DaemonSet mgmt-csi-node", Ok(_)) => {
                            bail!("a privileged pod was accepted")
                        }
                        (_, taken) => drop(taken.with_context(|| format!("{name}: {owner}"))?),
                    }
                }
            }
        }
        Ok(())
    })
    .await
}

async fn restrict(s: &Scenario, namespace: &str) -> Result<()> {
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let namespaces: Api<Namespace> = Api::all(s.management.clone());
    namespaces.patch(namespace, &PatchParams::default(), &Patch::Merge(&label)).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(s.management.clone(), namespace);
    eventually("the namespace has its default account", PATIENCE, || async {
        Ok(accounts.get_opt("default").await?.map(drop).ok_or_else(|| "no account".to_owned()))
    })
    .await
}

/// Whether a program accepts the arguments of a container: it prints its help or version only if it does.
async fn accepts(s: &Scenario, container: &Value, more: &[&str]) -> Result<(bool, String)> {
    let program = chart::program(&s.lab, container)?;
    let words = texts(&container["args"]);
    let is_ours = program.starts_with(&s.lab.state().binaries);
    let last = if is_ours { "--help" } else { "--version" };
    let words: Vec<&str> =
        words.iter().map(String::as_str).chain(more.iter().copied()).chain([last]).collect();
    let ended = run_to_end(&program, &words).await?;
    Ok((ended.code == Some(0), format!("{} {words:?}: {}", program.display(), ended.stderr)))
}

#[tokio::test]
async fn every_flag_in_a_chart_is_accepted_by_its_program() -> Result<()> {
    run(|s| async move {
        let mut checked = BTreeMap::new();
        for chart in Chart::both().await? {
            for (name, objects) in renderings(&chart, "nestor-system", &[]).await? {
                for (owner, spec) in pod_specs(&objects) {
                    for container in containers(spec) {
                        let (known, stderr) = accepts(&s, container, &[]).await?;
                        ensure!(known, "{name}: {owner}: {stderr}");
                        checked.insert(chart::program(&s.lab, container)?, container.clone());
                    }
                }
            }
        }
        // All eleven programs, none of which accepts an unknown flag.
        assert_eq!(checked.len(), 11, "{:?}", checked.keys());
        for container in checked.values() {
            let (known, stderr) = accepts(&s, container, &["--no-such-flag=1"]).await?;
            ensure!(!known && stderr.contains("no-such-flag"), "{stderr}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn sidecars_have_the_tested_versions() -> Result<()> {
    let go_mod = std::fs::read_to_string(repository().join("hack/tools/kubernetes/go.mod"))?;
    let module = |sidecar: &str| match sidecar {
        "csi-snapshotter" | "snapshot-controller" => "external-snapshotter".to_owned(),
        other => other.replace("csi-", "external-"),
    };
    for chart in Chart::both().await? {
        for (name, objects) in renderings(&chart, "nestor-system", &[]).await? {
            for container in pod_specs(&objects).into_iter().flat_map(|(_, spec)| containers(spec)) {
                let image = container["image"].as_str().context("no image")?;
                let Some(sidecar) = image.strip_prefix("registry.k8s.io/sig-storage/") else { continue };
                let (sidecar, tag) = sidecar.split_once(':').context("no tag")?;
                let path = format!("github.com/kubernetes-csi/{}/", module(sidecar));
                let required = go_mod.lines().filter_map(|line| line.trim().strip_suffix(" // indirect"));
                let tested = required.filter_map(|line| line.strip_prefix(&path)?.split_once(' '));
                let tested: Vec<_> = tested.filter(|(module, _)| !module.contains('/')).collect();
                ensure!(
                    tested.len() == 1 && tested[0].1 == tag,
                    "{name}: {sidecar} {tag}, but {tested:?} is tested"
                );
            }
        }
    }
    Ok(())
}

/// Sidecar flags that differ between lab and pod, or that shorten the tests.
const OWN: [&str; 11] = [
    "kubeconfig",
    "csi-address",
    "http-endpoint",
    "leader-election",
    "leader-election-namespace",
    "feature-gates",
    "v",
    "capacity-ownerref-level",
    "capacity-poll-interval",
    "snapshot-orphan-sweep-interval",
    "timeout",
];

fn shared_flags(words: &[String]) -> Vec<String> {
    let name = |word: &str| word.trim_start_matches('-').split('=').next().unwrap_or_default().to_owned();
    let mut flags: Vec<String> =
        words.iter().filter(|word| word.starts_with("--") && !OWN.contains(&&*name(word))).cloned().collect();
    flags.sort();
    flags
}

#[tokio::test]
async fn sidecars_have_the_flags_of_the_lab() -> Result<()> {
    run(|s| async move {
        let components = &s.lab.state().components;
        for (chart, tier) in [(Chart::management().await?, "mgmt"), (Chart::guest().await?, "g1")] {
            let objects = chart.render("nestor-system", &[&chart.example("everything")], &[]).await?;
            let mut compared = 0;
            for container in pod_specs(&objects).into_iter().flat_map(|(_, spec)| containers(spec)) {
                let name = container["name"].as_str().unwrap_or_default();
                let component = format!("{tier}-{}", name.trim_start_matches("csi-"));
                let Some(component) = components
                    .get(&component)
                    .filter(|_| container["image"].as_str().is_some_and(|i| i.contains("sig-storage")))
                else {
                    continue;
                };
                assert_eq!(shared_flags(&texts(&container["args"])), shared_flags(&component.argv), "{name}");
                compared += 1;
            }
            assert_eq!(compared, if tier == "mgmt" { 4 } else { 5 }, "{tier}");
        }
        Ok(())
    })
    .await
}

/// Renames cluster-wide roles with a prefix, so that those of the lab stay unchanged.
fn rename_rights(objects: &mut [Value], prefix: &str) {
    for object in objects {
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        if kind == "ClusterRole" || kind == "ClusterRoleBinding" {
            object["metadata"]["name"] =
                json!(format!("{prefix}:{}", object["metadata"]["name"].as_str().unwrap_or_default()));
        }
        if object["roleRef"]["kind"] == "ClusterRole" {
            object["roleRef"]["name"] =
                json!(format!("{prefix}:{}", object["roleRef"]["name"].as_str().unwrap_or_default()));
        }
    }
}

/// An endpoint with TLS.
const TRACING: &str = "tracing.endpoint=https://127.0.0.1:9";

/// Kinds of a chart's objects that are applied by the tests: the lab already has the others.
const OF_A_RELEASE: [&str; 9] = [
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ConfigMap",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Deployment",
];

/// Applies a chart's objects, runs the containers of its pods on this host, and waits until all their probes pass.
async fn pods_get_ready(client: &Client, s: &Scenario, namespace: &str, objects: &[Value]) -> Result<()> {
    for kind in OF_A_RELEASE {
        for object in of_kind(objects, kind) {
            chart::apply(client, object, false).await?;
        }
    }
    for object in objects.iter().filter(|object| object["spec"]["template"]["spec"].is_object()) {
        let pod = LocalPod::start(&s.lab, client, namespace, object)
            .await
            .with_context(|| kind_and_name(object))?;
        pod.ready().await.with_context(|| kind_and_name(object))?;
        let refused = pod.refused();
        ensure!(refused.is_empty(), "{}: {refused:?}", kind_and_name(object));
        pod.stop().await.with_context(|| kind_and_name(object))?;
    }
    Ok(())
}

async fn remove_rights(client: &Client, objects: &[Value]) -> Result<()> {
    for kind in ["ClusterRoleBinding", "ClusterRole"] {
        for object in of_kind(objects, kind) {
            chart::delete(client, object).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_management_charts_pods_become_ready() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let infra = s.lab.state().infra.clone().context("no infra")?;
        let read = |name: &str| std::fs::read_to_string(infra.pki.join(name));
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "storage-infra-client", "namespace": namespace.name},
            "stringData": {"ca.crt": read("ca.crt")?, "tls.crt": read("driver.crt")?, "tls.key": read("driver.key")?},
        });
        chart::apply(&s.management, &secret, false).await?;
        let chart = Chart::management().await?;
        let url = format!("infra.url={}", infra.url);
        // No collector listens there. The programs read the CA certificate when they start.
        let set = [&*url, "mgmtCsi.fence=never", TRACING, "tracing.ca.secret=storage-infra-client"];
        let more = tempfile::NamedTempFile::new()?;
        std::fs::write(more.path(), "shim: {enabled: true}\nsnapshotController: {enabled: true}\n")?;
        let smallest = chart.example("smallest");
        let mut objects = chart.render(&namespace.name, &[&smallest, more.path()], &set).await?;
        rename_rights(&mut objects, &unique("charts"));
        let outcome = pods_get_ready(&s.management, &s, &namespace.name, &objects).await;
        remove_rights(&s.management, &objects).await?;
        outcome
    })
    .await
}

#[tokio::test]
async fn a_guest_charts_pods_become_ready_with_a_token_for_the_management_cluster() -> Result<()> {
    run(|s| async move {
        let state = s.lab.state();
        let management = state.management.as_ref().context("no management cluster")?;
        let account = state.guests.get("g1").context("no guest")?.account();
        let token = lab::cluster::objects::token(&s.management, &s.namespace, &account).await?;
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "management", "namespace": s.name},
            "stringData": {"ca.crt": std::fs::read_to_string(&management.ca)?, "token": token},
        });
        chart::apply(&s.guest, &secret, false).await?;
        let chart = Chart::guest().await?;
        let kubelet = tempfile::tempdir()?;
        let proxy = HttpProxy::start().await?;
        // A new cluster ID, so that it does not touch the objects of the lab's guest.
        let set = [
            format!("clusterId={}", unique("cluster")),
            format!("management.namespace={}", s.namespace),
            "management.kubeconfig.secret=".to_owned(),
            "management.token.secret=management".to_owned(),
            format!("management.token.server={}", management.server),
            format!("management.token.proxyUrl={}", proxy.url),
            "controller.nodeSelector.no-such-node=true".to_owned(),
            "node.nodeSelector.no-such-node=true".to_owned(),
            format!("node.kubeletDir={}", kubelet.path().display()),
            TRACING.to_owned(),
            "tracing.ca.configMap=kube-root-ca.crt".to_owned(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let mut objects = chart.render(&s.name, &[&chart.example("smallest")], &set).await?;
        rename_rights(&mut objects, &unique("charts"));
        let outcome = pods_get_ready(&s.guest, &s, &s.name, &objects).await;
        remove_rights(&s.guest, &objects).await?;
        outcome?;
        let servers = proxy.servers();
        let server = management.server.trim_start_matches("https://");
        ensure!(!servers.is_empty() && servers.iter().all(|one| one == server), "{servers:?}, not {server}");
        Ok(())
    })
    .await
}
