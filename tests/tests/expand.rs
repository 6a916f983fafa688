//! Expansion of guest claims, through both csi-resizers, to the disk and the filesystem.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CapacityRange;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use tests::bytes::{noise, read, write};
use tests::crash::call_until_final;
use tests::guest::{handle, static_volume};
use tests::pods::{self, PodScenario, Script, Volume, block, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, requested, run, unique};
use tonic::Code;

/// A size in MiB as a Kubernetes quantity.
fn mebibytes(size: u64) -> String {
    format!("{size}Mi")
}

// ---- through both tiers ----

#[tokio::test]
async fn a_detached_volume_is_expanded_in_every_tier_and_keeps_its_data() -> Result<()> {
    run(|s| async move {
        let management_claim = s.bound_claim("data").await?;
        let file = s.file_of(&s.infra_volume(&management_claim).await?).await?;
        write(&file, &noise(1, 4 << 20))?;
        s.request("data", "64Mi").await?;
        s.expanded("data", 64).await?;
        assert_eq!(requested(&s.claims().get(&management_claim).await?), 64 << 20);
        assert_eq!(std::fs::metadata(&file)?.len(), 64 << 20);
        assert!(read(&file, 4 << 20)? == noise(1, 4 << 20));
        // The filesystem is expanded at the next attach; csi-resizer sets the condition once the volume has its new size.
        eventually("condition FileSystemResizePending on the guest claim", PATIENCE, || async {
            let status = s.guest_claims().get("data").await?.status.unwrap_or_default();
            let all = status.conditions.unwrap_or_default();
            let waits = all.iter().any(|one| one.type_ == "FileSystemResizePending");
            Ok(if waits { Ok(()) } else { Err(format!("{all:?}")) })
        })
        .await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn ten_claims_are_expanded_at_once() -> Result<()> {
    run(|s| async move {
        let names: Vec<String> = (0..10).map(|number| format!("data-{number}")).collect();
        for name in &names {
            s.claim(name, "nestor", "4Mi").await?;
        }
        for name in &names {
            s.bound(name).await?;
        }
        for (name, size) in names.iter().zip(8..) {
            s.request(name, &mebibytes(size)).await?;
        }
        for (name, size) in names.iter().zip(8..) {
            s.expanded(name, size).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn repeated_and_concurrent_calls_expand_a_volume_once() -> Result<()> {
    run(|s| async move {
        let handle = s.volume().await?;
        let all = (5..=12).map(|size| {
            let (driver, handle) = (s.driver.clone(), handle.clone());
            tokio::spawn(async move {
                // Another call may be running, and csi-resizer below may fail with a stale copy of the claim.
                let what = format!("{size} MiB of {handle}");
                call_until_final(&what, || driver.expand(&handle, size * MIB))
                    .await
                    .map(|bytes| (size * MIB, bytes))
            })
        });
        for one in all.collect::<Vec<_>>() {
            let (requested, has) = one.await??;
            assert!(has >= requested && has <= 12 * MIB, "{requested} bytes requested, {has} provided");
        }
        let mut volume = s.infra_volume(&handle).await?;
        assert_eq!(volume.capacity_bytes, 12 << 20);
        let version = s.claims().get(&handle).await?.resource_version();
        for size in [12, 12, 7, 1] {
            assert_eq!(s.driver.expand(&handle, size * MIB).await?, 12 * MIB);
        }
        assert_eq!(
            s.claims().get(&handle).await?.resource_version(),
            version,
            "the management claim changed"
        );
        volume = s.infra_volume(&handle).await?;
        assert_eq!(volume.capacity_bytes, 12 << 20);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_expansion_by_the_platform_team_is_reported_and_applied_when_the_guest_requests_it() -> Result<()>
{
    run(|s| async move {
        let management_claim = s.bound_claim("data").await?;
        let more = json!({"spec": {"resources": {"requests": {"storage": "8Mi"}}}});
        s.claims().patch(&management_claim, &PatchParams::default(), &Patch::Merge(more)).await?;
        let (reason, _) = s
            .wait_for_event("data", &[&management_claim, "8Mi", "4Mi", "spec.resources.requests.storage"])
            .await?;
        assert_eq!(reason, "VolumeCapacityAvailable");
        eventually("condition nestor.dev/Resizable on the guest claim", PATIENCE, || async {
            let status = s.guest_claims().get("data").await?.status.unwrap_or_default();
            let all = status.conditions.unwrap_or_default();
            let found = all.iter().find(|one| one.type_ == "nestor.dev/Resizable" && one.status == "True");
            Ok(found.map(|_| ()).ok_or_else(|| format!("{all:?}")))
        })
        .await?;
        // The guest's own objects do not change by themselves.
        assert_eq!(s.sizes("data").await?, [4 << 20, 4 << 20, 8 << 20, 8 << 20]);

        let (audit, version) = (s.lab.audit()?, s.claims().get(&management_claim).await?.resource_version());
        let mark = audit.mark()?;
        s.request("data", "8Mi").await?;
        s.expanded("data", 8).await?;
        let writes =
            audit.since(mark)?.into_iter().filter(|entry| entry.is_write() && entry.name == management_claim);
        assert_eq!(writes.map(|entry| format!("{entry:?}")).collect::<Vec<_>>(), Vec::<String>::new());
        assert_eq!(s.claims().get(&management_claim).await?.resource_version(), version);
        Ok(())
    })
    .await
}

// ---- refusals ----

#[tokio::test]
async fn volumes_are_never_shrunk() -> Result<()> {
    run(|s| async move {
        let management_claim = s.bound_claim("data").await?;
        let refused = s.request("data", "2Mi").await.unwrap_err().to_string();
        assert!(refused.contains("less than"), "{refused}");
        assert_eq!(s.driver.expand(&management_claim, 2 * MIB).await?, 4 * MIB);
        let refused = s
            .driver
            .expand_within(&management_claim, CapacityRange { required_bytes: MIB, limit_bytes: 2 * MIB })
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let texts = [management_claim.clone(), (4 * MIB).to_string(), (2 * MIB).to_string()];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        for unknown in [unique(&s.name), s.management_claim(&[], json!({})).await?] {
            let refused = s.driver.expand(&unknown, 8 * MIB).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{refused}");
            assert!(refused.message().contains(&unknown), "{refused}");
        }
        Ok(())
    })
    .await
}

/// Creates a guest claim `data` of 4 MiB with its own management class; returns the class and the management claim.
async fn of_own_class(s: &Scenario) -> Result<(String, String)> {
    let (management_class, class) = s.classes(&[]).await?;
    s.claim("data", &class, "4Mi").await?;
    Ok((management_class, handle(&s.bound("data").await?.1)?))
}

#[tokio::test]
async fn a_quota_error_is_reported_with_its_numbers_and_recovers_when_the_quota_is_raised() -> Result<()> {
    run(|s| async move {
        let (class, management_claim) = of_own_class(&s).await?;
        s.quota(&class, "10Mi").await?;
        s.limited(&class, "20Mi").await?;
        s.request("data", "20Mi").await?;
        let numbers = [management_claim.as_str(), "20Mi", "exceeded quota", "=16Mi", "=4Mi", "=10Mi"];
        let (reason, _) = s.wait_for_event("data", &numbers).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        assert_eq!(requested(&s.claims().get(&management_claim).await?), 4 << 20);
        s.quota(&class, "40Mi").await?;
        s.expanded("data", 20).await
    })
    .await
}

#[tokio::test]
async fn missing_capacity_is_reported_with_the_infras_message_and_a_smaller_size_succeeds() -> Result<()> {
    run(|s| async move {
        let management_claim = s.bound_claim("data").await?;
        s.request("data", "900Ti").await?;
        let (reason, _) =
            s.wait_for_event("data", &[&management_claim, "900Ti", "too little free space"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        s.request("data", "8Mi").await?;
        s.expanded("data", 8).await?;
        let requested = requested(&s.claims().get(&management_claim).await?);
        assert_eq!(requested, 8 << 20, "the management claim still requests the larger size");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_class_of_either_tier_without_volume_expansion_is_named() -> Result<()> {
    run(|s| async move {
        let (class, management_claim) = of_own_class(&s).await?;
        let fixed = Patch::Merge(json!({"allowVolumeExpansion": false}));
        let classes: Api<StorageClass> = Api::all(s.management.clone());
        classes.patch(&class, &PatchParams::default(), &fixed).await?;
        // The API server's admission sees the change a moment later.
        let more = json!({"spec": {"resources": {"requests": {"storage": "8Mi"}}}});
        eventually(&format!("an expansion of {management_claim} is rejected"), PATIENCE, || async {
            match s
                .claims()
                .patch(&management_claim, &PatchParams::default().dry_run(), &Patch::Merge(&more))
                .await
            {
                Ok(_) => Ok(Err("it would be accepted".to_owned())),
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(Ok(())),
                Err(error) => Err(error.into()),
            }
        })
        .await?;
        s.request("data", "8Mi").await?;
        let (reason, _) =
            s.wait_for_event("data", &[&management_claim, &class, "must support resize"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        // After the class allows expansion, the volume is expanded.
        let expandable = Patch::Merge(json!({"allowVolumeExpansion": true}));
        classes.patch(&class, &PatchParams::default(), &expandable).await?;
        s.expanded("data", 8).await?;

        let parameters = [(names::PARAMETER_MANAGEMENT_CLASS, class.as_str())];
        let fixed = s.guest_class_with(&parameters, json!({"allowVolumeExpansion": false})).await?;
        s.claim("fixed", &fixed, "4Mi").await?;
        s.bound("fixed").await?;
        let refused = s.request("fixed", "8Mi").await.unwrap_err().to_string();
        assert!(refused.contains("must support resize"), "{refused}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_shared_claim_can_only_be_expanded_by_its_owner() -> Result<()> {
    run(|s| async move {
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, s.cluster_id);
        let management_claim = s.management_claim(&[(&share, "rw")], json!({})).await?;
        let refused = eventually(&format!("gc-csi finds {management_claim}"), PATIENCE, || async {
            let refused = s.driver.expand(&management_claim, 8 * MIB).await.unwrap_err();
            Ok(if refused.code() == Code::NotFound { Err(refused.to_string()) } else { Ok(refused) })
        })
        .await?;
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(
            [management_claim.as_str(), "owner"].iter().all(|text| refused.message().contains(text)),
            "{refused}"
        );

        // A class with volume expansion, so that the request is sent; bound to this claim only.
        let spec = json!({
            "storageClassName": "nestor", "claimRef": {"namespace": s.name, "name": "data"},
        });
        let volume = static_volume(&unique(&s.name), &s.name, &management_claim, &spec)?;
        let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?.name_any();
        s.claim_with("data", "nestor", "4Mi", json!({"volumeName": volume})).await?;
        s.bound("data").await?;
        s.request("data", "8Mi").await?;
        let (reason, _) = s.wait_for_event("data", &[&management_claim, "owner"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        Ok(())
    })
    .await
}

// ---- pods ----

/// Shell functions that print the sizes of four volumes in bytes, one per line, and verify their data.
const PRINT_SIZES: &str = "size() {
        case $1 in
            raw) blockdev --getsize64 /dev/raw ;;
            *) df -kP /$1 | tail -n 1 | awk '{print $2 * 1024}' ;;
        esac
    }
    look() {
        for volume in ext4 xfs btrfs raw; do size $volume; done
        for volume in ext4 xfs btrfs; do (cd /$volume; sha256sum -c sums >/dev/null); done
        dd if=/dev/raw bs=5 count=1 2>/dev/null; dd if=/dev/raw bs=1M skip=319 count=1 2>/dev/null | head -c 4
    }";

/// A pod with all four volumes.
fn pod(name: &str, node: &str, volumes: &[Volume; 4], script: &str) -> Script {
    let [ext4, xfs, btrfs, raw] = volumes;
    let script = Script::new(name, node, &format!("{PRINT_SIZES}\n{script}"));
    script.mount(ext4, "/ext4").mount(xfs, "/xfs").mount(btrfs, "/btrfs").device(raw, "/dev/raw")
}

/// Checks the output of a pod: each volume has the expected size in MiB, and its data is valid.
fn check_output(output: &str, expected: u64) -> Result<()> {
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    let [ext4, xfs, btrfs, raw, data] = lines[..] else { anyhow::bail!("{output}") };
    for filesystem in [ext4, xfs, btrfs] {
        let size: u64 = filesystem.parse().with_context(|| output.to_owned())?;
        ensure!(
            size > (expected << 20) / 10 * 8 && size <= expected << 20,
            "{expected} MiB expected: {output}"
        );
    }
    ensure!(raw == (expected << 20).to_string() && data == "firstlast", "{expected} MiB expected: {output}");
    Ok(())
}

#[tokio::test]
async fn filesystems_and_devices_are_expanded_in_running_pods_and_between_pods() -> Result<()> {
    pods::run(|pods: Arc<PodScenario>| async move {
        let s = pods.scenario();
        let volumes = [
            pods.claim("ext4", &filesystem("ext4")).await?,
            pods.claim("xfs", &filesystem("xfs")).await?,
            pods.claim("btrfs", &filesystem("btrfs")).await?,
            pods.claim("raw", &block()).await?,
        ];
        // The pod keeps writing.
        let script = "for volume in ext4 xfs btrfs; do
                cd /$volume; dd if=/dev/urandom of=data bs=64k count=16 conv=fsync 2>/dev/null; sha256sum data > sums
            done
            printf first | dd of=/dev/raw conv=notrunc,fsync 2>/dev/null
            printf last | dd of=/dev/raw bs=1M seek=319 conv=notrunc,fsync 2>/dev/null
            for volume in ext4 xfs btrfs raw; do
                until [ $(size $volume) -gt $((420 * 1024 * 1024)) ]; do
                    for other in ext4 xfs btrfs; do echo more >> /$other/log; done; sleep 1
                done
            done
            look";
        let running = pods.start(pod("running", &pods.first_node, &volumes, script)).await?;
        pods.running(&running).await?;
        for volume in &volumes {
            s.request(&volume.claim, "512Mi").await?;
        }
        for volume in &volumes {
            s.expanded(&volume.claim, 512).await?;
            s.has_capacity(&volume.claim, "512Mi").await?;
        }
        check_output(&pods.finish(&running).await?, 512)?;
        pods.remove(&running).await?;
        for volume in &volumes {
            pods.detached(volume).await?;
        }

        for volume in &volumes {
            s.request(&volume.claim, "640Mi").await?;
        }
        for volume in &volumes {
            s.expanded(&volume.claim, 640).await?;
        }
        let next = pods.start(pod("next", &pods.second_node, &volumes, "look")).await?;
        check_output(&pods.finish(&next).await?, 640)?;
        for volume in &volumes {
            s.has_capacity(&volume.claim, "640Mi").await?;
        }
        Ok(())
    })
    .await
}
