//! Budgets: the storage infra refuses what a guest's StorageBudget does not allow, counts snapshots and volumes that are kept
//! after their claim's deletion, and mgmt-csi reports what is used. One test at a time: one restarts the storage infra, and a
//! guest can have one budget.

use anyhow::{Context, Result, ensure};
use crds::{StorageBudget, names};
use futures::future::try_join_all;
use infra_api::Usage;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube_kit::quantity;
use serde_json::json;
use tests::bytes::{noise, write};
use tests::crash::call_until_final;
use tests::guest::handle;
use tests::program::binary;
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone, unique};
use tokio::process::Command;

/// Size of a volume of 4 MiB.
const SIZE: u64 = 4 << 20;
const CLAIM: &str = "PersistentVolumeClaim";

/// Bytes and volumes of a class.
fn of_class(used: &Usage, class: &str) -> (u64, u64) {
    let of_class = used.classes.get(class).copied().unwrap_or_default();
    (of_class.bytes, of_class.volumes)
}

#[tokio::test]
async fn a_guests_claim_beyond_the_budget_of_a_class_is_refused_with_numbers_and_binds_when_it_is_raised()
-> Result<()> {
    run_alone(|s| async move {
        let (management_class, class) = s.classes(&[]).await?;
        let limits = |bytes: &str| json!({"classes": [{"name": management_class, "bytes": bytes}]});
        let budget = s.budget(&s.cluster_id, &limits("6Mi")).await?;
        s.claim("first", &class, "4Mi").await?;
        s.bound("first").await?;
        s.claim("second", &class, "4Mi").await?;
        let numbers = ["storage budget", "6Mi", &management_class, "4Mi used", "4Mi more requested"];
        s.wait_for_event("second", &numbers).await?;
        let used = s.infra_usage(&s.cluster_id).await?;
        ensure!(of_class(&used, &management_class) == (SIZE, 1), "{used:?}");
        let volumes = s.infra.list_volumes(None, None).await?.items;
        let of_own_class = volumes.iter().filter(|volume| volume.owner.class == management_class);
        ensure!(of_own_class.count() == 1, "the refused volume is held: {volumes:?}");
        // A class without limits.
        s.bound_claim("other").await?;
        s.change_budget(&budget, &limits("8Mi")).await?;
        s.bound("second").await?;
        let used = s.infra_usage(&s.cluster_id).await?;
        ensure!(of_class(&used, &management_class) == (2 * SIZE, 2), "{used:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_expansion_beyond_the_budget_is_refused_and_changes_nothing() -> Result<()> {
    run_alone(|s| async move {
        let (management_class, class) = s.classes(&[]).await?;
        let limits = json!({"classes": [{"name": management_class, "bytes": "8Mi"}]});
        s.budget(&s.cluster_id, &limits).await?;
        s.claim("data", &class, "4Mi").await?;
        let handle = handle(&s.bound("data").await?.1)?;
        s.request("data", "20Mi").await?;
        let numbers = [&handle, "storage budget", "8Mi", "4Mi used", "16Mi more requested"];
        let (reason, _) = s.wait_for_event("data", &numbers).await?;
        ensure!(reason == "VolumeResizeFailed", "{reason}");
        let refused = call_until_final("the refusal", || s.driver.expand(&handle, 20 * MIB)).await;
        let refused = format!("{:#}", refused.err().context("the volume was expanded")?);
        ensure!(refused.contains("past the valid range"), "{refused}");
        ensure!(s.sizes("data").await? == [SIZE; 4], "{:?}", s.sizes("data").await?);
        ensure!(of_class(&s.infra_usage(&s.cluster_id).await?, &management_class) == (SIZE, 1));
        s.request("data", "8Mi").await?;
        s.expanded("data", 8).await?;
        ensure!(of_class(&s.infra_usage(&s.cluster_id).await?, &management_class) == (2 * SIZE, 1));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_released_volume_counts_until_its_data_is_removed() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        s.budget(&account, &json!({"bytes": "6Mi"})).await?;
        let kept = s.claim_of_account(&account, "nestor", "4Mi").await?;
        let volume = s.management_bound(&kept).await?;
        s.set_reclaim_policy(&kept, "Retain").await?;
        s.claims().delete(&kept, &DeleteParams::default()).await?;
        eventually("the volume is released", PATIENCE, || async {
            let phase = s.phase_of_volume(&volume).await?;
            Ok(if phase == "Released" { Ok(()) } else { Err(phase) })
        })
        .await?;
        s.account_uses(&account, SIZE, 1).await?;
        let next = s.claim_of_account(&account, "nestor", "4Mi").await?;
        let (_, text) = s.wait_for_management_event_of(CLAIM, &next, &["6Mi", "4Mi used"]).await?;
        ensure!(text.contains("kept after their claim's deletion") && text.contains(&account), "{text}");

        let policy = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}}));
        s.volumes().patch(&volume, &PatchParams::default(), &policy).await?;
        s.management_bound(&next).await?;
        s.account_uses(&account, SIZE, 1).await
    })
    .await
}

#[tokio::test]
async fn snapshots_count_and_their_number_per_volume_is_limited() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        let budget = s.budget(&account, &json!({"bytes": "64Mi", "snapshotsPerVolume": 1})).await?;
        let claim = s.claim_of_account(&account, "nestor", "4Mi").await?;
        s.management_bound(&claim).await?;
        let volume = s.infra_volume(&claim).await?;
        write(&s.file_of(&volume).await?, &noise(1, 1 << 20))?;
        s.management_snapshot(&[(names::LABEL_CLUSTER_ID, &account)], &claim).await?;
        let used = s.infra_usage(&account).await?;
        ensure!(used.snapshots == 1 && used.bytes >= SIZE + (1 << 20), "{used:?}");

        let second = s.snapshot_of_account(&account, &claim).await?;
        let texts = ["storage budget", "1 snapshots of one volume", "1 used"];
        s.management_snapshot_failure(&second, &texts).await?;
        let held = s.infra.list_snapshots(Some(&volume.id), None, None).await?.items;
        ensure!(held.len() == 1, "{held:?}");
        s.change_budget(&budget, &json!({"snapshotsPerVolume": 2})).await?;
        s.management_snapshot_ready(&second).await?;
        ensure!(s.infra_usage(&account).await?.snapshots == 2);
        s.snapshots().delete(&second, &DeleteParams::default()).await?;
        eventually("the deleted snapshot does not count", PATIENCE, || async {
            let used = s.infra_usage(&account).await?;
            Ok(if used.snapshots == 1 { Ok(()) } else { Err(format!("{used:?}")) })
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_snapshot_without_a_label_counts_for_the_guest_of_its_volume() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        let budget = s.budget(&account, &json!({"snapshots": 0})).await?;
        let claim = s.claim_of_account(&account, "nestor", "4Mi").await?;
        s.management_bound(&claim).await?;
        let snapshot = s.new_management_snapshot(&[], &claim).await?;
        s.management_snapshot_failure(&snapshot, &["storage budget", &account, "0 snapshots"]).await?;
        s.change_budget(&budget, &json!({"snapshots": 1})).await?;
        s.management_snapshot_ready(&snapshot).await?;
        let used = s.infra_usage(&account).await?;
        ensure!(used.snapshots == 1, "{used:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_status_shows_what_the_storage_infra_counts() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        let class = s.management_class(&[]).await?;
        let name = s.budget(&account, &json!({"bytes": "1Gi"})).await?;
        for class in ["nestor", &class] {
            let claim = s.claim_of_account(&account, class, "4Mi").await?;
            s.management_bound(&claim).await?;
            s.management_snapshot(&[(names::LABEL_CLUSTER_ID, &account)], &claim).await?;
        }
        let counted = s.infra_usage(&account).await?;
        ensure!((counted.volumes, counted.snapshots) == (2, 2), "{counted:?}");
        eventually("the status shows the usage", PATIENCE, || async {
            let shown = s.budgets().get(&name).await?.status.and_then(|status| status.used);
            let shown = shown.unwrap_or_default();
            let number = |count: i64| u64::try_from(count).unwrap_or_default();
            let bytes = quantity::value(&shown.bytes).unwrap_or_default();
            let total = (bytes, number(shown.volumes), number(shown.snapshots));
            let is_equal = total == (counted.bytes, counted.volumes, counted.snapshots)
                && shown.classes.len() == counted.classes.len()
                && shown.classes.iter().all(|one| {
                    let bytes = quantity::value(&one.bytes).unwrap_or_default();
                    (bytes, number(one.volumes)) == of_class(&counted, &one.name)
                });
            Ok(if is_equal { Ok(()) } else { Err(format!("{shown:?}")) })
        })
        .await?;
        let (used, limit) = (format!("{} of 1Gi", quantity::of(counted.bytes).0), ["2", &name]);
        let usage = plugin_usage(&s).await?;
        let line = usage.lines().find(|line| line.contains(&account) && line.contains("(all)"));
        let line = line.with_context(|| usage.clone())?;
        ensure!(line.contains(&used) && limit.iter().all(|text| line.contains(text)), "{line}");
        Ok(())
    })
    .await
}

/// Output of `kubectl nestor usage`.
async fn plugin_usage(s: &Scenario) -> Result<String> {
    let management = s.lab.state().management.as_ref().context("no management cluster")?;
    let mut command = Command::new(binary(&s.lab, "kubectl-nestor"));
    command.arg("usage").arg("--management-kubeconfig").arg(&management.kubeconfig).env_remove("KUBECONFIG");
    let output = command.kill_on_drop(true).output().await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

#[tokio::test]
async fn concurrent_claims_never_exceed_the_budget() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        let budget = s.budget(&account, &json!({"bytes": "20Mi"})).await?;
        let claims = (0..12).map(|_| s.claim_of_account(&account, "nestor", "4Mi"));
        let claims: Vec<String> = try_join_all(claims).await?;
        eventually("five claims are bound and the others are refused", PATIENCE, || async {
            let used = s.infra_usage(&account).await?;
            ensure!(used.bytes <= 5 * SIZE && used.volumes <= 5, "{used:?}");
            let (mut bound, mut refused) = (0, 0);
            for claim in &claims {
                let status = s.claims().get(claim).await?.status.unwrap_or_default();
                let events = s.management_events_of(CLAIM, claim).await?;
                bound += usize::from(status.phase.as_deref() == Some("Bound"));
                refused += usize::from(events.iter().any(|(_, text)| text.contains("storage budget")));
            }
            let is_settled = bound == 5 && refused >= claims.len() - 5;
            Ok(if is_settled { Ok(()) } else { Err(format!("{bound} bound, {refused} refused, {used:?}")) })
        })
        .await?;
        s.account_uses(&account, 5 * SIZE, 5).await?;
        s.change_budget(&budget, &json!({"bytes": "48Mi"})).await?;
        for claim in &claims {
            s.management_bound(claim).await?;
        }
        s.account_uses(&account, 12 * SIZE, 12).await
    })
    .await
}

#[tokio::test]
async fn a_volume_that_is_assigned_to_another_guest_counts_for_it() -> Result<()> {
    run_alone(|s| async move {
        let (first, second) = (unique("account"), unique("account"));
        let claim = s.claim_of_account(&first, "nestor", "4Mi").await?;
        s.management_bound(&claim).await?;
        s.account_uses(&first, SIZE, 1).await?;
        s.label_volume(&claim, &json!({names::LABEL_CLUSTER_ID: second})).await?;
        s.account_uses(&second, SIZE, 1).await?;
        s.account_uses(&first, 0, 0).await?;
        ensure!(s.infra_volume(&claim).await?.owner.class == "nestor");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn of_two_budgets_of_a_guest_the_older_applies() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        let older = s.budget(&account, &json!({"volumes": 1})).await?;
        // Creation times have whole seconds; the names decide between equal ones.
        let younger = loop {
            let name = s.new_budget(&account, &json!({"volumes": 2})).await?;
            let created = |name: &str| {
                let (budgets, name) = (s.budgets(), name.to_owned());
                async move { anyhow::Ok(budgets.get(&name).await?.metadata.creation_timestamp) }
            };
            if (created(&older).await?, &older) < (created(&name).await?, &name) {
                break name;
            }
            s.budgets().delete(&name, &DeleteParams::default()).await?;
        };
        s.has_condition(&younger, "False", "Superseded").await?;
        let limit = || async { anyhow::Ok(s.infra_budget(&account).await?.limits.map(|all| all.volumes)) };
        ensure!(limit().await? == Some(Some(1)));
        s.budgets().delete(&older, &DeleteParams::default()).await?;
        s.has_condition(&younger, "True", "Applied").await?;
        ensure!(limit().await? == Some(Some(2)));
        s.budgets().delete(&younger, &DeleteParams::default()).await?;
        eventually("the limits are removed", PATIENCE, || async {
            let left = limit().await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{left:?}"))))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn the_limits_are_restored_when_the_storage_infra_has_lost_them() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        s.budget(&account, &json!({"volumes": 3})).await?;
        s.infra.delete_budget(&infra_api::Account::new(account.as_str())?).await?;
        s.kill_component("storage-infra").await?;
        s.start_component("storage-infra").await?;
        eventually("the limits are applied again", PATIENCE, || async {
            // The storage infra may still be starting.
            let limits = s.infra_budget(&account).await.map(|budget| budget.limits);
            let is_restored = matches!(&limits, Ok(Some(limits)) if limits.volumes == Some(3));
            Ok(if is_restored { Ok(()) } else { Err(format!("{limits:?}")) })
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_budget_is_validated_and_guests_cannot_read_it() -> Result<()> {
    run_alone(|s| async move {
        let account = unique("account");
        for limits in [json!({"bytes": "fast"}), json!({"volumes": -1}), json!({"clusterId": ""})] {
            let accepted = s.new_budget(&account, &limits).await;
            ensure!(accepted.is_err(), "{limits} was accepted");
        }
        let name = s.new_budget(&account, &json!({"bytes": "1.5Gi"})).await?;
        let moved = Patch::Merge(json!({"spec": {"clusterId": "other"}}));
        let refused = s.budgets().patch(&name, &PatchParams::default(), &moved).await;
        let refused = refused.err().context("the clusterId was changed")?.to_string();
        ensure!(refused.contains("immutable"), "{refused}");
        let guest = Api::<StorageBudget>::all(s.lab.management_as_guest("g1").await?);
        let refused = guest.list(&ListParams::default()).await;
        ensure!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 403), "{refused:?}");
        Ok(())
    })
    .await
}
