//! Snapshots in the guest, the management cluster and the storage infra, and volumes restored from them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::{VolumeSource, VolumeState};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;
use tests::bytes::{checksum, device, noise, read, read_at, write};
use tests::driver::restored_volume;
use tests::own_pool::freeze_filesystem_of;
use tests::pods::{self, ClaimOptions, Script, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, from_snapshot, run, unique};
use tonic::Code;

/// Size of a volume of 4 MiB.
const ALL: usize = 4 << 20;

// ---- in both tiers ----

#[tokio::test]
async fn a_guest_snapshot_has_matching_objects_in_every_tier_and_leaves_nothing() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "5Mi").await?;
        let (volume, _) = s.bound_file("data").await?;
        s.snapshot("first", "data").await?;
        let handle = s.snapshot_ready("first").await?;
        let guest_snapshot = s.guest_snapshots().get("first").await?;
        let csi_name = format!("snapshot-{}", guest_snapshot.uid().context("no UID")?);
        assert_eq!(handle, names::management_snapshot(&s.cluster_id, &csi_name), "a deterministic name");

        let management_snapshot = s.snapshots().get(&handle).await?;
        assert_eq!(management_snapshot.labels().get(names::LABEL_CLUSTER_ID), Some(&s.cluster_id));
        for (annotation, value) in
            [(names::ANNOTATION_GUEST_SNAPSHOT, "first"), (names::ANNOTATION_GUEST_NAMESPACE, &s.name)]
        {
            assert_eq!(
                management_snapshot.annotations().get(annotation).map(String::as_str),
                Some(value),
                "{annotation}"
            );
        }
        assert_eq!(management_snapshot.data["spec"]["source"]["persistentVolumeClaimName"], volume);
        assert_eq!(management_snapshot.data["spec"]["volumeSnapshotClassName"], "nestor");
        for status in [&guest_snapshot.data["status"], &management_snapshot.data["status"]] {
            assert_eq!(status["readyToUse"], true, "{status}");
            assert_eq!(status["restoreSize"], "5Mi", "{status}");
            assert_eq!(
                status["creationTime"], management_snapshot.data["status"]["creationTime"],
                "{status}"
            );
        }

        let kept = s.infra_snapshot(&handle).await?;
        assert_eq!(kept.volume, s.infra_volume(&volume).await?.id);
        assert_eq!((kept.capacity_bytes, kept.state), (5 << 20, VolumeState::Ready));
        let second = |time: &str| time.split(['.', 'Z']).next().unwrap_or_default().to_owned();
        let created = guest_snapshot.data["status"]["creationTime"].as_str().context("no creationTime")?;
        assert_eq!(
            second(&kept.created_at),
            second(created),
            "the creation time differs from the storage infra's"
        );

        let content =
            guest_snapshot.data["status"]["boundVolumeSnapshotContentName"].as_str().context("no content")?;
        s.guest_snapshots().delete("first", &DeleteParams::default()).await?;
        eventually("the guest's content is deleted", PATIENCE, || async {
            let left = s.guest_contents().get_opt(content).await?;
            Ok(left.map_or(Ok(()), |content| Err(content.data["status"].to_string())))
        })
        .await?;
        // The guest's content is deleted only after everything below it.
        assert!(s.snapshots().get_opt(&handle).await?.is_none());
        assert!(s.infra.get_snapshot(&kept.id).await?.is_none());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_is_not_ready_before_the_infra_has_copied_all_data() -> Result<()> {
    run(|s| async move {
        let (volume, file) = copied_volume(&s, "16Mi").await?;
        write(&file, &noise(5, 1 << 20).repeat(16))?;
        let id = s.infra_volume(&volume).await?.id;
        let frozen = freeze_filesystem_of(&file)?;
        s.snapshot("first", "data").await?;
        let both = || async {
            // The guest is read first: what it reports must be true in the storage infra by then.
            let guest_ready = s.guest_snapshots().get("first").await?.data["status"]["readyToUse"].as_bool();
            let infra_states = s.infra.list_snapshots(Some(&id), None, None).await?.items;
            let infra_states = infra_states.iter().map(|one| one.state).collect::<Vec<_>>();
            ensure!(
                guest_ready != Some(true) || infra_states == [VolumeState::Ready],
                "the storage infra has {infra_states:?}"
            );
            anyhow::Ok((guest_ready, infra_states))
        };
        eventually("the copy is in progress, and the guest's snapshot is not ready", PATIENCE, || async {
            let observed = both().await?;
            Ok(if observed == (Some(false), vec![VolumeState::Creating]) {
                Ok(())
            } else {
                Err(format!("{observed:?}"))
            })
        })
        .await?;
        drop(frozen);
        eventually("ready in the guest", PATIENCE, || async {
            let observed = both().await?;
            Ok(if observed.0 == Some(true) { Ok(()) } else { Err(format!("{observed:?}")) })
        })
        .await?;
        s.snapshot_ready("first").await?;
        Ok(())
    })
    .await
}

/// A bound claim `data` in a pool without reflink, where snapshots are full copies; returns its handle and file.
async fn copied_volume(s: &Scenario, size: &str) -> Result<(String, std::path::PathBuf)> {
    let label = unique("label");
    s.pool_of_copies(&[(&label, &s.name)]).await?;
    let (_, class) = s.classes(&[(&format!("pool.{label}"), &s.name)]).await?;
    s.claim("data", &class, size).await?;
    s.bound_file("data").await
}

// ---- data ----

#[tokio::test]
async fn restored_volumes_of_the_same_and_a_larger_size_have_the_data_of_the_snapshot() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (_, source) = s.bound_file("data").await?;
        let (then, later) = (noise(1, ALL), noise(2, ALL));
        write(&source, &then)?;
        s.snapshot("first", "data").await?;
        let handle = s.snapshot_ready("first").await?;
        write(&source, &later)?;

        s.restore("same", "first", "4Mi").await?;
        s.restore("larger", "first", "8Mi").await?;
        for (claim, size) in [("same", 4_u64 << 20), ("larger", 8 << 20)] {
            let (management_claim, file) = s.bound_file(claim).await?;
            s.has_capacity(claim, &format!("{}Mi", size >> 20)).await?;
            let reference = s.claims().get(&management_claim).await?.spec.and_then(|spec| spec.data_source);
            let reference = reference.context("the management claim has no source")?;
            assert_eq!((reference.kind.as_str(), &reference.name), ("VolumeSnapshot", &handle));
            let volume = s.infra_volume(&management_claim).await?;
            assert_eq!(volume.capacity_bytes, size);
            let kept = s.infra_snapshot(&handle).await?.id;
            assert_eq!(volume.source, Some(VolumeSource::Snapshot(kept)));
            assert!(read(&file, ALL)? == then, "{claim} has other data");
            let rest = read_at(&file, 4 << 20, size as usize - ALL)?;
            assert!(rest.iter().all(|byte| *byte == 0), "{claim} has data behind the snapshot's data");
        }

        // The volumes are independent of each other.
        let (_, same) = s.bound_file("same").await?;
        write(&same, b"changed")?;
        s.restore("again", "first", "4Mi").await?;
        let (again, file) = s.bound_file("again").await?;
        assert!(read(&file, ALL)? == then, "the snapshot changed with a restored volume");
        assert!(read(&source, ALL)? == later, "the source changed");
        let node = s.node().await?;
        let disk = s.driver.publish(&again, &node.name).await?;
        assert!(read(&device(&node, &disk), ALL)? == then, "the node reads other data");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_source_can_be_deleted_before_its_snapshot_and_a_snapshot_before_its_restored_volume() -> Result<()>
{
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (volume, source) = s.bound_file("data").await?;
        write(&source, &noise(1, ALL))?;
        s.snapshot("first", "data").await?;
        let handle = s.snapshot_ready("first").await?;

        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        eventually("the source is deleted in both tiers", PATIENCE, || async {
            let left = s.claims().get_opt(&volume).await?;
            Ok(left.map_or(Ok(()), |claim| Err(format!("{:?}", claim.metadata))))
        })
        .await?;
        eventually("the source is deleted in the storage infra", PATIENCE, || async {
            Ok(if source.exists() { Err(source.display().to_string()) } else { Ok(()) })
        })
        .await?;
        assert_eq!(s.infra_snapshot(&handle).await?.state, VolumeState::Ready);
        s.restore("restored", "first", "4Mi").await?;
        let (_, restored) = s.bound_file("restored").await?;
        assert!(read(&restored, ALL)? == noise(1, ALL));

        s.guest_snapshots().delete("first", &DeleteParams::default()).await?;
        s.snapshot_gone("first").await?;
        assert!(read(&restored, ALL)? == noise(1, ALL), "the data was deleted with the snapshot");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_restore_smaller_than_the_snapshot_is_refused_with_both_sizes() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        s.bound("data").await?;
        s.snapshot("first", "data").await?;
        let handle = s.snapshot_ready("first").await?;
        let name = s.csi_name();
        let refused = s.driver.create(restored_volume(&name, 2 * MIB, &handle)).await.unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let texts = [handle.as_str(), "4Mi", "2Mi"];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        assert!(s.claims().get_opt(&s.claim_name(&name)).await?.is_none());

        s.restore("smaller", "first", "2Mi").await?;
        s.wait_for_event("smaller", &[&(2 * MIB).to_string(), &(4 * MIB).to_string(), "first"]).await?;
        s.guest_claims().delete("smaller", &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

// ---- refusals ----

#[tokio::test]
async fn a_class_without_a_management_class_is_reported_and_recovers_when_there_is_one() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        s.bound("data").await?;
        let of = json!({"persistentVolumeClaimName": "data"});
        let none = s.snapshot_class(&[]).await?;
        s.snapshot_of("without", &none, of.clone()).await?;
        let texts = ["InvalidArgument", names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS, "is missing"];
        s.snapshot_failure("without", &texts).await?;

        let absent = s.snapshot_class(&[]).await?;
        let leads = s.snapshot_class(&[(names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS, &absent)]).await?;
        s.snapshot_of("data", &leads, of).await?;
        let texts = ["InvalidArgument", &absent, "does not exist in the management cluster"];
        s.snapshot_failure("data", &texts).await?;
        let content = s.guest_snapshots().get("data").await?.data["status"].clone();
        let content = content["boundVolumeSnapshotContentName"].as_str().context("no content")?;
        let (reason, _) = s.wait_for_event_of("VolumeSnapshotContent", content, &texts).await?;
        // csi-snapshotter uses the second reason if an earlier attempt failed for another cause.
        let reasons = ["SnapshotCreationFailed", "SnapshotContentCheckandUpdateFailed"];
        assert!(reasons.contains(&reason.as_str()), "{reason}");
        s.management_snapshot_class(&absent).await?;
        s.snapshot_ready("data").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_refused_by_the_infra_is_reported_with_its_message_and_retried() -> Result<()> {
    run(|s| async move {
        let (volume, file) = copied_volume(&s, "4Mi").await?;
        write(&file, &noise(3, ALL))?;
        let node = s.node().await?;
        s.driver.publish(&volume, &node.name).await?;
        s.snapshot("first", "data").await?;
        s.snapshot_failure("first", &["attached to a VM", "detach it there first"]).await?;
        s.driver.unpublish(&volume, &node.name).await?;
        s.snapshot_ready("first").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_deleted_before_it_was_taken_leaves_nothing() -> Result<()> {
    run(|s| async move {
        let (volume, _) = copied_volume(&s, "4Mi").await?;
        let node = s.node().await?;
        s.driver.publish(&volume, &node.name).await?;
        s.snapshot("first", "data").await?;
        s.snapshot_failure("first", &["detach it there first"]).await?;
        s.guest_snapshots().delete("first", &DeleteParams::default()).await?;
        s.snapshot_gone("first").await?;
        eventually("the management snapshot is deleted", PATIENCE, || async {
            let own = |one: &&kube::api::DynamicObject| {
                one.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&s.name)
            };
            let list = s.snapshots().list(&ListParams::default()).await?;
            let left = list.iter().find(own).map(|one| one.data["status"].to_string());
            Ok(left.map_or(Ok(()), Err))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_restore_that_cannot_be_created_can_be_deleted_with_its_snapshot() -> Result<()> {
    run(|s| async move {
        let source = s.bound_claim("data").await?;
        s.snapshot("first", "data").await?;
        let handle = s.snapshot_ready("first").await?;
        // No pool matches the class.
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        let claim = s.claim_with("restored", &class, "4Mi", from_snapshot("first")).await?;
        let restored = s.claim_name(&format!("pvc-{}", claim.uid().context("no UID")?));
        s.wait_for_event("restored", &["no pool for"]).await?;
        // Like the deletion of their namespace.
        s.guest_snapshots().delete("first", &DeleteParams::default()).await?;
        for claim in ["data", "restored"] {
            s.guest_claims().delete(claim, &DeleteParams::default()).await?;
        }
        s.snapshot_gone("first").await?;
        eventually("everything is deleted in the management cluster", PATIENCE, || async {
            let claims = (s.claims().get_opt(&source).await?, s.claims().get_opt(&restored).await?);
            let left = s.snapshots().get_opt(&handle).await?.is_some() || claims != (None, None);
            Ok(if left { Err(format!("{claims:?}")) } else { Ok(()) })
        })
        .await
    })
    .await
}

// ---- many ----

#[tokio::test]
async fn twenty_concurrent_snapshots_are_twenty_snapshots() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (volume, file) = s.bound_file("data").await?;
        write(&file, &noise(1, ALL))?;
        let names: Vec<String> = (0..20).map(|number| format!("number-{number}")).collect();
        for name in &names {
            s.snapshot(name, "data").await?;
        }
        let mut handles = BTreeSet::new();
        for name in &names {
            handles.insert(s.snapshot_ready(name).await?);
        }
        assert_eq!(handles.len(), 20);
        let id = s.infra_volume(&volume).await?.id;
        assert_eq!(s.infra.list_snapshots(Some(&id), None, None).await?.items.len(), 20);
        s.restore("restored", "number-19", "4Mi").await?;
        let (_, restored) = s.bound_file("restored").await?;
        assert_eq!(checksum(&restored).await?, checksum(&file).await?);
        Ok(())
    })
    .await
}

// ---- pods ----

/// A shell loop that waits until a file exists.
fn until(path: &str) -> String {
    format!("until [ -e {path} ]; do sleep 1; done")
}

#[tokio::test]
async fn a_snapshot_of_a_running_pods_volume_has_all_earlier_and_no_later_writes() -> Result<()> {
    pods::run(|pods| async move {
        let s = pods.scenario();
        let volume = pods.claim("data", &filesystem("ext4")).await?;
        let dd =
            |name: &str| format!("dd if=/dev/urandom of=/data/{name} bs=64k count=64 conv=fsync 2>/dev/null");
        // The pod keeps writing, so that the snapshot is of a mounted filesystem.
        let writer = format!(
            "{}\ntouch /data/written; sync
            while [ ! -e /data/go ]; do echo more >> /data/log; done
            {}\ntouch /data/rewritten; sync; exec sleep 1000",
            dd("first.bin"),
            dd("second.bin")
        );
        let (here, there) = (&pods.first_node, &pods.second_node);
        let writer = pods.start(Script::new("writer", here, &writer).mount(&volume, "/data")).await?;
        pods.running(&writer).await?;
        // The file can be visible before the writer's sync has ended.
        let look = format!("{}\nsync; sha256sum < /data/first.bin", until("/data/written"));
        let written = pods.run(Script::new("look", here, &look).mount(&volume, "/data")).await?;
        s.snapshot("first", &volume.claim).await?;
        s.snapshot_ready("first").await?;
        let go = format!("touch /data/go; {}; ls /data", until("/data/rewritten"));
        let output = pods.run(Script::new("go", here, &go).mount(&volume, "/data")).await?;
        ensure!(output.contains("second.bin"), "{output}");

        let mut more = from_snapshot("first");
        let same = pods.claim("same", &ClaimOptions { more: more.clone(), ..filesystem("ext4") }).await?;
        more["resources"] = json!({"requests": {"storage": "640Mi"}});
        let larger = pods.claim("larger", &ClaimOptions { more, ..filesystem("ext4") }).await?;
        let read = "for claim in same larger; do
                sha256sum < /$claim/first.bin; ls /$claim | grep -v -e lost+found -e log | tr '\\n' ' '; echo
                df -kP /$claim | tail -n 1 | awk '{print $2}'
            done";
        let reader = Script::new("reader", there, read).mount(&same, "/same").mount(&larger, "/larger");
        let output = pods.run(reader).await?;
        let lines: Vec<&str> = output.lines().map(str::trim).collect();
        let [first, files, size, first_larger, files_larger, size_larger] = lines[..] else {
            anyhow::bail!("{output}")
        };
        ensure!(first == written && first_larger == written, "written {written}, read {output}");
        ensure!(files == "first.bin written" && files_larger == files, "{output}");
        let of_disk = |kib: &str, mebibytes: u64| -> Result<bool> {
            let kib: u64 = kib.parse().with_context(|| output.clone())?;
            Ok(kib > (mebibytes << 10) / 10 * 8 && kib <= mebibytes << 10)
        };
        ensure!(of_disk(size, 320)? && of_disk(size_larger, 640)?, "{output}");
        let capacity = s.volume_bytes(&larger.handle).await?;
        ensure!(capacity == 640 << 20, "the volume has {capacity} bytes");
        Ok(())
    })
    .await
}
