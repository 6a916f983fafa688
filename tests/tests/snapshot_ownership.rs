//! Ownership of snapshots: which ones a guest can use, list and delete.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::{ListSnapshotsRequest, Snapshot};
use kube::api::DeleteParams;
use serde_json::json;
use tests::bytes::{noise, read, write};
use tests::driver::{Driver, restored_volume};
use tests::{MIB, run, unique};
use tonic::Code;

/// Size of a volume of 4 MiB.
const ALL: usize = 4 << 20;

// ---- existing snapshots ----

#[tokio::test]
async fn a_snapshot_assigned_by_the_platform_team_is_used_and_kept() -> Result<()> {
    run(|s| async move {
        let own = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let claim = s.management_claim(&own, json!({})).await?;
        write(&s.file_of(&s.infra_volume(&claim).await?).await?, &noise(7, ALL))?;
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, s.cluster_id);
        for (name, labels) in [("own", own), ("shared", [(share.as_str(), "ro")])] {
            let handle = s.management_snapshot(&labels, &claim).await?;
            s.static_snapshot(name, &handle, "Retain").await?;
            assert_eq!(s.snapshot_ready(name).await?, handle);
            let status = s.guest_snapshots().get(name).await?.data["status"].clone();
            assert_eq!(status["restoreSize"], "4Mi", "{status}");
            let restored = format!("from-{name}");
            s.restore(&restored, name, "4Mi").await?;
            let (_, file) = s.bound_file(&restored).await?;
            assert!(read(&file, ALL)? == noise(7, ALL), "{name}");
            s.guest_snapshots().delete(name, &DeleteParams::default()).await?;
            s.snapshot_gone(name).await?;
            assert!(s.snapshots().get(&handle).await?.metadata.deletion_timestamp.is_none(), "{name}");
        }

        let handle = s.management_snapshot(&[(&share, "ro")], &claim).await?;
        let refused = s.driver.delete_snapshot(&handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        let texts = [handle.as_str(), "shared", "Retain"];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        assert!(s.snapshots().get(&handle).await?.metadata.deletion_timestamp.is_none());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_of_another_guest_is_reported_like_a_missing_one() -> Result<()> {
    run(|s| async move {
        let claim = s.management_claim(&[(names::LABEL_CLUSTER_ID, &s.cluster_id)], json!({})).await?;
        let unlabelled = s.management_snapshot(&[], &claim).await?;
        let another = [(names::LABEL_CLUSTER_ID, "another-guest")];
        let their_claim = s.management_claim(&another, json!({})).await?;
        let foreign = s.management_snapshot(&another, &their_claim).await?;
        let absent = unique(&s.name);
        let mut messages = Vec::new();
        for (name, handle) in [("absent", &absent), ("unlabelled", &unlabelled), ("foreign", &foreign)] {
            let content = s.static_snapshot(name, handle, "Delete").await?;
            let error = s.snapshot_failure(name, &[handle]).await?;
            s.wait_for_event_of("VolumeSnapshotContent", &content, &[handle]).await?;

            let restored = restored_volume(&s.csi_name(), 4 * MIB, handle);
            let refused = s.driver.create(restored).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{name}: {refused}");
            s.driver.delete_snapshot(handle).await?;

            // The content has deletionPolicy Delete.
            s.guest_snapshots().delete(name, &DeleteParams::default()).await?;
            s.snapshot_gone(name).await?;
            let without = |text: &str| text.replace(handle.as_str(), "SNAPSHOT").replace(&content, "CONTENT");
            messages.push((without(&error), without(refused.message())));
        }
        assert!(messages.iter().all(|one| *one == messages[0]), "{messages:#?}");
        for handle in [&unlabelled, &foreign] {
            assert!(s.snapshots().get(handle).await?.metadata.deletion_timestamp.is_none(), "{handle}");
        }
        Ok(())
    })
    .await
}

// ---- lists ----

/// All snapshots that a driver lists, page by page.
async fn listed(driver: &Driver, most: i32, source: &str) -> Result<Vec<Snapshot>> {
    let mut request =
        ListSnapshotsRequest { max_entries: most, source_volume_id: source.to_owned(), ..Default::default() };
    let mut found = Vec::new();
    loop {
        let answer = driver.calls().list_snapshots(request.clone()).await?.into_inner();
        ensure!(most == 0 || answer.entries.len() <= most as usize, "{} of {most}", answer.entries.len());
        found.extend(answer.entries.into_iter().filter_map(|entry| entry.snapshot));
        if answer.next_token.is_empty() {
            return Ok(found);
        }
        request.starting_token = answer.next_token;
    }
}

#[tokio::test]
async fn each_guest_lists_only_its_own_snapshots_page_by_page() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let own_volume = s.volume().await?;
        let other_volume =
            s.management_claim(&[(names::LABEL_CLUSTER_ID, &second.cluster_id)], json!({})).await?;
        let mut own = BTreeSet::new();
        for _ in 0..5 {
            own.insert(s.csi_snapshot(&unique(&s.name), &own_volume).await?.snapshot_id);
        }
        let foreign =
            s.management_snapshot(&[(names::LABEL_CLUSTER_ID, &second.cluster_id)], &other_volume).await?;
        let unlabelled = s.management_snapshot(&[], &own_volume).await?;

        for most in [0, 1, 2, 1000] {
            let found = listed(&s.driver, most, "").await?;
            let times = found.iter().fold(BTreeMap::new(), |mut times, one| {
                *times.entry(one.snapshot_id.as_str()).or_insert(0) += 1;
                times
            });
            for id in &own {
                assert_eq!(times.get(id.as_str()), Some(&1), "in pages of {most}");
            }
            assert!(!times.contains_key(foreign.as_str()) && !times.contains_key(unlabelled.as_str()));
        }
        let of_volume: BTreeSet<_> =
            listed(&s.driver, 2, &own_volume).await?.into_iter().map(|one| one.snapshot_id).collect();
        assert_eq!(of_volume, own);
        let other_snapshots: Vec<_> = listed(&second.driver, 0, &other_volume).await?;
        assert!(
            other_snapshots.len() == 1 && other_snapshots[0].snapshot_id == foreign,
            "{other_snapshots:?}"
        );

        for (id, expected) in [(own.first().context("none")?, 1), (&foreign, 0), (&unlabelled, 0)] {
            let request = ListSnapshotsRequest { snapshot_id: id.clone(), ..Default::default() };
            let answer = s.driver.calls().list_snapshots(request).await?.into_inner();
            assert_eq!(answer.entries.len(), expected, "{answer:?}");
        }
        let request = ListSnapshotsRequest { starting_token: "no-token".into(), ..Default::default() };
        let refused = s.driver.calls().list_snapshots(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::Aborted, "{refused}");
        Ok(())
    })
    .await
}

// ---- calls ----

#[tokio::test]
async fn calls_are_idempotent_and_another_source_or_class_for_the_same_name_is_refused() -> Result<()> {
    run(|s| async move {
        let (one, other) = (s.volume().await?, s.volume().await?);
        let name = unique(&s.name);
        let first = s.csi_snapshot(&name, &one).await?;
        assert!(first.ready_to_use && first.size_bytes == 4 * MIB && first.source_volume_id == one);
        assert_eq!(s.csi_snapshot(&name, &one).await?, first);
        let refused = s.csi_snapshot(&name, &other).await.unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        let texts = [&first.snapshot_id, &one, &other];
        assert!(texts.iter().all(|text| refused.message().contains(*text)), "{refused}");
        let refused = s.driver.snapshot(&name, &one, "another").await.unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");

        for unknown in [unique(&s.name), s.management_claim(&[], json!({})).await?] {
            let refused = s.csi_snapshot(&unique(&s.name), &unknown).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{refused}");
            assert!(refused.message().contains(&unknown), "{refused}");
        }
        for _ in 0..2 {
            s.driver.delete_snapshot(&first.snapshot_id).await?;
        }
        s.driver.delete_snapshot("never-was").await?;
        assert!(s.snapshots().get_opt(&first.snapshot_id).await?.is_none());
        Ok(())
    })
    .await
}
