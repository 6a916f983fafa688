//! Topology: zones of VMs, nodes, pools and volumes, and the storage capacity of each zone for the scheduler.

use anyhow::{Context, Result};
use crds::names;
use csi::proto::{GetCapacityRequest, Topology};
use infra_api::Pool;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use kube_kit::quantity;
use serde_json::{Value, json};
use tests::driver::new_volume;
use tests::guest::handle;
use tests::own_pool::OwnPool;
use tests::{MIB, PATIENCE, Scenario, eventually, run};

const A: &str = "zone-a";
const B: &str = "zone-b";
/// Label of a scenario's pools.
const OWN: &str = "test";

/// Creates a pool for the scenario in a zone, or in none.
async fn pool_in(s: &Scenario, zone: Option<&str>) -> Result<OwnPool> {
    let zone = zone.map(|zone| (names::LABEL_ZONE, zone));
    let labels: Vec<_> = [(OWN, s.name.as_str())].into_iter().chain(zone).collect();
    s.pool(&labels).await
}

/// Creates a management class for the scenario's pools, and a guest class with `more` merged into it.
async fn classes(s: &Scenario, more: Value) -> Result<(String, String)> {
    let management_class = s.management_class(&[(&format!("pool.{OWN}"), &s.name)]).await?;
    let guest_class =
        s.guest_class_with(&[(names::PARAMETER_MANAGEMENT_CLASS, &management_class)], more).await?;
    Ok((management_class, guest_class))
}

fn wait_for_consumer() -> Value {
    json!({"volumeBindingMode": "WaitForFirstConsumer"})
}

fn only_in(zone: &str) -> Value {
    json!({"allowedTopologies": [{"matchLabelExpressions": [{"key": names::LABEL_ZONE, "values": [zone]}]}]})
}

/// Creates a raw block claim, so that no pod needs a filesystem.
async fn raw_claim(s: &Scenario, name: &str, class: &str) -> Result<()> {
    s.claim_with(name, class, "4Mi", json!({"volumeMode": "Block"})).await.map(drop)
}

/// A volume's node affinity as text; `None` if it has none.
fn affinity(volume: &PersistentVolume) -> Option<String> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?;
    serde_json::to_string(affinity).ok()
}

/// Checks that the volume of a guest claim is in this pool and accessible from this zone only.
async fn is_in(s: &Scenario, claim: &str, pool: &OwnPool, zone: &str) -> Result<()> {
    let (_, volume) = s.bound(claim).await?;
    let handle = handle(&volume)?;
    assert_eq!(s.infra_volume(&handle).await?.pool, pool.name);
    let term = json!({"matchExpressions": [{"key": names::LABEL_ZONE, "operator": "In", "values": [zone]}]});
    let expected = json!({"required": {"nodeSelectorTerms": [term]}});
    let affinity =
        affinity(&volume).with_context(|| format!("volume {} has no node affinity", volume.name_any()))?;
    assert_eq!(serde_json::from_str::<Value>(&affinity)?, expected);
    let management_claim = s.claims().get(&handle).await?;
    for annotation in [names::ANNOTATION_REQUESTED_ZONES, names::ANNOTATION_ACCESSIBLE_ZONES] {
        assert_eq!(
            management_claim.annotations().get(annotation).map(String::as_str),
            Some(zone),
            "{annotation}"
        );
    }
    Ok(())
}

// ---- VMs ----

#[tokio::test]
async fn a_vms_zone_is_a_label_of_its_node_and_a_topology_key_of_the_driver() -> Result<()> {
    run(|s| async move {
        let vms = s.lab.vms();
        anyhow::ensure!(vms.len() > 1, "the test needs two virtual machines: `cargo lab up --vms 2`");
        let mut zones = Vec::new();
        for vm in vms {
            let zone = s.lab.vm(&vm)?.zone;
            let node = Api::<Node>::all(s.guest.clone()).get(&vm).await?;
            assert_eq!(node.labels().get(names::LABEL_ZONE), Some(&zone), "{vm}");
            let node = Api::<CSINode>::all(s.guest.clone()).get(&vm).await?;
            let driver = node.spec.drivers.into_iter().find(|driver| driver.name == names::GUEST_DRIVER);
            let keys = driver.and_then(|driver| driver.topology_keys);
            assert_eq!(keys, Some(vec![names::LABEL_ZONE.to_owned()]), "{vm}");
            zones.push(zone);
        }
        assert_eq!(zones[..2], [A, B]);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_zone_label_set_by_hand_is_kept_and_reported() -> Result<()> {
    run(|s| async move {
        let node = s.node_for_pods(A, None).await?;
        let nodes = Api::<Node>::all(s.guest.clone());
        let label = async |zone: Option<&str>| {
            let patch = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_ZONE: zone}}}));
            nodes.patch(&node.name, &PatchParams::default(), &patch).await
        };
        label(Some("elsewhere")).await?;
        let (reason, _) = s.wait_for_event_of("Node", &node.name, &["elsewhere", A, &node.name]).await?;
        assert_eq!(reason, "ZoneMismatch");
        let there = nodes.get(&node.name).await?;
        assert_eq!(there.labels().get(names::LABEL_ZONE).map(String::as_str), Some("elsewhere"));
        label(None).await?;
        eventually("the node has its VM's zone again", PATIENCE, || async {
            let there = nodes.get(&node.name).await?;
            let zone = there.labels().get(names::LABEL_ZONE).cloned();
            Ok(if zone.as_deref() == Some(A) { Ok(()) } else { Err(format!("{zone:?}")) })
        })
        .await
    })
    .await
}

// ---- placement of volumes ----

#[tokio::test]
async fn a_volume_is_created_in_its_pods_zone_and_later_pods_are_scheduled_there() -> Result<()> {
    run(|s| async move {
        let (pool_a, pool_b) = (pool_in(&s, Some(A)).await?, pool_in(&s, Some(B)).await?);
        let (node_a, node_b) = (s.node_for_pods(A, None).await?, s.node_for_pods(B, None).await?);
        let (_, class) = classes(&s, wait_for_consumer()).await?;
        for (name, node, pool, zone) in [("a", &node_a, &pool_a, A), ("b", &node_b, &pool_b, B)] {
            raw_claim(&s, name, &class).await?;
            s.pod(name, Some(node), &[name]).await?;
            assert_eq!(s.scheduled(name).await?, node.name);
            is_in(&s, name, pool, zone).await?;
        }
        s.pod("astray", Some(&node_a), &["b"]).await?;
        s.not_scheduled("astray", &["1 node(s) didn't match PersistentVolume's node affinity"]).await?;
        s.pod("anywhere", None, &["b"]).await?;
        assert_eq!(s.scheduled("anywhere").await?, node_b.name);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_without_a_zone_is_scheduled_to_a_zone_with_capacity() -> Result<()> {
    run(|s| async move {
        let pool = pool_in(&s, Some(B)).await?;
        s.node_for_pods(A, None).await?;
        let node = s.node_for_pods(B, None).await?;
        let (_, class) = classes(&s, wait_for_consumer()).await?;
        raw_claim(&s, "data", &class).await?;
        s.pod("pod", None, &["data"]).await?;
        assert_eq!(s.scheduled("pod").await?, node.name);
        is_in(&s, "data", &pool, B).await
    })
    .await
}

#[tokio::test]
async fn allowed_topologies_of_a_class_are_respected() -> Result<()> {
    run(|s| async move {
        pool_in(&s, Some(A)).await?;
        let pool = pool_in(&s, Some(B)).await?;
        let (_, class) = classes(&s, only_in(B)).await?;
        raw_claim(&s, "data", &class).await?;
        is_in(&s, "data", &pool, B).await
    })
    .await
}

#[tokio::test]
async fn a_volume_accessible_from_all_zones_has_no_node_affinity() -> Result<()> {
    run(|s| async move {
        let pool = pool_in(&s, None).await?;
        let (management_class, class) = classes(&s, json!({})).await?;
        raw_claim(&s, "data", &class).await?;
        let (_, volume) = s.bound("data").await?;
        assert_eq!(affinity(&volume), None);
        let handle = handle(&volume)?;
        assert_eq!(s.infra_volume(&handle).await?.pool, pool.name);
        let claim = s.claims().get(&handle).await?;
        for annotation in [names::ANNOTATION_REQUESTED_ZONES, names::ANNOTATION_ACCESSIBLE_ZONES] {
            assert!(!claim.annotations().contains_key(annotation), "{annotation}");
        }
        // The same with allowedTopologies: the zone can access the volume too.
        let parameters = [(names::PARAMETER_MANAGEMENT_CLASS, management_class.as_str())];
        let zoned = s.guest_class_with(&parameters, only_in(B)).await?;
        raw_claim(&s, "zoned", &zoned).await?;
        assert_eq!(affinity(&s.bound("zoned").await?.1), None);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_zone_without_capacity_is_reported_with_the_reason_per_pool_and_recovers() -> Result<()> {
    run(|s| async move {
        let pool = pool_in(&s, Some(A)).await?;
        let (_, class) = classes(&s, only_in(B)).await?;
        raw_claim(&s, "data", &class).await?;
        let (reason, _) =
            s.wait_for_event("data", &["no pool for", "in another zone", "labels do not match"]).await?;
        assert_eq!(reason, "ProvisioningFailed");
        s.label_own_pool(&pool, &[(OWN, &s.name), (names::LABEL_ZONE, B)]).await?;
        is_in(&s, "data", &pool, B).await
    })
    .await
}

// ---- capacity ----

/// Free bytes of a pool in the storage infra.
async fn free(s: &Scenario, pool: &OwnPool) -> Result<u64> {
    let pool: Pool = s.infra.get_pool(&pool.name).await?.context("the pool is gone")?;
    Ok(pool.free_bytes)
}

/// The published CSIStorageCapacity of a class and a zone: capacity and maximum volume size.
async fn published(
    client: &Client,
    namespace: &str,
    class: &str,
    zone: &str,
) -> Result<Option<(Option<u64>, Option<u64>)>> {
    let api: Api<CSIStorageCapacity> = Api::namespaced(client.clone(), namespace);
    let list = api.list(&ListParams::default()).await?;
    let is_of_zone = |one: &CSIStorageCapacity| {
        let labels = one.node_topology.as_ref().and_then(|topology| topology.match_labels.as_ref());
        labels.and_then(|labels| labels.get(names::LABEL_ZONE)).map(String::as_str) == Some(zone)
    };
    let found = list.items.into_iter().find(|one| one.storage_class_name == class && is_of_zone(one));
    let bytes = |quantity: Option<_>| quantity.as_ref().and_then(quantity::value);
    Ok(found.map(|one| (bytes(one.capacity), bytes(one.maximum_volume_size))))
}

/// Waits until both tiers publish the free space of the pools in both zones; the guest at most `most`, if there is a
/// limit. Returns the free space of each pool.
async fn capacity_published(
    s: &Scenario,
    management_class: &str,
    guest_class: &str,
    pools: &[(&str, &OwnPool); 2],
    most: Option<u64>,
) -> Result<[u64; 2]> {
    let mut frees = [0; 2];
    for (at, (zone, pool)) in pools.iter().enumerate() {
        let what = format!("the capacity of {guest_class} in {zone}, at most {most:?}, is published");
        frees[at] = eventually(&what, PATIENCE, || async {
            let free = free(s, pool).await?;
            let left = most.map_or(free, |most| most.min(free));
            let request = GetCapacityRequest {
                parameters: [(names::PARAMETER_MANAGEMENT_CLASS.to_owned(), management_class.to_owned())]
                    .into(),
                accessible_topology: Some(Topology {
                    segments: [(names::LABEL_ZONE.to_owned(), (*zone).to_owned())].into(),
                }),
                ..Default::default()
            };
            let answer = s.driver.calls().get_capacity(request).await?.into_inner();
            let observed = [
                published(&s.management, "nestor-system", management_class, zone).await?,
                published(&s.guest, "kube-system", guest_class, zone).await?,
                Some((
                    u64::try_from(answer.available_capacity).ok(),
                    answer.maximum_volume_size.map(|size| size as u64),
                )),
            ];
            let expected = [free, left, left].map(|bytes| Some((Some(bytes), Some(bytes))));
            Ok(if observed == expected {
                Ok(free)
            } else {
                Err(format!("{observed:?} instead of {expected:?}"))
            })
        })
        .await?;
    }
    Ok(frees)
}

#[tokio::test]
async fn both_tiers_publish_the_capacity_of_each_zone_limited_by_quotas() -> Result<()> {
    run(|s| async move {
        let (pool_a, pool_b) = (pool_in(&s, Some(A)).await?, pool_in(&s, Some(B)).await?);
        let pools = [(A, &pool_a), (B, &pool_b)];
        let (management_class, guest_class) = classes(&s, wait_for_consumer()).await?;
        let before = capacity_published(&s, &management_class, &guest_class, &pools, None).await?;
        assert!(before.iter().all(|bytes| *bytes > 100 << 20), "{before:?}");

        let mut request = new_volume(&s.csi_name(), 64 * MIB, &management_class);
        let zone = Topology { segments: [(names::LABEL_ZONE.to_owned(), A.to_owned())].into() };
        request.accessibility_requirements = Some(csi::proto::TopologyRequirement {
            requisite: vec![zone.clone()],
            preferred: vec![zone.clone()],
        });
        let made = s.driver.create(request).await?;
        assert_eq!(made.accessible_topology, [zone]);
        let after = capacity_published(&s, &management_class, &guest_class, &pools, None).await?;
        assert!(after[0] <= before[0] - (64 << 20), "{before:?} before, {after:?} with a volume");

        s.quota(&management_class, "100Mi").await?;
        capacity_published(&s, &management_class, &guest_class, &pools, Some(36 << 20)).await?;
        s.driver.delete(&made.volume_id).await?;
        capacity_published(&s, &management_class, &guest_class, &pools, Some(100 << 20)).await.map(drop)
    })
    .await
}
