//! Registration of nodes without the name of a hypervisor: the server finds the virtual machine by its UUID. Runs with
//! the real server, two real libvirt daemons and QEMU domains without a boot disk. Runs as root.

use std::fs;

use crate::support::libvirtd::Libvirtd;
use crate::support::*;
use infra_api::{Client, ClientOptions, EventKind, Labels, Node, NodeSpec, NodeState, ProblemCode, Role};
use uuid::Uuid;

/// A site with the loop hypervisor `here`, and the simulated one `there` in a zone.
fn two_kinds() -> Site {
    let mut site = Site::new();
    let there = format!("there=simulated:{}", site.path("simulated").display());
    site.flags.extend(["--hypervisor", &there, "--hypervisor-zone", "there=z1"].map(str::to_owned));
    site
}

fn unnamed(name: &str) -> NodeSpec {
    NodeSpec { name: name.into(), hypervisor: String::new(), zone: None, labels: Labels::new() }
}

/// A node that the hypervisor `there` has.
fn simulated(site: &Site) -> Uuid {
    let node = Uuid::new_v4();
    fs::create_dir_all(site.path("simulated").join(node.to_string())).unwrap();
    node
}

#[tokio::test]
async fn a_driver_registers_a_vm_where_it_is_and_removes_it() {
    let site = two_kinds();
    let server = site.start();
    let url = format!("https://{}", server.api);
    let driver = Client::new(&ClientOptions::from_pki_dir(&url, &site.path("pki"), Role::Driver)).unwrap();
    let node = simulated(&site);
    let found = driver.put_node(node, &unnamed("vm")).await.unwrap();
    assert_eq!((found.hypervisor.as_str(), found.zone.as_deref()), ("there", Some("z1")));
    assert_eq!(found.state, NodeState::Running);
    let named = NodeSpec { zone: Some("z2".into()), ..unnamed("vm") };
    assert_eq!(driver.put_node(node, &named).await.unwrap().zone.as_deref(), Some("z2"));
    driver.delete_node(node).await.unwrap();
    assert_eq!(driver.get_node(node).await.unwrap(), None);
}

#[tokio::test]
async fn a_vm_that_no_hypervisor_has_or_that_two_have_is_not_registered() {
    let site = two_kinds();
    let server = site.start();
    let node = simulated(&site);
    let refused = server.client.put_node(Uuid::new_v4(), &unnamed("vm")).await;
    assert_eq!(code(refused), ProblemCode::NotFound);
    fs::create_dir_all(site.path("by-id").join(node.to_string())).unwrap();
    let refused = server.client.put_node(node, &unnamed("vm")).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().code, ProblemCode::Exists);
    assert!(refused.to_string().contains("here, there"), "{refused}");
    // Named by an administrator, and kept by requests without a name.
    server.client.put_node(node, &NodeSpec { hypervisor: "here".into(), ..unnamed("vm") }).await.unwrap();
    assert_eq!(server.client.put_node(node, &unnamed("vm")).await.unwrap().hypervisor, "here");
}

#[tokio::test]
async fn a_repeated_registration_is_no_change() {
    let site = two_kinds();
    let server = site.start();
    let node = simulated(&site);
    server.client.put_node(node, &unnamed("vm")).await.unwrap();
    let mut events = server.client.events().await.unwrap();
    server.client.put_node(node, &unnamed("vm")).await.unwrap();
    server.client.put_node(node, &unnamed("renamed")).await.unwrap();
    server.client.delete_node(node).await.unwrap();
    let mut changes = Vec::new();
    while changes.len() < 2 {
        let event = futures::StreamExt::next(&mut events).await.unwrap().unwrap();
        if event.kind == EventKind::Node {
            changes.push(event.change);
        }
    }
    assert_eq!(changes, [infra_api::Change::Updated, infra_api::Change::Deleted]);
}

#[tokio::test]
async fn a_vm_is_followed_to_another_libvirt_but_not_away_from_its_disks() {
    let (mut first, second) = (Libvirtd::start(), Libvirtd::start());
    let mut site = Site::new();
    site.libvirt = Some(first.uri());
    let there = format!("there=libvirt:{}", second.uri());
    site.flags.extend(["--hypervisor", &there].map(str::to_owned));
    let server = site.ready(&[]).await;
    let vm = first.domain();
    let register = async || -> Node { server.client.put_node(vm, &unnamed("vm")).await.unwrap() };
    assert_eq!(register().await.hypervisor, "here");

    // It starts on the other host, as after a cold migration.
    let name = vm.to_string();
    let xml = first.virsh(&["dumpxml", "--inactive", &name]);
    first.virsh(&["destroy", &name]);
    assert_eq!(register().await.hypervisor, "here", "it runs nowhere");
    fs::write(second.path("moved.xml"), xml).unwrap();
    second.virsh(&["create", text(&second.path("moved.xml"))]);
    assert_eq!(register().await.hypervisor, "there");

    // With a disk, it stays registered where the disk is until the previous host confirms that it has left.
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("a"), &writer(&id, vm), SOON).await.unwrap();
    first.virsh(&["start", &name]);
    assert_eq!(register().await.hypervisor, "there");
    second.virsh(&["destroy", &name]);
    assert_eq!(register().await.hypervisor, "here", "it has left the other host");
    assert_eq!(code(server.client.delete_node(vm).await), ProblemCode::InUse);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.delete_node(vm).await.unwrap();
}
