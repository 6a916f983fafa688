//! Images that become volumes, and volumes that become images.

use infra_api::{Adoption, Owner, PoolName, ProblemCode, Qos, Release};

use super::{ONE_AT_A_TIME, Plugged, images};
use crate::support::ceph::Ceph;
use crate::support::*;

/// An adoption of an image of the Ceph pool `vms`.
pub(super) fn adoption(image: &str) -> Adoption {
    let (path, qos, owner) = (format!("rbd:vms/{image}"), Qos::default(), Owner::default());
    Adoption { path, pool: None, qos, shareable: false, owner }
}

pub(super) fn release(to: &str) -> Release {
    Release { path: Some(to.to_owned()) }
}

/// Creates an image of 16 MiB with a pattern at 1 MiB.
pub(super) fn create_image(ceph: &Ceph, name: &str) {
    ceph.rbd(&["create", "--size", "16M", &format!("vms/{name}")]);
    ceph.write(&format!("vms/{name}"), 7, MIB);
}

/// Ceph's ID of an image.
fn id(ceph: &Ceph, image: &str) -> String {
    let info: serde_json::Value =
        serde_json::from_str(&ceph.rbd(&["info", "--format", "json", image])).unwrap();
    info["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_image_becomes_a_volume_without_a_copy_and_an_image_again() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let here = Plugged::new().await;
    let (client, ceph) = (&here.server.client, &here.ceph);
    let v = volume("v");
    create_image(ceph, "disk");
    let before = id(ceph, "vms/disk");
    let adopted = client.adopt(&v, &adoption("disk"), SOON).await.unwrap();
    assert_eq!((adopted.capacity_bytes, adopted.pool.as_str()), (16 * MIB, "pool"));
    assert_eq!(images(ceph, ""), ["_nestor-pool", "v"]);
    assert_eq!(id(ceph, "vms/v"), before);
    // Repeated, it changes nothing; another request is refused.
    client.adopt(&v, &adoption("disk"), SOON).await.unwrap();
    assert_eq!(code(client.put_volume(&v, &size(16 * MIB), SOON).await), ProblemCode::Exists);
    let attached = client.attach(&attachment("a"), &writer(&v, here.nodes[0]), SOON).await.unwrap();
    assert_eq!(attached.blank_attestation, None);
    here.has(&v, 7, MIB);
    here.write(0, &v, 8, 4 * MIB);
    assert_eq!(code(client.release(&v, &Release::default()).await), ProblemCode::InUse);
    client.detach(&attachment("a"), SOON).await.unwrap();
    client.put_snapshot(&snapshot("s"), &of(&v), SOON).await.unwrap();
    let kept = client.release(&v, &Release::default()).await.unwrap_err().to_string();
    assert!(kept.contains("has snapshots, such as s"), "{kept}");
    client.delete_snapshot(&snapshot("s")).await.unwrap();
    for (to, what) in [
        ("rbd:vms/_nestor-pool", "must start with a letter or digit"),
        ("rbd:other/v", "is not in vms"),
        ("/srv/v.img", "must have the form"),
    ] {
        let refused = client.release(&v, &release(to)).await.unwrap_err();
        assert!(
            refused.code() == Some(ProblemCode::Invalid) && refused.to_string().contains(what),
            "{refused}"
        );
    }
    let released = client.release(&v, &Release::default()).await.unwrap();
    assert_eq!((released.path.as_str(), id(ceph, "vms/v.img")), ("rbd:vms/v.img", before.clone()));
    assert_eq!(client.get_volume(&v).await.unwrap(), None);
    let metadata = ceph.rbd(&["image-meta", "list", "vms/v.img"]);
    assert!(!metadata.contains("nestor-record"), "{metadata}");
    // And again, under other names.
    let w = volume("w");
    client.adopt(&w, &adoption("v.img"), SOON).await.unwrap();
    here.has(&w, 8, 4 * MIB);
    let taken = client.release(&w, &release("rbd:vms/w")).await.unwrap_err();
    assert!(taken.to_string().contains("exists"), "{taken}");
    client.release(&w, &release("rbd:vms/disk")).await.unwrap();
    assert_eq!(id(ceph, "vms/disk"), before);
}

#[tokio::test]
async fn an_image_that_somebody_uses_or_keeps_is_not_adopted() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let ceph = Ceph::start();
    ceph.rbd(&["namespace", "create", "vms/a"]);
    ceph.user("own", None);
    let site = Site::new();
    let server = site.start();
    let client = &server.client;
    client.put_pool(&pool(), &ceph.pool_spec("own", None)).await.unwrap();
    client.put_volume(&volume("v"), &size(8 * MIB), SOON).await.unwrap();
    for name in ["open", "kept", "protected", "locked", "no", "_own", "a/inside"] {
        ceph.rbd(&["create", "--size", "8M", &format!("vms/{name}")]);
    }
    for name in ["kept", "protected"] {
        ceph.rbd(&["snap", "create", "--no-progress", &format!("vms/{name}@s")]);
    }
    ceph.rbd(&["snap", "protect", "vms/protected@s"]);
    ceph.rbd(&["lock", "add", "vms/locked", "mine"]);
    let _foreign = ceph.open_image("vms/open");
    for (image, expected, what) in [
        ("open", ProblemCode::InUse, "the Ceph client"),
        ("kept", ProblemCode::Invalid, "has 1 snapshots, such as s"),
        ("protected", ProblemCode::Invalid, "has 1 snapshots, such as s"),
        ("locked", ProblemCode::Invalid, "the lock mine"),
        ("v", ProblemCode::Invalid, "has the record of a volume"),
        ("_own", ProblemCode::Invalid, "must start with a letter or digit"),
        ("_nestor-pool", ProblemCode::Invalid, "must start with a letter or digit"),
        ("a/inside", ProblemCode::Invalid, "of no pool"),
        ("missing", ProblemCode::Invalid, "does not exist"),
        ("no", ProblemCode::Exists, "use another id"),
    ] {
        let refused = client.adopt(&volume("no"), &adoption(image), SOON).await.unwrap_err();
        assert!(refused.code() == Some(expected) && refused.to_string().contains(what), "{image}: {refused}");
        assert_eq!(client.get_volume(&volume("no")).await.unwrap(), None);
    }
    let elsewhere = Adoption { pool: Some(PoolName::new("elsewhere").unwrap()), ..adoption("no") };
    assert_eq!(code(client.adopt(&volume("w"), &elsewhere, SOON).await), ProblemCode::Invalid);
}
