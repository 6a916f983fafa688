//! The network of the VMs: a namespace for each host of the run, where only forwarded ports of this machine exist.
//!
//! QEMU's user-mode networks open connections in the namespace of their libvirtd. It has a loopback interface and no route, so a
//! VM reaches nothing else of the host or beyond it. A process that belongs to the host forwards connections: its sockets on
//! the other side are opened by threads that enter the namespace.
//!
//! The VMs' networks are IPv4 alone, so ports of the IPv6 loopback are for QEMU itself, which is a client of Ceph, and not
//! for the VMs.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use crate::host::Host;
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
pub(super) fn namespace(run: &Run, host: Host) -> PathBuf {
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

/// Starts to forward: VMs of each host reach `to_host`, this machine reaches `to_vms`, and QEMU reaches `to_host_ipv6`.
pub async fn start(run: &Run, to_host: &[u16], to_vms: &[u16], to_host_ipv6: &[u16]) -> Result<()> {
    let list = |ports: &[u16]| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let ready = run.socket_dir().join("vm-network.sock");
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut argv = vec![program.display().to_string(), COMPONENT.to_owned()];
    let hosts = run.state()?.hosts();
    argv.extend(hosts.iter().map(|host| format!("--namespace={}", namespace(run, *host).display())));
    argv.push(format!("--ready={}", ready.display()));
    for (flag, ports) in [("to-host", to_host), ("to-vms", to_vms), ("to-host-ipv6", to_host_ipv6)] {
        if !ports.is_empty() {
            argv.push(format!("--{flag}={}", list(ports)));
        }
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

/// Forwards until the process is stopped. A VM is in one of the namespaces: its ports are those of the first one where
/// something listens.
pub async fn forward(options: &ForwardOptions) -> Result<()> {
    let vms: Vec<Side> = options.namespace.iter().cloned().map(Side::Vms).collect();
    let (ipv4, ipv6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
    let to_host = options.to_host.iter().map(|port| SocketAddr::from((ipv4, *port)));
    let of_ceph = options.to_host_ipv6.iter().map(|port| SocketAddr::from((ipv6, *port)));
    let mut listeners = Vec::new();
    for address in to_host.chain(of_ceph) {
        for from in &vms {
            listeners.push((listen(from, address)?, vec![Side::Host], address));
        }
    }
    for port in &options.to_vms {
        let address = (ipv4, *port).into();
        listeners.push((listen(&Side::Host, address)?, vms.clone(), address));
    }
    let ready = UnixListener::bind(&options.ready)
        .with_context(|| format!("cannot make the socket {}", options.ready.display()))?;
    let served = listeners.into_iter().map(|(listener, to, address)| serve(listener, to, address));
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

fn listen(from: &Side, address: SocketAddr) -> Result<TcpListener> {
    from.listen(address).with_context(|| format!("cannot listen on {address} of {from:?}"))
}

async fn serve(listener: TcpListener, to: Vec<Side>, address: SocketAddr) -> io::Result<()> {
    loop {
        let (mut from, _) = listener.accept().await?;
        let to = to.clone();
        tokio::spawn(async move {
            // A connection that fails is closed, as by a host where nothing listens.
            if let Some(mut to) = connect_first(&to, address).await {
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            }
        });
    }
}

async fn connect_first(sides: &[Side], address: SocketAddr) -> Option<TcpStream> {
    for side in sides {
        if let Ok(connection) = side.connect(address).await {
            return Some(connection);
        }
    }
    None
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
