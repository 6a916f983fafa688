//! Moves of detached volumes between files and images.

use infra_api::{DrainSpec, Move, MoveSpec, ProblemCode, Volume, VolumeId};

use super::data::{add_files, in_pool, named};
use super::{ONE_AT_A_TIME, Plugged, images};
use crate::support::*;

impl Plugged {
    async fn begin(&self, id: &VolumeId, to: &str, rate: Option<u64>) {
        let spec = MoveSpec { pool: named(to), bytes_per_second: rate };
        self.server.client.move_volume(id, &spec).await.unwrap();
    }

    async fn volume(&self, id: &VolumeId) -> Volume {
        self.server.client.get_volume(id).await.unwrap().unwrap()
    }

    /// Waits until the volume is in this pool.
    async fn ends(&self, id: &VolumeId, pool: &str) {
        until("the move is complete", async || self.volume(id).await.moving.is_none()).await;
        assert_eq!(self.volume(id).await.pool, named(pool));
    }

    async fn moves(&self, id: &VolumeId, to: &str) {
        self.begin(id, to, None).await;
        self.ends(id, to).await;
    }

    async fn waits_until(&self, id: &VolumeId, what: &str, so: impl Fn(&Move) -> bool) {
        until(what, async || self.volume(id).await.moving.is_some_and(|moving| so(&moving))).await;
    }

    /// Content of the file of a volume.
    fn file(&self, id: &VolumeId) -> Vec<u8> {
        std::fs::read(self.site.file(id)).unwrap()
    }
}

/// A server with the pools `pool` and `guest` in Ceph, and `files`.
async fn site() -> Plugged {
    let here = Plugged::new().await;
    here.ceph.create_pool("guest");
    here.ceph.user_of("guest", "guest", None);
    here.server
        .client
        .put_pool(&named("guest"), &here.ceph.pool_spec_of("guest", "guest", None))
        .await
        .unwrap();
    add_files(&here.site, &here.server).await;
    here
}

/// Names of the images in the Ceph pool `guest`.
fn guest_images(here: &Plugged) -> Vec<String> {
    serde_json::from_str(&here.ceph.rbd(&["ls", "--format", "json", "--pool", "guest"])).unwrap()
}

#[tokio::test]
async fn a_detached_volume_moves_between_files_and_images_with_its_data() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let here = site().await;
    let client = &here.server.client;
    let v = volume("v");
    client.put_volume(&v, &in_pool("files", size(64 * MIB)), SOON).await.unwrap();
    here.site.write(&v, &vec![3; 24 * MIB as usize], 16 * MIB);
    let content = here.file(&v);
    here.begin(&v, "pool", Some(MIB)).await;
    here.waits_until(&v, "the copy has progress", |moving| moving.copied_bytes > Some(16 * MIB)).await;
    // An attach is not delayed. The move goes on after the detach.
    client.attach(&attachment("a"), &writer(&v, here.nodes[0]), SOON).await.unwrap();
    let says_why =
        |moving: &Move| moving.message.as_ref().is_some_and(|why| why.contains("while it is detached"));
    here.waits_until(&v, "the move waits for the detach", says_why).await;
    assert!(here.site.file(&v).exists());
    client.detach(&attachment("a"), SOON).await.unwrap();
    here.moves(&v, "pool").await;
    assert!(here.ceph.export("vms/v") == content && !here.site.file(&v).exists());

    // A VM uses the image, and then it is not moved.
    client.attach(&attachment("b"), &writer(&v, here.nodes[0]), SOON).await.unwrap();
    here.write(0, &v, 6, MIB);
    let spec = MoveSpec { pool: named("files"), bytes_per_second: None };
    let refused = client.move_volume(&v, &spec).await.unwrap_err();
    assert!(
        refused.code() == Some(ProblemCode::InUse) && refused.to_string().contains("while it is detached"),
        "{refused}"
    );
    client.detach(&attachment("b"), SOON).await.unwrap();

    // To another Ceph pool, from an image that has a clone; and to a file again.
    let (s, w) = (snapshot("s"), volume("w"));
    client.put_snapshot(&s, &of(&v), SOON).await.unwrap();
    let content = here.ceph.export("vms/v");
    here.moves(&v, "guest").await;
    assert!(here.ceph.export("guest/v") == content);
    assert_eq!(images(&here.ceph, ""), ["_nestor-pool", "_snapshot.s"]);
    client.put_volume(&w, &restored(&s, 64 * MIB), SOON).await.unwrap();
    assert_eq!(here.volume(&w).await.pool, pool());
    here.moves(&v, "files").await;
    assert!(here.file(&v) == content && here.ceph.export("vms/w") == content);
    assert_eq!(guest_images(&here), ["_nestor-pool"]);

    // A drain stays with the engine.
    let drained = client.drain_pool(&named("files"), &DrainSpec::default()).await.unwrap();
    assert!(drained.volumes.iter().all(|one| one.volume == v && one.to.is_none()), "{drained:?}");
    client.drain_pool(&pool(), &DrainSpec::default()).await.unwrap();
    here.ends(&w, "guest").await;
    assert!(here.ceph.export("guest/w") == content);
}

#[tokio::test]
async fn a_cancelled_move_leaves_the_volume_where_it_is() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let here = site().await;
    let client = &here.server.client;
    let v = volume("v");
    client.put_volume(&v, &in_pool("files", size(64 * MIB)), SOON).await.unwrap();
    here.site.write(&v, &vec![3; 40 * MIB as usize], 0);
    let content = here.file(&v);
    here.begin(&v, "pool", Some(MIB)).await;
    here.waits_until(&v, "the copy has progress", |moving| moving.copied_bytes > Some(MIB)).await;
    client.cancel_move(&v).await.unwrap();
    here.ends(&v, "files").await;
    assert!(here.file(&v) == content);
    assert_eq!(images(&here.ceph, ""), ["_nestor-pool"]);
    here.moves(&v, "pool").await;
    here.begin(&v, "files", Some(MIB)).await;
    here.waits_until(&v, "the copy has progress", |moving| moving.copied_bytes > Some(MIB)).await;
    client.cancel_move(&v).await.unwrap();
    here.ends(&v, "pool").await;
    assert_eq!(here.site.files(), [""; 0]);
    assert!(here.ceph.export("vms/v") == content);
}
