//! What the driver must never do, and what it says instead.

use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::machine::{Machine, block, filesystem, tool};

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

/// Puts something on an image.
type Fill = fn(&Path);

#[tokio::test]
async fn a_disk_with_anything_on_it_is_never_formatted() {
    let mut machine = Machine::start().await;
    let fills: [(&str, Fill); 12] = [
        ("has xfs, and ext4 is asked for", |image| tool("mkfs.xfs", &["-q"], image)),
        ("has ext3, and ext4 is asked for", |image| tool("mkfs.ext3", &["-q", "-F"], image)),
        ("has vfat, and ext4 is asked for", |image| write(image, 0, &vfat())),
        ("has swap, and ext4 is asked for", |image| tool("mkswap", &[], image)),
        ("has crypto_LUKS, and ext4 is asked for", |image| write(image, 0, b"LUKS\xba\xbe\x00\x01")),
        ("dos partition table", |image| partition(image, 0x83)),
        // The protective table of a GPT whose own header is damaged.
        ("PMBR partition table", |image| partition(image, 0xee)),
        ("data at byte 0", |image| write(image, 0, &noise(8192))),
        ("data at byte 700000", |image| write(image, 700_000, &[1])),
        ("data at byte 16777215", |image| write(image, (16 << 20) - 1, &[1])),
        ("mark of a formatting of disk 00000000-0000-0000-0000-000000000001", |image| {
            write(image, mark_at(image), &foreign_mark());
        }),
        ("signatures of several filesystems", |image| {
            tool("mkfs.ext4", &["-q", "-F"], image);
            write(image, 0, &vfat());
        }),
    ];
    for (says, fill) in fills {
        // The least that mkfs.xfs takes.
        let image = machine.image(if says.contains("xfs") { 300 } else { 16 });
        fill(&image.image);
        let before = std::fs::read(&image.image).unwrap();
        let disk = machine.plug(image, &[]);
        let refused = machine.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.expect_err(says);
        assert_eq!(refused.code(), Code::FailedPrecondition, "{says}: {refused}");
        assert!(
            refused.message().contains(says) && refused.message().contains(&disk.uuid),
            "{says}: {refused}"
        );
        assert!(machine.mounted(&machine.staging(&disk)).is_none(), "{says}");
        assert!(std::fs::read(&disk.image).unwrap() == before, "{says}: the disk was written to");
    }
}

#[tokio::test]
async fn an_empty_disk_is_not_formatted_for_a_read_only_use() {
    let mut machine = Machine::start().await;
    let image = machine.image(16);
    for (disk, mode) in [
        (machine.plug(image, &["--read-only"]), Mode::SingleNodeWriter),
        (machine.disk(16), Mode::SingleNodeReaderOnly),
        (machine.disk(16), Mode::MultiNodeReaderOnly),
    ] {
        let refused = machine.stage(&disk, filesystem("xfs", mode)).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("it is empty"), "{refused}");
        assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0));
    }
}

#[tokio::test]
async fn one_disk_is_not_taken_for_another() {
    let mut machine = Machine::start().await;
    let (one, two) = (machine.disk(16), machine.disk(16));
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&one, wanted()).await.unwrap();

    // The staging path has another disk.
    let mut request = machine.stage_request(&two, wanted());
    request.staging_target_path = machine.staging(&one).display().to_string();
    let refused = machine.node().await.node_stage_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(one.device.to_str().unwrap()), "{refused}");

    // Nothing is staged: the target would show the machine's own disk.
    let refused = machine.publish(&two, "one", wanted(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(!machine.target(&two, "one").exists());

    // Staged already, but as something else.
    let refused = machine.stage(&one, filesystem("xfs", Mode::SingleNodeWriter)).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");

    // The name leads to no block device.
    std::fs::remove_file(machine.link(&two)).unwrap();
    std::os::unix::fs::symlink(&two.image, machine.link(&two)).unwrap();
    let refused = machine.stage(&two, wanted()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("no block device"), "{refused}");
}

#[tokio::test]
async fn what_was_attached_for_other_bytes_is_neither_staged_nor_published() {
    use crds::names::{CONTEXT_MANAGEMENT_VOLUME, CONTEXT_OVERRIDDEN_PIN, MANAGEMENT_VOLUME};
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let said = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let mut request = machine.stage_request(&disk, filesystem("ext4", Mode::SingleNodeWriter));
    request.volume_context = [said(MANAGEMENT_VOLUME, "pvc-old")].into();
    request.publish_context.extend([said(CONTEXT_MANAGEMENT_VOLUME, "pvc-new")]);
    let publish = |of: &csi::proto::NodeStageVolumeRequest| csi::proto::NodePublishVolumeRequest {
        volume_id: of.volume_id.clone(),
        volume_context: of.volume_context.clone(),
        publish_context: of.publish_context.clone(),
        volume_capability: of.volume_capability.clone(),
        staging_target_path: of.staging_target_path.clone(),
        target_path: machine.target(&disk, "one").display().to_string(),
        ..csi::proto::NodePublishVolumeRequest::default()
    };
    let mut node = machine.node().await;
    for refused in [
        node.node_stage_volume(request.clone()).await.unwrap_err(),
        node.node_publish_volume(publish(&request)).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(["pvc-old", "pvc-new"].iter().all(|name| refused.message().contains(name)), "{refused}");
    }
    assert!(std::fs::read(&disk.image).unwrap().iter().all(|byte| *byte == 0), "the disk was written to");

    // A person pinned the volume to the other one, and the controller attached that.
    request.publish_context.extend([said(CONTEXT_OVERRIDDEN_PIN, "pvc-old")]);
    node.node_stage_volume(request.clone()).await.unwrap();
    node.node_publish_volume(publish(&request)).await.unwrap();
}

#[tokio::test]
async fn a_device_that_cannot_prove_its_identity_is_refused() {
    // The machine's own root disk under a volume's name: the worst that a wrong name can do.
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
    let machine = Machine::start().await;
    let mut disk = machine.image(1);
    disk.device = Path::new("/dev").join(device.file_name().unwrap());
    machine.name(&disk);
    let refused = machine.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert!(refused.message().contains("nothing was touched"), "{refused}");
}

#[tokio::test]
async fn a_target_that_somebody_uses_is_neither_covered_nor_removed() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    let target = machine.target(&disk, "one");
    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("precious"), "data").unwrap();
    let refused = machine.publish(&disk, "one", wanted(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let refused = machine.unpublish(&disk, "one").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(target.join("precious").exists());
}

#[tokio::test]
async fn requests_that_mean_nothing_are_told_so() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let good = || machine.stage_request(&disk, filesystem("ext4", Mode::SingleNodeWriter));
    let mut bad = vec![good(); 6];
    bad[0].volume_id.clear();
    bad[1].staging_target_path = "../there".to_owned();
    bad[2].volume_capability = None;
    bad[3].publish_context.clear();
    bad[4].volume_capability = Some(filesystem("ntfs", Mode::SingleNodeWriter));
    bad[5].volume_capability = Some(filesystem("ext4", Mode::MultiNodeMultiWriter));
    for request in bad {
        let refused = machine.node().await.node_stage_volume(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{request:?}: {refused}");
    }
    let inline = csi::proto::NodePublishVolumeRequest {
        volume_id: disk.id.clone(),
        target_path: machine.target(&disk, "one").display().to_string(),
        volume_capability: Some(block(Mode::SingleNodeWriter)),
        volume_context: [("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned())].into(),
        ..csi::proto::NodePublishVolumeRequest::default()
    };
    let refused = machine.node().await.node_publish_volume(inline).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("inline"), "{refused}");
}

/// Bytes that are nothing that anybody knows; the same each time.
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
