//! Space in pools: promised space is available, and failed requests reserve none.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::{Labels, NodeSpec, OnFull};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tests::bytes::read_at;
use tests::guest::handle;
use tests::own_pool::OwnPool;
use tests::writer_vm::{BEGINNING, PIECE, WriterVm};
use tests::{MIB, PATIENCE, Scenario, eventually, run, unique};

/// Size of each claim: three of them fill a scenario's own pool.
const SIZE: &str = "300Mi";
/// Number of attempts of a guest.
const TRIES: usize = 4;

/// Creates a claim as soon as the quota no longer counts the previous one.
async fn create_in_quota(
    claims: &Api<PersistentVolumeClaim>,
    claim: &PersistentVolumeClaim,
) -> Result<PersistentVolumeClaim> {
    eventually("the quota allows the claim", PATIENCE, || async {
        match claims.create(&PostParams::default(), claim).await {
            Err(kube::Error::Api(status)) if status.code == 403 => Ok(Err(status.message)),
            made => Ok(Ok(made?)),
        }
    })
    .await
}

/// Reserved bytes of a pool.
async fn reserved(s: &Scenario, pool: &OwnPool) -> Result<u64> {
    Ok(s.infra.get_pool(&pool.name).await?.context("the pool is gone")?.reserved_bytes)
}

#[tokio::test]
async fn claims_that_cannot_be_provisioned_reserve_no_space() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[]).await?;
        let class = s.management_class(&[("pool", pool.name.as_str())]).await?;
        s.quota(&class, "500Mi").await?;
        // Without the admission policy, which refuses so long an annotation.
        let guest = s.management_without_policies().await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest, &s.namespace);
        let zones: Vec<String> = (0..17_000).map(|number| format!("zone-{number}")).collect();
        for _ in 0..TRIES {
            let claim = serde_json::from_value(json!({
                "metadata": {
                    "name": unique(&s.name),
                    "labels": {names::LABEL_CLUSTER_ID: s.cluster_id},
                    "annotations": {names::ANNOTATION_REQUESTED_ZONES: zones.join(",")},
                },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                    "resources": {"requests": {"storage": SIZE}},
                },
            }))?;
            let claim = create_in_quota(&claims, &claim).await?;
            let name = claim.metadata.name.context("a claim without a name")?;
            s.wait_for_management_event(
                &name,
                &["InvalidArgument", names::ANNOTATION_REQUESTED_ZONES, "17000 zones", "at most 64"],
            )
            .await?;
            claims.delete(&name, &DeleteParams::default()).await?;
        }
        ensure!(reserved(&s, &pool).await? == 0, "{} bytes are reserved", reserved(&s, &pool).await?);

        let spec = json!({"storageClassName": class, "resources": {"requests": {"storage": SIZE}}});
        let second = s.second_guest().await?.cluster_id;
        eventually("an empty quota", PATIENCE, || async {
            let list = s.quotas().list(&ListParams::default()).await?;
            let used: Vec<String> = list
                .into_iter()
                .filter(|quota| quota.metadata.name.as_deref().is_some_and(|name| name.starts_with(&s.name)))
                .flat_map(|quota| quota.status.unwrap_or_default().used.unwrap_or_default())
                .map(|(_, used)| used.0)
                .collect();
            Ok(if used.iter().all(|used| used == "0") { Ok(()) } else { Err(format!("{used:?}")) })
        })
        .await?;
        let served = s.management_claim(&[(names::LABEL_CLUSTER_ID, &second)], spec).await?;
        ensure!(s.infra_volume(&served).await?.pool == pool.name, "it is in another pool");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_larger_than_any_volume_is_refused_with_exact_numbers_and_creates_nothing() -> Result<()> {
    run(|s| async move {
        let most = i64::MAX.to_string();
        s.claim("vast", "nestor", &most).await?;
        let exact = format!(
            "no volume can have {most} bytes: the largest that can be requested has 9223372036853727232 bytes"
        );
        s.wait_for_event("vast", &["OutOfRange", &exact]).await?;
        let events = s.events("vast").await?;
        ensure!(!events.iter().any(|(_, text)| text.contains("AlreadyExists")), "{events:?}");
        let uid = s.guest_claims().get("vast").await?.metadata.uid.context("no UID")?;
        let management_claim = s.claims().get_opt(&s.claim_name(&format!("pvc-{uid}"))).await?;
        ensure!(management_claim.is_none(), "{management_claim:?}");
        s.guest_claims().delete("vast", &DeleteParams::default()).await?;

        // A management claim of this size is refused by the storage infra.
        let guest = s.lab.management_as_guest("g1").await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(guest, &s.namespace);
        let name = unique(&s.name);
        let claim = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: s.cluster_id}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                "resources": {"requests": {"storage": most}},
            },
        }))?;
        claims.create(&PostParams::default(), &claim).await?;
        let exact =
            format!("capacityBytes {most} exceeds the maximum disk size of 9223372036854771712 bytes");
        s.wait_for_management_event(&name, &["InvalidArgument", &exact]).await?;
        claims.delete(&name, &DeleteParams::default()).await?;
        Ok(())
    })
    .await
}

/// Size of the disk of a VM that writes, and the free space of its pool at first.
const DISK: u64 = 32 * MIB.cast_unsigned();
const LEFT: u64 = DISK / 2;

/// A VM whose disk is in a pool with too little free space, before it writes.
struct AlmostFullPool<'a> {
    vm: WriterVm<'a>,
    file: PathBuf,
    filler: PathBuf,
}

impl<'a> AlmostFullPool<'a> {
    async fn begin(s: &'a Scenario, pool: &OwnPool, claim: &str) -> Result<Self> {
        let (_, class) = s.classes(&[("pool", pool.name.as_str())]).await?;
        s.claim_with(claim, &class, &DISK.to_string(), json!({"volumeMode": "Block"})).await?;
        let (_, volume) = s.bound(claim).await?;
        let node = s.node().await?;
        let spec = NodeSpec {
            name: node.name.clone(),
            hypervisor: "libvirt".to_owned(),
            zone: None,
            labels: Labels::new(),
        };
        s.infra.put_node(node.uuid, &spec).await?;
        s.lab.join_guest(&node).await?;
        let vm = WriterVm::create(s, &node).await?;
        let attachment = s.k8s_attach(&volume.name_any(), &node.name).await?;
        s.attached(&attachment).await?;
        let file = s.file_of(&s.infra_volume(&handle(&volume)?).await?).await?;
        Ok(Self { vm, file, filler: pool.fill_up_to(LEFT).await? })
    }

    /// Number of pieces of the disk that were written.
    fn written(&self) -> Result<usize> {
        let pieces = (0..DISK).step_by(PIECE);
        let beginnings = pieces.map(|start| read_at(&self.file, start, BEGINNING.len()));
        Ok(beginnings.collect::<Result<Vec<_>>>()?.into_iter().filter(|bytes| *bytes == BEGINNING).count())
    }
}

const PIECES: usize = DISK as usize / PIECE;
const PAUSED: &str = "paused (I/O error)";

async fn vm_is_paused_until_there_is_space(
    s: &Scenario,
    pool: &OwnPool,
    almost_full: &AlmostFullPool<'_>,
) -> Result<()> {
    almost_full.vm.resume().await?;
    almost_full.vm.wait_for_state(Some(PAUSED), "shut off").await?;
    let texts = ["is paused", "got no space"];
    s.wait_for_event("pause", &texts).await?;
    ensure!(
        s.infra.get_pool(&pool.name).await?.is_some_and(|pool| pool.full),
        "the pool is not reported as full"
    );
    ensure!(almost_full.written()? < PIECES, "there was enough space");
    std::fs::remove_file(&almost_full.filler)?;
    almost_full.vm.wait_for_state(None, "shut off").await?;
    ensure!(
        almost_full.written()? == PIECES,
        "only {} of {PIECES} pieces were written",
        almost_full.written()?
    );
    s.wait_for_event("pause", &["the volume is healthy"]).await.map(drop)
}

async fn writes_fail_and_vm_runs(almost_full: &AlmostFullPool<'_>) -> Result<()> {
    almost_full.vm.resume().await?;
    // The VM shuts down at the first error.
    almost_full.vm.wait_for_state(None, PAUSED).await?;
    ensure!(almost_full.written()? < PIECES, "there was enough space");
    Ok(std::fs::remove_file(&almost_full.filler)?)
}

#[tokio::test]
async fn a_vm_whose_pool_is_full_is_paused_until_there_is_space_and_no_write_fails() -> Result<()> {
    run(|s| async move {
        let pool = s.pool(&[]).await?;
        s.show_to_libvirt(&pool).await?;
        let almost_full = AlmostFullPool::begin(&s, &pool, "pause").await?;
        let outcome = vm_is_paused_until_there_is_space(&s, &pool, &almost_full).await;
        almost_full.vm.destroy().await?;
        outcome?;

        s.set_on_full(&pool, OnFull::Fail).await?;
        let almost_full = AlmostFullPool::begin(&s, &pool, "fail").await?;
        let outcome = writes_fail_and_vm_runs(&almost_full).await;
        almost_full.vm.destroy().await?;
        outcome
    })
    .await
}
