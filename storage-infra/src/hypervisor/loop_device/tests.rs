use infra_api::{DiskOptions, OnFull, Qos};

use super::*;
use crate::hypervisor::{CephClient, RbdImage, RbdSource};

#[tokio::test]
async fn an_rbd_image_is_not_attached_to_a_host_and_the_error_says_so() {
    let root = tempfile::tempdir().unwrap();
    let host = LoopDevices::of_this_host(root.path()).unwrap();
    let node = host_links::HostLinks::at(root.path()).node().unwrap().unwrap();
    let client = CephClient {
        conf: "/etc/ceph/ceph.conf".into(),
        user: "nestor".into(),
        keyring: "/etc/ceph/keyring".into(),
        secret: Uuid::from_u128(1),
    };
    let image = RbdImage::parse("vms/pvc-1").unwrap();
    let disk = Disk {
        uuid: Uuid::from_u128(2),
        source: DiskSource::Rbd(RbdSource { image, client }),
        read_only: false,
        shared: false,
        qos: Qos::default(),
        on_full: OnFull::default(),
        options: DiskOptions::default(),
    };
    let refused = host.attach(node, &disk).await.unwrap_err();
    assert!(matches!(refused, HypervisorError::Unsupported(_)), "{refused}");
    assert!(refused.to_string().contains("the RBD image vms/pvc-1 is not a file"), "{refused}");
}
