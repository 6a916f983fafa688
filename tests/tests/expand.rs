//! Expansion: a guest claim that asks for more, through both csi-resizers, down to the disk and up to the filesystem.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CapacityRange;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use tests::bytes::{noise, read, write};
use tests::crash::insist;
use tests::guest::{handle, static_volume};
use tests::pods::{self, Machines, Script, Volume, block, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, requested, run, unique};
use tonic::Code;

/// A number of mebibytes, as a claim asks for them.
fn mebibytes(size: u64) -> String {
    format!("{size}Mi")
}

// ---- through both tiers ----

#[tokio::test]
async fn a_volume_that_nobody_uses_grows_in_every_tier_and_keeps_its_bytes() -> Result<()> {
    run(|s| async move {
        let below = s.bound_claim("data").await?;
        let file = s.file_of(&s.infra_volume(&below).await?).await?;
        write(&file, &noise(1, 4 << 20))?;
        s.request("data", "64Mi").await?;
        s.grown("data", 64).await?;
        assert_eq!(requested(&s.claims().get(&below).await?), 64 << 20);
        assert_eq!(std::fs::metadata(&file)?.len(), 64 << 20);
        assert!(read(&file, 4 << 20)? == noise(1, 4 << 20));
        // Its filesystem grows when a machine has it; csi-resizer says so once the volume has its new size.
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
async fn ten_claims_that_ask_for_more_at_once_get_it() -> Result<()> {
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
            s.grown(name, size).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn calls_that_are_repeated_and_that_meet_grow_a_volume_once() -> Result<()> {
    run(|s| async move {
        let handle = s.volume().await?;
        let all = (5..=12).map(|size| {
            let (driver, handle) = (s.driver.clone(), handle.clone());
            tokio::spawn(async move {
                // Another one may be under way, and csi-resizer below stumble over a copy from before that.
                let what = format!("{size} MiB of {handle}");
                insist(&what, || driver.expand(&handle, size * MIB)).await.map(|bytes| (size * MIB, bytes))
            })
        });
        for one in all.collect::<Vec<_>>() {
            let (wanted, has) = one.await??;
            assert!(has >= wanted && has <= 12 * MIB, "{wanted} were asked for, {has} are there");
        }
        let mut volume = s.infra_volume(&handle).await?;
        assert_eq!(volume.capacity_bytes, 12 << 20);
        let version = s.claims().get(&handle).await?.resource_version();
        for size in [12, 12, 7, 1] {
            assert_eq!(s.driver.expand(&handle, size * MIB).await?, 12 * MIB);
        }
        assert_eq!(s.claims().get(&handle).await?.resource_version(), version, "nothing was written below");
        volume = s.infra_volume(&handle).await?;
        assert_eq!(volume.capacity_bytes, 12 << 20);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn what_the_platform_team_grew_is_told_and_given_when_the_guest_asks_for_it() -> Result<()> {
    run(|s| async move {
        let below = s.bound_claim("data").await?;
        let more = json!({"spec": {"resources": {"requests": {"storage": "8Mi"}}}});
        s.claims().patch(&below, &PatchParams::default(), &Patch::Merge(more)).await?;
        let (reason, _) = s.told("data", &[&below, "8Mi", "4Mi", "spec.resources.requests.storage"]).await?;
        assert_eq!(reason, "VolumeCapacityAvailable");
        eventually("condition nestor.dev/Resizable on the guest claim", PATIENCE, || async {
            let status = s.guest_claims().get("data").await?.status.unwrap_or_default();
            let all = status.conditions.unwrap_or_default();
            let found = all.iter().find(|one| one.type_ == "nestor.dev/Resizable" && one.status == "True");
            Ok(found.map(|_| ()).ok_or_else(|| format!("{all:?}")))
        })
        .await?;
        // Nothing of the guest's changes by itself.
        assert_eq!(s.sizes("data").await?, [4 << 20, 4 << 20, 8 << 20, 8 << 20]);

        let (audit, version) = (s.lab.audit()?, s.claims().get(&below).await?.resource_version());
        let mark = audit.mark()?;
        s.request("data", "8Mi").await?;
        s.grown("data", 8).await?;
        let writes = audit.since(mark)?.into_iter().filter(|entry| entry.is_write() && entry.name == below);
        assert_eq!(writes.map(|entry| format!("{entry:?}")).collect::<Vec<_>>(), Vec::<String>::new());
        assert_eq!(s.claims().get(&below).await?.resource_version(), version);
        Ok(())
    })
    .await
}

// ---- refusals ----

#[tokio::test]
async fn nothing_shrinks() -> Result<()> {
    run(|s| async move {
        let below = s.bound_claim("data").await?;
        let refused = s.request("data", "2Mi").await.unwrap_err().to_string();
        assert!(refused.contains("less than"), "{refused}");
        assert_eq!(s.driver.expand(&below, 2 * MIB).await?, 4 * MIB);
        let refused = s
            .driver
            .expand_within(&below, CapacityRange { required_bytes: MIB, limit_bytes: 2 * MIB })
            .await
            .unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let texts = [below.clone(), (4 * MIB).to_string(), (2 * MIB).to_string()];
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

/// A guest claim `data` of 4 MiB, of a management class of its own; gives the class and the management claim.
async fn of_own_class(s: &Scenario) -> Result<(String, String)> {
    let below = s.management_class(&[]).await?;
    let class = s.guest_class("Delete", &[(names::PARAMETER_MANAGEMENT_CLASS, &below)]).await?;
    s.claim("data", &class, "4Mi").await?;
    Ok((below, handle(&s.bound("data").await?.1)?))
}

#[tokio::test]
async fn a_quota_is_told_with_its_numbers_and_heals_when_it_is_raised() -> Result<()> {
    run(|s| async move {
        let (class, below) = of_own_class(&s).await?;
        s.quota(&class, "10Mi").await?;
        s.limited(&class, "20Mi").await?;
        s.request("data", "20Mi").await?;
        let numbers = [below.as_str(), "20Mi", "exceeded quota", "=16Mi", "=4Mi", "=10Mi"];
        let (reason, _) = s.told("data", &numbers).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        assert_eq!(requested(&s.claims().get(&below).await?), 4 << 20);
        s.quota(&class, "40Mi").await?;
        s.grown("data", 20).await
    })
    .await
}

#[tokio::test]
async fn what_the_infra_has_no_room_for_is_told_in_its_words_and_less_can_be_had() -> Result<()> {
    run(|s| async move {
        let below = s.bound_claim("data").await?;
        s.request("data", "900Ti").await?;
        let (reason, _) = s.told("data", &[&below, "900Ti", "more bytes", "free"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        s.request("data", "8Mi").await?;
        s.grown("data", 8).await?;
        let asked = requested(&s.claims().get(&below).await?);
        assert_eq!(asked, 8 << 20, "what could not be had is still asked for below");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_class_of_either_tier_whose_volumes_cannot_grow_is_named() -> Result<()> {
    run(|s| async move {
        let (class, below) = of_own_class(&s).await?;
        let fixed = Patch::Merge(json!({"allowVolumeExpansion": false}));
        let classes: Api<StorageClass> = Api::all(s.management.clone());
        classes.patch(&class, &PatchParams::default(), &fixed).await?;
        // The API server's admission check learns of it a moment later.
        let more = json!({"spec": {"resources": {"requests": {"storage": "8Mi"}}}});
        eventually(&format!("{below} is not let grow any more"), PATIENCE, || async {
            match s.claims().patch(&below, &PatchParams::default().dry_run(), &Patch::Merge(&more)).await {
                Ok(_) => Ok(Err("it would grow".to_owned())),
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(Ok(())),
                Err(error) => Err(error.into()),
            }
        })
        .await?;
        s.request("data", "8Mi").await?;
        let (reason, _) = s.told("data", &[&below, &class, "must support resize"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        // Once its volumes can grow, it grows.
        let growing = Patch::Merge(json!({"allowVolumeExpansion": true}));
        classes.patch(&class, &PatchParams::default(), &growing).await?;
        s.grown("data", 8).await?;

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
async fn a_shared_claim_is_its_owners_to_expand() -> Result<()> {
    run(|s| async move {
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, s.cluster_id);
        let below = s.management_claim(&[(&share, "rw")], json!({})).await?;
        let refused = eventually(&format!("gc-csi knows of {below}"), PATIENCE, || async {
            let refused = s.driver.expand(&below, 8 * MIB).await.unwrap_err();
            Ok(if refused.code() == Code::NotFound { Err(refused.to_string()) } else { Ok(refused) })
        })
        .await?;
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!([below.as_str(), "owner"].iter().all(|text| refused.message().contains(text)), "{refused}");

        // Of a class whose volumes can grow, so that it is asked for; and kept from other claims of that class.
        let spec = json!({
            "storageClassName": "nestor", "claimRef": {"namespace": s.name, "name": "data"},
        });
        let volume = static_volume(&unique(&s.name), &s.name, &below, &spec)?;
        let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?.name_any();
        s.claim_with("data", "nestor", "4Mi", json!({"volumeName": volume})).await?;
        s.bound("data").await?;
        s.request("data", "8Mi").await?;
        let (reason, _) = s.told("data", &[&below, "owner"]).await?;
        assert_eq!(reason, "VolumeResizeFailed");
        assert_eq!(s.sizes("data").await?, [4 << 20; 4]);
        Ok(())
    })
    .await
}

// ---- pods ----

/// What a pod says of its four volumes: their sizes in bytes, one in each line, and then that their data holds.
const LOOK: &str = "size() {
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

/// A pod on a machine that has all four volumes.
fn pod(name: &str, node: &str, volumes: &[Volume; 4], script: &str) -> Script {
    let [ext4, xfs, btrfs, raw] = volumes;
    let script = Script::new(name, node, &format!("{LOOK}\n{script}"));
    script.mount(ext4, "/ext4").mount(xfs, "/xfs").mount(btrfs, "/btrfs").device(raw, "/dev/raw")
}

/// Fails unless a pod said that each volume is as large as it should be, in mebibytes, and its data holds.
fn right(said: &str, wanted: u64) -> Result<()> {
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    let [ext4, xfs, btrfs, raw, data] = lines[..] else { anyhow::bail!("{said}") };
    for filesystem in [ext4, xfs, btrfs] {
        let size: u64 = filesystem.parse().with_context(|| said.to_owned())?;
        ensure!(
            size > (wanted << 20) / 10 * 8 && size <= wanted << 20,
            "{wanted} MiB were asked for: {said}"
        );
    }
    ensure!(raw == (wanted << 20).to_string() && data == "firstlast", "{wanted} MiB were asked for: {said}");
    Ok(())
}

#[tokio::test]
async fn filesystems_and_devices_grow_under_running_pods_and_between_them() -> Result<()> {
    pods::run(|machines: Arc<Machines>| async move {
        let s = machines.scenario();
        let volumes = [
            machines.claim("ext4", &filesystem("ext4")).await?,
            machines.claim("xfs", &filesystem("xfs")).await?,
            machines.claim("btrfs", &filesystem("btrfs")).await?,
            machines.claim("raw", &block()).await?,
        ];
        // It writes all the while.
        let grows = "for volume in ext4 xfs btrfs; do
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
        let running = machines.start(pod("running", &machines.here, &volumes, grows)).await?;
        machines.running(&running).await?;
        for volume in &volumes {
            s.request(&volume.claim, "512Mi").await?;
        }
        for volume in &volumes {
            s.grown(&volume.claim, 512).await?;
            s.has_capacity(&volume.claim, "512Mi").await?;
        }
        right(&machines.finish(&running).await?, 512)?;
        machines.remove(&running).await?;
        for volume in &volumes {
            machines.detached(volume).await?;
        }

        for volume in &volumes {
            s.request(&volume.claim, "640Mi").await?;
        }
        for volume in &volumes {
            s.grown(&volume.claim, 640).await?;
        }
        let next = machines.start(pod("next", &machines.there, &volumes, "look")).await?;
        right(&machines.finish(&next).await?, 640)?;
        for volume in &volumes {
            s.has_capacity(&volume.claim, "640Mi").await?;
        }
        Ok(())
    })
    .await
}
