//! Hosts: disks are attached only where the host reaches the pool, and a VM that migrates keeps its attachments. Runs with the
//! real server, two real libvirt daemons, QEMU domains without a boot disk, and real live migrations. Runs as root.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;

use crate::support::libvirtd::{HOST, Libvirtd, Tls};
use crate::support::*;
use infra_api::{
    AttachmentState, CapacityQuery, Labels, MoveSpec, NodeSpec, Placement, PoolHosts, PoolName, PoolSpec,
    ProblemCode, Rejection, VolumeId, VolumeSize, VolumeSpec,
};
use uuid::Uuid;

/// Two hosts, `here` and `there`, in the zones `z-here` and `z-there`. Each has a pool of its own, and both reach the pool
/// `shared`.
struct Hosts {
    // Dropped in this order.
    server: Server,
    site: Site,
    here: Libvirtd,
    there: Libvirtd,
}

fn name(pool: &str) -> PoolName {
    PoolName::new(pool).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn named(hosts: &[&str]) -> PoolHosts {
    PoolHosts { names: hosts.iter().map(|host| (*host).to_owned()).collect(), labels: Labels::new() }
}

fn labelled(key: &str, value: &str) -> PoolHosts {
    PoolHosts { names: Vec::new(), labels: Labels::from([(key.to_owned(), value.to_owned())]) }
}

impl Hosts {
    /// The second host is reached over TLS, with certificates of `storage-infra pki`.
    async fn new() -> Self {
        let mut site = Site::new();
        let pki = site.path("pki");
        let tls = Tls { port: free_port(), certificates: pki.clone() };
        let (here, there) =
            (Libvirtd::start(), Libvirtd::start_on(Uuid::from_u128(HOST.as_u128() + 1), Some(tls)));
        let client = site.path("libvirt-client");
        fs::create_dir(&client).unwrap();
        for (from, to) in
            [("ca.crt", "cacert.pem"), ("operator.crt", "clientcert.pem"), ("operator.key", "clientkey.pem")]
        {
            fs::copy(pki.join(from), client.join(to)).unwrap();
        }
        site.libvirt = Some(here.uri());
        let flags = [
            "--hypervisor".to_owned(),
            format!("there=libvirt:{}", there.tls_uri(&client)),
            "--hypervisor-zone=here=z-here".to_owned(),
            "--hypervisor-zone=there=z-there".to_owned(),
            "--hypervisor-label=here=nfs=yes".to_owned(),
            "--hypervisor-label=there=nfs=yes".to_owned(),
            "--hypervisor-label=there=disks=local".to_owned(),
        ];
        site.flags.extend(flags);
        let server = site.start();
        let all = Self { server, site, here, there };
        all.add("local-here", named(&["here"])).await;
        all.add("local-there", labelled("disks", "local")).await;
        all.add("shared", labelled("nfs", "yes")).await;
        all
    }

    fn spec(&self, pool: &str, hosts: PoolHosts) -> PoolSpec {
        let path = self.site.path(pool);
        fs::create_dir_all(&path).unwrap();
        PoolSpec { path: text(&path).to_owned(), hosts, ..self.site.pool_spec() }
    }

    async fn add(&self, pool: &str, hosts: PoolHosts) {
        self.server.client.put_pool(&name(pool), &self.spec(pool, hosts)).await.unwrap();
    }

    /// A running VM on the host `here`, registered without the name of its host.
    async fn vm(&mut self) -> Uuid {
        let vm = self.here.domain();
        let spec =
            NodeSpec { name: "vm".into(), hypervisor: String::new(), zone: None, labels: Labels::new() };
        assert_eq!(self.server.client.put_node(vm, &spec).await.unwrap().hypervisor, "here");
        vm
    }

    async fn volume(&self, id: &str, pool: &str) -> (VolumeId, Uuid) {
        let placement = Placement { pool: Some(name(pool)), ..Placement::default() };
        let spec = VolumeSpec { placement, ..size(MIB) };
        let id = volume(id);
        let made = self.server.client.put_volume(&id, &spec, SOON).await.unwrap();
        (id, made.disk_uuid)
    }

    async fn host_of(&self, vm: Uuid) -> String {
        self.server.client.get_node(vm).await.unwrap().unwrap().hypervisor
    }

    async fn is_followed_to(&self, vm: Uuid, host: &str) {
        until("the VM is followed", async || self.host_of(vm).await == host).await;
    }

    /// The byte that the volume's file has at an offset.
    fn byte(&self, pool: &str, id: &VolumeId, at: u64) -> u8 {
        let file = fs::File::open(self.site.path(pool).join(format!("{id}.raw"))).unwrap();
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, at).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        bytes[0]
    }

    async fn metric(&self, line: &str) -> bool {
        self.server.ops("/metrics").await.1.contains(line)
    }
}

#[tokio::test]
async fn hosts_are_listed_with_their_health_and_what_they_reach() {
    let mut all = Hosts::new().await;
    all.vm().await;
    let hosts = all.server.client.list_hosts().await.unwrap();
    let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
    assert_eq!(names, ["here", "there"]);
    let pools = |index: usize| hosts[index].pools.iter().map(PoolName::as_str).collect::<Vec<_>>().join(" ");
    assert_eq!((pools(0), pools(1)), ("local-here shared".into(), "local-there shared".into()));
    assert!(hosts.iter().all(|host| host.reachable && host.message.is_none()), "{hosts:?}");
    assert!(hosts[1].location.starts_with("qemu+tls://"), "{hosts:?}");
    assert_eq!((hosts[0].nodes, hosts[1].nodes), (1, 0));
    assert_eq!(hosts[1].zone.as_deref(), Some("z-there"));
    assert!(hosts[0].free_bytes > 0);

    all.there.stop();
    let down = async || all.server.client.list_hosts().await.unwrap().remove(1);
    until("the host is down", async || !down().await.reachable).await;
    let since = down().await.since;
    let again = down().await;
    assert!(again.since == since && again.message.is_some(), "{again:?}");
}

#[tokio::test]
async fn a_volume_is_placed_and_attached_only_where_the_host_reaches_its_pool() {
    let mut all = Hosts::new().await;
    let vm = all.vm().await;
    let client = &all.server.client;
    let pool = client.get_pool(&name("shared")).await.unwrap().unwrap();
    assert_eq!(
        (pool.reached_by.join(" "), pool.zones.join(" ")),
        ("here there".into(), "z-here z-there".into())
    );

    // Zones follow from the hosts.
    let labels = Labels::from([("kind".to_owned(), "local".to_owned())]);
    for local in ["local-here", "local-there"] {
        let hosts = client.get_pool(&name(local)).await.unwrap().unwrap().hosts;
        let spec = PoolSpec { labels: labels.clone(), ..all.spec(local, hosts) };
        client.put_pool(&name(local), &spec).await.unwrap();
    }
    let local = |zone: &str| VolumeSpec {
        placement: Placement {
            zones: vec![zone.into()],
            pool_labels: labels.clone(),
            ..Placement::default()
        },
        ..size(MIB)
    };
    let far = volume("far");
    let made = client.put_volume(&far, &local("z-there"), SOON).await.unwrap();
    assert_eq!((made.pool.as_str(), made.zone.as_deref()), ("local-there", Some("z-there")));
    let refused = client.put_volume(&volume("nowhere"), &local("z-other"), SOON).await.unwrap_err();
    assert!(refused.problem().unwrap().rejections.iter().any(|one| one.reason == Rejection::Zone));
    let query = CapacityQuery { zone: Some("z-other".into()), ..CapacityQuery::default() };
    assert_eq!(client.capacity(&query).await.unwrap().free_bytes, 0);

    // The VM is here: nothing of the other host's disks comes to it.
    let refused = client.attach(&attachment("a"), &writer(&far, vm), SOON).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert_eq!(problem.code, ProblemCode::NotReachable);
    for part in ["local-there", "reached by these hosts: there", "on the host here"] {
        assert!(problem.detail.contains(part), "{part}: {}", problem.detail);
    }
    assert!(client.list_attachments(None, None).await.unwrap().is_empty());

    // Nor by a move.
    let (near, _) = all.volume("near", "shared").await;
    client.attach(&attachment("b"), &writer(&near, vm), SOON).await.unwrap();
    let unzoned = PoolSpec { labels: labels.clone(), ..all.spec("any", PoolHosts::default()) };
    client.put_pool(&name("any"), &unzoned).await.unwrap();
    let narrow = MoveSpec { pool: name("local-here"), bytes_per_second: None };
    assert_eq!(code(client.move_volume(&near, &narrow).await), ProblemCode::Invalid);

    // The pool of an attached volume cannot be taken away from its host, nor a pool from all hosts.
    let shared = |hosts| all.spec("shared", hosts);
    let refused = client.put_pool(&name("shared"), &shared(named(&["there"]))).await;
    assert_eq!(code(refused), ProblemCode::InUse);
    let refused = client.put_pool(&name("shared"), &shared(named(&["typo"]))).await;
    assert_eq!(code(refused), ProblemCode::Invalid);
    client.put_pool(&name("shared"), &shared(named(&["here"]))).await.unwrap();
    // A server that starts again knows all of it, and so do the records in the pools.
    let Hosts { server, site, here, there } = all;
    server.kill();
    let all = Hosts { server: site.start(), site, here, there };
    let pool = all.server.client.get_pool(&name("shared")).await.unwrap().unwrap();
    assert_eq!(pool.hosts, named(&["here"]));
    let refused = all.server.client.attach(&attachment("c"), &writer(&far, vm), SOON).await;
    assert_eq!(code(refused), ProblemCode::NotReachable);
}

#[tokio::test]
async fn a_live_migration_takes_the_attachments_along() {
    let mut all = Hosts::new().await;
    let vm = all.vm().await;
    let (id, disk) = all.volume("v", "shared").await;
    let before = all.server.client.attach(&attachment("a"), &writer(&id, vm), SOON).await.unwrap();
    all.here.write(vm, disk, 1, 0);

    all.here.migrate(vm, &mut all.there, &["--undefinesource"]);
    all.is_followed_to(vm, "there").await;
    assert!(all.there.has(vm, disk));
    all.there.write(vm, disk, 2, 4096);
    let now = all.server.client.get_attachment(&attachment("a")).await.unwrap().unwrap();
    assert_eq!((now.state, &now.created_at), (AttachmentState::Attached, &before.created_at));
    assert_eq!(all.server.client.list_attachments(None, None).await.unwrap().len(), 1);
    let node = all.server.client.get_node(vm).await.unwrap().unwrap();
    assert_eq!(node.zone.as_deref(), Some("z-there"));

    // Calls reach it where it is now.
    let larger = VolumeSize { capacity_bytes: 2 * MIB, limit_bytes: None };
    assert_eq!(all.server.client.expand_volume(&id, &larger).await.unwrap().capacity_bytes, 2 * MIB);
    let (local, local_disk) = all.volume("l", "local-there").await;
    all.server.client.attach(&attachment("l"), &writer(&local, vm), SOON).await.unwrap();
    assert!(all.there.has(vm, local_disk));
    all.server.client.detach(&attachment("l"), SOON).await.unwrap();

    // Back again. The other host keeps the configuration, and says that the VM has left.
    all.there.migrate(vm, &mut all.here, &[]);
    all.is_followed_to(vm, "here").await;
    all.here.write(vm, disk, 3, 8192);
    assert_eq!([0, 4096, 8192].map(|at| all.byte("shared", &id, at)), [1, 2, 3]);
    for host in ["here", "there"] {
        let none = format!("nestor_storage_infra_unexpected_disks{{hypervisor=\"{host}\"}} 0");
        until("the disks were compared", async || all.metric(&none).await).await;
    }
    assert!(all.metric("nestor_storage_infra_unexpected_disks_detached_total 0").await);
    let moved = all.server.logged(|event| event["message"] == "the VM has moved to another hypervisor");
    assert_eq!(moved.len(), 2, "{moved:?}");

    all.here.virsh(&["destroy", &vm.to_string()]);
    until("it is proven off", async || all.server.client.get_node(vm).await.unwrap().unwrap().proven_off)
        .await;
    all.server.client.detach(&attachment("a"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_vm_is_off_only_if_every_host_that_can_have_its_disks_says_so() {
    let mut all = Hosts::new().await;
    let vm = all.vm().await;
    let (shared, _) = all.volume("s", "shared").await;
    let (local, _) = all.volume("l", "local-here").await;
    for (attached, volume) in [("s", &shared), ("l", &local)] {
        all.server.client.attach(&attachment(attached), &writer(volume, vm), SOON).await.unwrap();
    }
    all.there.stop();
    all.here.virsh(&["destroy", &vm.to_string()]);
    let node = async || all.server.client.get_node(vm).await.unwrap().unwrap();
    until("it is off here", async || node().await.state == infra_api::NodeState::Off).await;
    assert!(!node().await.proven_off, "it may run on the other host");
    let client = &all.server.client;
    let short = std::time::Duration::from_secs(2);
    until("the detach waits for the other host", async || {
        still_running(async || client.detach(&attachment("s"), short).await).await.contains("does not answer")
    })
    .await;
    // The other host has no data of this pool.
    client.detach(&attachment("l"), SOON).await.unwrap();
    assert_eq!(client.list_attachments(None, None).await.unwrap().len(), 1);

    all.there.restart(Uuid::from_u128(HOST.as_u128() + 1));
    until("the disk is detached", async || client.list_attachments(None, None).await.unwrap().is_empty())
        .await;
}

#[tokio::test]
async fn a_vm_that_started_where_its_pool_is_not_reached_keeps_its_record() {
    let mut all = Hosts::new().await;
    let vm = all.vm().await;
    let (local, disk) = all.volume("l", "local-here").await;
    all.server.client.attach(&attachment("l"), &writer(&local, vm), SOON).await.unwrap();
    let name = vm.to_string();
    let xml = all.here.virsh(&["dumpxml", "--inactive", &name]);
    all.here.virsh(&["destroy", &name]);
    let file = all.there.path("moved.xml");
    fs::write(&file, xml).unwrap();
    all.there.virsh(&["create", text(&file)]);
    until("the refusal is logged", async || {
        !all.server
            .logged(|event| {
                event["message"].as_str().is_some_and(|text| text.contains("does not reach the pools"))
            })
            .is_empty()
    })
    .await;
    assert_eq!(all.host_of(vm).await, "here");
    assert!(!all.there.has(vm, disk), "the disk of the other host is not plugged");
    // It can be detached: the other host cannot have it. Then the VM is followed.
    all.server.client.detach(&attachment("l"), SOON).await.unwrap();
    all.is_followed_to(vm, "there").await;
    all.there.virsh(&["destroy", &name]);
}
