//! Sidecars of the Deployments that the charts install: versions, and the flags whose defaults delay or break Nestor.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Container;
use kube::ResourceExt;
use kube::api::ListParams;
use kube_kit::client::chain;
use process_kit::duration;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;
use crate::gather::read::is_answer;

/// Label of the charts' objects.
const PART_OF_NESTOR: &str = "app.kubernetes.io/part-of=nestor";

/// Sidecars, the major version that Nestor is tested with, and their flag for the number of workers.
const SIDECARS: [(&str, u32, &str); 4] = [
    ("csi-provisioner", 6, "worker-threads"),
    ("csi-attacher", 4, "worker-threads"),
    ("csi-resizer", 2, "workers"),
    ("csi-snapshotter", 8, "worker-threads"),
];

/// Least values: below them, volumes wait for the sidecar rather than for the storage.
const LEAST_QPS: f64 = 50.0;
const LEAST_WORKERS: u64 = 20;
const LEAST_TIMEOUT: u64 = 30;

/// Checks the sidecars of a cluster.
pub async fn check(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    let api = cluster.all::<Deployment>();
    match api.list(&ListParams::default().labels(PART_OF_NESTOR)).await {
        Ok(list) => Ok(judge(cluster.tier, &list.items)),
        Err(error) if is_answer(&error) => {
            Ok(vec![Finding::skipped(cluster.tier, "sidecars").because(chain(&error))])
        }
        Err(error) => Err(Error::request(cluster.tier.name(), "Deployments", &error)),
    }
}

fn judge(tier: Tier, deployments: &[Deployment]) -> Vec<Finding> {
    let findings: Vec<Finding> = deployments.iter().flat_map(|one| of_deployment(tier, one)).collect();
    match findings.is_empty() {
        true => {
            vec![Finding::skipped(tier, "sidecars").because(
                "no Deployment of the charts in this cluster: their versions and flags are not seen",
            )]
        }
        false => findings,
    }
}

fn of_deployment(tier: Tier, deployment: &Deployment) -> Vec<Finding> {
    let replicas = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let pod = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let containers = pod.map(|pod| pod.containers.as_slice()).unwrap_or_default();
    let mut findings = vec![available(tier, deployment, replicas)];
    findings.extend(
        containers.iter().filter_map(|container| sidecar(tier, &deployment.name_any(), container, replicas)),
    );
    findings
}

fn available(tier: Tier, deployment: &Deployment, replicas: i32) -> Finding {
    let what = format!("Deployment {}", deployment.name_any());
    let ready = deployment.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0);
    let text = format!("{ready} of {replicas} replicas available");
    match ready {
        0 => Finding::error(tier, what).because(text).next("see the Deployment's pods and their logs"),
        _ if ready < replicas => Finding::warning(tier, what).because(text).next("see the Deployment's pods"),
        _ => Finding::ok(tier, what).because(text),
    }
}

/// Judges one sidecar. None for other containers.
fn sidecar(tier: Tier, deployment: &str, container: &Container, replicas: i32) -> Option<Finding> {
    let (name, major, workers) = SIDECARS.into_iter().find(|(name, ..)| *name == container.name)?;
    let image = container.image.as_deref().unwrap_or_default();
    let what = format!("{name} in {deployment} ({})", image.rsplit('/').next().unwrap_or_default());
    let problems = [
        version(image, major),
        qps(container),
        threads(container, workers),
        timeout(container),
        election(container, replicas),
    ];
    let problems: Vec<String> = problems.into_iter().flatten().collect();
    Some(match problems.is_empty() {
        true => Finding::ok(tier, what),
        false => Finding::warning(tier, what)
            .because(problems.join("; "))
            .next("use the chart's settings (docs/reference/speed.md, \"Sidecar settings\")"),
    })
}

/// Value of a flag, as `--flag=value` or `--flag value`.
fn flag<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    let mut words = container.args.iter().chain(&container.command).flatten();
    while let Some(word) = words.next() {
        let Some(rest) = word.trim_start_matches('-').strip_prefix(name) else { continue };
        match rest.strip_prefix('=') {
            Some(value) => return Some(value),
            None if rest.is_empty() => return words.next().map(String::as_str),
            None => {}
        }
    }
    None
}

fn version(image: &str, tested: u32) -> Option<String> {
    let tag = image.rsplit_once(':')?.1.trim_start_matches('v');
    let major: u32 = tag.split('.').next()?.parse().ok()?;
    (major != tested).then(|| format!("version {tag}; Nestor is tested with {tested}.x"))
}

fn qps(container: &Container) -> Option<String> {
    let value: f64 = flag(container, "kube-api-qps").and_then(|value| value.parse().ok()).unwrap_or(5.0);
    (value < LEAST_QPS).then(|| format!("--kube-api-qps is {value}"))
}

fn threads(container: &Container, name: &str) -> Option<String> {
    let value: u64 = flag(container, name).and_then(|value| value.parse().ok()).unwrap_or(10);
    (value < LEAST_WORKERS).then(|| format!("--{name} is {value}"))
}

fn timeout(container: &Container) -> Option<String> {
    let value = flag(container, "timeout").unwrap_or("10s");
    let seconds = duration::parse(value).map(|time| time.as_secs()).ok()?;
    (seconds < LEAST_TIMEOUT).then(|| format!("--timeout is {value}"))
}

/// Several replicas without leader election act twice.
fn election(container: &Container, replicas: i32) -> Option<String> {
    let elects = flag(container, "leader-election").is_some_and(|value| value == "true");
    (replicas > 1 && !elects).then(|| "several replicas without --leader-election=true".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::finding::Level;
    use super::*;

    fn deployment(image: &str, args: &[&str]) -> Deployment {
        let container = json!({"name": "csi-attacher", "image": image, "args": args});
        serde_json::from_value(
            json!({"metadata": {"name": "gc-csi-controller"}, "status": {"availableReplicas": 3},
            "spec": {"replicas": 3, "selector": {}, "template": {"spec": {"containers": [container]}}}}),
        )
        .unwrap()
    }

    #[test]
    fn the_charts_flags_are_fine_and_the_defaults_are_not() {
        let good = ["--kube-api-qps=500", "--worker-threads=500", "--timeout=60s", "--leader-election=true"];
        let levels = |image, args: &[&str]| {
            let findings = judge(Tier::Guest, &[deployment(image, args)]);
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(levels("r/csi-attacher:v4.12.0", &good), [Level::Ok, Level::Ok]);
        assert_eq!(levels("r/csi-attacher:v3.0.0", &good), [Level::Ok, Level::Warning]);
        let findings = judge(Tier::Guest, &[deployment("r/csi-attacher:v4.12.0", &[])]);
        let why = findings[1].why.clone().unwrap_or_default();
        assert!(
            ["kube-api-qps is 5", "worker-threads is 10", "timeout is 10s", "leader-election"]
                .iter()
                .all(|part| why.contains(part)),
            "{why}"
        );
    }

    #[test]
    fn without_deployments_nothing_is_claimed() {
        assert_eq!(judge(Tier::Guest, &[])[0].level, Level::Skipped);
    }
}
