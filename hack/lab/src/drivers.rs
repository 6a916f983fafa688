//! The system itself: both drivers with their sidecars, and the VM Operator's stand-in.

use std::path::Path;

use anyhow::{Context, Result};

use crate::cluster::argv;
use crate::ports;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{Cluster, Guest, Infra, Part, State};

/// How long a binary of ours may take to finish what it does.
const GRACE: u64 = 15;

/// mgmt-csi, its csi-provisioner, and the shim.
pub async fn start_management(run: &Run, state: &State) -> Result<()> {
    let cluster = state.management.as_ref().context("no management cluster")?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let csi = async {
        run.launch("mgmt-csi", mgmt_csi(state, cluster, infra)?).await?;
        let kubeconfig = cluster.kubeconfig_of("csi-provisioner");
        run.launch("mgmt-provisioner", provisioner(state, &kubeconfig, &infra.mgmt_socket)?).await
    };
    let shim = async { run.launch("vm-operator-shim", shim(state, cluster)?).await };
    futures::try_join!(csi, shim).map(drop)
}

/// A guest's gc-csi controller, csi-provisioner and csi-attacher.
pub async fn start_guest(run: &Run, state: &State, name: &str) -> Result<()> {
    let guest = state.guests.get(name).with_context(|| format!("no guest {name}"))?;
    let management = state.management.as_ref().context("no management cluster")?;
    run.launch(&format!("{name}-gc-csi"), gc_csi(state, management, guest)?).await?;
    let kubeconfig = guest.cluster.kubeconfig_of("csi-sidecars");
    let provisioner = provisioner(state, &kubeconfig, &guest.controller_socket)?;
    let attacher = attacher(state, &kubeconfig, &guest.controller_socket)?;
    let sidecars = [("provisioner", provisioner), ("attacher", attacher)];
    let starts =
        sidecars.map(|(kind, part)| async move { run.launch(&format!("{name}-{kind}"), part).await });
    futures::future::try_join_all(starts).await.map(drop)
}

/// A part that serves `/readyz` and `/metrics` over HTTP, and CSI where there is a socket.
pub(crate) fn part(mut words: Vec<String>, http: u16, socket: Option<&Path>) -> Part {
    words.push(format!("--http-listen=127.0.0.1:{http}"));
    let mut conditions = vec![Ready::http(http, "/readyz")];
    conditions.extend(socket.map(|path| Ready::Socket(path.to_owned())));
    Part {
        argv: words,
        env: Default::default(),
        ready: Ready::All(conditions),
        http: Some(format!("http://127.0.0.1:{http}")),
        grace: GRACE,
    }
}

pub(crate) fn endpoint(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn mgmt_csi(state: &State, cluster: &Cluster, infra: &Infra) -> Result<Part> {
    let file = |name: &str| text(&infra.pki.join(name));
    let words = argv(
        &state.binaries,
        "mgmt-csi",
        &[
            ("endpoint", endpoint(&infra.mgmt_socket)),
            ("kubeconfig", text(&cluster.kubeconfig_of("mgmt-csi"))),
            ("infra-url", infra.url.clone()),
            ("infra-ca", file("ca.crt")),
            ("infra-cert", file("client.crt")),
            ("infra-key", file("client.key")),
        ],
    );
    Ok(part(words, ports::free(1)?[0], Some(&infra.mgmt_socket)))
}

fn shim(state: &State, cluster: &Cluster) -> Result<Part> {
    let kubeconfig = text(&cluster.kubeconfig_of("vm-operator-shim"));
    let words = argv(&state.binaries, "vm-operator-shim", &[("kubeconfig", kubeconfig)]);
    Ok(part(words, ports::free(1)?[0], None))
}

fn gc_csi(state: &State, management: &Cluster, guest: &Guest) -> Result<Part> {
    let mut words = vec![text(&state.binaries.join("gc-csi")), "controller".to_owned()];
    words.extend([
        format!("--endpoint={}", endpoint(&guest.controller_socket)),
        format!("--guest-kubeconfig={}", text(&guest.cluster.kubeconfig_of("gc-csi-controller"))),
        format!("--management-kubeconfig={}", text(&management.kubeconfig_of(&guest.namespace))),
        format!("--management-namespace={}", guest.namespace),
        format!("--cluster-id={}", guest.cluster_id),
    ]);
    Ok(part(words, ports::free(1)?[0], Some(&guest.controller_socket)))
}

/// A sidecar counts as ready when it has found its driver: only then it serves metrics.
fn sidecar(
    state: &State,
    program: &str,
    kubeconfig: &Path,
    socket: &Path,
    more: &[(&str, &str)],
) -> Result<Part> {
    let port = ports::free(1)?[0];
    let mut flags = vec![
        ("kubeconfig", text(kubeconfig)),
        ("csi-address", text(socket)),
        ("http-endpoint", format!("127.0.0.1:{port}")),
        ("kube-api-qps", "500".to_owned()),
        ("kube-api-burst", "1000".to_owned()),
        ("worker-threads", "100".to_owned()),
        ("timeout", "60s".to_owned()),
        ("retry-interval-start", "500ms".to_owned()),
        ("retry-interval-max", "10s".to_owned()),
        ("leader-election", "false".to_owned()),
        ("v", "4".to_owned()),
    ];
    flags.extend(more.iter().map(|(flag, value)| (*flag, (*value).to_owned())));
    Ok(Part {
        argv: argv(&state.tools, program, &flags),
        env: Default::default(),
        ready: Ready::http(port, "/metrics"),
        http: Some(format!("http://127.0.0.1:{port}")),
        grace: 5,
    })
}

fn provisioner(state: &State, kubeconfig: &Path, socket: &Path) -> Result<Part> {
    sidecar(state, "csi-provisioner", kubeconfig, socket, &[("extra-create-metadata", "true")])
}

fn attacher(state: &State, kubeconfig: &Path, socket: &Path) -> Result<Part> {
    sidecar(state, "csi-attacher", kubeconfig, socket, &[])
}
