//! What happens when something comes late, is cut off, or does not let go.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use csi::proto::volume_capability::access_mode::Mode;
use tonic::{Code, Request};

use crate::machine::{Machine, begin, block, filesystem, tool};

/// A folder with one tool in place of the system's.
fn tools(machine: &Machine, name: &str, script: &str) -> PathBuf {
    let folder = machine.path("tools");
    std::fs::create_dir_all(&folder).unwrap();
    let tool = folder.join(name);
    std::fs::write(&tool, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

#[tokio::test]
async fn a_disk_that_appears_late_is_found_at_once() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(8);
    // The driver's safety net never sees it so soon. What notices it at once can be held up on a busy machine, but not
    // every time.
    for _ in 0..5 {
        std::fs::remove_file(machine.link(&disk)).unwrap();
        let mut staging = std::pin::pin!(machine.stage(&disk, block(Mode::SingleNodeWriter)));
        let early = tokio::time::timeout(Duration::from_millis(300), &mut staging).await;
        assert!(early.is_err(), "the driver did not wait: {early:?}");
        machine.name(&disk);
        let named = Instant::now();
        staging.await.unwrap();
        if named.elapsed() < Duration::from_secs(4) {
            return;
        }
    }
    panic!("the driver did not notice");
}

#[tokio::test]
async fn a_disk_that_never_appears_is_told_by_its_names_before_the_deadline() {
    let mut machine = Machine::start().await;
    let (there, missing) = (machine.disk(8), machine.image(8));
    let mut request = Request::new(machine.stage_request(&missing, block(Mode::SingleNodeWriter)));
    // The driver keeps a tenth of it for the way of its answer.
    request.set_timeout(Duration::from_secs(10));
    let refused = machine.node().await.node_stage_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    for name in crds::names::disk_by_id(&missing.uuid) {
        assert!(refused.message().contains(&name), "{name} is not in: {refused}");
    }
    let name = machine.link(&there).file_name().unwrap().to_string_lossy().into_owned();
    assert!(refused.message().contains(&name), "what is there is not told: {refused}");
}

#[tokio::test]
async fn a_format_that_failed_half_way_is_done_again() {
    let mut machine = Machine::new();
    // What an interrupted mkfs.btrfs leaves: its temporary magic, and parts of its trees.
    let half = "for device; do :; done
        for at in 0 17 16384; do
            printf '!BHRfS_M and more' | dd of=$device bs=4k seek=$at conv=notrunc status=none
        done
        echo 'out of luck' >&2; exit 1";
    let tools = tools(&machine, "mkfs.btrfs", half);
    machine.start_driver(Some(&tools)).await;
    let disk = machine.disk(128);
    let wanted = || filesystem("btrfs", Mode::SingleNodeWriter);
    let failed = machine.stage(&disk, wanted()).await.unwrap_err();
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    assert!(failed.message().contains("out of luck"), "{failed}");

    // Not by a read-only use, which must write nothing.
    let refused = machine.stage(&disk, filesystem("btrfs", Mode::SingleNodeReaderOnly)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");

    assert_eq!(machine.stop_driver().await, Some(0));
    machine.start_driver(None).await;
    machine.stage(&disk, wanted()).await.unwrap();
    machine.unstage(&disk).await.unwrap();

    // Once done, the mark is gone: later damage is not taken for an interrupted format.
    let image = std::fs::File::options().write(true).open(&disk.image).unwrap();
    for offset in [64 << 10, 64 << 20] {
        image.write_all_at(&[7; 4096], offset).unwrap();
    }
    tool("blockdev", &["--flushbufs"], &disk.device);
    let refused = machine.stage(&disk, wanted()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

#[tokio::test]
async fn a_driver_that_dies_in_a_format_leaves_a_disk_that_its_successor_formats() {
    let mut machine = Machine::new();
    let dying = "for device; do :; done
        printf noise | dd of=$device bs=1k seek=3 conv=notrunc status=none
        kill -9 $PPID";
    let tools = tools(&machine, "mkfs.ext4", dying);
    machine.start_driver(Some(&tools)).await;
    let disk = machine.disk(16);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap_err();
    assert_eq!(machine.wait_for_driver().await, None, "the driver was to be killed");
    machine.start_driver(None).await;
    machine.stage(&disk, wanted()).await.unwrap();
}

#[tokio::test]
async fn a_caller_that_goes_away_does_not_stop_the_work() {
    let mut machine = Machine::new();
    let gate = machine.path("gate");
    tool("mkfifo", &[], &gate);
    let begun = machine.path("begun");
    // Waits at the gate, then does the real thing.
    let (begins, opens) = (begun.display(), gate.display());
    let slow = format!("touch {begins}\nread -r real < {opens}\nexec \"$real\" \"$@\"");
    let tools = tools(&machine, "mkfs.ext4", &slow);
    machine.start_driver(Some(&tools)).await;
    let disk = machine.disk(16);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    let at_the_gate = async {
        while !begun.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        answer = machine.stage(&disk, wanted()) => panic!("its tool was not waited for: {answer:?}"),
        () = at_the_gate => {}
    }
    let meanwhile = machine.stage(&disk, wanted()).await.unwrap_err();
    assert_eq!(meanwhile.code(), Code::Aborted, "{meanwhile}");

    let mut find = Command::new("sh");
    find.args(["-c", "command -v mkfs.ext4"]).stdout(Stdio::piped());
    let real = begin(&mut find).wait_with_output().unwrap().stdout;
    std::fs::write(&gate, real).unwrap();
    let done = async {
        while let Err(status) = machine.stage(&disk, wanted()).await {
            assert_eq!(status.code(), Code::Aborted, "{status}");
        }
    };
    tokio::time::timeout(Duration::from_secs(60), done).await.unwrap();
    assert!(machine.mounted(&machine.staging(&disk)).is_some());
}

#[tokio::test]
async fn a_filesystem_in_use_stays_and_its_user_is_named() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    machine.stage(&disk, filesystem("ext4", Mode::SingleNodeWriter)).await.unwrap();
    let mut user = Command::new("sleep");
    let mut user = begin(user.arg("600").current_dir(machine.staging(&disk)).stdout(Stdio::null()));
    let refused = machine.unstage(&disk).await;
    user.kill().unwrap();
    user.wait().unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&format!("sleep (pid {})", user.id())), "{refused}");
    machine.unstage(&disk).await.unwrap();
}

#[tokio::test]
async fn a_publish_that_was_cut_off_is_finished() {
    let mut machine = Machine::start().await;
    let disk = machine.disk(16);
    let wanted = || filesystem("ext4", Mode::SingleNodeWriter);
    machine.stage(&disk, wanted()).await.unwrap();
    // Bound, but not yet read-only.
    let target = machine.target(&disk, "one");
    std::fs::create_dir(&target).unwrap();
    rustix::mount::mount_bind(machine.staging(&disk), &target).unwrap();
    machine.publish(&disk, "one", wanted(), true).await.unwrap();
    assert!(std::fs::write(target.join("file"), "x").is_err());
    // Mounts upon each other all go.
    rustix::mount::mount_bind(machine.staging(&disk), &target).unwrap();
    machine.unpublish(&disk, "one").await.unwrap();
    assert!(!target.exists());
}
