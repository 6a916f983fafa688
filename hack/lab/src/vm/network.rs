//! The network of the VMs: a namespace for each host of the run, where only forwarded ports of this machine exist.
//!
//! QEMU's user-mode networks open connections in the namespace of their libvirtd. It has a loopback interface and no route, so a
//! VM reaches nothing else of the host or beyond it. A process that belongs to the host forwards connections: its sockets on
//! the other side are opened by threads that enter the namespace.
//!
//! The VMs' networks are IPv4 alone, so ports of the IPv6 loopback are for QEMU itself, which is a client of Ceph, and not
//! for the VMs.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use crate::cluster::SERVER_ADDRESS_FROM_VM;
use crate::host::Host;
use crate::kubevirt;
use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;

/// The component that forwards.
const COMPONENT: &str = "vm-network";

/// Arguments of the component.
#[derive(Debug, Clone, clap::Args)]
pub struct ForwardOptions {
    /// The VMs' network namespace, a file. Once for each host.
    #[arg(long, required = true)]
    namespace: Vec<PathBuf>,
    /// Unix socket that exists while connections are forwarded.
    #[arg(long)]
    ready: PathBuf,
    /// Ports of the host's loopback address that VMs reach.
    #[arg(long, value_delimiter = ',')]
    to_host: Vec<u16>,
    /// Ports of the host's IPv6 loopback address that QEMU reaches.
    #[arg(long, value_delimiter = ',')]
    to_host_ipv6: Vec<u16>,
    /// Ports of the VMs that the host reaches on its loopback address.
    #[arg(long, value_delimiter = ',')]
    to_vms: Vec<u16>,
    /// Ports of the host's loopback address that pods in the namespace reach.
    #[arg(long, value_delimiter = ',')]
    to_host_from_pods: Vec<u16>,
    /// Ports of KubeVirt's VMs that the host reaches on its loopback address: NAMESPACE/NAME/PORT.
    #[arg(long, value_delimiter = ',', requires = "management_kubeconfig")]
    to_kubevirt: Vec<Machine>,
    /// Kubeconfig of the management cluster, which knows the addresses of KubeVirt's VMs.
    #[arg(long)]
    management_kubeconfig: Option<PathBuf>,
}

/// What is forwarded.
#[derive(Debug, Default)]
pub struct Forwarded {
    /// Ports of the host that VMs reach.
    pub to_host: Vec<u16>,
    /// Ports of VMs that the host reaches.
    pub to_vms: Vec<u16>,
    /// Ports of the host that QEMU reaches.
    pub to_host_ipv6: Vec<u16>,
    /// Ports of the host that pods in the namespace reach.
    pub to_host_from_pods: Vec<u16>,
    /// Ports of KubeVirt's VMs that the host reaches.
    pub to_kubevirt: Vec<Machine>,
}

/// A port of a VM of KubeVirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The port, the same on the host.
    pub port: u16,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.name, self.port)
    }
}

impl FromStr for Machine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is not NAMESPACE/NAME/PORT");
        let words: Vec<&str> = text.split('/').collect();
        let [namespace, name, port] = words[..] else { return Err(bad()) };
        let port = port.parse().map_err(|_| bad())?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), port })
    }
}

/// Where a connection goes.
#[derive(Debug, Clone)]
enum Target {
    /// A VM is in one of the namespaces: its ports are those of the first one where something listens.
    Address(Vec<Side>, SocketAddr),
    /// A VM of KubeVirt, whose address changes with each start.
    Machine { vms: Side, management: PathBuf, machine: Machine },
}

/// A side of the forwarding.
#[derive(Debug, Clone)]
enum Side {
    Host,
    Vms(PathBuf),
}

/// The namespace's name: one for each host of each run.
fn name(run: &Run, host: Host) -> String {
    host.own(&run.socket_dir().file_name().unwrap_or_default().to_string_lossy())
}

/// The file that stands for the namespace.
pub(crate) fn namespace(run: &Run, host: Host) -> PathBuf {
    Path::new("/run/netns").join(name(run, host))
}

/// Creates the namespace of a host.
pub async fn create(run: &Run, host: Host) -> Result<()> {
    let name = name(run, host);
    run_helper(&mut command("ip", ["netns", "add", &name])).await?;
    run_helper(&mut command("ip", ["-netns", &name, "link", "set", "lo", "up"])).await.map(drop)
}

/// Removes the namespace of a host. Succeeds if it does not exist.
pub async fn remove(run: &Run, host: Host) -> Result<()> {
    if !namespace(run, host).exists() {
        return Ok(());
    }
    run_helper(&mut command("ip", ["netns", "delete", &name(run, host)])).await.map(drop)
}

/// Gives pods in the namespace the address at which VMs of libvirt reach the host.
pub async fn add_host_address(run: &Run) -> Result<()> {
    let address = format!("{SERVER_ADDRESS_FROM_VM}/32");
    let add = ["-netns", &name(run, Host::default()), "address", "add", &address, "dev", "lo"];
    run_helper(&mut command("ip", add)).await.map(drop)
}

/// Starts to forward.
pub async fn start(run: &Run, forwarded: &Forwarded) -> Result<()> {
    let ready = run.socket_dir().join("vm-network.sock");
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut argv = vec![program.display().to_string(), COMPONENT.to_owned()];
    let hosts = run.state()?.hosts();
    argv.extend(hosts.iter().map(|host| format!("--namespace={}", namespace(run, *host).display())));
    argv.push(format!("--ready={}", ready.display()));
    for (flag, ports) in [
        ("to-host", list(&forwarded.to_host)),
        ("to-vms", list(&forwarded.to_vms)),
        ("to-host-ipv6", list(&forwarded.to_host_ipv6)),
        ("to-host-from-pods", list(&forwarded.to_host_from_pods)),
        ("to-kubevirt", list(&forwarded.to_kubevirt)),
    ] {
        if !ports.is_empty() {
            argv.push(format!("--{flag}={ports}"));
        }
    }
    if !forwarded.to_kubevirt.is_empty() {
        let management = run.state()?.management.context("no management cluster")?;
        argv.push(format!("--management-kubeconfig={}", management.kubeconfig.display()));
    }
    let component = Component {
        argv,
        env: Default::default(),
        ready: Ready::Socket(ready),
        http: None,
        grace: 0,
        driver: None,
    };
    run.launch(COMPONENT, component).await
}

fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

impl ForwardOptions {
    /// Where connections come from, and where they go.
    fn ways(&self) -> Result<Vec<(Side, SocketAddr, Target)>> {
        let all: Vec<Side> = self.namespace.iter().cloned().map(Side::Vms).collect();
        let first = all.first().context("no namespace")?;
        let at = |ip: IpAddr, ports: &[u16]| -> Vec<SocketAddr> {
            ports.iter().map(|port| (ip, *port).into()).collect()
        };
        let (ipv4, ipv6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
        let mut ways = Vec::new();
        for address in [at(ipv4, &self.to_host), at(ipv6, &self.to_host_ipv6)].concat() {
            for vms in &all {
                ways.push((vms.clone(), address, Target::Address(vec![Side::Host], address)));
            }
        }
        for address in at(ipv4, &self.to_vms) {
            ways.push((Side::Host, address, Target::Address(all.clone(), address)));
        }
        let pods: IpAddr = SERVER_ADDRESS_FROM_VM.parse()?;
        for port in &self.to_host_from_pods {
            let target = Target::Address(vec![Side::Host], (ipv4, *port).into());
            ways.push((first.clone(), (pods, *port).into(), target));
        }
        for machine in &self.to_kubevirt {
            let management = self.management_kubeconfig.clone().context("no kubeconfig")?;
            let target = Target::Machine { vms: first.clone(), management, machine: machine.clone() };
            ways.push((Side::Host, (ipv4, machine.port).into(), target));
        }
        Ok(ways)
    }
}

/// Forwards until the process is stopped.
pub async fn forward(options: &ForwardOptions) -> Result<()> {
    let mut listeners = Vec::new();
    for (from, address, to) in options.ways()? {
        let listener =
            from.listen(address).with_context(|| format!("cannot listen on {address} of {from:?}"))?;
        listeners.push((listener, to));
    }
    let ready = UnixListener::bind(&options.ready)
        .with_context(|| format!("cannot make the socket {}", options.ready.display()))?;
    let served = listeners.into_iter().map(|(listener, to)| serve(listener, to));
    let outcome = tokio::select! {
        outcome = accept_probes(&ready) => outcome,
        outcome = try_join_all(served) => outcome.map(drop),
    };
    outcome.context("cannot accept connections")
}

async fn accept_probes(ready: &UnixListener) -> io::Result<()> {
    loop {
        ready.accept().await?;
    }
}

async fn serve(listener: TcpListener, to: Target) -> io::Result<()> {
    loop {
        let (mut from, _) = listener.accept().await?;
        let to = to.clone();
        tokio::spawn(async move {
            // A connection that fails is closed, as by a host where nothing listens.
            if let Ok(mut to) = to.connect().await {
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            }
        });
    }
}

impl Target {
    async fn connect(&self) -> Result<TcpStream> {
        match self {
            Self::Address(sides, address) => connect_first(sides, *address).await,
            Self::Machine { vms, management, machine } => {
                let address = kubevirt::address(management, &machine.namespace, &machine.name).await?;
                Ok(vms.connect((address, machine.port).into()).await?)
            }
        }
    }
}

async fn connect_first(sides: &[Side], address: SocketAddr) -> Result<TcpStream> {
    for side in sides {
        if let Ok(connection) = side.connect(address).await {
            return Ok(connection);
        }
    }
    bail!("nothing listens on {address}")
}

impl Side {
    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        let listener = self.run(move || StdListener::bind(address))?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    }

    async fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let side = self.clone();
        let connect = move || side.run(move || StdStream::connect(address));
        let stream = tokio::task::spawn_blocking(connect).await??;
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }

    /// Runs a function in a thread of its own that has entered the side: a socket stays in the namespace where it was opened.
    fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let Self::Vms(namespace) = self else { return work() };
        let enter_and_work = || {
            let file = File::open(namespace)?;
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter_and_work).join())
            .unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace panicked")))
    }
}

#[cfg(test)]
mod tests {
    use super::Machine;

    #[test]
    fn a_machine_is_read_as_it_is_written() {
        let machine = Machine { namespace: "guest-g1".to_owned(), name: "vm-1".to_owned(), port: 20_001 };
        assert_eq!(machine.to_string().parse(), Ok(machine));
        for text in ["vm-1/20001", "a/b/c", "a/b/1/2", "a/b/70000"] {
            assert!(text.parse::<Machine>().is_err(), "{text}");
        }
    }
}
