//! virt-api and virt-controller, which run on the host, and virt-handler's flags.

use std::path::Path;

use anyhow::Result;

use super::NAMESPACE;
use super::objects::{Hooks, Serving};
use crate::cache::KubeVirt;
use crate::cluster::{argv, token_kubeconfig};
use crate::kubeconfig;
use crate::pki::write_private;
use crate::ports;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{Cluster, Component};

/// ServiceAccounts: with other users' rights, KubeVirt refuses their updates of statuses.
const ACCOUNTS: [&str; 3] = ["kubevirt-apiserver", "kubevirt-controller", "kubevirt-handler"];

/// Starts virt-api and virt-controller. Returns the hooks of virt-api.
pub(super) async fn start(
    run: &Run,
    cluster: &Cluster,
    built: &KubeVirt,
    serving: &Serving,
) -> Result<Hooks> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    for account in ACCOUNTS {
        token_kubeconfig(&client, cluster, NAMESPACE, account).await?;
    }
    let free = ports::free(3)?;
    let folder = run.path("kubevirt");
    // The name is that of virt-api's Service, by which the API server calls it.
    let names = ["127.0.0.1", "virt-api.kubevirt.svc"];
    serving.authority.server("virt-api", &names)?.write(&folder, "serving")?;
    write_private(&folder.join("ca.crt"), &serving.authority.cert())?;
    run.launch("virt-api", virt_api(&folder, cluster, built, &free)).await?;
    run.launch("virt-controller", virt_controller(&folder, cluster, built, free[2])).await?;
    Ok(serving.at(free[0]))
}

fn file(folder: &Path, path: &str) -> String {
    folder.join(path).display().to_string()
}

fn component(argv: Vec<String>, folder: &Path, port: u16) -> Component {
    Component {
        argv,
        env: [("NODE_NAME", "host"), ("POD_NAME", "host"), ("POD_NAMESPACE", NAMESPACE)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ready: Ready::https(port, "/healthz", &folder.join("ca.crt")),
        http: None,
        grace: 5,
        driver: None,
    }
}

fn virt_api(folder: &Path, cluster: &Cluster, built: &KubeVirt, ports: &[u16]) -> Component {
    let flags = [
        ("kubeconfig", cluster.kubeconfig_of("kubevirt-apiserver").display().to_string()),
        ("listen", "127.0.0.1".to_owned()),
        ("port", ports[0].to_string()),
        ("console-server-port", ports[1].to_string()),
        ("subresources-only", "true".to_owned()),
        ("tls-cert-file", file(folder, "serving.crt")),
        ("tls-key-file", file(folder, "serving.key")),
        ("handler-cert-file", file(folder, "kubevirt-virt-handler-certs/tls.crt")),
        ("handler-key-file", file(folder, "kubevirt-virt-handler-certs/tls.key")),
    ];
    component(argv(&built.programs, "virt-api", &flags), folder, ports[0])
}

fn virt_controller(folder: &Path, cluster: &Cluster, built: &KubeVirt, port: u16) -> Component {
    let flags = [
        ("kubeconfig", cluster.kubeconfig_of("kubevirt-controller").display().to_string()),
        ("listen", "127.0.0.1".to_owned()),
        ("port", port.to_string()),
        ("launcher-image", KubeVirt::LAUNCHER.to_owned()),
        ("exporter-image", KubeVirt::LAUNCHER.to_owned()),
        ("prom-cert-file", file(folder, "serving.crt")),
        ("prom-key-file", file(folder, "serving.key")),
    ];
    component(argv(&built.programs, "virt-controller", &flags), folder, port)
}

/// The command line of virt-handler, on a node at this address.
pub(super) fn virt_handler(
    run: &Run,
    cluster: &Cluster,
    built: &KubeVirt,
    node: &str,
    address: &str,
) -> Vec<String> {
    let folder = run.path("kubevirt");
    let mut flags = vec![
        ("kubeconfig", cluster.kubeconfig_of("kubevirt-handler").display().to_string()),
        ("listen", "127.0.0.1".to_owned()),
        ("hostname-override", node.to_owned()),
        ("pod-ip-address", address.to_owned()),
        ("max-metric-requests", "3".to_owned()),
    ];
    for (flags_of, secret) in [
        (["client-cert-file", "client-key-file"], "kubevirt-virt-handler-certs"),
        (["tls-cert-file", "tls-key-file"], "kubevirt-virt-handler-server-certs"),
        (
            ["migration-client-cert-file", "migration-client-key-file"],
            "kubevirt-virt-handler-migration-client-certs",
        ),
        (["vsock-client-cert-file", "vsock-client-key-file"], "kubevirt-virt-handler-vsock-client-certs"),
    ] {
        for (flag, end) in flags_of.into_iter().zip(["crt", "key"]) {
            flags.push((flag, file(&folder, &format!("{secret}/tls.{end}"))));
        }
    }
    argv(&built.programs, "virt-handler", &flags)
}
