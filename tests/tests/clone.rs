//! Clones of volumes, through both tiers.

use anyhow::{Context, Result, ensure};
use crds::names;
use csi::proto::CreateVolumeRequest;
use csi::proto::volume_capability::access_mode::Mode;
use infra_api::VolumeSource;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;
use tests::bytes::{noise, read, read_at, write};
use tests::driver::{block, cloned_volume};
use tests::pods::{self, ClaimOptions, Script, filesystem};
use tests::{MIB, PATIENCE, Scenario, eventually, from_claim, run, run_alone, unique};
use tonic::Code;

/// Size of a volume of 4 MiB.
const ALL: usize = 4 << 20;

/// Waits until a guest claim and the management claim of its volume are deleted.
async fn claim_gone(s: &Scenario, claim: &str, handle: &str) -> Result<()> {
    eventually(&format!("guest claim {claim} and management claim {handle} deleted"), PATIENCE, || async {
        let left = (s.guest_claims().get_opt(claim).await?, s.claims().get_opt(handle).await?);
        Ok(if left == (None, None) { Ok(()) } else { Err(format!("{left:?}")) })
    })
    .await
}

// ---- through both tiers ----

#[tokio::test]
async fn clones_of_the_same_and_a_larger_size_have_the_sources_data_and_are_independent_of_it() -> Result<()>
{
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (handle, source) = s.bound_file("data").await?;
        write(&source, &noise(1, ALL))?;
        let source_id = s.infra_volume(&handle).await?.id;
        s.clone_of("same", "data", "4Mi").await?;
        s.clone_of("larger", "data", "8Mi").await?;
        for (claim, size) in [("same", 4_u64 << 20), ("larger", 8 << 20)] {
            let (management_claim, file) = s.bound_file(claim).await?;
            s.has_capacity(claim, &format!("{}Mi", size >> 20)).await?;
            let reference = s.claims().get(&management_claim).await?.spec.and_then(|spec| spec.data_source);
            let reference = reference.context("the management claim has no source")?;
            assert_eq!((reference.kind.as_str(), &reference.name), ("PersistentVolumeClaim", &handle));
            let volume = s.infra_volume(&management_claim).await?;
            assert_eq!(volume.capacity_bytes, size);
            assert_eq!(volume.source, Some(VolumeSource::Volume(source_id.clone())));
            assert!(read(&file, ALL)? == noise(1, ALL), "{claim} has other data");
            let rest = read_at(&file, 4 << 20, size as usize - ALL)?;
            assert!(rest.iter().all(|byte| *byte == 0), "{claim} has data behind the source's data");
        }

        // Writes to one do not affect the others, and a clone can be cloned.
        let (_, same) = s.bound_file("same").await?;
        let (_, larger) = s.bound_file("larger").await?;
        write(&source, &noise(2, ALL))?;
        write(&same, &noise(3, ALL))?;
        assert!(read(&larger, ALL)? == noise(1, ALL));
        assert!(read(&source, ALL)? == noise(2, ALL));
        s.clone_of("again", "same", "4Mi").await?;
        let (_, again) = s.bound_file("again").await?;
        assert!(read(&again, ALL)? == noise(3, ALL));

        // The source is deleted first.
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        claim_gone(&s, "data", &handle).await?;
        eventually("the source is deleted in the storage infra", PATIENCE, || async {
            Ok(if source.exists() { Err(source.display().to_string()) } else { Ok(()) })
        })
        .await?;
        assert!(read(&larger, ALL)? == noise(1, ALL) && read(&same, ALL)? == noise(3, ALL));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn calls_are_idempotent_and_another_source_for_the_same_name_is_refused() -> Result<()> {
    run(|s| async move {
        let (one, other) = (s.volume().await?, s.volume().await?);
        let request = cloned_volume(&s.csi_name(), 4 * MIB, &one);
        let made = s.driver.create(request.clone()).await?;
        assert_eq!(made.content_source, request.volume_content_source);
        assert_eq!(s.driver.create(request.clone()).await?, made);
        let empty = CreateVolumeRequest { volume_content_source: None, ..request.clone() };
        for differs in [cloned_volume(&request.name, 4 * MIB, &other), empty] {
            let refused = s.driver.create(differs).await.unwrap_err();
            assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
            let texts = [&made.volume_id, &one];
            assert!(texts.iter().all(|text| refused.message().contains(*text)), "{refused}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn ten_concurrent_clones_are_ten_volumes_with_the_same_data() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (_, source) = s.bound_file("data").await?;
        write(&source, &noise(4, ALL))?;
        let names: Vec<String> = (0..10).map(|number| format!("clone-{number}")).collect();
        for name in &names {
            s.clone_of(name, "data", "4Mi").await?;
        }
        let mut files = std::collections::BTreeSet::new();
        for name in &names {
            let (_, file) = s.bound_file(name).await?;
            assert!(read(&file, ALL)? == noise(4, ALL), "{name} has other data");
            files.insert(file);
        }
        assert!(files.len() == 10 && !files.contains(&source));
        Ok(())
    })
    .await
}

// ---- refusals ----

#[tokio::test]
async fn a_source_of_another_guest_is_reported_like_a_missing_one() -> Result<()> {
    run(|s| async move {
        let second = s.second_guest().await?;
        let foreign = s.management_claim(&[(names::LABEL_CLUSTER_ID, &second.cluster_id)], json!({})).await?;
        let unlabelled = s.management_claim(&[], json!({})).await?;
        let absent = unique(&s.name);
        let mut messages = Vec::new();
        for source in [&absent, &foreign, &unlabelled] {
            let name = s.csi_name();
            let refused = s.driver.create(cloned_volume(&name, 4 * MIB, source)).await.unwrap_err();
            assert_eq!(refused.code(), Code::NotFound, "{refused}");
            assert!(refused.message().contains(source.as_str()), "{refused}");
            assert!(s.claims().get_opt(&s.claim_name(&name)).await?.is_none());
            messages.push(refused.message().replace(source.as_str(), "SOURCE"));
        }
        assert!(messages.iter().all(|one| *one == messages[0]), "{messages:#?}");

        // A claim that is shared read-only can be cloned.
        let share = format!("{}{}", names::LABEL_SHARE_PREFIX, s.cluster_id);
        let shared = s.management_claim(&[(&share, "ro")], json!({})).await?;
        write(&s.file_of(&s.infra_volume(&shared).await?).await?, &noise(6, ALL))?;
        let request = cloned_volume(&s.csi_name(), 4 * MIB, &shared);
        let made = eventually(&format!("a clone of {shared}"), PATIENCE, || async {
            match s.driver.create(request.clone()).await {
                Ok(made) => Ok(Ok(made.volume_id)),
                // The driver's cache does not have the bound source yet.
                Err(stale) if stale.code() == Code::FailedPrecondition => Ok(Err(stale.to_string())),
                Err(refused) => Err(refused.into()),
            }
        })
        .await?;
        let copied = s.file_of(&s.infra_volume(&made).await?).await?;
        assert!(read(&copied, ALL)? == noise(6, ALL));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_smaller_clone_or_one_with_another_volume_mode_is_refused() -> Result<()> {
    run(|s| async move {
        let source = s.bound_claim("data").await?;
        let name = s.csi_name();
        let refused = s.driver.create(cloned_volume(&name, 2 * MIB, &source)).await.unwrap_err();
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let texts = [source.as_str(), "4Mi", "2Mi"];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        let mut raw = cloned_volume(&name, 4 * MIB, &source);
        raw.volume_capabilities = vec![block(Mode::SingleNodeWriter)];
        let refused = s.driver.create(raw).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let texts = [source.as_str(), "Filesystem", "Block"];
        assert!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        assert!(s.claims().get_opt(&s.claim_name(&name)).await?.is_none(), "a claim was created");

        s.clone_of("smaller", "data", "2Mi").await?;
        s.wait_for_event("smaller", &[&(2 * MIB).to_string(), &(4 * MIB).to_string()]).await?;
        Ok(())
    })
    .await
}

// ---- deletion of the source meanwhile ----

#[tokio::test]
async fn a_source_deleted_while_it_is_cloned_is_kept_until_the_clone_is_complete() -> Result<()> {
    run_alone(|s| async move {
        s.claim("data", "nestor", "4Mi").await?;
        let (handle, source) = s.bound_file("data").await?;
        write(&source, &noise(1, ALL))?;
        let frozen = s.pause_component("mgmt-csi")?;
        let claim = s.clone_of("clone", "data", "4Mi").await?;
        let management_claim = s.claim_name(&format!("pvc-{}", claim.uid().context("no UID")?));
        eventually(&format!("management claim {management_claim} exists"), PATIENCE, || async {
            Ok(s.claims()
                .get_opt(&management_claim)
                .await?
                .map(|_| ())
                .ok_or_else(|| "it does not exist".to_owned()))
        })
        .await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        drop(frozen);
        let (_, clone) = s.bound_file("clone").await?;
        assert!(read(&clone, ALL)? == noise(1, ALL));
        claim_gone(&s, "data", &handle).await?;
        assert!(read(&clone, ALL)? == noise(1, ALL));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_clone_that_cannot_be_created_can_be_deleted_with_its_source() -> Result<()> {
    run(|s| async move {
        let source = s.bound_claim("data").await?;
        // No pool matches the class.
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        let claim = s.claim_with("clone", &class, "4Mi", from_claim("data")).await?;
        let clone = s.claim_name(&format!("pvc-{}", claim.uid().context("no UID")?));
        s.wait_for_event("clone", &["no pool for"]).await?;
        // Like the deletion of their namespace.
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        s.wait_for_event("clone", &["data", "being deleted"]).await?;
        s.guest_claims().delete("clone", &DeleteParams::default()).await?;
        claim_gone(&s, "clone", &clone).await?;
        claim_gone(&s, "data", &source).await
    })
    .await
}

// ---- pods ----

#[tokio::test]
async fn an_xfs_volume_and_its_clone_are_mounted_on_one_vm() -> Result<()> {
    pods::run(|pods| async move {
        let source = pods.claim("data", &filesystem("xfs")).await?;
        // The pod keeps writing, so that the clone is of a mounted filesystem.
        let write = "dd if=/dev/urandom of=/data/first.bin bs=64k count=64 conv=fsync 2>/dev/null
            touch /data/written; sync
            while :; do echo more >> /data/log; done";
        let here = &pods.first_node;
        let writer = pods.start(Script::new("writer", here, write).mount(&source, "/data")).await?;
        let look = "until [ -e /data/written ]; do sleep 1; done; sha256sum < /data/first.bin";
        let written = pods.run(Script::new("look", here, look).mount(&source, "/data")).await?;
        let more = from_claim(&source.claim);
        let clone = pods.claim("clone", &ClaimOptions { more, ..filesystem("xfs") }).await?;

        let both =
            "for claim in data clone; do sha256sum < /$claim/first.bin; echo $claim > /$claim/mine; done
            sync; cat /data/mine /clone/mine; grep -c -e ' /data xfs ' -e ' /clone xfs ' /proc/mounts";
        let both = Script::new("both", here, both).mount(&source, "/data").mount(&clone, "/clone");
        let output = pods.run(both).await?;
        ensure!(output == format!("{written}\n{written}\ndata\nclone\n2"), "written was {written}; {output}");
        pods.remove(&writer).await
    })
    .await
}
