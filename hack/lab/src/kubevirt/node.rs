//! The management cluster's node: this host, with a root filesystem, mounts, processes and a network of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;

use super::{PATIENCE, components};
use crate::cache::KubeVirt;
use crate::cluster::{ControlPlane, KubeletFiles, SERVER_ADDRESS_FROM_VM};
use crate::host::Host;
use crate::kubeconfig;
use crate::pki::write_private;
use crate::ports;
use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;
use crate::vm::{self, network};
use crate::wait::eventually;

/// Name of the node and of the component with its first process and containerd.
pub(super) const NODE: &str = "mgmt-node";
const INIT: &str = include_str!("../../kubevirt/init");
const CONTAINERD: &str = include_str!("../../kubevirt/containerd.toml");
const CNI: &str = include_str!("../../kubevirt/cni.conflist");
const KUBELET: &str = include_str!("../../kubevirt/kubelet.yaml");
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The label that virt-handler sets once pods of VMs can start.
const SCHEDULABLE: &str = "kubevirt.io/schedulable";
const CGROUPS: &str = "/sys/fs/cgroup";

/// Enters the node, whose first process has the PID in the file `$0`, and runs the rest. That ends when nsenter does.
const ENTER: &str =
    r#"exec nsenter --target "$(cat "$0")" --mount --pid --net --wd=/ setpriv --pdeathsig KILL "$@""#;

/// The node's ports on the host.
pub(crate) struct Node {
    kubelet: u16,
    healthz: u16,
}

impl Node {
    /// Allocates the ports.
    pub(crate) fn plan() -> Result<Self> {
        let free = ports::free(2)?;
        Ok(Self { kubelet: free[0], healthz: free[1] })
    }

    /// The ports on which it listens.
    pub(crate) fn ports(&self) -> [u16; 2] {
        [self.kubelet, self.healthz]
    }

    /// Starts the node's components. Returns when pods of VMs can start on it.
    pub(super) async fn start(
        &self,
        run: &Run,
        management: &ControlPlane,
        built: &KubeVirt,
        is_emulated: bool,
    ) -> Result<()> {
        let state = run.state()?;
        let tools = &state.tools;
        self.write_files(run, tools, &management.kubelet_files_of_host(NODE)?)?;
        run.launch(NODE, init(run, tools, &state.binaries, built, is_emulated)).await?;
        import(run, tools, built).await?;
        run.launch(&format!("{NODE}-kubelet"), self.kubelet(run, tools)).await?;
        let client = kubeconfig::client(&management.cluster.kubeconfig).await?;
        vm::wait_for_node(run, &client, NODE).await?;
        // On a node that does not exist yet, virt-handler would wait for minutes.
        let argv = components::virt_handler(run, &management.cluster, built, NODE, SERVER_ADDRESS_FROM_VM);
        let ready = Ready::Socket(run.socket_dir().join("kubevirt/domain-notify.sock"));
        run.launch("virt-handler", inside(run, tools, argv, ready)).await?;
        wait_until_schedulable(run, &client).await
    }

    fn write_files(&self, run: &Run, tools: &Path, files: &KubeletFiles) -> Result<()> {
        let node = folder(run);
        for name in ["upper", "work", "root", "kubelet/pods", "containerd", "net.d"] {
            fs::create_dir_all(node.join(name))?;
        }
        // Overlayfs takes the mode of the root from there.
        fs::set_permissions(node.join("upper"), fs::Permissions::from_mode(0o755))?;
        fs::create_dir_all(run.socket_dir().join("kubevirt"))?;
        for folder in cgroups(run)? {
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let fill = |text: &str| {
            let values = [
                ("FOLDER", run.dir().display().to_string()),
                ("SOCKETS", run.socket_dir().display().to_string()),
                ("TOOLS", tools.display().to_string()),
                ("FILES", node.display().to_string()),
                ("CGROUP", cgroup(run)),
                ("PORT", self.kubelet.to_string()),
                ("HEALTHZ", self.healthz.to_string()),
            ];
            values
                .iter()
                .fold(text.to_owned(), |text, (key, value)| text.replace(&format!("${{{key}}}"), value))
        };
        fs::write(node.join("init"), INIT)?;
        fs::write(node.join("containerd.toml"), fill(CONTAINERD))?;
        fs::write(node.join("net.d/10-lab.conflist"), CNI)?;
        fs::write(node.join("kubelet.yaml"), fill(KUBELET))?;
        write_private(&node.join("kubeconfig"), &files.kubeconfig)?;
        write_private(&node.join("ca.crt"), &files.ca)?;
        files.serving.write(&node, "kubelet").map(drop)
    }

    fn kubelet(&self, run: &Run, tools: &Path) -> Component {
        let node = folder(run);
        let flag = |name: &str, file: &str| format!("--{name}={}", node.join(file).display());
        let argv = vec![
            tools.join("kubelet").display().to_string(),
            flag("config", "kubelet.yaml"),
            flag("kubeconfig", "kubeconfig"),
            format!("--hostname-override={NODE}"),
            format!("--node-ip={SERVER_ADDRESS_FROM_VM}"),
            "--cloud-provider=external".to_owned(),
        ];
        inside(run, tools, argv, Ready::http(self.healthz, "/healthz"))
    }
}

fn folder(run: &Run) -> PathBuf {
    run.path("node")
}

fn init(run: &Run, tools: &Path, binaries: &Path, built: &KubeVirt, is_emulated: bool) -> Component {
    let network = format!("--net={}", network::namespace(run, Host::default()).display());
    let script = folder(run).join("init").display().to_string();
    let argv =
        ["nsenter", &network, "unshare", "--pid", "--mount", "--fork", "--kill-child", "bash", &script];
    let env = [
        ("FOLDER", run.dir().display().to_string()),
        ("SOCKETS", run.socket_dir().display().to_string()),
        ("BASE", built.root.display().to_string()),
        ("TOOLS", tools.display().to_string()),
        ("PROGRAMS", built.programs.display().to_string()),
        ("BINARIES", binaries.display().to_string()),
        ("TYPE", if is_emulated { "qemu" } else { "kvm" }.to_owned()),
        ("PATH", path(tools)),
    ];
    Component {
        argv: argv.map(ToOwned::to_owned).to_vec(),
        env: env.map(|(name, value)| (name.to_owned(), value)).into(),
        ready: Ready::Socket(containerd(run)),
        http: None,
        grace: 0,
        driver: None,
    }
}

fn containerd(run: &Run) -> PathBuf {
    run.socket_dir().join("containerd.sock")
}

fn path(tools: &Path) -> String {
    format!("{}:{PATH}", tools.display())
}

/// A component that runs on the node.
pub(super) fn inside(run: &Run, tools: &Path, argv: Vec<String>, ready: Ready) -> Component {
    let pid = folder(run).join("pid").display().to_string();
    let mut words = vec!["sh".to_owned(), "-c".to_owned(), ENTER.to_owned(), pid];
    words.extend(argv);
    let env = [("PATH", path(tools)), ("NODE_NAME", NODE.to_owned()), ("HOME", "/root".to_owned())];
    Component {
        argv: words,
        env: env.map(|(name, value)| (name.to_owned(), value)).into(),
        ready,
        http: None,
        grace: 0,
        driver: None,
    }
}

async fn import(run: &Run, tools: &Path, built: &KubeVirt) -> Result<()> {
    for archive in &built.archives {
        let mut ctr = command(&tools.join("ctr").display().to_string(), ["--address"]);
        ctr.arg(containerd(run)).args(["--namespace", "k8s.io", "images", "import"]).arg(archive);
        run_helper(&mut ctr).await?;
    }
    Ok(())
}

async fn wait_until_schedulable(run: &Run, client: &kube::Client) -> Result<()> {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    eventually("virt-handler has taken the node over", PATIENCE, || async {
        let labels = nodes.get(NODE).await?.metadata.labels.unwrap_or_default();
        let value = labels.get(SCHEDULABLE).cloned().unwrap_or_default();
        Ok(if value == "true" { Ok(()) } else { Err(format!("label {SCHEDULABLE}: {value:?}")) })
    })
    .await
    .with_context(|| run.explain("virt-handler", "it does not work"))
}

// ---- cgroups ----

/// The name of the folder with the cgroups of a run's containers.
fn cgroup(run: &Run) -> String {
    run.socket_dir().file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The folder in each hierarchy: there are several with cgroups of version 1.
fn cgroups(run: &Run) -> Result<Vec<PathBuf>> {
    let root = Path::new(CGROUPS);
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.join(cgroup(run))]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root).context("cannot read the cgroups")? {
        let entry = entry?;
        // Some hierarchies have links with other names.
        if entry.file_type()?.is_dir() {
            found.push(entry.path().join(cgroup(run)));
        }
    }
    Ok(found)
}

/// Removes the cgroups of a run once their processes have ended. Succeeds if there are none.
pub(crate) async fn remove_cgroups(run: &Run, patience: Duration) -> Result<()> {
    for folder in cgroups(run)?.into_iter().filter(|folder| folder.exists()) {
        eventually(&format!("{} is removed", folder.display()), patience, || async {
            Ok(remove_cgroup(&folder).map_err(|error| error.to_string()))
        })
        .await?;
    }
    Ok(())
}

/// Removes a cgroup with those in it. Its files are removed with it.
fn remove_cgroup(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
