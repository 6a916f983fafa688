//! Storage infra of a lab: its pools and the storage-infra server.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use infra_api::{
    ClientOptions, EngineKind, Labels, NodeSpec, OnFull, PoolHosts, PoolName, PoolSpec, Role,
    account_organization,
};

use crate::ceph::Engine;
use crate::cluster::{SERVER_ADDRESS_FROM_VM, argv};
use crate::database;
use crate::host::{Host, Pool, REACH};
use crate::kubevirt::VmManager;
use crate::lab::Lab;
use crate::pki::{Authority, write_private};
use crate::ports;
use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{Component, Infra};
use crate::vm::libvirtd;
use crate::wait::eventually;

/// The pools of a lab with one host: one filesystem or Ceph pool each.
pub(crate) const POOLS: [&str; 2] = ["pool-a", "pool-b"];
const POOL_BYTES: u64 = 8 << 30;
/// The zones of the lab. VMs are assigned to them in turn, loop nodes are in the first by default. Pools have no
/// zone: all nodes reach them, unless the lab has several hosts, of which each is a zone.
pub const ZONES: [&str; 2] = ["zone-a", "zone-b"];
/// The account of the certificate of the role backup. No guest of the lab has this cluster ID.
pub const BACKUP_ACCOUNT: &str = "lab-backup";
/// Name of the libvirt hypervisor in the server's flags, if the lab has one host.
pub const LIBVIRT: &str = "libvirt";
/// Name of the loop hypervisor: this host plays the VM.
pub const LOOP: &str = "loop";
/// Name of the simulated hypervisor: VMs without a domain or devices.
pub const SIMULATED: &str = "simulated";

/// Directory in which the server shows the disks that it attached to this host.
pub(crate) fn host_links(run: &Run) -> PathBuf {
    run.path("infra").join("host")
}

/// Value of the flag with which the server attaches volumes to this host.
pub(crate) fn host_hypervisor(run: &Run) -> String {
    format!("this-host=host:{}", host_links(run).display())
}

/// Creates and mounts the pools. Must run before libvirt starts, whose mount namespace is copied at its start.
pub async fn mount_pools(run: &Run, hosts: &[Host]) -> Result<BTreeMap<String, PathBuf>> {
    let pools = Pool::of_lab(hosts);
    let made = futures::future::try_join_all(pools.iter().map(|pool| mount_pool(run, pool.name))).await?;
    Ok(pools.iter().map(|pool| pool.name.to_owned()).zip(made).collect())
}

/// Mounts a filesystem with reflinks.
pub(crate) async fn mount_pool(run: &Run, name: &str) -> Result<PathBuf> {
    let dir = run.path("pools").join(name);
    let file = run.path("pools").join(format!("{name}.xfs"));
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    File::create(&file)
        .and_then(|file| file.set_len(POOL_BYTES))
        .with_context(|| format!("cannot make {}", file.display()))?;
    run_helper(command("mkfs.xfs", ["-q", "-m", "reflink=1"]).arg(&file)).await?;
    // `down` finds the mount and its loop device by the path of the run folder.
    run_helper(command("mount", ["-o", "loop"]).arg(&file).arg(&dir)).await?;
    Ok(dir)
}

/// Component name of a server: the first has the plain one.
pub fn server_name(number: u32) -> String {
    if number == 1 { "storage-infra".to_owned() } else { format!("storage-infra-{number}") }
}

/// Starts the servers and registers the pools.
pub async fn start(
    run: &Run,
    binaries: &Path,
    engine: Engine,
    pools: BTreeMap<String, PathBuf>,
    servers: u32,
) -> Result<()> {
    let (api, ops) = (ports::free(servers as usize)?, ports::free(servers as usize)?);
    let urls: Vec<String> = api.iter().map(|port| format!("https://127.0.0.1:{port}")).collect();
    let dir = run.path("infra");
    let infra = Infra {
        url: urls.join(","),
        pki: dir.join("pki"),
        pools,
        loop_root: dir.join("loop"),
        simulated_root: dir.join("simulated"),
        libvirt_uri: libvirtd::uri(run, Host::default()),
        mgmt_socket: run.socket_dir().join("mgmt-csi.sock"),
    };
    run.update(|state| state.infra = Some(infra.clone()))?;
    fs::create_dir_all(&infra.loop_root)
        .with_context(|| format!("cannot make {}", infra.loop_root.display()))?;
    write_certificates(&infra.pki)?;
    let state = run.state()?;
    let hosts = state.hosts();
    let hypervisors = match state.vm_manager {
        VmManager::Libvirt => hypervisors(run, hosts),
        // Its VMs get volumes from kubelet of this host.
        VmManager::KubeVirt => vec![("hypervisor", host_hypervisor(run))],
    };
    let catalog = if servers > 1 { Some(database::start(run).await?) } else { None };
    for (number, ports) in (1..).zip(api.into_iter().zip(ops)) {
        let component =
            server(&infra, binaries, &dir.join(data_dir(number)), ports, &hypervisors, catalog.as_deref());
        run.launch(&server_name(number), component).await?;
    }
    register_pools(&infra, engine, hosts).await
}

/// Folder of a server beside the PKI.
fn data_dir(number: u32) -> String {
    if number == 1 { "data".to_owned() } else { format!("data-{number}") }
}

/// Flags of the hosts. One host has no zone: its VMs have their own.
fn hypervisors(run: &Run, hosts: &[Host]) -> Vec<(&'static str, String)> {
    let names = hosts.iter().map(|host| (*host, host.hypervisor(hosts)));
    let mut flags: Vec<_> = names
        .clone()
        .map(|(host, name)| ("hypervisor", format!("{name}=libvirt:{}", libvirtd::uri(run, host))))
        .collect();
    if hosts.len() > 1 {
        flags.extend(names.map(|(host, name)| ("hypervisor-zone", format!("{name}={}", host.zone()))));
    }
    flags
}

/// A server that listens on these ports: of the API, and of health and metrics.
fn server(
    infra: &Infra,
    binaries: &Path,
    data: &Path,
    (api, ops): (u16, u16),
    hypervisors: &[(&str, String)],
    catalog: Option<&str>,
) -> Component {
    let program = binaries.join("storage-infra").display().to_string();
    let file = |name: &str| infra.pki.join(name).display().to_string();
    let mut words = vec![program, "serve".to_owned()];
    words.extend(
        argv(
            Path::new(""),
            "",
            &[
                ("data-dir", data.display().to_string()),
                ("listen", format!("127.0.0.1:{api}")),
                ("tls-cert", file("server.crt")),
                ("tls-key", file("server.key")),
                ("client-ca", file("ca.crt")),
                ("hypervisor", format!("{LOOP}=loop:{}", infra.loop_root.display())),
                ("hypervisor", format!("{SIMULATED}=simulated:{}", infra.simulated_root.display())),
                ("http-listen", format!("127.0.0.1:{ops}")),
            ],
        )
        .into_iter()
        .skip(1),
    );
    words.extend(argv(Path::new(""), "", hypervisors).into_iter().skip(1));
    // As variables, which an earlier version without these flags ignores.
    let mut env: BTreeMap<String, String> =
        [("NESTOR_CLIENTS_WITHOUT_ROLE".to_owned(), "refuse".to_owned())].into();
    match catalog {
        Some(url) => words.push(format!("--catalog={url}")),
        None => {
            let backups = data.with_file_name("backups").display().to_string();
            env.insert("NESTOR_BACKUP_DIR".to_owned(), backups);
        }
    }
    Component {
        argv: words,
        env,
        // A passive server lives, but is not ready.
        ready: Ready::http(ops, if catalog.is_some() { "/healthz" } else { "/readyz" }),
        http: Some(format!("http://127.0.0.1:{ops}")),
        grace: 15,
        driver: None,
    }
}

async fn register_pools(infra: &Infra, engine: Engine, hosts: &[Host]) -> Result<()> {
    let client = client(infra)?;
    let pools = Pool::of_lab(hosts);
    for (name, path) in &infra.pools {
        let pool = pools.iter().find(|pool| pool.name == name.as_str());
        let pool = pool.with_context(|| format!("the lab has no pool {name}"))?;
        let reach = pool.reach().map(|reach| (REACH.to_owned(), reach.to_owned()));
        let spec = PoolSpec {
            engine: match engine {
                Engine::File => EngineKind::File,
                Engine::Rbd => EngineKind::Rbd,
            },
            path: path.display().to_string(),
            labels: [("lab.nestor.dev/pool".to_owned(), name.clone())].into_iter().chain(reach).collect(),
            cordoned: false,
            on_full: OnFull::default(),
            hosts: PoolHosts {
                names: pool.hosts.iter().map(|host| host.hypervisor(hosts)).collect(),
                labels: Labels::new(),
            },
        };
        client
            .put_pool(&PoolName::new(name.clone())?, &spec)
            .await
            .with_context(|| format!("cannot register pool {name}"))?;
    }
    Ok(())
}

impl Lab {
    /// The names of all files or images in the pools.
    pub async fn stored(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for (name, path) in &self.infra_record()?.pools {
            found.extend(match self.state().engine {
                Engine::File => files(path)?,
                Engine::Rbd => self.ceph()?.images(name).await?,
            });
        }
        Ok(found)
    }
}

fn files(pool: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(pool).with_context(|| format!("cannot read {}", pool.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Certificates of the server and of a client of each role, as `storage-infra pki init` writes them. The program may be an
/// earlier version, whose `pki` has no roles.
fn write_certificates(pki: &Path) -> Result<()> {
    let authority = Authority::new("storage infra")?;
    write_private(&pki.join("ca.crt"), &authority.cert())?;
    authority.server("storage-infra", &["127.0.0.1", SERVER_ADDRESS_FROM_VM])?.write(pki, "server")?;
    for role in Role::ALL {
        let account = role.is_of_one_account().then(|| account_organization(BACKUP_ACCOUNT));
        let organizations: Vec<String> = [role.organization()].into_iter().chain(account).collect();
        let client = authority.client(role.name(), organizations.iter().map(String::as_str))?;
        client.write(pki, role.name())?;
    }
    Ok(())
}

/// A client with the certificate of an operator.
pub fn client(infra: &Infra) -> Result<infra_api::Client> {
    Ok(infra_api::Client::new(&ClientOptions::from_pki_dir(infra.url.clone(), &infra.pki, Role::Operator))?)
}

/// Lets the simulated hypervisor have a VM with this UUID.
pub fn simulate(infra: &Infra, uuid: &str) -> Result<()> {
    let dir = infra.simulated_root.join(uuid);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))
}

/// Registers a VM with the storage infra and waits until the hypervisor finds it, as an administrator of an earlier version
/// whose mgmt-csi does not register VMs.
pub(crate) async fn register_node(
    infra: &Infra,
    name: &str,
    uuid: &str,
    zone: &str,
    hypervisor: &str,
) -> Result<()> {
    let client = client(infra)?;
    let spec = NodeSpec {
        name: name.to_owned(),
        hypervisor: hypervisor.to_owned(),
        zone: Some(zone.to_owned()),
        labels: BTreeMap::new(),
    };
    let uuid = uuid.parse().with_context(|| format!("{uuid:?} is not a UUID"))?;
    eventually(&format!("the storage infra reports {name} as running"), Duration::from_secs(180), || async {
        let node = client.put_node(uuid, &spec).await?;
        let running = node.state == infra_api::NodeState::Running;
        Ok(if running { Ok(()) } else { Err(format!("it is {}", node.state)) })
    })
    .await
}
