//! What an attach costs the management cluster's API, counted in its audit log. One test at a time, since
//! each counts everything that our parts ask.

use std::collections::BTreeMap;

use anyhow::Result;
use kube::ResourceExt;
use kube::api::DeleteParams;
use lab::LoopNode;
use lab::audit::{Entry, Mark};
use tests::{MIB, PATIENCE, Scenario, alone, eventually, run, unique};

/// Our parts, by the beginning of their user agents.
const PARTS: [&str; 3] = ["gc-csi", "vm-operator-shim", "mgmt-csi"];

#[tokio::test]
async fn an_attach_is_four_writes_and_gc_csi_reads_nothing_for_it() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        warm(&s, &node, &handle).await?;
        let mark = s.lab.audit()?.mark()?;
        s.driver.publish(&handle, &node.name).await?;
        let entries = settled(&s, mark).await?;
        let writes = tally(&entries, Entry::is_write);
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
        let entries = settled(&s, mark).await?;
        let writes = tally(&entries, Entry::is_write);
        assert_eq!(writes.values().sum::<usize>(), 4, "{writes:?}");
        nothing_read_for(&entries, &node, &handle);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn twenty_attaches_at_once_on_one_machine_are_merged_into_few_patches_without_conflicts() -> Result<()>
{
    let _alone = alone().await;
    run(|s| async move {
        let node = s.node().await?;
        let mut handles = Vec::new();
        for _ in 0..20 {
            handles.push(s.volume().await?);
        }
        warm(&s, &node, &handles[0]).await?;
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
        let entries = settled(&s, mark).await?;
        let patches = tally(&entries, |entry| {
            entry.verb == "patch" && entry.resource == "virtualmachines" && part(entry) == Some("gc-csi")
        });
        let patches: usize = patches.values().sum();
        assert!((1..=5).contains(&patches), "{patches} PATCHes of the machine by gc-csi");
        // The shim tells of the machine that it saw: when a PATCH of gc-csi's comes in between, it tells anew.
        let overtaken = |entry: &Entry| {
            entry.code == 409 && entry.resource == "virtualmachines" && entry.subresource == "status"
        };
        let refused = tally(&entries, |entry| entry.code >= 400 && !overtaken(entry));
        assert_eq!(refused, BTreeMap::new(), "nothing was refused, as a conflict or otherwise");
        let reads = tally(&entries, |entry| part(entry) == Some("gc-csi") && entry.verb == "get");
        assert_eq!(reads, BTreeMap::new());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_volumes_whole_life_is_four_writes_of_gc_csi_and_no_read() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let node = s.simulated_node().await?;
        let life = async |name: &str| {
            s.claim(name, "nestor", "4Mi").await?;
            let volume = s.bound(name).await?.1.name_any();
            let order = s.order_attach(&volume, &node.name).await?;
            s.attached(&order).await?;
            s.order_detach(&order).await?;
            s.guest_claims().delete(name, &DeleteParams::default()).await?;
            eventually(&format!("volume {volume} gone"), PATIENCE, || async {
                let left = s.guest_volumes().get_opt(&volume).await?;
                Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.status))))
            })
            .await
        };
        life("warm-up").await?;
        let mut reads = Vec::new();
        for number in 0..5 {
            let mark = calm(&s).await?;
            life(&format!("life-{number}")).await?;
            let entries = of_gc_csi(&s, mark).await?;
            let expected = [
                ("gc-csi create persistentvolumeclaims", 1),
                ("gc-csi delete persistentvolumeclaims", 1),
                ("gc-csi patch virtualmachines", 2),
            ];
            let expected = expected.map(|(line, count)| (line.to_owned(), count));
            assert_eq!(tally(&entries, Entry::is_write), expected.into());
            reads.push(tally(&entries, |entry| !entry.is_write() && entry.verb != "watch"));
        }
        // A sidecar that repeats a call much later than it usually does is answered after a read.
        assert!(reads.iter().any(BTreeMap::is_empty), "{reads:#?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_expansion_a_snapshot_and_its_deletion_are_one_write_each_of_gc_csi_and_no_read() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let handle = s.volume().await?;
        let mut mark = calm(&s).await?;
        for size in [8, 16] {
            s.driver.expand(&handle, size * MIB).await?;
            mark = only(&s, mark, "gc-csi patch persistentvolumeclaims").await?;
        }
        let snapshot = s.csi_snapshot(&unique(&s.name), &handle).await?;
        mark = only(&s, mark, "gc-csi create volumesnapshots").await?;
        s.driver.delete_snapshot(&snapshot.snapshot_id).await?;
        only(&s, mark, "gc-csi delete volumesnapshots").await.map(drop)
    })
    .await
}

/// One attach and detach before, so that nothing is done for the first time; and then nothing is on its way any more,
/// of an earlier test either.
async fn warm(s: &Scenario, node: &LoopNode, handle: &str) -> Result<()> {
    s.driver.publish(handle, &node.name).await?;
    s.driver.unpublish(handle, &node.name).await?;
    s.nothing_is_attached(node).await?;
    calm(s).await.map(drop)
}

/// The end of the log, once nothing is on its way any more.
async fn calm(s: &Scenario) -> Result<Mark> {
    settled(s, s.lab.audit()?.mark()?).await?;
    s.lab.audit()?.mark()
}

/// What gc-csi asked since `mark`, but for its Lease.
async fn of_gc_csi(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    let mut entries = settled(s, mark).await?;
    entries.retain(|entry| part(entry) == Some("gc-csi") && entry.resource != "leases");
    Ok(entries)
}

/// This one request is all that gc-csi made since `mark`.
async fn only(s: &Scenario, mark: Mark, request: &str) -> Result<Mark> {
    let all = tally(&of_gc_csi(s, mark).await?, |entry| entry.verb != "watch");
    assert_eq!(all, [(request.to_owned(), 1)].into());
    s.lab.audit()?.mark()
}

/// The entries of our parts since `mark`, once no more come: the last answer of a call is written before the
/// call ends, but a write that should not be there may come later.
async fn settled(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    let audit = s.lab.audit()?;
    let mut seen = usize::MAX;
    let mut calm = 0;
    eventually("no more requests of our parts", PATIENCE, || {
        let entries: Result<Vec<Entry>> =
            audit.since(mark).map(|all| all.into_iter().filter(|entry| part(entry).is_some()).collect());
        let result = entries.map(|entries| {
            calm = if entries.len() == seen { calm + 1 } else { 0 };
            seen = entries.len();
            if calm >= 5 { Ok(entries) } else { Err(format!("{seen} so far")) }
        });
        async move { result }
    })
    .await
}

/// The part that made a request, unless it is about how much room is left: that is written when volumes come and go,
/// whatever is attached meanwhile.
fn part(entry: &Entry) -> Option<&'static str> {
    if entry.resource == "csistoragecapacities" {
        return None;
    }
    PARTS.into_iter().find(|part| entry.user_agent.starts_with(part))
}

/// How often each kind of request was made.
fn tally(entries: &[Entry], pick: impl Fn(&Entry) -> bool) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for entry in entries.iter().filter(|entry| pick(entry)) {
        let separator = if entry.subresource.is_empty() { "" } else { "/" };
        let Entry { verb, resource, subresource, .. } = entry;
        let line = format!("{} {verb} {resource}{separator}{subresource}", part(entry).unwrap_or("?"));
        *counts.entry(line).or_default() += 1;
    }
    counts
}

/// The shared watches are renewed now and then; a read that names an object is made for a call.
fn nothing_read_for(entries: &[Entry], node: &LoopNode, claim: &str) {
    let reads = tally(entries, |entry| {
        let own = entry.name == node.name || entry.name == claim;
        part(entry) == Some("gc-csi")
            && (["get", "list"].contains(&entry.verb.as_str()) || entry.verb == "watch" && own)
    });
    assert_eq!(reads, BTreeMap::new(), "gc-csi answered from what it knows");
}
