//! API requests per operation, counted in the management cluster's audit log. The tests run one at a time, because each
//! counts all requests of our components.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use kube::ResourceExt;
use kube::api::DeleteParams;
use lab::LoopNode;
use lab::audit::{Audit, Entry, Mark};
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone, unique};

/// Our components, by the prefix of their user agents.
const COMPONENTS: [&str; 3] = ["gc-csi", "vm-operator-shim", "mgmt-csi"];

#[tokio::test]
async fn an_attach_is_four_writes_and_gc_csi_makes_no_read() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        warm_up(&s, &node, &handle).await?;
        let mark = s.lab.audit()?.mark()?;
        s.driver.publish(&handle, &node.name).await?;
        let entries = requests_since(&s, mark).await?;
        let writes = count_by_kind(&entries, Entry::is_write);
        let expected = [
            "gc-csi patch virtualmachines",
            "mgmt-csi patch volumeattachments/status",
            "vm-operator-shim create volumeattachments",
            "vm-operator-shim patch virtualmachines/status",
        ];
        assert_eq!(writes, expected.map(|line| (line.to_owned(), 1)).into());
        nothing_read_for(&entries, &node, &handle);

        let mark = s.lab.audit()?.mark()?;
        s.driver.unpublish(&handle, &node.name).await?;
        let entries = requests_since(&s, mark).await?;
        let writes = count_by_kind(&entries, Entry::is_write);
        assert_eq!(writes.values().sum::<usize>(), 4, "{writes:?}");
        nothing_read_for(&entries, &node, &handle);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn twenty_concurrent_attaches_to_one_vm_are_merged_into_few_patches_without_conflicts() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        let mut handles = Vec::new();
        for _ in 0..20 {
            handles.push(s.volume().await?);
        }
        warm_up(&s, &node, &handles[0]).await?;
        let mark = s.lab.audit()?.mark()?;
        let tasks: Vec<_> = handles
            .iter()
            .map(|handle| {
                let (s, node, handle) = (s.clone(), node.name.clone(), handle.clone());
                tokio::spawn(async move { s.driver.publish(&handle, &node).await })
            })
            .collect();
        for task in tasks {
            task.await??;
        }
        let entries = requests_since(&s, mark).await?;
        let patches = count_by_kind(&entries, |entry| {
            entry.verb == "patch" && entry.resource == "virtualmachines" && component(entry) == Some("gc-csi")
        });
        let patches: usize = patches.values().sum();
        assert!((1..=5).contains(&patches), "{patches} PATCHes of the VM by gc-csi");
        // The shim writes the status with a resourceVersion; if gc-csi's PATCH comes in between, it retries.
        let overtaken = |entry: &Entry| {
            entry.code == 409 && entry.resource == "virtualmachines" && entry.subresource == "status"
        };
        let refused = count_by_kind(&entries, |entry| entry.code >= 400 && !overtaken(entry));
        assert_eq!(refused, BTreeMap::new(), "requests were refused");
        let reads =
            count_by_kind(&entries, |entry| component(entry) == Some("gc-csi") && entry.verb == "get");
        assert_eq!(reads, BTreeMap::new());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volume_lifecycle_is_four_writes_by_gc_csi_and_no_read() -> Result<()> {
    run_alone(|s| async move {
        let node = s.simulated_node().await?;
        let lifecycle = async |name: &str| {
            s.claim(name, "nestor", "4Mi").await?;
            let volume = s.bound(name).await?.1.name_any();
            let attachment = s.k8s_attach(&volume, &node.name).await?;
            s.attached(&attachment).await?;
            s.k8s_detach(&attachment).await?;
            s.guest_claims().delete(name, &DeleteParams::default()).await?;
            eventually(&format!("volume {volume} deleted"), PATIENCE, || async {
                let left = s.guest_volumes().get_opt(&volume).await?;
                Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.status))))
            })
            .await
        };
        lifecycle("warm-up").await?;
        let mut reads = Vec::new();
        for number in 0..5 {
            let mark = end_of_idle_log(&s).await?;
            lifecycle(&format!("volume-{number}")).await?;
            let entries = of_gc_csi(&s, mark).await?;
            let expected = [
                ("gc-csi create persistentvolumeclaims", 1),
                ("gc-csi delete persistentvolumeclaims", 1),
                ("gc-csi patch virtualmachines", 2),
            ];
            let expected = expected.map(|(line, count)| (line.to_owned(), count));
            assert_eq!(count_by_kind(&entries, Entry::is_write), expected.into());
            reads.push(count_by_kind(&entries, |entry| !entry.is_write() && entry.verb != "watch"));
        }
        // A call that a sidecar repeats much later than usual may need a read.
        assert!(reads.iter().any(BTreeMap::is_empty), "{reads:#?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_create_is_one_write_to_the_claim_and_a_delete_is_two() -> Result<()> {
    run_alone(|s| async move {
        let of_claims = |entries: &[Entry]| {
            count_by_kind(entries, |entry| entry.is_write() && entry.resource == "persistentvolumeclaims")
        };
        let mark = end_of_idle_log(&s).await?;
        s.claim("data", "nestor", "4Mi").await?;
        let volume = s.bound("data").await?.1.name_any();
        let entries = requests_since(&s, mark).await?;
        let create = [("gc-csi create persistentvolumeclaims".to_owned(), 1)];
        assert_eq!(of_claims(&entries), create.into());

        let mark = s.lab.audit()?.mark()?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        is_deleted(&s, &volume).await?;
        let entries = requests_since(&s, mark).await?;
        // mgmt-csi removes its finalizer.
        let delete = ["gc-csi delete persistentvolumeclaims", "mgmt-csi patch persistentvolumeclaims"];
        assert_eq!(of_claims(&entries), delete.map(|line| (line.to_owned(), 1)).into());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn deletes_cause_no_conflict_and_no_list_of_volumes() -> Result<()> {
    run_alone(|s| async move {
        let names: Vec<String> = (0..10).map(|number| format!("data-{number}")).collect();
        for name in &names {
            s.claim(name, "nestor", "4Mi").await?;
        }
        let mut volumes = Vec::new();
        for name in &names {
            volumes.push(s.bound(name).await?.1.name_any());
        }
        let mark = end_of_idle_log(&s).await?;
        for name in &names {
            s.guest_claims().delete(name, &DeleteParams::default()).await?;
        }
        for volume in &volumes {
            is_deleted(&s, volume).await?;
        }
        let lists = count_by_kind(&requests_since(&s, mark).await?, |entry| {
            entry.verb == "list" && entry.resource == "persistentvolumes"
        });
        assert_eq!(lists, BTreeMap::new());
        // kube-controller-manager would repeat a refused update only 100 ms later.
        let mut conflicts = s.lab.audit()?.since(mark)?;
        conflicts.retain(|entry| entry.resource == "persistentvolumeclaims" && entry.code == 409);
        ensure!(conflicts.is_empty(), "{conflicts:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_expansion_a_snapshot_and_its_deletion_are_one_write_each_by_gc_csi_and_no_read() -> Result<()> {
    run_alone(|s| async move {
        let handle = s.volume().await?;
        let mut mark = end_of_idle_log(&s).await?;
        for size in [8, 16] {
            s.driver.expand(&handle, size * MIB).await?;
            mark = is_only_request(&s, mark, "gc-csi patch persistentvolumeclaims").await?;
        }
        let snapshot = s.csi_snapshot(&unique(&s.name), &handle).await?;
        mark = is_only_request(&s, mark, "gc-csi create volumesnapshots").await?;
        s.driver.delete_snapshot(&snapshot.snapshot_id).await?;
        is_only_request(&s, mark, "gc-csi delete volumesnapshots").await.map(drop)
    })
    .await
}

/// Attaches and detaches once, so that one-time work is done, and waits until no requests are in flight, of earlier tests
/// either.
async fn warm_up(s: &Scenario, node: &LoopNode, handle: &str) -> Result<()> {
    s.driver.publish(handle, &node.name).await?;
    s.driver.unpublish(handle, &node.name).await?;
    s.no_attachments(node).await?;
    end_of_idle_log(s).await.map(drop)
}

/// The end of the log, once no requests are in flight.
async fn end_of_idle_log(s: &Scenario) -> Result<Mark> {
    requests_since(s, s.lab.audit()?.mark()?).await?;
    s.lab.audit()?.mark()
}

/// Waits until a PersistentVolume of the guest is deleted.
async fn is_deleted(s: &Scenario, volume: &str) -> Result<()> {
    eventually(&format!("volume {volume} deleted"), PATIENCE, || async {
        let left = s.guest_volumes().get_opt(volume).await?;
        Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.status))))
    })
    .await
}

/// gc-csi's requests since `mark`, except for its Lease.
async fn of_gc_csi(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    let mut entries = requests_since(s, mark).await?;
    entries.retain(|entry| component(entry) == Some("gc-csi") && entry.resource != "leases");
    Ok(entries)
}

/// Checks that gc-csi made only this request since `mark`; returns the new end of the log.
async fn is_only_request(s: &Scenario, mark: Mark, request: &str) -> Result<Mark> {
    let all = count_by_kind(&of_gc_csi(s, mark).await?, |entry| entry.verb != "watch");
    assert_eq!(all, [(request.to_owned(), 1)].into());
    s.lab.audit()?.mark()
}

/// The requests of our components since `mark`, once no more arrive: an unexpected write may arrive after the end of a
/// call.
pub(crate) async fn requests_since(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    settled_requests(&s.lab.audit()?, mark).await
}

/// The requests of our components after a mark, once there are no more.
pub(crate) async fn settled_requests(audit: &Audit, mark: Mark) -> Result<Vec<Entry>> {
    let mut count = usize::MAX;
    let mut unchanged = 0;
    eventually("no more requests of our components", PATIENCE, || {
        let entries: Result<Vec<Entry>> =
            audit.since(mark).map(|all| all.into_iter().filter(|entry| component(entry).is_some()).collect());
        let result = entries.map(|entries| {
            unchanged = if entries.len() == count { unchanged + 1 } else { 0 };
            count = entries.len();
            if unchanged >= 5 { Ok(entries) } else { Err(format!("{count} so far")) }
        });
        async move { result }
    })
    .await
}

/// The component that made a request; `None` for CSIStorageCapacity objects, which are written when volumes are created
/// or deleted, and for the tokens of guests, which are renewed at any time.
fn component(entry: &Entry) -> Option<&'static str> {
    if ["csistoragecapacities", "secrets", "serviceaccounts"].contains(&entry.resource.as_str()) {
        return None;
    }
    COMPONENTS.into_iter().find(|component| entry.user_agent.starts_with(component))
}

/// The number of requests of each kind.
pub(crate) fn count_by_kind(entries: &[Entry], pick: impl Fn(&Entry) -> bool) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for entry in entries.iter().filter(|entry| pick(entry)) {
        let separator = if entry.subresource.is_empty() { "" } else { "/" };
        let Entry { verb, resource, subresource, .. } = entry;
        let line = format!("{} {verb} {resource}{separator}{subresource}", component(entry).unwrap_or("?"));
        *counts.entry(line).or_default() += 1;
    }
    counts
}

/// Checks that gc-csi made no reads. Renewals of shared watches do not count, unless they name an object.
fn nothing_read_for(entries: &[Entry], node: &LoopNode, claim: &str) {
    let reads = count_by_kind(entries, |entry| {
        let own = entry.name == node.name || entry.name == claim;
        component(entry) == Some("gc-csi")
            && (["get", "list"].contains(&entry.verb.as_str()) || entry.verb == "watch" && own)
    });
    assert_eq!(reads, BTreeMap::new(), "gc-csi made reads");
}
