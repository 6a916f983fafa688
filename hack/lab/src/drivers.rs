//! Nestor's components: both drivers with their sidecars, vm-operator-shim, and nestor-console on request.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cluster::{GUEST_NAMESPACE, MANAGEMENT_NAMESPACE, argv};
use crate::kubevirt::VmManager;
use crate::ports;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{Cluster, Component, Guest, Infra, State};

/// Driver whose volumes gc-csi serves under its name too, in a lab with KubeVirt.
pub const KUBEVIRT_CSI: &str = "csi.kubevirt.io";

/// Flag of mgmt-csi with which it attaches volumes to hosts.
pub(crate) const NODE_SERVICE: &str = "--node-service";

/// Seconds that our programs may take to exit after SIGTERM.
const GRACE: u64 = 15;

/// Starts the replicas of mgmt-csi with its sidecars, and of vm-operator-shim.
pub async fn start_management(run: &Run, state: &State, replicas: u32) -> Result<()> {
    let cluster = state.management.as_ref().context("no management cluster")?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let all = Replica::all(replicas).map(|replica| async move {
        let driver = Driver {
            name: replica.name("mgmt-csi"),
            tier: "mgmt",
            cluster,
            socket: replica.socket(&infra.mgmt_socket),
            replica,
            namespace: MANAGEMENT_NAMESPACE,
        };
        let csi = async {
            run.launch(&driver.name, mgmt_csi(state, &driver, infra)?).await?;
            let components =
                [provisioner(state, &driver, None)?, resizer(state, &driver)?, snapshotter(state, &driver)?];
            launch_all(run, components).await
        };
        let shim = (replica.name("vm-operator-shim"), shim(state, cluster, replica)?);
        futures::try_join!(csi, launch_all(run, [shim])).map(drop)
    });
    futures::future::try_join_all(all).await.map(drop)
}

/// Starts mgmt-csi with its sidecars for volumes of pods: the cluster has no VirtualMachines of a VM Operator.
pub(crate) async fn start_management_for_pods(run: &Run, state: &State) -> Result<()> {
    let cluster = state.management.as_ref().context("no management cluster")?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let driver = Driver {
        name: "mgmt-csi".to_owned(),
        tier: "mgmt",
        cluster,
        socket: infra.mgmt_socket.clone(),
        replica: Replica::alone(),
        namespace: MANAGEMENT_NAMESPACE,
    };
    let mut component = mgmt_csi(state, &driver, infra)?;
    component.argv.push(NODE_SERVICE.to_owned());
    run.launch(&driver.name, component).await?;
    let components = [
        provisioner(state, &driver, None)?,
        attacher(state, &driver)?,
        resizer(state, &driver)?,
        snapshotter(state, &driver)?,
    ];
    launch_all(run, components).await
}

/// Starts the replicas of a guest's gc-csi controller with its sidecars.
pub async fn start_guest(run: &Run, state: &State, name: &str, replicas: u32) -> Result<()> {
    // Only mgmt-csi publishes capacity; with KubeVirt, most classes are another driver's.
    let capacity = (state.vm_manager == VmManager::Libvirt).then_some(GUEST_NAMESPACE);
    let all = Replica::all(replicas).map(|replica| async move {
        let driver = start_gc_csi(run, state, name, replica).await?;
        let components = [
            provisioner(state, &driver, capacity)?,
            attacher(state, &driver)?,
            resizer(state, &driver)?,
            snapshotter(state, &driver)?,
        ];
        launch_all(run, components).await?;
        match state.vm_manager {
            VmManager::Libvirt => Ok(()),
            VmManager::KubeVirt => attach_volumes_of_kubevirt_csi(run, state, driver).await,
        }
    });
    futures::future::try_join_all(all).await.map(drop)
}

/// Starts the csi-attacher of the name of kubevirt-csi, which gc-csi serves for volumes that it took over.
async fn attach_volumes_of_kubevirt_csi(run: &Run, state: &State, driver: Driver<'_>) -> Result<()> {
    let (tier, socket) = (format!("{}-kubevirt-csi", driver.tier), legacy_socket(&driver));
    let driver = Driver { tier: &tier, socket, ..driver };
    launch_all(run, [attacher(state, &driver)?]).await
}

/// Starts the sidecars of another CSI driver of the management cluster.
pub(crate) async fn start_other_driver(run: &Run, state: &State, name: &str, socket: PathBuf) -> Result<()> {
    let cluster = state.management.as_ref().context("no management cluster")?;
    let driver = Driver {
        name: name.to_owned(),
        tier: name,
        cluster,
        socket,
        replica: Replica::alone(),
        namespace: MANAGEMENT_NAMESPACE,
    };
    let components =
        [provisioner(state, &driver, None)?, resizer(state, &driver)?, snapshotter(state, &driver)?];
    launch_all(run, components).await
}

/// Starts a replica of a guest's gc-csi controller.
async fn start_gc_csi<'a>(
    run: &Run,
    state: &'a State,
    name: &'a str,
    replica: Replica,
) -> Result<Driver<'a>> {
    let guest = state.guests.get(name).with_context(|| format!("no guest {name}"))?;
    let management = state.management.as_ref().context("no management cluster")?;
    let driver = Driver {
        name: replica.name(&format!("{name}-gc-csi")),
        tier: name,
        cluster: &guest.cluster,
        socket: replica.socket(&guest.controller_socket),
        replica,
        namespace: GUEST_NAMESPACE,
    };
    run.launch(&driver.name, gc_csi(state, &driver, management, guest)?).await?;
    Ok(driver)
}

/// Starts one snapshot-controller for each cluster.
pub async fn start_snapshot_controllers(run: &Run, state: &State) -> Result<()> {
    let management = state.management.as_ref().context("no management cluster")?;
    let guests = state.guests.iter().map(|(name, guest)| (name.as_str(), &guest.cluster));
    let components = [("mgmt", management)].into_iter().chain(guests);
    let components = components.map(|(tier, cluster)| snapshot_controller(state, tier, cluster));
    launch_all(run, components.collect::<Result<Vec<_>>>()?).await
}

/// One replica of a component.
#[derive(Debug, Clone, Copy)]
pub struct Replica {
    number: u32,
    /// Whether it has peers and takes part in leader election.
    elects: bool,
}

impl Replica {
    fn all(replicas: u32) -> impl Iterator<Item = Self> {
        (1..=replicas).map(move |number| Self { number, elects: replicas > 1 })
    }

    /// The only replica.
    fn alone() -> Self {
        Self { number: 1, elects: false }
    }

    /// Replica `number` of several, from 1.
    pub fn nth(number: u32) -> Self {
        Self { number, elects: true }
    }

    /// Its component name: the first replica has the plain one.
    pub fn name(self, plain: &str) -> String {
        if self.number == 1 { plain.to_owned() } else { format!("{plain}-{}", self.number) }
    }

    /// The leader election flags of our programs.
    fn lease(self, namespace: &str) -> Option<String> {
        self.elects.then(|| format!("--lease-namespace={namespace}"))
    }

    /// Its socket, beside the first replica's.
    pub fn socket(self, first: &Path) -> PathBuf {
        let stem = first.file_stem().unwrap_or_default().to_string_lossy();
        first.with_file_name(format!("{}.sock", self.name(&stem)))
    }
}

async fn launch_all(run: &Run, components: impl IntoIterator<Item = (String, Component)>) -> Result<()> {
    let launches =
        components.into_iter().map(|(name, component)| async move { run.launch(&name, component).await });
    futures::future::try_join_all(launches).await.map(drop)
}

/// A component that serves `/readyz` and `/metrics` over HTTP, and CSI if it has a socket.
pub(crate) fn component(mut words: Vec<String>, http: u16, socket: Option<&Path>) -> Component {
    words.push(format!("--http-listen=127.0.0.1:{http}"));
    let mut conditions = vec![Ready::http(http, "/readyz")];
    conditions.extend(socket.map(|path| Ready::Socket(path.to_owned())));
    Component {
        argv: words,
        env: Default::default(),
        ready: Ready::All(conditions),
        http: Some(format!("http://127.0.0.1:{http}")),
        grace: GRACE,
        driver: None,
    }
}

pub(crate) fn endpoint(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn mgmt_csi(state: &State, driver: &Driver<'_>, infra: &Infra) -> Result<Component> {
    let file = |name: &str| text(&infra.pki.join(name));
    let mut words = argv(
        &state.binaries,
        "mgmt-csi",
        &[
            ("endpoint", endpoint(&driver.socket)),
            ("kubeconfig", text(&driver.cluster.kubeconfig_of("mgmt-csi"))),
            ("infra-url", infra.url.clone()),
            ("infra-ca", file("ca.crt")),
            ("infra-cert", file("driver.crt")),
            ("infra-key", file("driver.key")),
            ("capacity-namespace", MANAGEMENT_NAMESPACE.to_owned()),
            ("vm-record-namespace", MANAGEMENT_NAMESPACE.to_owned()),
            ("guest-accounts", MANAGEMENT_NAMESPACE.to_owned()),
            ("vm-status-writer", "mgmt-csi".to_owned()),
            // Short enough for a test, and long enough for every other way of recovery.
            ("repair-grace", "30s".to_owned()),
            ("repair-interval", "5s".to_owned()),
            // Everything runs on this host, with one clock.
            ("max-clock-skew", "0s".to_owned()),
        ],
    );
    words.extend(driver.replica.lease(driver.namespace));
    Ok(component(words, ports::free(1)?[0], Some(&driver.socket)))
}

fn shim(state: &State, cluster: &Cluster, replica: Replica) -> Result<Component> {
    let kubeconfig = text(&cluster.kubeconfig_of("vm-operator-shim"));
    let mut words = argv(&state.binaries, "vm-operator-shim", &[("kubeconfig", kubeconfig)]);
    words.extend(replica.lease(MANAGEMENT_NAMESPACE));
    words.extend(state.cluster_api.is_some().then(|| "--cluster-api".to_owned()));
    Ok(component(words, ports::free(1)?[0], None))
}

/// The console, which serves its page on `listen`.
pub(crate) fn console(state: &State, listen: &str) -> Result<Component> {
    let cluster = state.management.as_ref().context("no management cluster")?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let file = |name: &str| text(&infra.pki.join(name));
    let words = argv(
        &state.binaries,
        "nestor-console",
        &[
            ("listen", listen.to_owned()),
            ("kubeconfig", text(&cluster.kubeconfig_of("nestor-console"))),
            ("infra-url", infra.url.clone()),
            ("infra-ca", file("ca.crt")),
            ("infra-cert", file("reader.crt")),
            ("infra-key", file("reader.key")),
        ],
    );
    Ok(component(words, ports::free(1)?[0], None))
}

fn gc_csi(state: &State, driver: &Driver<'_>, management: &Cluster, guest: &Guest) -> Result<Component> {
    let mut words = vec![text(&state.binaries.join("gc-csi"))];
    words.extend([
        format!("--endpoint={}", endpoint(&driver.socket)),
        format!("--guest-kubeconfig={}", text(&guest.cluster.kubeconfig_of("gc-csi-controller"))),
        format!("--management-kubeconfig={}", text(&management.kubeconfig_of(&guest.account()))),
        format!("--management-namespace={}", guest.namespace),
        format!("--cluster-id={}", guest.cluster_id),
        format!("--capacity-namespace={MANAGEMENT_NAMESPACE}"),
    ]);
    words.extend(match state.vm_manager {
        VmManager::Libvirt => vec!["--topology".to_owned()],
        VmManager::KubeVirt => vec![
            format!("--legacy-driver-name={KUBEVIRT_CSI}"),
            format!("--legacy-endpoint={}", endpoint(&legacy_socket(driver))),
        ],
    });
    words.extend(driver.replica.lease(driver.namespace));
    Ok(component(words, ports::free(1)?[0], Some(&driver.socket)))
}

/// Socket of gc-csi for the volumes of kubevirt-csi.
fn legacy_socket(driver: &Driver<'_>) -> PathBuf {
    driver.socket.with_extension("legacy.sock")
}

/// A driver and what its sidecars need to know of it.
struct Driver<'a> {
    /// Its component name.
    name: String,
    /// Prefix of its sidecars' names.
    tier: &'a str,
    cluster: &'a Cluster,
    socket: PathBuf,
    replica: Replica,
    /// Namespace of its Lease and those of its sidecars.
    namespace: &'a str,
}

/// Flags of a sidecar.
type Flags<'a> = &'a [(&'a str, &'a str)];

/// A sidecar of the Kubernetes project. It is ready when it serves metrics.
fn controller(
    state: &State,
    tier: &str,
    cluster: &Cluster,
    program: &str,
    more: Flags<'_>,
) -> Result<(String, Component)> {
    let port = ports::free(1)?[0];
    let mut flags = vec![
        ("kubeconfig", text(&cluster.kubeconfig_of(program))),
        ("http-endpoint", format!("127.0.0.1:{port}")),
        ("kube-api-qps", "500".to_owned()),
        ("kube-api-burst", "1000".to_owned()),
        ("retry-interval-start", "500ms".to_owned()),
        ("retry-interval-max", "10s".to_owned()),
        ("v", "4".to_owned()),
    ];
    flags.extend(more.iter().map(|(flag, value)| (*flag, (*value).to_owned())));
    let component = Component {
        argv: argv(&state.tools, program, &flags),
        env: Default::default(),
        ready: Ready::http(port, "/metrics"),
        http: Some(format!("http://127.0.0.1:{port}")),
        grace: 5,
        driver: None,
    };
    Ok((format!("{tier}-{}", program.trim_start_matches("csi-")), component))
}

/// A sidecar with a driver's socket. It serves metrics, and so is ready, once it has found its driver.
fn sidecar(
    state: &State,
    driver: &Driver<'_>,
    program: &str,
    more: Flags<'_>,
) -> Result<(String, Component)> {
    let socket = text(&driver.socket);
    let mut flags = vec![("csi-address", socket.as_str()), ("timeout", "60s")];
    if driver.replica.elects {
        flags.extend([
            ("leader-election", "true"),
            ("leader-election-namespace", driver.namespace),
            // Otherwise the other replicas wait until the Lease expires, also after a clean exit.
            ("feature-gates", "ReleaseLeaderElectionOnExit=true"),
        ]);
    }
    let (name, mut component) =
        controller(state, driver.tier, driver.cluster, program, &[&flags, more].concat())?;
    let name = driver.replica.name(&name);
    component.driver = Some(driver.name.clone());
    if driver.replica.elects {
        component.argv = with_hostname(&name, component.argv);
    }
    Ok((name, component))
}

/// Runs a program with a hostname of its own, like in a pod: sidecars use it as their leader election identity.
fn with_hostname(name: &str, argv: Vec<String>) -> Vec<String> {
    let shell = ["unshare", "--uts", "--", "/bin/sh", "-c", r#"hostname "$0" && exec "$@""#, name];
    shell.into_iter().map(str::to_owned).chain(argv).collect()
}

/// `capacity` is the namespace in which it publishes CSIStorageCapacity objects, if it does.
fn provisioner(state: &State, driver: &Driver<'_>, capacity: Option<&str>) -> Result<(String, Component)> {
    let mut flags = vec![
        ("worker-threads", "100"),
        ("extra-create-metadata", "true"),
        // With immediate binding the class's topology or the driver decides. By default the provisioner passes the
        // zones of all nodes, and fails while no node has one.
        ("immediate-topology", "false"),
        // With delayed binding the volume is placed in the zone of the pod's node only: the pod may not reach other
        // zones. The scheduler knows from CSIStorageCapacity which zones have capacity.
        ("strict-topology", "true"),
        // How long a deleted claim keeps its source snapshot: 5 minutes by default.
        ("snapshot-orphan-sweep-interval", "10s"),
    ];
    if capacity.is_some() {
        flags.extend([
            ("enable-capacity", "true"),
            // The provisioner does not run in a pod that could own the CSIStorageCapacity objects.
            ("capacity-ownerref-level", "-1"),
            ("capacity-poll-interval", "5s"),
            ("kube-api-capacity-qps", "100"),
            ("kube-api-capacity-burst", "200"),
        ]);
    }
    let (name, mut component) = sidecar(state, driver, "csi-provisioner", &flags)?;
    component.env.extend(capacity.map(|namespace| ("NAMESPACE".to_owned(), namespace.to_owned())));
    Ok((name, component))
}

fn attacher(state: &State, driver: &Driver<'_>) -> Result<(String, Component)> {
    // A call for a VM that hangs occupies a worker until it ends. If all workers are occupied, all other attaches wait.
    sidecar(state, driver, "csi-attacher", &[("worker-threads", "500")])
}

fn resizer(state: &State, driver: &Driver<'_>) -> Result<(String, Component)> {
    // Both drivers expand volumes in use, so the resizer need not watch pods.
    sidecar(state, driver, "csi-resizer", &[("workers", "100"), ("handle-volume-inuse-error", "false")])
}

fn snapshotter(state: &State, driver: &Driver<'_>) -> Result<(String, Component)> {
    sidecar(state, driver, "csi-snapshotter", &[("worker-threads", "100"), ("extra-create-metadata", "true")])
}

fn snapshot_controller(state: &State, tier: &str, cluster: &Cluster) -> Result<(String, Component)> {
    controller(state, tier, cluster, "snapshot-controller", &[("worker-threads", "100")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_belongs_to_its_driver_and_only_a_guests_provisioner_publishes_capacity() {
        let cluster = cluster();
        let driver = driver(&cluster, Replica { number: 1, elects: false });
        let state = State::default();
        let (name, component) = provisioner(&state, &driver, Some("kube-system")).unwrap();
        assert_eq!((name.as_str(), component.driver.as_deref()), ("g2-provisioner", Some("g2-gc-csi")));
        assert!(component.argv.contains(&"--kubeconfig=/lab/g2/csi-provisioner.kubeconfig".to_owned()));
        assert!(component.argv.contains(&"--enable-capacity=true".to_owned()));
        assert_eq!(component.env["NAMESPACE"], "kube-system");
        let (_, component) = provisioner(&state, &driver, None).unwrap();
        assert!(component.env.is_empty() && !component.argv.iter().any(|word| word.contains("capacity")));
        let (name, component) = snapshot_controller(&state, "g2", &cluster).unwrap();
        assert_eq!((name.as_str(), component.driver), ("g2-snapshot-controller", None));
        assert!(!component.argv.iter().any(|word| word.contains("csi-address")));
    }

    #[test]
    fn replicas_elect_with_different_identities_and_a_single_one_does_not() {
        let cluster = cluster();
        let state = State::default();
        let alone = Replica::alone();
        let (_, component) = attacher(&state, &driver(&cluster, alone)).unwrap();
        assert!(!component.argv.iter().any(|word| word.contains("leader-election") || word == "unshare"));
        assert_eq!(alone.lease("kube-system"), None);
        let second = Replica::all(3).nth(1).unwrap();
        let driver = driver(&cluster, second);
        let (name, component) = attacher(&state, &driver).unwrap();
        assert_eq!((name.as_str(), component.driver.as_deref()), ("g2-attacher-2", Some("g2-gc-csi-2")));
        assert!(component.argv.contains(&"--csi-address=/run/g2-2.sock".to_owned()), "{:?}", component.argv);
        assert!(component.argv.contains(&"--leader-election=true".to_owned()));
        assert!(component.argv.contains(&"g2-attacher-2".to_owned()));
    }

    fn cluster() -> Cluster {
        Cluster {
            name: "g2".to_owned(),
            server: String::new(),
            kubeconfig: "/lab/g2/admin.kubeconfig".into(),
            ca: "/lab/g2/ca.crt".into(),
            audit_log: "/lab/g2/audit.jsonl".into(),
        }
    }

    fn driver(cluster: &Cluster, replica: Replica) -> Driver<'_> {
        Driver {
            name: replica.name("g2-gc-csi"),
            tier: "g2",
            cluster,
            socket: replica.socket(Path::new("/run/g2.sock")),
            replica,
            namespace: "kube-system",
        }
    }
}
