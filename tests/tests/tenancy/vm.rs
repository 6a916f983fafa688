//! Attempts from inside a VM, as root.

use anyhow::{Context, Result};
use futures::future::BoxFuture;
use lab::ports::of_url;
use tests::pods::{PodScenario, Script};

use super::attempt::Outcome::Refused;
use super::attempt::{Attempt, By, Outcome, Seen, everywhere};

/// An attempt from inside the first VM.
pub(super) type VmAct = for<'a> fn(&'a PodScenario) -> BoxFuture<'a, Result<Seen>>;

/// The host, as VMs of the lab reach it.
const HOST: &str = lab::cluster::SERVER_ADDRESS_FROM_VM;

const NETWORK: Outcome = Refused(By::Network);
const TLS: Outcome = Refused(By::Tls);

fn attempt(name: &'static str, act: VmAct, expected: Outcome) -> Attempt<VmAct> {
    Attempt { name, act, expected: everywhere(expected) }
}

pub(super) fn attempts() -> Vec<Attempt<VmAct>> {
    vec![
        attempt("connect to the storage infra", |pods| Box::pin(infra(pods)), NETWORK),
        attempt("connect to etcd of the management cluster", |pods| Box::pin(etcd(pods)), NETWORK),
        attempt("connect to the management API", |pods| Box::pin(management_api(pods)), NETWORK),
        attempt("call the kubelet of another VM", |pods| Box::pin(kubelet(pods)), TLS),
        attempt(
            "connect to libvirt",
            |pods| Box::pin(connect(pods, &[(HOST, 16509), (HOST, 16514)])),
            NETWORK,
        ),
        attempt(
            "connect to the metadata service of a cloud",
            |pods| Box::pin(connect(pods, &[("169.254.169.254", 80)])),
            NETWORK,
        ),
        attempt("find the disk of another VM", |pods| Box::pin(find_the_disk(pods)), Refused(By::Hypervisor)),
    ]
}

/// Runs a script in the first VM that prints `refused`, or what it got.
async fn run(pods: &PodScenario, by: By, script: &str) -> Result<Seen> {
    let output = pods.run(Script::new("attempt", &pods.first_node, script)).await?;
    let is_refused = output.lines().last() == Some("refused");
    if !is_refused {
        println!("{output}");
    }
    Ok(if is_refused { Seen::Refused(by, output) } else { Seen::Permitted })
}

/// Sends an HTTP request to the host without TLS. Only a success counts as an answer.
async fn call(pods: &PodScenario, port: u16, path: &str) -> Result<Seen> {
    let script = format!(
        "answer=$(printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' | timeout 20 nc -w 10 {HOST} {port} 2>&1 \
         | head -c 400 | tr -cd '[:print:]')
         case \"$answer\" in HTTP/1.?' 2'[0-9][0-9]*) echo \"$answer\" ;; *) echo refused ;; esac"
    );
    run(pods, By::Tls, &script).await
}

/// Connects to ports. nc ends with 1 if it cannot connect; otherwise it is ended after a moment.
async fn connect(pods: &PodScenario, targets: &[(&str, u16)]) -> Result<Seen> {
    let tries = targets.iter().map(|(host, port)| {
        format!(
            "code=0; timeout 20 nc -w 10 {host} {port} </dev/null || code=$?
             if [ $code != 1 ]; then echo {host}:{port} is open; exit; fi\n"
        )
    });
    let script: String = tries.collect();
    run(pods, By::Network, &format!("{script}echo refused")).await
}

/// Connects to a port of the host, which serves it on its loopback address.
async fn connect_to_host(pods: &PodScenario, port: u16) -> Result<Seen> {
    let here = (std::net::Ipv4Addr::LOCALHOST, port);
    tokio::net::TcpStream::connect(here).await.with_context(|| format!("nothing serves port {port}"))?;
    connect(pods, &[(HOST, port)]).await
}

async fn infra(pods: &PodScenario) -> Result<Seen> {
    let infra = pods.scenario().lab.state().infra.as_ref().context("the lab has no storage infra")?;
    connect_to_host(pods, of_url(&infra.url)?).await
}

async fn management_api(pods: &PodScenario) -> Result<Seen> {
    let cluster = pods.scenario().lab.state().management.as_ref().context("no management cluster")?;
    connect_to_host(pods, of_url(&cluster.server)?).await
}

async fn kubelet(pods: &PodScenario) -> Result<Seen> {
    let vm = pods.scenario().lab.state().vms.get(&pods.second_node).context("no such VM")?;
    call(pods, vm.kubelet_port, "/pods").await
}

async fn etcd(pods: &PodScenario) -> Result<Seen> {
    let state = pods.scenario().lab.state();
    let cluster = &state.management.as_ref().context("no management cluster")?.name;
    let etcd = state.components.get(&format!("{cluster}-etcd")).context("no etcd")?;
    let flag = etcd.argv.iter().find_map(|argument| argument.strip_prefix("--listen-client-urls="));
    connect_to_host(pods, of_url(flag.context("etcd has no client URL")?)?).await
}

/// Looks for a disk that is attached to the second VM.
async fn find_the_disk(pods: &PodScenario) -> Result<Seen> {
    let s = pods.scenario();
    let volume = s.volume().await?;
    let disk = s.driver.publish(&volume, &pods.second_node).await?;
    let [link, ..] = crds::names::disk_by_id(&disk);
    let serial = disk.replace('-', "");
    let look = format!(
        "ls /dev/disk/by-id | grep -e '{link}' -e '{disk}' -e '{serial}' && exit
         cat /sys/block/*/device/wwid /sys/block/*/serial 2>/dev/null | grep -e '{disk}' -e '{serial}' && exit
         echo refused"
    );
    let output = pods.run(Script::on_vm("attempt", &pods.first_node, &look)).await;
    s.driver.unpublish(&volume, &pods.second_node).await?;
    let output = output?;
    let is_refused = output.lines().last() == Some("refused");
    Ok(if is_refused { Seen::Refused(By::Hypervisor, output) } else { Seen::Permitted })
}
