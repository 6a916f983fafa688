//! Two servers on one Ceph cluster and one database.

use futures::{StreamExt, stream};
use infra_api::VolumeSource;
use test_postgres::Cluster;

use super::data::{exported, in_pool};
use super::{ONE_AT_A_TIME, images};
use crate::support::ceph::Ceph;
use crate::support::*;

async fn becomes_active(server: &Server) {
    until("the server is active", async || server.ops("/readyz").await.0 == 200).await;
}

fn send(signal: &str, server: &Server) {
    let kill = std::process::Command::new("kill").args([signal, &server.pid().to_string()]).status();
    assert!(kill.unwrap().success());
}

#[tokio::test]
async fn two_servers_never_write_to_one_unfinished_image() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let ceph = Ceph::start();
    ceph.user("own", None);
    let cluster = Cluster::start();
    let mut site = Site::new();
    site.flags = vec!["--catalog".to_owned(), cluster.database()];
    let mut first = site.start();
    becomes_active(&first).await;
    first.client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
    let spec = in_pool("pool", size(64 * MIB));
    first.client.put_volume(&volume("v"), &spec, SOON).await.unwrap();
    for (pattern, at) in [(7, 8 * MIB), (8, 9 * MIB), (9, 63 * MIB)] {
        ceph.write("vms/v", pattern, at);
    }
    let bytes = exported(&first.client, VolumeSource::Volume(volume("v"))).await;
    let second = site.start_with_data("other");

    // The first server receives a part of a stream, and keeps the image open.
    first.client.put_import(&volume("w"), &spec).await.unwrap();
    let (client, half) = (first.client.clone(), bytes[..bytes.len() / 2].to_vec());
    let importing = tokio::spawn(async move {
        let stalled = stream::iter([Ok::<_, std::io::Error>(half)]).chain(stream::pending());
        client.send_import(&volume("w"), false, stalled).await
    });
    let unfinished = "_incomplete-1-volume.w".to_owned();
    until("the first server writes", async || {
        images(&ceph, "").contains(&unfinished)
            && ceph.rbd(&["status", &format!("vms/{unfinished}")]).contains("watcher=")
    })
    .await;
    send("-STOP", &first);
    becomes_active(&second).await;

    // The second one begins anew, beside what the first one has open.
    let all = || stream::iter([Ok::<_, std::io::Error>(bytes.clone())]);
    second.client.send_import(&volume("w"), false, all()).await.unwrap();
    assert!(images(&ceph, "").contains(&unfinished));
    assert_eq!(ceph.export("vms/w"), ceph.export("vms/v"));

    // The first one goes on, writes to no image of the second one, and ends.
    send("-CONT", &first);
    importing.await.unwrap().unwrap_err();
    first.wait_for_crash().await;
    assert_eq!(ceph.export("vms/w"), ceph.export("vms/v"));
    until("what the first server left is removed", async || {
        second.client.list_pools().await.unwrap();
        !images(&ceph, "").contains(&unfinished)
    })
    .await;
    assert_eq!(ceph.export("vms/w"), ceph.export("vms/v"));
}
