//! Volumes in pods on real VMs: data survives pods, and non-blank disks are never formatted.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use tests::pods::{self, ClaimOptions, PodScenario, Script, Volume, block, filesystem};
use tests::{PATIENCE, eventually};

// ---- data survives ----

/// Prints the filesystem's type and the checksum of the data.
const READ: &str = "grep ' /data ' /proc/mounts | cut -d' ' -f3; cat /data/*.bin | sha256sum | cut -d' ' -f1";

async fn data_survives_pods(kind: &'static str, pods: Arc<PodScenario>) -> Result<()> {
    let (here, there) = (&pods.first_node, &pods.second_node);
    let volume = pods.claim("data", &filesystem(kind)).await?;
    let write = "dd if=/dev/urandom of=/data/1.bin bs=64k count=64 conv=fsync 2>/dev/null";
    let writer = Script::new("writer", here, &format!("{write}\n{READ}")).mount(&volume, "/data");
    let written = pods.run(writer).await?;
    ensure!(
        written.starts_with(&format!("{kind}\n")),
        "{kind} was requested, but this is mounted: {written}"
    );

    let restarted = Script::new("restarted", here, READ).mount(&volume, "/data");
    let read = pods.run(restarted).await?;
    ensure!(read == written, "after a restart: read {read}, written {written}");

    let moved = format!("{READ}\necho more > /data/2.bin\nsync");
    let moved = Script::new("moved", there, &moved).mount(&volume, "/data");
    let read = pods.run(moved).await?;
    ensure!(read == written, "on another VM: read {read}, written {written}");
    Ok(())
}

#[tokio::test]
async fn data_on_ext4_survives_the_pod_and_a_move_to_another_vm() -> Result<()> {
    pods::run(|pods| data_survives_pods("ext4", pods)).await
}

#[tokio::test]
async fn data_on_xfs_survives_the_pod_and_a_move_to_another_vm() -> Result<()> {
    pods::run(|pods| data_survives_pods("xfs", pods)).await
}

#[tokio::test]
async fn data_on_btrfs_survives_the_pod_and_a_move_to_another_vm() -> Result<()> {
    pods::run(|pods| data_survives_pods("btrfs", pods)).await
}

#[tokio::test]
async fn a_pod_reads_what_another_pod_wrote_to_a_block_device() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("raw", &block()).await?;
        // At both ends of the device, to check its size too.
        let write = "size=$(blockdev --getsize64 /dev/volume)
            printf 'the first block' | dd of=/dev/volume conv=notrunc,fsync 2>/dev/null
            printf 'the last block' | dd of=/dev/volume bs=512 seek=$((size / 512 - 1)) conv=notrunc,fsync 2>/dev/null
            echo $size";
        let writer = Script::new("writer", &pods.first_node, write).device(&volume, "/dev/volume");
        let size: u64 = pods.run(writer).await?.parse().context("blockdev printed no size")?;
        ensure!(size == 320 << 20, "the device has {size} bytes");
        let read = "size=$(blockdev --getsize64 /dev/volume)
            dd if=/dev/volume bs=15 count=1 2>/dev/null; echo
            dd if=/dev/volume bs=512 skip=$((size / 512 - 1)) 2>/dev/null | head -c 14";
        let reader = Script::new("reader", &pods.second_node, read).device(&volume, "/dev/volume");
        let output = pods.run(reader).await?;
        ensure!(output == "the first block\nthe last block", "{output}");
        Ok(())
    })
    .await
}

// ---- pod options ----

#[tokio::test]
async fn a_pod_with_a_read_only_volume_cannot_write() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let writer =
            Script::new("writer", &pods.first_node, "echo kept > /data/file; sync").mount(&volume, "/data");
        pods.run(writer).await?;
        let script =
            "cat /data/file; touch /data/new && exit 1; echo more >> /data/file && exit 1; cat /data/file";
        let reader = Script::new("reader", &pods.first_node, script).mount_read_only(&volume, "/data");
        let output = pods.run(reader).await?;
        let refused = output.matches("Read-only file system").count();
        ensure!(refused == 2 && output.matches("kept").count() == 2 && !output.contains("more"), "{output}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn sub_paths_of_a_volume_are_mounted_separately() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let script = "echo one > /one/file; echo two > /two/file
            cd /all; find one two -type f | sort; cat one/file two/file; ls /one";
        let pod = Script::new("pod", &pods.first_node, script)
            .mount(&volume, "/all")
            .and_sub_path(&volume, "one", "/one")
            .and_sub_path(&volume, "two", "/two");
        let output = pods.run(pod).await?;
        ensure!(output == "one/file\ntwo/file\none\ntwo\nfile", "{output}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_belongs_to_the_fs_group_of_the_pod() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let script = "umask 077; echo secret > /data/file; sync";
        pods.run(Script::new("root", &pods.first_node, script).mount(&volume, "/data")).await?;
        let script = "id -u; stat -c %g /data /data/file; echo more >> /data/file
            echo new > /data/new; stat -c %g /data/new; cat /data/file";
        let user = Script::new("user", &pods.first_node, script).mount(&volume, "/data").as_user(1000, 2000);
        let output = pods.run(user).await?;
        ensure!(output == "1000\n2000\n2000\n2000\nsecret\nmore", "{output}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn two_pods_on_one_vm_share_a_volume() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let script = |pod_name: &str, other: &str| {
            format!(
                "echo {pod_name} > /data/{pod_name}.new; mv /data/{pod_name}.new /data/{pod_name}
                until [ -e /data/{other} ]; do sleep 1; done; cat /data/{other}"
            )
        };
        for (pod_name, other) in [("one", "two"), ("two", "one")] {
            let pod =
                Script::new(pod_name, &pods.first_node, &script(pod_name, other)).mount(&volume, "/data");
            pods.start(pod).await?;
        }
        for (pod_name, other) in [("one", "two"), ("two", "one")] {
            let output = pods.finish(pod_name).await?;
            ensure!(output == other, "pod {pod_name} read {output:?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn mount_options_of_the_class_are_used() -> Result<()> {
    pods::run(|pods| async move {
        let ask = ClaimOptions { options: &["noatime", "commit=17", "nosuid"], ..filesystem("ext4") };
        let volume = pods.claim("data", &ask).await?;
        let script = "grep ' /data ' /proc/mounts | cut -d' ' -f4";
        let output = pods.run(Script::new("pod", &pods.first_node, script).mount(&volume, "/data")).await?;
        let options: Vec<&str> = output.split(',').collect();
        let missing: Vec<_> = ask.options.iter().filter(|option| !options.contains(option)).collect();
        ensure!(missing.is_empty(), "{missing:?} missing in {output}");
        Ok(())
    })
    .await
}

// ---- disks that are not blank ----

/// Runs a pod with ext4 on a volume that `prepare` has written to. The pod must not start, kubelet must report these
/// words, and no byte may change.
async fn is_never_formatted(
    pods: Arc<PodScenario>,
    prepare: impl AsyncFnOnce(&Path) -> Result<()>,
    words: &[&str],
) -> Result<()> {
    let volume = pods.claim("data", &filesystem("ext4")).await?;
    prepare(&volume.file).await?;
    let before = checksum(&volume.file).await?;
    let pod = pods.start(Script::new("pod", &pods.first_node, "ls /data").mount(&volume, "/data")).await?;
    let output = pods.mount_failure(&pod, words).await?;
    ensure!(output.contains(&volume.disk), "the event does not contain the disk: {output}");
    let waits = pods.waiting_reason(&pod).await?;
    ensure!(waits == "ContainerCreating", "the pod waits for {waits}");
    pods.remove(&pod).await?;
    pods.detached(&volume).await?;
    let after = checksum(&volume.file).await?;
    ensure!(before == after, "the disk was written to: {before} became {after}");
    Ok(())
}

#[tokio::test]
async fn a_disk_with_another_filesystem_is_never_formatted() -> Result<()> {
    pods::run(|pods| async move {
        let prepare = async |file: &Path| {
            let path = file.to_string_lossy();
            lab::process::run(&mut lab::process::command("mkfs.xfs", ["-q", "-f", &path])).await.map(drop)
        };
        is_never_formatted(pods, prepare, &["xfs", "ext4", "not changed"]).await
    })
    .await
}

#[tokio::test]
async fn a_disk_with_a_partition_table_is_never_formatted() -> Result<()> {
    pods::run(|pods| async move {
        // An MBR partition table with one Linux partition (type 0x83) of 64 MiB at 1 MiB.
        let mut entry = [0; 16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&2048_u32.to_le_bytes());
        entry[12..16].copy_from_slice(&131_072_u32.to_le_bytes());
        let prepare = async |file: &Path| write_at(file, &[(446, &entry), (510, &[0x55, 0xaa])]);
        is_never_formatted(pods, prepare, &["dos partition table", "not changed"]).await
    })
    .await
}

#[tokio::test]
async fn a_disk_with_unknown_data_is_never_formatted() -> Result<()> {
    pods::run(|pods| async move {
        // Pseudo-random bytes that match no known format.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(256 * 1024)
        .collect();
        let prepare = async |file: &Path| write_at(file, &[(0, &noise)]);
        is_never_formatted(pods, prepare, &["not empty", "not changed"]).await
    })
    .await
}

fn write_at(file: &Path, pieces: &[(u64, &[u8])]) -> Result<()> {
    let mut file = File::options().write(true).open(file).with_context(|| format!("{}", file.display()))?;
    for (at, bytes) in pieces {
        file.seek(SeekFrom::Start(*at))?;
        file.write_all(bytes)?;
    }
    Ok(file.sync_all()?)
}

async fn checksum(file: &Path) -> Result<String> {
    lab::process::run(&mut lab::process::command("sha256sum", [file])).await
}

// ---- the VM ----

#[tokio::test]
async fn the_directory_below_a_mount_has_mode_0() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let pod = Script::new("pod", &pods.first_node, "exec sleep 1000").mount(&volume, "/data");
        let pod = pods.start(pod).await?;
        let uid = pods.running(&pod).await?.uid().context("the pod has no UID")?;
        // Unmounted in a separate mount namespace, so that the pod keeps its volume.
        let look = format!(
            "target='/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/{}/mount'
            mountpoint -q \"$target\"
            unshare --mount sh -euc 'umount \"$0\"; stat -c %a \"$0\"' \"$target\"",
            volume.pv
        );
        let mode = pods.run(Script::on_vm("look", &pods.first_node, &look)).await?;
        ensure!(mode == "0", "the target has mode {mode}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_vm_keeps_nothing_of_a_detached_volume() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        // Traces of the volume: its disk by WWN, mounts, kubelet's folders for pods and staging.
        let wwn = format!("wwn-0x{}", &volume.disk.replace('-', "")[..16]);
        let look = format!(
            "staged=$(printf %s '{}' | sha256sum | cut -d' ' -f1)
            ls -d /dev/disk/by-id/{wwn} 2>/dev/null || true
            grep -e '{}' -e \"$staged\" /proc/self/mountinfo | cut -d' ' -f5 || true
            ls -d /var/lib/kubelet/plugins/kubernetes.io/csi/*/$staged 2>/dev/null || true
            ls -d /var/lib/kubelet/pods/*/volumes/kubernetes.io~csi/{} 2>/dev/null || true",
            volume.handle, volume.pv, volume.pv
        );
        let pod = pods
            .start(Script::new("pod", &pods.first_node, "exec sleep 1000").mount(&volume, "/data"))
            .await?;
        pods.running(&pod).await?;
        let during = pods.run(Script::on_vm("during", &pods.first_node, &look)).await?;
        ensure!(during.lines().count() == 5, "expected a disk, two mounts and two folders: {during}");
        pods.remove(&pod).await?;
        pods.detached(&volume).await?;
        // The guest OS's kernel and udev process the removal a moment after the hypervisor.
        eventually("the VM has no trace of the volume", PATIENCE, || async {
            let after = pods.run(Script::on_vm("after", &pods.first_node, &look)).await?;
            Ok(if after.is_empty() { Ok(()) } else { Err(after) })
        })
        .await
    })
    .await
}

#[tokio::test]
async fn kubelet_reports_the_usage_of_a_volume() -> Result<()> {
    pods::run(|pods| async move {
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let script = "dd if=/dev/zero of=/data/file bs=1M count=64 conv=fsync 2>/dev/null
            exec sleep 1000";
        let pod = pods.start(Script::new("pod", &pods.first_node, script).mount(&volume, "/data")).await?;
        let uid = pods.running(&pod).await?.uid().context("the pod has no UID")?;
        let (used, capacity) = pods.usage(&pods.first_node, &uid, &volume.claim, 64 << 20).await?;
        let size = 320 << 20;
        ensure!(capacity > size / 10 * 8 && capacity <= size, "a volume of {size} bytes reports {capacity}");
        ensure!(used < 96 << 20, "64 MiB are written, but {used} bytes are reported");
        Ok(())
    })
    .await
}

// ---- bytes inside a filesystem ----

/// Magic of an uberblock of ZFS.
const UBERBLOCK: [u8; 8] = 0x00ba_b10c_u64.to_le_bytes();

#[tokio::test]
async fn a_filesystem_with_signatures_inside_it_is_mounted() -> Result<()> {
    pods::run(|pods| async move {
        let (here, there) = (&pods.first_node, &pods.second_node);
        for kind in ["ext4", "xfs"] {
            let volume = pods.claim(kind, &filesystem(kind)).await?;
            let script = "echo kept > /data/kept; sync; cat /data/kept";
            let writer = Script::new(&format!("write-{kind}"), here, script).mount(&volume, "/data");
            ensure!(pods.run(writer).await? == "kept");
            pods.detached(&volume).await?;
            // The last label of ZFS, as a file with an image of a disk leaves it: each KiB begins as an uberblock.
            let label = (320 << 20) - (128 << 10)..320 << 20;
            let blocks: Vec<(u64, &[u8])> = label.step_by(1024).map(|at| (at, &UBERBLOCK[..])).collect();
            write_at(&volume.file, &blocks)?;
            let blkid =
                lab::process::command("blkid", ["-p".as_ref(), volume.file.as_os_str()]).output().await?;
            ensure!(blkid.status.code() == Some(8), "{kind}: blkid is not ambivalent: {blkid:?}");
            let reader =
                Script::new(&format!("read-{kind}"), there, "cat /data/kept").mount(&volume, "/data");
            ensure!(pods.run(reader).await? == "kept", "{kind}");
        }
        Ok(())
    })
    .await
}

// ---- a disk that was replaced ----

/// Deletes the VolumeAttachment of a volume under a running pod, and waits until it is attached again.
async fn replace_disk(pods: &PodScenario, volume: &Volume) -> Result<()> {
    let api = pods.scenario().guest_attachments();
    let of_volume = async || -> Result<_> {
        let all = api.list(&ListParams::default()).await?;
        let found =
            |one: &VolumeAttachment| one.spec.source.persistent_volume_name.as_ref() == Some(&volume.pv);
        Ok(all.items.into_iter().find(found))
    };
    let before = of_volume().await?.context("the volume is not attached")?;
    api.delete(&before.name_any(), &DeleteParams::default()).await?;
    let uid = before.uid();
    eventually("the volume is attached again", pods::GONE, || async {
        let now = of_volume().await?.filter(|one| one.uid() != uid);
        let is_attached = now.is_some_and(|one| one.status.is_some_and(|status| status.attached));
        Ok(if is_attached { Ok(()) } else { Err("it is not".to_owned()) })
    })
    .await
}

#[tokio::test]
async fn a_disk_that_was_replaced_under_its_mount_is_mounted_for_the_next_pod() -> Result<()> {
    pods::run(|pods| async move {
        let node = &pods.first_node;
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let hold = "echo kept > /data/kept; sync; exec sleep 10000";
        let holder = pods.start(Script::new("holder", node, hold).mount(&volume, "/data")).await?;
        pods.running(&holder).await?;
        replace_disk(&pods, &volume).await?;

        // It starts before the other pod ends, so kubelet does not stage the volume again.
        let next = Script::new("next", node, "cat /data/kept; echo more > /data/more; sync");
        let next = pods.start(next.mount(&volume, "/data")).await?;
        let said = pods.mount_failure(&next, &["was removed from this node", &volume.disk]).await?;
        let uid = pods.running(&holder).await?.uid().context("the pod has no UID")?;
        ensure!(said.contains(&uid), "the event does not name the pod with the dead mount: {said}");
        ensure!(pods.finish(&next).await? == "kept");
        pods.remove(&holder).await?;
        pods.remove(&next).await?;
        pods.detached(&volume).await?;
        let after = Script::new("after", node, "cat /data/kept /data/more").mount(&volume, "/data");
        ensure!(pods.run(after).await? == "kept\nmore");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_raw_disk_that_was_replaced_under_a_pod_is_given_to_the_next_pod() -> Result<()> {
    pods::run(|pods| async move {
        let node = &pods.first_node;
        let volume = pods.claim("raw", &block()).await?;
        let hold = "printf kept | dd of=/dev/volume conv=notrunc,fsync 2>/dev/null; exec sleep 10000";
        let holder = pods.start(Script::new("holder", node, hold).device(&volume, "/dev/volume")).await?;
        pods.running(&holder).await?;
        // kubelet calls a pod running when its container has started: it may not have written yet.
        eventually("the pod has written", PATIENCE, || async {
            let file = std::fs::read(&volume.file)?;
            Ok(if file.starts_with(b"kept") { Ok(()) } else { Err("it has not".to_owned()) })
        })
        .await?;
        replace_disk(&pods, &volume).await?;
        let script = "dd if=/dev/volume bs=4 count=1 2>/dev/null";
        let next = Script::new("next", node, script).device(&volume, "/dev/volume");
        ensure!(pods.run(next).await? == "kept");
        Ok(())
    })
    .await
}
