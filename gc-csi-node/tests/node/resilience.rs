//! Resilience: late disks, interrupted operations, and mounts in use.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use csi::proto::volume_capability::access_mode::Mode;
use tonic::{Code, Request};

use crate::test_node::{TestNode, block, filesystem, spawn, tool};

/// Creates a directory with a replacement for one command.
fn tools(node: &TestNode, name: &str, script: &str) -> PathBuf {
    let dir = node.path("tools");
    std::fs::create_dir_all(&dir).unwrap();
    let tool = dir.join(name);
    std::fs::write(&tool, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[tokio::test]
async fn a_disk_that_appears_late_is_found_immediately() {
    let mut node = TestNode::start().await;
    let disk = node.disk(8);
    // The driver's fallback poll does not find it this early. inotify may be slow on a busy node, but not every time.
    for _ in 0..5 {
        std::fs::remove_file(node.link(&disk)).unwrap();
        let mut staging = std::pin::pin!(node.stage(&disk, block(Mode::SingleNodeWriter)));
        let early = tokio::time::timeout(Duration::from_millis(300), &mut staging).await;
        assert!(early.is_err(), "the driver did not wait: {early:?}");
        node.name(&disk);
        let named = Instant::now();
        staging.await.unwrap();
        if named.elapsed() < Duration::from_secs(4) {
            return;
        }
    }
    panic!("the driver did not notice");
}

#[tokio::test]
async fn the_error_for_a_disk_that_never_appears_lists_its_names_before_the_deadline() {
    let mut node = TestNode::start().await;
    let (there, missing) = (node.disk(8), node.image(8));
    let mut request = Request::new(node.stage_request(&missing, block(Mode::SingleNodeWriter)));
    // The driver reserves a tenth of the deadline for its answer.
    request.set_timeout(Duration::from_secs(10));
    let refused = node.client().node_stage_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    for name in crds::names::disk_by_id(&missing.uuid) {
        assert!(refused.message().contains(&name), "{name} is not in: {refused}");
    }
    let name = node.link(&there).file_name().unwrap().to_string_lossy().into_owned();
    assert!(refused.message().contains(&name), "the existing names are missing: {refused}");
}

#[tokio::test]
async fn a_failed_format_is_repeated() {
    let mut node = TestNode::new();
    // Content after an interrupted mkfs.btrfs: its temporary magic, and parts of its trees.
    let half = "for device; do :; done
        for at in 0 17 16384; do
            printf '!BHRfS_M and more' | dd of=$device bs=4k seek=$at conv=notrunc status=none
        done
        echo 'out of luck' >&2; exit 1";
    let tools = tools(&node, "mkfs.btrfs", half);
    node.start_driver(Some(&tools)).await;
    let disk = node.disk(128);
    let capability = || filesystem("btrfs", Mode::SingleNodeWriter);
    let failed = node.stage(&disk, capability()).await.unwrap_err();
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    assert!(failed.message().contains("out of luck"), "{failed}");

    // Not for a read-only mount, which must write nothing.
    let refused = node.stage(&disk, filesystem("btrfs", Mode::SingleNodeReaderOnly)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");

    assert_eq!(node.stop_driver().await, Some(0));
    node.start_driver(None).await;
    node.stage(&disk, capability()).await.unwrap();
    node.unstage(&disk).await.unwrap();

    // After a successful format, the marker is gone: later damage is not taken for an interrupted format.
    let image = std::fs::File::options().write(true).open(&disk.image).unwrap();
    for offset in [64 << 10, 64 << 20] {
        image.write_all_at(&[7; 4096], offset).unwrap();
    }
    tool("blockdev", &["--flushbufs"], &disk.device);
    let refused = node.stage(&disk, capability()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

#[tokio::test]
async fn a_format_interrupted_by_a_crash_is_repeated_after_the_restart() {
    let mut node = TestNode::new();
    let dying = "for device; do :; done
        printf noise | dd of=$device bs=1k seek=3 conv=notrunc status=none
        kill -9 $PPID";
    let tools = tools(&node, "mkfs.ext4", dying);
    node.start_driver(Some(&tools)).await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap_err();
    assert_eq!(node.wait_for_driver().await, None, "the driver was not killed");
    node.start_driver(None).await;
    node.stage(&disk, capability()).await.unwrap();
}

#[tokio::test]
async fn an_operation_continues_after_its_caller_disconnects() {
    let mut node = TestNode::new();
    let gate = node.path("gate");
    tool("mkfifo", &[], &gate);
    let started = node.path("started");
    // Waits for the gate, then runs the real command.
    let (begins, opens) = (started.display(), gate.display());
    let slow = format!("touch {begins}\nread -r real < {opens}\nexec \"$real\" \"$@\"");
    let tools = tools(&node, "mkfs.ext4", &slow);
    node.start_driver(Some(&tools)).await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    let at_the_gate = async {
        while !started.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        answer = node.stage(&disk, capability()) => panic!("the driver did not wait for mkfs: {answer:?}"),
        () = at_the_gate => {}
    }
    let meanwhile = node.stage(&disk, capability()).await.unwrap_err();
    assert_eq!(meanwhile.code(), Code::Aborted, "{meanwhile}");

    let mut find = Command::new("sh");
    find.args(["-c", "command -v mkfs.ext4"]).stdout(Stdio::piped());
    let real = spawn(&mut find).wait_with_output().unwrap().stdout;
    std::fs::write(&gate, real).unwrap();
    let done = async {
        while let Err(status) = node.stage(&disk, capability()).await {
            assert_eq!(status.code(), Code::Aborted, "{status}");
        }
    };
    tokio::time::timeout(Duration::from_secs(60), done).await.unwrap();
    assert!(node.mounted(&node.staging(&disk)).is_some());
}

#[tokio::test]
async fn a_filesystem_in_use_stays_mounted_and_the_error_names_the_process() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    node.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap();
    let mut user = Command::new("sleep");
    let mut user = spawn(user.arg("600").current_dir(node.staging(&disk)).stdout(Stdio::null()));
    let refused = node.unstage(&disk).await;
    user.kill().unwrap();
    user.wait().unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&format!("sleep (pid {})", user.id())), "{refused}");
    node.unstage(&disk).await.unwrap();
}

#[tokio::test]
async fn an_interrupted_publish_is_completed() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    // Bind-mounted, but not yet read-only.
    let target = node.target(&disk, "one");
    std::fs::create_dir(&target).unwrap();
    rustix::mount::mount_bind(node.staging(&disk), &target).unwrap();
    node.publish(&disk, "one", capability(), true).await.unwrap();
    assert!(std::fs::write(target.join("file"), "x").is_err());
    // Stacked mounts are all unmounted.
    rustix::mount::mount_bind(node.staging(&disk), &target).unwrap();
    node.unpublish(&disk, "one").await.unwrap();
    assert!(!target.exists());
}

#[tokio::test]
async fn a_volume_whose_staging_mount_is_gone_is_staged_again_when_it_is_published() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    std::fs::write(node.staging(&disk).join("kept"), "data").unwrap();
    // As after a driver that was killed while it replaced a dead mount: kubelet takes the volume for staged.
    rustix::mount::unmount(node.staging(&disk), rustix::mount::UnmountFlags::empty()).unwrap();
    let target = node.publish(&disk, "one", capability(), false).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("kept")).unwrap(), "data");
    assert!(node.mounted(&node.staging(&disk)).is_some());
    node.unpublish(&disk, "one").await.unwrap();
    node.unstage(&disk).await.unwrap();

    // kubelet removes the directory when it has unstaged the volume.
    std::fs::remove_dir(node.staging(&disk)).unwrap();
    let refused = node.publish(&disk, "one", capability(), false).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(!node.staging(&disk).exists() && !node.target(&disk, "one").exists());
}

#[tokio::test]
async fn a_mount_whose_device_answers_is_never_replaced() {
    let mut node = TestNode::start().await;
    let disk = node.disk(16);
    let capability = || filesystem("ext4", Mode::SingleNodeWriter);
    node.stage(&disk, capability()).await.unwrap();
    node.publish(&disk, "one", capability(), false).await.unwrap();
    let raw = node.disk(16);
    node.stage(&raw, block(Mode::SingleNodeWriter)).await.unwrap();
    let raw_target = node.publish(&raw, "one", block(Mode::SingleNodeWriter), false).await.unwrap();
    // The disk has another device, and the earlier one is still there.
    for moved in [&disk, &raw] {
        std::fs::remove_file(node.link(moved)).unwrap();
        let again = node.attach(moved.clone(), &["--read-only"]);
        assert_ne!(again.device, moved.device);
    }
    let staged = node.mounts_at(&node.staging(&disk));
    for refused in [
        node.stage(&disk, capability()).await.unwrap_err(),
        node.publish(&disk, "two", capability(), false).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("instead of disk"), "{refused}");
    }
    assert_eq!(node.mounts_at(&node.staging(&disk)), staged);
    let refused = node.publish(&raw, "one", block(Mode::SingleNodeWriter), true).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(node.mounted(&raw_target).is_some());
}
