//! High availability with three replicas of each controller: any replica serves calls, and one of each runs the
//! reconcilers. Leaders are killed, restarted and paused during operations. The times until a new leader are printed.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use lab::audit::{Entry, Mark};
use lab::{Lab, LoopNode, Replica};
use tests::driver::{Driver, new_volume};
use tests::{MIB, PATIENCE, Scenario, alone, eventually};
use tonic::{Code, Status};

/// The guest whose gc-csi is replicated.
const GUEST: &str = "g1";
/// Number of replicas.
const REPLICAS: u32 = 3;
/// Our controllers: the component of the first replica, and the metric that is 1 on the leader.
const CONTROLLERS: [(&str, &str); 3] = [
    ("g1-gc-csi", "nestor_gc_csi_leader"),
    ("mgmt-csi", "nestor_mgmt_csi_leader"),
    ("vm-operator-shim", "nestor_vm_operator_shim_leader"),
];
/// Number of volumes that are created and attached at once.
const VOLUMES: usize = 50;
/// Number of volumes that are started last.
const BATCH: usize = 10;

#[tokio::test]
async fn operations_complete_once_although_every_leader_is_killed_meanwhile() -> Result<()> {
    with_replicas(|s| async move {
        let since = s.lab.audit()?.mark()?;
        let (drivers, nodes) = (drivers(&s).await?, [s.node().await?, s.node().await?]);
        let done = Arc::new(AtomicUsize::new(0));
        let begin = |number: usize| {
            let (s, drivers, done) = (s.clone(), drivers.clone(), done.clone());
            let node = nodes[number % nodes.len()].name.clone();
            tokio::spawn(async move {
                let handle = create(&s, &drivers, number).await?;
                attach(&drivers, number, &handle, &node).await?;
                done.fetch_add(1, Ordering::SeqCst);
                anyhow::Ok(handle)
            })
        };
        let mut work: Vec<_> = (0..VOLUMES - BATCH).map(&begin).collect();
        eventually("the first volumes are attached", PATIENCE, || async {
            let done = done.load(Ordering::SeqCst);
            Ok(if done > 4 { Ok(()) } else { Err(format!("{done} of {VOLUMES}")) })
        })
        .await?;
        // The storage infra is paused, so that some operations are unfinished when the leaders are killed.
        let frozen = s.pause_component("storage-infra")?;
        work.extend((VOLUMES - BATCH..VOLUMES).map(&begin));
        let killed = Instant::now();
        let mut leaders = Vec::new();
        for controller in CONTROLLERS {
            let leader = leader(&s, controller, &[]).await?;
            s.kill_component(&leader).await?;
            leaders.push((controller, leader));
        }
        let before = done.load(Ordering::SeqCst);
        drop(frozen);
        let scenario = &s;
        try_join_all(leaders.iter().map(|(controller, old)| async move {
            let new = leader(scenario, *controller, std::slice::from_ref(old)).await?;
            println!("{old} was killed: {new} leads {:.1} s later", killed.elapsed().as_secs_f64());
            anyhow::Ok(())
        }))
        .await?;
        let mut handles = Vec::new();
        for one in work {
            handles.push(one.await??);
        }
        println!(
            "all {VOLUMES} volumes are attached {:.1} s after the leaders were killed, {} of them since",
            killed.elapsed().as_secs_f64(),
            VOLUMES - before
        );
        assert!(before < VOLUMES, "no operation was in progress");

        let mut plugged = 0;
        for node in &nodes {
            let list = s.infra.list_attachments(Some(node.uuid.to_string().parse()?), None).await?;
            let mut volumes: Vec<String> = list.iter().map(|one| one.volume.to_string()).collect();
            volumes.sort();
            volumes.dedup();
            assert_eq!(volumes.len(), list.len(), "a volume was attached twice: {list:?}");
            plugged += list.len();
        }
        assert_eq!(plugged, VOLUMES);
        each_created_once(&s, since, &handles)?;
        remove(&drivers, &handles, &nodes).await
    })
    .await
}

#[tokio::test]
async fn a_rolling_restart_under_load_fails_no_call_and_repeats_no_operation() -> Result<()> {
    with_replicas(|s| async move {
        let since = s.lab.audit()?.mark()?;
        let drivers = drivers(&s).await?;
        let restarted = Arc::new(AtomicBool::new(false));
        let mut work = Vec::new();
        for number in 0..6 {
            let (s, drivers, restarted) = (s.clone(), drivers.clone(), restarted.clone());
            let node = s.node().await?;
            work.push(tokio::spawn(async move {
                let mut handles = Vec::new();
                while !restarted.load(Ordering::SeqCst) || handles.is_empty() {
                    let turn = number + handles.len();
                    let handle = create(&s, &drivers, turn).await?;
                    attach(&drivers, turn + 1, &handle, &node.name).await?;
                    remove(&drivers, std::slice::from_ref(&handle), std::slice::from_ref(&node)).await?;
                    handles.push(handle);
                }
                anyhow::Ok(handles)
            }));
        }
        for number in 1..=REPLICAS {
            for controller in CONTROLLERS {
                restart(&s, controller, &Replica::nth(number).name(controller.0)).await?;
            }
        }
        restarted.store(true, Ordering::SeqCst);
        let mut handles = Vec::new();
        for one in work {
            handles.extend(one.await??);
        }
        println!("{} volumes were created, attached, detached and deleted meanwhile", handles.len());
        each_created_once(&s, since, &handles)
    })
    .await
}

#[tokio::test]
async fn a_leader_paused_for_longer_than_its_lease_writes_nothing_when_it_continues() -> Result<()> {
    with_replicas(|s| async move {
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        let drivers = drivers(&s).await?;
        let since = s.lab.audit()?.mark()?;
        let mut stopped = Vec::new();
        for controller in CONTROLLERS {
            let leader = leader(&s, controller, &[]).await?;
            let counted = writes(&s, &leader).await?;
            stopped.push((controller, s.pause_component(&leader)?, s.lab.pid(&leader), leader, counted));
        }
        // The paused leaders will receive these changes when they continue.
        let others: Vec<Driver> = drivers
            .iter()
            .zip(1..)
            .filter(|(_, number)| Replica::nth(*number).name(GUEST_DRIVER) != stopped[0].3)
            .map(|(driver, _)| driver.clone())
            .collect();
        attach(&others, 0, &handle, &node.name).await?;
        for (controller, _, _, old, _) in &stopped {
            leader(&s, *controller, std::slice::from_ref(old)).await?;
        }
        let nodes = std::slice::from_ref(&node);
        detach(&others, 1, &handle, nodes).await?;
        s.no_attachments(&node).await?;

        for (controller, frozen, pid, old, counted) in stopped {
            drop(frozen);
            eventually(&format!("{old} has noticed that it is not the leader"), PATIENCE, || async {
                // It may take a while to respond.
                let metrics = s.lab.metrics(&old).await.unwrap_or_default();
                Ok(if has_metric(&metrics, controller.1, "0") {
                    Ok(())
                } else {
                    Err("it still reports that it leads".to_owned())
                })
            })
            .await?;
            assert_eq!(writes(&s, &old).await?, counted, "{old} wrote after it was paused");
            assert_eq!(s.lab.pid(&old), pid, "{old} was restarted");
        }
        s.no_attachments(&node).await?;
        let creations = creations(&s.lab.audit()?.since(since)?, "nestor.dev", "volumeattachments");
        assert_eq!(creations.into_values().collect::<Vec<_>>(), [1]);
        // The replicas still serve calls.
        for (driver, turn) in drivers.iter().zip(0..) {
            attach(std::slice::from_ref(driver), turn, &handle, &node.name).await?;
            detach(std::slice::from_ref(driver), turn, &handle, nodes).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn each_event_is_written_by_one_replica() -> Result<()> {
    with_replicas(|s| async move {
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        let drivers = drivers(&s).await?;
        attach(&drivers, 0, &handle, &node.name).await?;
        s.wait_for_event("data", &["attached to VirtualMachine", &node.name]).await?;
        detach(&drivers, 1, &handle, std::slice::from_ref(&node)).await?;
        s.wait_for_event("data", &["not attached to any VirtualMachine"]).await?;
        let events = s.events_of("PersistentVolumeClaim", "data").await?;
        for what in ["VolumeAttached", "VolumeDetached"] {
            assert_eq!(events.iter().filter(|(reason, _)| reason == what).count(), 1, "{events:?}");
        }
        for controller in CONTROLLERS {
            leader(&s, controller, &[]).await?;
        }
        Ok(())
    })
    .await
}

/// The component of the guest driver's first replica.
const GUEST_DRIVER: &str = CONTROLLERS[0].0;

/// Runs a test with three replicas of each controller and a leader of each; scales back to one afterwards.
async fn with_replicas<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let alone = alone().await;
    let lab = Lab::from_env()?;
    lab.scale(GUEST, REPLICAS).await?;
    let outcome = alone
        .run(|s| async move {
            for controller in CONTROLLERS {
                leader(&s, controller, &[]).await?;
            }
            body(s).await
        })
        .await;
    let scaled_back = lab.scale(GUEST, 1).await;
    outcome.and(scaled_back)
}

/// The guest driver's replicas.
async fn drivers(s: &Scenario) -> Result<Vec<Driver>> {
    let first = s.lab.controller_socket(GUEST)?;
    try_join_all((1..=REPLICAS).map(|number| {
        let socket = Replica::nth(number).socket(&first);
        async move { Driver::connect(&socket).await }
    }))
    .await
}

/// Waits until one replica leads, ignoring the replicas in `without_metrics`, which do not respond.
async fn leader(s: &Scenario, (plain, metric): (&str, &str), without_metrics: &[String]) -> Result<String> {
    eventually(&format!("one {plain} leads"), PATIENCE, || async {
        let mut leading = Vec::new();
        for component in (1..=REPLICAS).map(|number| Replica::nth(number).name(plain)) {
            if !without_metrics.contains(&component)
                && s.lab.pid(&component).is_some()
                && has_metric(&s.lab.metrics(&component).await.unwrap_or_default(), metric, "1")
            {
                leading.push(component);
            }
        }
        match leading.len() {
            0 => Ok(Err("no replica leads".to_owned())),
            1 => Ok(Ok(leading.remove(0))),
            _ => bail!("several lead: {leading:?}"),
        }
    })
    .await
}

fn has_metric(metrics: &str, metric: &str, value: &str) -> bool {
    metrics.lines().any(|line| line.split_once(' ') == Some((metric, value)))
}

/// The write counters of a component, as far as it has any.
async fn writes(s: &Scenario, component: &str) -> Result<Vec<String>> {
    let metrics = s.lab.metrics(component).await?;
    let counts = [
        "nestor_vm_operator_shim_writes_total",
        "nestor_mgmt_csi_attachment_operation_duration_seconds_count",
    ];
    let lines = metrics.lines().filter(|line| counts.iter().any(|count| line.starts_with(count)));
    Ok(lines.map(str::to_owned).collect())
}

/// Stops a replica and its sidecars, and starts it again; prints the time until another replica leads.
async fn restart(s: &Scenario, controller: (&str, &str), component: &str) -> Result<()> {
    let led = leader(s, controller, &[]).await? == component;
    // Sidecars are stopped first: a sidecar that loses its driver exits like in a crash.
    try_join_all(s.lab.sidecars(component)?.iter().map(|sidecar| s.lab.stop(sidecar))).await?;
    let start = Instant::now();
    let left = [component.to_owned()];
    let next = async {
        if led {
            let next = leader(s, controller, &left).await?;
            println!("{component} was stopped: {next} leads {:.1} s later", start.elapsed().as_secs_f64());
        }
        Ok(())
    };
    futures::try_join!(s.lab.stop(component), next)?;
    s.lab.start(component).await
}

/// Calls the replicas in turn like a sidecar until a call succeeds; fails on a final code.
async fn call_until_final<T, Call, Calling>(
    drivers: &[Driver],
    first: usize,
    what: &str,
    call: Call,
) -> Result<T>
where
    Call: Fn(Driver) -> Calling,
    Calling: Future<Output = Result<T, Status>>,
{
    let turn = AtomicUsize::new(first);
    eventually(what, PATIENCE, || async {
        let turn = turn.fetch_add(1, Ordering::SeqCst);
        match call(drivers[turn % drivers.len()].clone()).await {
            Ok(done) => Ok(Ok(done)),
            Err(status) if is_retryable(&status) => Ok(Err(status.to_string())),
            Err(status) => bail!("{what}: final status: {status}"),
        }
    })
    .await
}

/// Whether sidecars retry after a status. A broken connection has no status code.
fn is_retryable(status: &Status) -> bool {
    let again = [Code::Unavailable, Code::Aborted, Code::Cancelled, Code::DeadlineExceeded];
    again.contains(&status.code()) || status.source().is_some()
}

async fn create(s: &Scenario, drivers: &[Driver], turn: usize) -> Result<String> {
    let name = s.csi_name();
    let call = |driver: Driver| {
        let request = new_volume(&name, 4 * MIB, "nestor");
        async move { driver.create(request).await }
    };
    Ok(call_until_final(drivers, turn, &format!("volume {name} created"), call).await?.volume_id)
}

async fn attach(drivers: &[Driver], turn: usize, handle: &str, node: &str) -> Result<()> {
    let call = |driver: Driver| async move { driver.publish(handle, node).await };
    call_until_final(drivers, turn, &format!("{handle} attached to {node}"), call).await.map(drop)
}

/// Detaches a volume from all of these nodes.
async fn detach(drivers: &[Driver], turn: usize, handle: &str, nodes: &[LoopNode]) -> Result<()> {
    try_join_all(nodes.iter().map(|node| {
        let call = move |driver: Driver| async move { driver.unpublish(handle, &node.name).await };
        async move {
            call_until_final(drivers, turn, &format!("{handle} detached from {}", node.name), call).await
        }
    }))
    .await
    .map(drop)
}

/// Detaches and deletes volumes concurrently.
async fn remove(drivers: &[Driver], handles: &[String], nodes: &[LoopNode]) -> Result<()> {
    try_join_all(handles.iter().zip(0..).map(|(handle, turn)| async move {
        detach(drivers, turn, handle, nodes).await?;
        let call = |driver: Driver| async move { driver.delete(handle).await };
        call_until_final(drivers, turn + 1, &format!("{handle} deleted"), call).await
    }))
    .await
    .map(drop)
}

/// Fails unless each volume's claim, management volume and VolumeAttachment were created exactly once.
fn each_created_once(s: &Scenario, since: Mark, handles: &[String]) -> Result<()> {
    let requests = s.lab.audit()?.since(since)?;
    let claims = creations(&requests, "", "persistentvolumeclaims");
    for handle in handles {
        let count = claims.get(handle).with_context(|| format!("claim {handle} was not created"))?;
        assert_eq!(*count, 1, "claim {handle}");
    }
    for (group, resource) in [("", "persistentvolumes"), ("nestor.dev", "volumeattachments")] {
        let creations = creations(&requests, group, resource);
        assert!(creations.values().all(|count| *count == 1), "{resource}: {creations:?}");
        assert_eq!(creations.len(), handles.len(), "{resource}: {creations:?}");
    }
    Ok(())
}

/// How often each object of a resource was created. A request whose client died may be logged as failed although it was
/// executed: then no other request created the object.
fn creations(requests: &[Entry], group: &str, resource: &str) -> BTreeMap<String, usize> {
    let mut creations = BTreeMap::new();
    let mut broken_off = Vec::new();
    for request in requests {
        let is_of_kind =
            request.group == group && request.resource == resource && request.subresource.is_empty();
        let creates = is_of_kind && request.verb == "create";
        match request.code {
            201 if creates => *creations.entry(request.name.clone()).or_default() += 1,
            500..=599 if creates => broken_off.push(request.name.clone()),
            _ => {}
        }
    }
    for name in broken_off {
        creations.entry(name).or_insert(1);
    }
    creations
}
