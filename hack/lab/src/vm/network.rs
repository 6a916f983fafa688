//! The network of the VMs: a namespace of the run, where only forwarded ports of the host exist.
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

use crate::process::{command, run as run_helper};
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;

/// The component that forwards.
const COMPONENT: &str = "vm-network";

/// Arguments of the component.
#[derive(Debug, Clone, clap::Args)]
pub struct ForwardOptions {
    /// The VMs' network namespace, a file.
    #[arg(long)]
    namespace: PathBuf,
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

/// The namespace's name: one for each run.
fn name(run: &Run) -> String {
    run.socket_dir().file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The file that stands for the namespace.
pub(super) fn namespace(run: &Run) -> PathBuf {
    Path::new("/run/netns").join(name(run))
}

/// Creates the namespace.
pub async fn create(run: &Run) -> Result<()> {
    let name = name(run);
    run_helper(&mut command("ip", ["netns", "add", &name])).await?;
    run_helper(&mut command("ip", ["-netns", &name, "link", "set", "lo", "up"])).await.map(drop)
}

/// Removes the namespace. Succeeds if it does not exist.
pub async fn remove(run: &Run) -> Result<()> {
    if !namespace(run).exists() {
        return Ok(());
    }
    run_helper(&mut command("ip", ["netns", "delete", &name(run)])).await.map(drop)
}

/// Starts to forward: VMs reach `to_host`, the host reaches `to_vms`, and QEMU reaches `to_host_ipv6`.
pub async fn start(run: &Run, to_host: &[u16], to_vms: &[u16], to_host_ipv6: &[u16]) -> Result<()> {
    let list = |ports: &[u16]| ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let ready = run.socket_dir().join("vm-network.sock");
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut argv = vec![program.display().to_string(), COMPONENT.to_owned()];
    argv.push(format!("--namespace={}", namespace(run).display()));
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

/// Forwards until the process is stopped.
pub async fn forward(options: &ForwardOptions) -> Result<()> {
    let vms = Side::Vms(options.namespace.clone());
    let (ipv4, ipv6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
    let to_host = options.to_host.iter().map(|port| (vms.clone(), Side::Host, (ipv4, *port).into()));
    let to_vms = options.to_vms.iter().map(|port| (Side::Host, vms.clone(), (ipv4, *port).into()));
    let of_ceph = options.to_host_ipv6.iter().map(|port| (vms.clone(), Side::Host, (ipv6, *port).into()));
    let mut listeners = Vec::new();
    for (from, to, address) in to_host.chain(to_vms).chain(of_ceph) {
        let listener =
            from.listen(address).with_context(|| format!("cannot listen on {address} of {from:?}"))?;
        listeners.push((listener, to, address));
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

async fn serve(listener: TcpListener, to: Side, address: SocketAddr) -> io::Result<()> {
    loop {
        let (mut from, _) = listener.accept().await?;
        let to = to.clone();
        tokio::spawn(async move {
            // A connection that fails is closed, as by a host where nothing listens.
            if let Ok(mut to) = to.connect(address).await {
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            }
        });
    }
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
