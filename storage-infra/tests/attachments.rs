//! Attachments against the real server with real loop devices. Runs as root.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use crate::support::*;
use infra_api::{AttachmentState, ObjectKind, ProblemCode, VolumeSize, VolumeSpec};
use uuid::Uuid;

fn sectors(link: &std::path::Path) -> u64 {
    let device = fs::read_link(link).unwrap();
    let name = device.file_name().unwrap().to_owned();
    fs::read_to_string(std::path::Path::new("/sys/block").join(name).join("size"))
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

#[tokio::test]
async fn a_disk_is_attached_written_expanded_live_and_detached() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("data");
    let made = server.client.put_volume(&id, &size(4 * MIB), SOON).await.unwrap();
    let name = attachment("ns.vm-data");
    let attached = server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
    assert_eq!((attached.state, attached.disk_uuid), (AttachmentState::Attached, made.disk_uuid));
    assert_eq!(server.client.attach(&name, &writer(&id, node), SOON).await.unwrap(), attached);
    let link = site.link(node, made.disk_uuid);
    let disk = fs::File::options().write(true).open(&link).unwrap();
    disk.write_all_at(b"hello", 0).unwrap();
    disk.sync_all().unwrap();
    drop(disk);

    let refused = server.client.delete_volume(&id).await.unwrap_err();
    assert_eq!(refused.problem().unwrap().nodes[0].uuid, node);
    assert_eq!(code(server.client.delete_node(node).await), ProblemCode::InUse);
    let bigger = VolumeSize { capacity_bytes: 6 * MIB, limit_bytes: None };
    let grown = server.client.expand_volume(&id, &bigger).await.unwrap();
    assert_eq!((grown.capacity_bytes, grown.attached_to), (6 * MIB, vec![node]));
    assert_eq!(sectors(&link) * 512, 6 * MIB);

    server.client.detach(&name, SOON).await.unwrap();
    server.client.detach(&name, SOON).await.unwrap();
    assert!(fs::symlink_metadata(&link).is_err() && site.devices().is_empty());
    let mut bytes = [0; 5];
    fs::File::open(site.file(&id)).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"hello");
    server.client.delete_node(node).await.unwrap();
    server.client.delete_volume(&id).await.unwrap();
}

#[tokio::test]
async fn at_most_one_writer_and_readers_share_only_with_readers() {
    let site = Site::new();
    let nodes = [Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4()];
    let server = site.ready(&nodes).await;
    let id = volume("shared");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let names = [attachment("w0"), attachment("w1"), attachment("w2")];
    let specs = nodes.map(|node| writer(&id, node));
    let race = names.iter().zip(&specs).map(|(name, spec)| server.client.attach(name, spec, SOON));
    let answers = futures::future::join_all(race).await;
    let winner = answers.iter().position(Result::is_ok).expect("one attach succeeds");
    for (index, answer) in answers.into_iter().enumerate().filter(|(index, _)| *index != winner) {
        let error = answer.unwrap_err();
        let problem = error.problem().unwrap();
        assert_eq!(problem.code, ProblemCode::InUse, "{index}");
        assert_eq!(problem.nodes[0].uuid, nodes[winner]);
        assert_eq!(problem.nodes[0].name, format!("node-{winner}"));
    }
    assert_eq!(site.devices().len(), 1);
    let loser = nodes[(winner + 1) % 3];
    assert_eq!(
        code(server.client.attach(&attachment("r"), &reader(&id, loser), SOON).await),
        ProblemCode::InUse
    );
    // An ID identifies one spec.
    assert_eq!(
        code(server.client.attach(&names[winner], &writer(&id, loser), SOON).await),
        ProblemCode::Exists
    );
    server.client.detach(&names[winner], SOON).await.unwrap();
    let names = [attachment("w3"), attachment("w4"), attachment("w5")];

    for (index, node) in nodes.iter().take(2).enumerate() {
        let name = attachment(&format!("r{index}"));
        server.client.attach(&name, &reader(&id, *node), SOON).await.unwrap();
    }
    assert_eq!(code(server.client.attach(&names[2], &specs[2], SOON).await), ProblemCode::InUse);
    for device in site.devices() {
        let disk = fs::File::options().write(true).open(&device);
        let written = disk.and_then(|disk| disk.write_all_at(&[1; 4096], 0).and_then(|()| disk.sync_all()));
        assert!(written.is_err(), "{device:?} can be written");
    }
    server.client.detach(&attachment("r0"), SOON).await.unwrap();
    assert_eq!(site.devices().len(), 1);
    let mut wrong = reader(&id, nodes[2]);
    wrong.read_only = false;
    assert_eq!(code(server.client.attach(&names[2], &wrong, SOON).await), ProblemCode::Invalid);
}

#[tokio::test]
async fn several_writers_share_only_a_shareable_volume_and_only_with_each_other() {
    let site = Site::new();
    let nodes = [Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4()];
    let server = site.ready(&nodes).await;
    let (alone, id) = (volume("alone"), volume("shared"));
    server.client.put_volume(&alone, &size(MIB), SOON).await.unwrap();
    let refused = server.client.attach(&attachment("x"), &sharer(&alone, nodes[0]), SOON).await.unwrap_err();
    assert!(refused.to_string().contains("is not shareable"), "{refused}");
    assert_eq!(refused.code(), Some(ProblemCode::Invalid));

    let shareable = VolumeSpec { shareable: true, ..size(MIB) };
    let made = server.client.put_volume(&id, &shareable, SOON).await.unwrap();
    assert!(made.shareable);
    assert_eq!(code(server.client.put_volume(&id, &size(MIB), SOON).await), ProblemCode::Exists);
    for (index, node) in nodes.iter().take(2).enumerate() {
        let name = attachment(&format!("w{index}"));
        server.client.attach(&name, &sharer(&id, *node), SOON).await.unwrap();
    }
    let links = [site.link(nodes[0], made.disk_uuid), site.link(nodes[1], made.disk_uuid)];
    assert_eq!(site.devices().len(), 2);
    for (index, link) in links.iter().enumerate() {
        let disk = fs::File::options().write(true).open(link).unwrap();
        disk.write_all_at(&[index as u8 + 1; 4096], index as u64 * 4096).unwrap();
        disk.sync_all().unwrap();
    }
    assert_eq!((site.read(&id, 1, 0), site.read(&id, 1, 4096)), (vec![1], vec![2]));
    for spec in [writer(&id, nodes[2]), reader(&id, nodes[2])] {
        assert_eq!(code(server.client.attach(&attachment("x"), &spec, SOON).await), ProblemCode::InUse);
    }
    let mut looking = sharer(&id, nodes[2]);
    looking.read_only = true;
    server.client.attach(&attachment("w2"), &looking, SOON).await.unwrap();
    for name in ["w0", "w1", "w2"] {
        server.client.detach(&attachment(name), SOON).await.unwrap();
    }
    // A shareable volume may also be attached single-node.
    server.client.attach(&attachment("x"), &writer(&id, nodes[2]), SOON).await.unwrap();
    assert_eq!(
        code(server.client.attach(&attachment("w3"), &sharer(&id, nodes[0]), SOON).await),
        ProblemCode::InUse
    );
    server.client.detach(&attachment("x"), SOON).await.unwrap();
    assert_eq!(server.client.get_node(nodes[0]).await.unwrap().unwrap().max_disks, None);
}

#[tokio::test]
async fn a_volume_attached_read_only_cannot_be_expanded() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    server.client.attach(&attachment("r"), &reader(&id, node), SOON).await.unwrap();
    let to = VolumeSize { capacity_bytes: 2 * MIB, limit_bytes: None };
    let error = server.client.expand_volume(&id, &to).await.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!((problem.code, problem.nodes[0].uuid), (ProblemCode::InUse, node));
    // The expansion was not started: the pool's reservation is unchanged.
    assert_eq!(server.client.list_pools().await.unwrap()[0].reserved_bytes, MIB);
    server.client.detach(&attachment("r"), SOON).await.unwrap();
    assert_eq!(server.client.expand_volume(&id, &to).await.unwrap().capacity_bytes, 2 * MIB);
}

#[tokio::test]
async fn errors_name_the_missing_object() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let missing = async |spec| {
        let error = server.client.attach(&attachment("a"), &spec, SOON).await.unwrap_err();
        let problem = error.problem().unwrap().clone();
        assert_eq!(problem.code, ProblemCode::NotFound);
        (problem.what.unwrap(), problem.id.unwrap())
    };
    assert_eq!(missing(writer(&volume("other"), node)).await, (ObjectKind::Volume, "other".to_owned()));
    let stranger = Uuid::new_v4();
    assert_eq!(missing(writer(&id, stranger)).await, (ObjectKind::Node, stranger.to_string()));
    assert_eq!(server.client.list_attachments(None, None).await.unwrap(), []);
}

#[tokio::test]
async fn a_killed_server_completes_its_operations_after_a_restart() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let mut server = site.ready(&[node]).await;
    for round in 0..4_u64 {
        let name = attachment(&format!("a{round}"));
        let id = volume(&format!("v{round}"));
        let moment = Duration::from_millis(round * 7);
        // Each kill hits another moment between the first byte of the request and the response.
        let (client, volume) = (server.client.clone(), id.clone());
        let create = tokio::spawn(async move { client.put_volume(&volume, &size(MIB), SOON).await });
        tokio::time::sleep(moment / 2).await;
        server.kill();
        let _ = create.await.unwrap();
        server = site.start();
        let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();

        let (client, spec, key) = (server.client.clone(), writer(&id, node), name.clone());
        let attach = tokio::spawn(async move { client.attach(&key, &spec, SOON).await });
        tokio::time::sleep(moment).await;
        server.kill();
        if let Err(error) = attach.await.unwrap() {
            assert!(error.problem().is_none(), "{error}");
        }
        server = site.start();
        server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
        assert_eq!((site.devices().len(), sectors(&site.link(node, made.disk_uuid))), (1, MIB / 512));

        let (client, key) = (server.client.clone(), name.clone());
        let detach = tokio::spawn(async move { client.detach(&key, SOON).await });
        tokio::time::sleep(moment).await;
        server.kill();
        let _ = detach.await.unwrap();
        server = site.start();
        server.client.detach(&name, SOON).await.unwrap();
        assert_eq!(site.devices(), Vec::<std::path::PathBuf>::new());

        server.client.delete_volume(&id).await.unwrap();
        assert!(!site.file(&id).exists());
    }
}

#[tokio::test]
async fn interrupted_operations_complete_without_a_request() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("a");
    server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
    server.kill();
    // The node lost its disk while the server was down.
    let device = fs::read_link(site.link(node, made.disk_uuid)).unwrap();
    assert!(Command::new("losetup").arg("--detach").arg(device).status().unwrap().success());
    let server = site.start();
    until("the disk is back", async || site.devices().len() == 1).await;
    until("the repair is counted", async || {
        server.ops("/metrics").await.1.contains("nestor_storage_infra_repairs_total 1")
    })
    .await;
    server.client.detach(&name, SOON).await.unwrap();
}

#[tokio::test]
async fn a_disk_in_use_is_not_reported_as_detached() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("a");
    server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
    let held = fs::File::open(site.link(node, made.disk_uuid)).unwrap();
    still_running(async || server.client.detach(&name, Duration::from_secs(2)).await).await;
    assert_eq!(code(server.client.delete_volume(&id).await), ProblemCode::InUse);
    until("it is detaching", async || {
        let waiting = server.client.get_attachment(&name).await.unwrap().unwrap();
        waiting.state == AttachmentState::Detaching
    })
    .await;
    assert_eq!(code(server.client.attach(&name, &writer(&id, node), SOON).await), ProblemCode::Unavailable);
    drop(held);
    server.client.detach(&name, SOON).await.unwrap();
    assert!(site.devices().is_empty());
}

#[tokio::test]
async fn an_attachment_id_is_never_reused() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let id = volume("v");
    server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let name = attachment("a");
    server.client.attach(&name, &writer(&id, node), SOON).await.unwrap();
    server.client.detach(&name, SOON).await.unwrap();
    assert_eq!(code(server.client.attach(&name, &writer(&id, node), SOON).await), ProblemCode::Ended);
    // A detach before the attach prevents it, also after a crash.
    server.client.detach(&attachment("b"), SOON).await.unwrap();
    server.kill();
    let server = site.start();
    let late = server.client.attach(&attachment("b"), &writer(&id, node), SOON).await;
    assert_eq!(code(late), ProblemCode::Ended);
    assert!(site.devices().is_empty());
    server.client.attach(&attachment("c"), &writer(&id, node), SOON).await.unwrap();
    server.client.detach(&attachment("c"), SOON).await.unwrap();
}

#[tokio::test]
async fn an_attachment_takes_over_only_the_disk_of_the_one_that_it_replaces() {
    let site = Site::new();
    let (node, other) = (Uuid::new_v4(), Uuid::new_v4());
    let server = site.ready(&[node, other]).await;
    let id = volume("v");
    let made = server.client.put_volume(&id, &size(MIB), SOON).await.unwrap();
    let [first, second, third] = ["a", "b", "c"].map(attachment);
    server.client.attach(&first, &writer(&id, node), SOON).await.unwrap();
    assert_eq!(code(server.client.attach(&second, &writer(&id, node), SOON).await), ProblemCode::InUse);
    let elsewhere = server.client.attach_replacing(&second, &writer(&id, other), &first, SOON).await;
    assert_eq!(code(elsewhere), ProblemCode::InUse);
    let not_that = server.client.attach_replacing(&second, &writer(&id, node), &third, SOON).await;
    assert_eq!(code(not_that), ProblemCode::InUse);

    // A process that has the disk open in the node is not affected.
    let held = fs::File::open(site.link(node, made.disk_uuid)).unwrap();
    let taken = server.client.attach_replacing(&second, &writer(&id, node), &first, SOON).await.unwrap();
    assert_eq!((taken.id.as_str(), taken.state), ("b", AttachmentState::Attached));
    assert_eq!(site.devices().len(), 1);
    // The earlier attachment has ended, and operations on it have no effect.
    server.client.detach(&first, SOON).await.unwrap();
    assert_eq!(code(server.client.attach(&first, &writer(&id, node), SOON).await), ProblemCode::Ended);
    assert_eq!(server.client.list_attachments(None, None).await.unwrap(), [taken]);
    drop(held);
    server.client.detach(&second, SOON).await.unwrap();
    assert!(site.devices().is_empty());
}
