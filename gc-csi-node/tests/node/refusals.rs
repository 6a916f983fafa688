//! Refused requests: the driver changes nothing and reports why.

use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::test_node::{TestNode, block, filesystem, tool};

fn write(image: &Path, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(image).unwrap().write_all_at(bytes, at).unwrap();
}

/// Writes a partition table with one partition of this type.
fn partition(image: &Path, kind: u8) {
    let mut sector = vec![0; 512];
    sector[446..462].copy_from_slice(&[0, 0, 2, 0, kind, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0x40, 0, 0]);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    write(image, 0, &sector);
}

/// Writes content to an image.
type Fill = fn(&Path);

#[tokio::test]
async fn a_disk_with_any_content_is_never_formatted() {
    let mut node = TestNode::start().await;
    let fills: [(&str, Fill); 12] = [
        ("contains xfs, but the request is for ext4", |image| tool("mkfs.xfs", &["-q"], image)),
        ("contains ext3, but the request is for ext4", |image| tool("mkfs.ext3", &["-q", "-F"], image)),
        ("contains vfat, but the request is for ext4", |image| write(image, 0, &vfat())),
        ("contains swap, but the request is for ext4", |image| tool("mkswap", &[], image)),
        ("contains crypto_LUKS, but the request is for ext4", |image| {
            write(image, 0, b"LUKS\xba\xbe\x00\x01");
        }),
        ("dos partition table", |image| partition(image, 0x83)),
        // Protective MBR of a GPT whose header is damaged.
        ("PMBR partition table", |image| partition(image, 0xee)),
        ("data at byte 0", |image| write(image, 0, &noise(8192))),
        ("data at byte 700000", |image| write(image, 700_000, &[1])),
        ("data at byte 16777215", |image| write(image, (16 << 20) - 1, &[1])),
        ("format marker for disk 00000000-0000-0000-0000-000000000001", |image| {
            write(image, mark_at(image), &foreign_mark());
        }),
        ("signatures of several filesystems", |image| {
            tool("mkfs.ext4", &["-q", "-F"], image);
            write(image, 0, &vfat());
            // A letter of the label: the checksum of the superblock is wrong.
            write(image, 1024 + 0x78, b"x");
        }),
    ];
    for (expected, fill) in fills {
        // Minimum size for mkfs.xfs.
        let image = node.image(if expected.contains("xfs") { 300 } else { 16 });
        fill(&image.image);
        let before = std::fs::read(&image.image).unwrap();
        let disk = node.attach(image, &[]);
        let refused =
            node.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.expect_err(expected);
        assert_eq!(refused.code(), Code::FailedPrecondition, "{expected}: {refused}");
        assert!(
            refused.message().contains(expected) && refused.message().contains(&disk.uuid),
            "{expected}: {refused}"
        );
        assert!(node.mounted(&node.staging(&disk)).is_none(), "{expected}");
        assert!(std::fs::read(&disk.image).unwrap() == before, "{expected}: the disk was written to");
    }
}

#[tokio::test]
async fn an_empty_disk_is_not_formatted_for_a_read_only_mount() {
    let mut node = TestNode::start().await;
    let image = node.image(16);
    for (disk, mode) in [
        (node.attach(image, &["--read-only"]), Mode::SingleNodeWriter),
        (node.disk(16), Mode::SingleNodeReaderOnly),
        (node.disk(16), Mode::MultiNodeReaderOnly),
    ] {
        let refused = node.stage(&disk, filesystem("xfs", mode)).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("it is empty"), "{refused}");
        assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0));
    }
}

#[tokio::test]
async fn a_disk_is_not_confused_with_another() {
    let mut node = TestNode::start().await;
    let (one, two) = (node.disk(16), node.disk(16));
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&one, capability()).await.unwrap();

    // Another disk is mounted at the staging path.
    let mut request = node.stage_request(&two, capability());
    request.staging_target_path = node.staging(&one).display().to_string();
    let refused = node.client().node_stage_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(one.device.to_str().unwrap()), "{refused}");

    // Nothing is staged: the target would show the node's own disk.
    let refused = node.publish(&two, "one", capability(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(!node.target(&two, "one").exists());

    // Already staged with another filesystem type.
    let refused = node.stage(&one, filesystem("xfs", Mode::SingleNodeWriter)).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");

    // The name does not point to a block device.
    std::fs::remove_file(node.link(&two)).unwrap();
    std::os::unix::fs::symlink(&two.image, node.link(&two)).unwrap();
    let refused = node.stage(&two, capability()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("not a block device"), "{refused}");
}

#[tokio::test]
async fn a_disk_of_another_management_volume_than_the_pinned_one_is_refused() {
    use crds::names::{CONTEXT_MANAGEMENT_VOLUME, CONTEXT_OVERRIDDEN_PIN, MANAGEMENT_VOLUME};
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let entry = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let mut request = node.stage_request(&disk, filesystem("ext4", Mode::SingleNodeWriter));
    request.volume_context = [entry(MANAGEMENT_VOLUME, "pvc-old")].into();
    request.publish_context.extend([entry(CONTEXT_MANAGEMENT_VOLUME, "pvc-new")]);
    let publish = |of: &csi::proto::NodeStageVolumeRequest| csi::proto::NodePublishVolumeRequest {
        volume_id: of.volume_id.clone(),
        volume_context: of.volume_context.clone(),
        publish_context: of.publish_context.clone(),
        volume_capability: of.volume_capability.clone(),
        staging_target_path: of.staging_target_path.clone(),
        target_path: node.target(&disk, "one").display().to_string(),
        ..csi::proto::NodePublishVolumeRequest::default()
    };
    let mut client = node.client();
    for refused in [
        client.node_stage_volume(request.clone()).await.unwrap_err(),
        client.node_publish_volume(publish(&request)).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(["pvc-old", "pvc-new"].iter().all(|name| refused.message().contains(name)), "{refused}");
    }
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0), "the disk was written to");

    // An operator pinned the volume to the other one, and the controller plugin attached that.
    request.publish_context.extend([entry(CONTEXT_OVERRIDDEN_PIN, "pvc-old")]);
    client.node_stage_volume(request.clone()).await.unwrap();
    client.node_publish_volume(publish(&request)).await.unwrap();
}

#[tokio::test]
async fn a_device_without_identifiers_is_refused() {
    // The node's root disk under a volume's name: the worst case of a wrong name.
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let Some(number) = table
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|fields| fields[4] == "/" && !fields[2].starts_with("0:") && !fields[2].starts_with("7:"))
        .map(|fields| fields[2].to_owned())
    else {
        return;
    };
    let device = Path::new("/sys/dev/block").join(number).canonicalize().unwrap();
    let node = TestNode::start().await;
    let mut disk = node.image(1);
    disk.device = Path::new("/dev").join(device.file_name().unwrap());
    node.name(&disk);
    let refused = node.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("nothing was changed"), "{refused}");
}

#[tokio::test]
async fn a_target_with_data_is_neither_mounted_over_nor_removed() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    let target = node.target(&disk, "one");
    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("precious"), "data").unwrap();
    let refused = node.publish(&disk, "one", capability(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let refused = node.unpublish(&disk, "one").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(target.join("precious").exists());
}

#[tokio::test]
async fn invalid_requests_are_refused() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let good = || node.stage_request(&disk, filesystem("ext4", Mode::SingleNodeWriter));
    let mut bad = vec![good(); 6];
    bad[0].volume_id.clear();
    bad[1].staging_target_path = "../there".to_owned();
    bad[2].volume_capability = None;
    bad[3].publish_context.clear();
    bad[4].volume_capability = Some(filesystem("ntfs", Mode::SingleNodeWriter));
    bad[5].volume_capability = Some(filesystem("ext4", Mode::MultiNodeMultiWriter));
    for request in bad {
        let refused = node.client().node_stage_volume(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{request:?}: {refused}");
    }
    let inline = csi::proto::NodePublishVolumeRequest {
        volume_id: disk.id.clone(),
        target_path: node.target(&disk, "one").display().to_string(),
        volume_capability: Some(block(Mode::SingleNodeWriter)),
        volume_context: [("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned())].into(),
        ..csi::proto::NodePublishVolumeRequest::default()
    };
    let refused = node.client().node_publish_volume(inline).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("inline"), "{refused}");
}

/// Data without any known signature; the same in every call.
fn noise(length: u32) -> Vec<u8> {
    (1..=length).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect()
}

/// The first sector of a FAT16 filesystem.
fn vfat() -> Vec<u8> {
    let mut sector = vec![0; 512];
    sector[..11].copy_from_slice(b"\xeb\x3c\x90mkfs.fat");
    sector[11..24].copy_from_slice(&[0, 2, 4, 4, 0, 2, 0, 2, 0, 0, 0xf8, 0, 1]);
    sector[32..36].copy_from_slice(&(100_000u32).to_le_bytes());
    sector[38] = 0x29;
    sector[54..62].copy_from_slice(b"FAT16   ");
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

fn mark_at(image: &Path) -> u64 {
    std::fs::metadata(image).unwrap().len() / 7 * 6 / 4096 * 4096
}

fn foreign_mark() -> Vec<u8> {
    b"nestor.dev: format under way; disk 00000000-0000-0000-0000-000000000001".to_vec()
}
