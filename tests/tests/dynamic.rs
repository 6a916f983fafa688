//! Dynamic provisioning: guest claim, management claim, volume of the storage infra, and their deletion.

use anyhow::{Context, Result};
use crds::names;
use csi::proto::CapacityRange;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use tests::driver::new_volume;
use tests::guest::handle;
use tests::{MIB, PATIENCE, eventually, run, unique};
use tonic::Code;

#[tokio::test]
async fn a_guest_claim_is_bound_with_matching_objects_in_both_tiers_and_leaves_nothing() -> Result<()> {
    run(|s| async move {
        s.claim("data", "nestor", "5Mi").await?;
        let (claim, volume) = s.bound("data").await?;
        let handle = handle(&volume)?;
        assert_eq!(handle, s.claim_name(&volume.name_any()), "the handle is the deterministic name");
        let capacity = |quantity: Option<&_>| quantity.map(|q: &_| format!("{q:?}")).unwrap_or_default();
        let of_claim = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
        let of_volume = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref());
        assert_eq!(
            capacity(of_claim.and_then(|all| all.get("storage"))),
            capacity(of_volume.and_then(|all| all.get("storage")))
        );
        assert!(capacity(of_volume.and_then(|all| all.get("storage"))).contains("5Mi"));
        assert_eq!(volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref()), Some("nestor"));

        let management_claim = s.claims().get(&handle).await?;
        assert_eq!(management_claim.labels().get(names::LABEL_CLUSTER_ID), Some(&s.cluster_id));
        for (annotation, value) in [
            (names::ANNOTATION_GUEST_PVC, "data"),
            (names::ANNOTATION_GUEST_NAMESPACE, s.name.as_str()),
            (names::ANNOTATION_GUEST_PV, &volume.name_any()),
            (names::ANNOTATION_GUEST_STORAGE_CLASS, "nestor"),
        ] {
            assert_eq!(
                management_claim.annotations().get(annotation).map(String::as_str),
                Some(value),
                "{annotation}"
            );
        }
        let spec = management_claim.spec.context("the management claim has no spec")?;
        assert_eq!(spec.storage_class_name.as_deref(), Some("nestor"));
        assert_eq!(spec.access_modes, Some(vec!["ReadWriteOnce".to_owned()]));

        let disk = s.infra_volume(&handle).await?;
        assert_eq!(disk.capacity_bytes, 5 << 20);
        let file = s.file_of(&disk).await?;
        assert_eq!(std::fs::metadata(&file)?.len(), 5 << 20);

        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        eventually("the guest volume is deleted", PATIENCE, || async {
            let left = s.guest_volumes().get_opt(&volume.name_any()).await?;
            Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.status))))
        })
        .await?;
        // The guest volume is deleted only after everything below it.
        assert!(s.claims().get_opt(&handle).await?.is_none());
        s.own(&volume.name_any());
        s.no_leftovers().await?;
        assert!(!file.exists(), "{} is left", file.display());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn calls_are_idempotent_and_a_different_request_with_the_same_name_is_refused() -> Result<()> {
    run(|s| async move {
        let request = new_volume(&s.csi_name(), 4 * MIB, "nestor");
        let first = s.driver.create(request.clone()).await?;
        assert_eq!(s.driver.create(request.clone()).await?, first);

        let mut larger = request.clone();
        larger.capacity_range = Some(CapacityRange { required_bytes: 8 * MIB, limit_bytes: 0 });
        let refused = s.driver.create(larger).await.unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        assert!(refused.message().contains(&first.volume_id), "{refused}");

        let class = s.management_class(&[]).await?;
        let other = new_volume(&request.name, 4 * MIB, &class);
        let refused = s.driver.create(other).await.unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        assert!(refused.message().contains("nestor") && refused.message().contains(&class), "{refused}");
        assert_eq!(s.infra_volume(&first.volume_id).await?.capacity_bytes, 4 << 20);

        s.driver.delete(&first.volume_id).await?;
        s.driver.delete(&first.volume_id).await?;
        s.driver.delete("never-was").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_class_without_a_valid_management_class_is_refused_with_the_reason() -> Result<()> {
    run(|s| async move {
        let mut without = new_volume(&s.csi_name(), MIB, "nestor");
        without.parameters.clear();
        let refused = s.driver.create(without.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(names::PARAMETER_MANAGEMENT_CLASS), "{refused}");

        without.parameters.insert("managmentStorageClass".into(), "nestor".into());
        let refused = s.driver.create(without).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("managmentStorageClass"), "{refused}");

        let absent = unique("absent");
        let refused = s.driver.create(new_volume(&s.csi_name(), MIB, &absent)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(&absent), "{refused}");

        let class = s.guest_class("Delete", &[(names::PARAMETER_MANAGEMENT_CLASS, &absent)]).await?;
        s.claim("data", &class, "1Mi").await?;
        let (reason, _) = s.wait_for_event("data", &[&absent, "does not exist"]).await?;
        assert_eq!(reason, "ProvisioningFailed");
        let none = s.guest_class("Delete", &[]).await?;
        s.claim("other", &none, "1Mi").await?;
        s.wait_for_event("other", &[names::PARAMETER_MANAGEMENT_CLASS, "is missing"]).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_quota_error_of_the_management_cluster_is_reported_with_its_numbers_and_recovers() -> Result<()> {
    run(|s| async move {
        let (management_class, class) = s.classes(&[]).await?;
        s.quota(&management_class, "10Mi").await?;
        s.limited(&management_class, "20Mi").await?;
        let refused =
            s.driver.create(new_volume(&s.csi_name(), 20 * MIB, &management_class)).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        let numbers = ["exceeded quota", "10Mi", "20Mi"];
        assert!(numbers.iter().all(|number| refused.message().contains(number)), "{refused}");

        s.claim("data", &class, "20Mi").await?;
        s.wait_for_event("data", &numbers).await?;
        s.quota(&management_class, "40Mi").await?;
        s.bound("data").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn missing_capacity_is_reported_with_the_infras_message_and_recovers() -> Result<()> {
    run(|s| async move {
        // Only pools with this label can serve the class, and there are none yet.
        let label = unique("label");
        let (_, class) = s.classes(&[(&format!("pool.{label}"), &s.name)]).await?;
        s.claim("data", &class, "4Mi").await?;
        s.wait_for_event("data", &["no pool for", "labels do not match"]).await?;
        let claims = s.claims().list(&ListParams::default()).await?;
        let waiting = claims
            .iter()
            .any(|claim| claim.annotations().get(names::ANNOTATION_GUEST_NAMESPACE) == Some(&s.name));
        assert!(waiting, "the management claim is pending");
        s.label_pool(&label, &s.name).await?;
        s.bound("data").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_larger_than_every_pool_is_refused_with_the_infras_message_and_can_be_deleted() -> Result<()>
{
    run(|s| async move {
        let name = s.csi_name();
        let huge = new_volume(&name, 900 << 40, "nestor");
        let refused = s.driver.create(huge.clone()).await.unwrap_err();
        assert!(refused.message().contains("too little free space"), "{refused}");
        // A later retry may succeed, so the code must not be final.
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
        assert!(s.claims().get_opt(&s.claim_name(&name)).await?.is_some());
        s.driver.delete(&s.claim_name(&name)).await?;
        assert!(s.claims().get_opt(&s.claim_name(&name)).await?.is_none());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_guest_claim_deleted_while_there_is_no_capacity_leaves_nothing() -> Result<()> {
    run(|s| async move {
        let (_, class) = s.classes(&[("pool.test", &s.name)]).await?;
        let claim = s.claim("data", &class, "4Mi").await?;
        s.own(&format!("pvc-{}", claim.uid().context("no UID")?));
        s.wait_for_event("data", &["no pool for"]).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        s.no_leftovers().await
    })
    .await
}

#[tokio::test]
async fn sizes_are_rounded_up_to_mebibytes_within_the_limit() -> Result<()> {
    run(|s| async move {
        let of_size = |required_bytes, limit_bytes| {
            let mut request = new_volume(&s.csi_name(), 0, "nestor");
            request.capacity_range = Some(CapacityRange { required_bytes, limit_bytes });
            request
        };
        let made = s.driver.create(of_size(5 * MIB + 1, 7 * MIB)).await?;
        assert_eq!(made.capacity_bytes, 6 * MIB);
        let exact = s.driver.create(of_size(3 * MIB, 3 * MIB)).await?;
        assert_eq!(exact.capacity_bytes, 3 * MIB);
        let limit_only = s.driver.create(of_size(0, 2 * MIB)).await?;
        assert_eq!(limit_only.capacity_bytes, 2 * MIB);
        for (required, limit) in [(1, 1000), (MIB + 1, 2 * MIB - 1), (5 * MIB, 4 * MIB)] {
            let refused = s.driver.create(of_size(required, limit)).await.unwrap_err();
            assert_eq!(refused.code(), Code::OutOfRange, "{required}..{limit}: {refused}");
        }
        let refused = s.driver.create(of_size(-1, 0)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let mut unspecified = new_volume(&s.csi_name(), 0, "nestor");
        unspecified.capacity_range = None;
        assert_eq!(s.driver.create(unspecified).await?.capacity_bytes, 1 << 30);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn any_csi_name_becomes_a_separate_volume() -> Result<()> {
    run(|s| async move {
        let mut handles = std::collections::BTreeSet::new();
        for odd in ["x".repeat(130), "ünï/cödé ../..".to_owned(), "A\tB".to_owned(), "a\"b'c\\".to_owned()]
        {
            let name = s.own(&format!("{}{odd}", s.name));
            let request = new_volume(&name, MIB, "nestor");
            let made = s.driver.create(request.clone()).await.with_context(|| format!("{odd:?}"))?;
            assert_eq!(made.volume_id, s.claim_name(&name));
            assert_eq!(s.driver.create(request).await?, made, "{odd:?}");
            s.infra_volume(&made.volume_id).await?;
            handles.insert(made.volume_id);
        }
        assert_eq!(handles.len(), 4);
        Ok(())
    })
    .await
}
