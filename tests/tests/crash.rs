//! Crash tests: each component dies before and after each of its writes, for each operation, and is started again. The
//! operation must complete, nothing may be left or done twice, and no write of a VM may be lost.
//!
//! The cases are recorded from an undisturbed run of each operation, so new writes are covered without changes here. By
//! default each fail point is tested in the first operation that passes it; `NESTOR_CRASH_CASES=all` tests it in all
//! of them, and any other value selects the cases whose names contain it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use csi::Status;
use csi::proto::CreateVolumeRequest;
use lab::LoopNode;
use tests::bytes::device;
use tests::crash::{BACKGROUND, CrashInjector, CrashPoint, call_until_final};
use tests::driver::{cloned_volume, new_volume, restored_volume};
use tests::inventory::Inventory;
use tests::records::{Log, Records, Writer};
use tests::{MIB, PATIENCE, Scenario, eventually, run_alone, unique};

/// The components that die.
const COMPONENTS: &[&str] = &["g1-gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];
/// Writes that happen once per volume, of which there is only one here. storage-infra's own crash tests cover them, each
/// time with a new volume.
const ONCE: [&str; 1] = ["catalog.records.is_written"];
/// Number of attempts for a write that can be skipped because of concurrent work.
const ATTEMPTS: usize = 3;
/// Size of the area that the VM writes to.
const RECORDS_SIZE: u64 = 128 << 10;
/// Initial size of volumes.
const SIZE: u64 = 4 << 20;

#[tokio::test]
async fn each_operation_completes_wherever_a_component_dies() -> Result<()> {
    run_alone(|s| async move {
        let mut crashes = CrashInjector::new(&s, COMPONENTS)?;
        let outcome = matrix(&s, &mut crashes).await;
        crashes.finish().await.and(outcome)
    })
    .await
}

async fn matrix(s: &Scenario, crashes: &mut CrashInjector<'_>) -> Result<()> {
    let mut state = State::begin(s).await?;
    let mut table = Vec::new();
    for operation in ALL {
        state.prepare(operation, crashes).await?;
        let ((), crash_points) = crashes.trace(state.run(operation)).await?;
        let is_its_own = |crash_point: &CrashPoint| {
            !BACKGROUND.iter().chain(&ONCE).any(|other| crash_point.point.contains(other))
        };
        table.push((operation, crash_points.into_iter().filter(is_its_own).collect::<Vec<_>>()));
    }
    let silent: Vec<_> = COMPONENTS
        .iter()
        .filter(|component| !table.iter().any(|(_, all)| all.iter().any(|one| one.component == **component)))
        .collect();
    ensure!(silent.is_empty(), "{silent:?} passed no fail point: were they built with debug assertions?");

    let (cases, of_all) =
        (chosen(&table), table.iter().map(|(_, crash_points)| crash_points.len()).sum::<usize>());
    let (start, total) = (Instant::now(), cases.len());
    let mut missed = Vec::new();
    for (operation, crash_point) in &cases {
        let case = Instant::now();
        let died = state
            .crash(*operation, crash_point, crashes)
            .await
            .with_context(|| name(*operation, crash_point))?;
        if !died {
            missed.push(name(*operation, crash_point));
        }
        eprintln!(
            "{:5.1} s  {}{}",
            case.elapsed().as_secs_f64(),
            name(*operation, crash_point),
            if died { "" } else { ": not passed" }
        );
    }
    let points: BTreeSet<_> =
        cases.iter().map(|(_, crash_point)| (crash_point.component, &crash_point.point)).collect();
    let operations: BTreeSet<_> = cases.iter().map(|(operation, _)| operation).collect();
    eprintln!(
        "{total} crashes of {of_all} possible ones: {} fail points in {} operations; {:.0} s, {} records written meanwhile",
        points.len(),
        operations.len(),
        start.elapsed().as_secs_f64(),
        state.log.acknowledged(),
    );
    ensure!(missed.is_empty(), "not passed in {ATTEMPTS} attempts nor in another operation: {missed:#?}");
    // Verify the written records once more.
    state.prepare(Attach, crashes).await
}

fn name(operation: Operation, crash_point: &CrashPoint) -> String {
    format!("{operation:?}: {crash_point}")
}

/// The selected cases, ordered so that operations that undo each other are adjacent.
fn chosen(table: &[(Operation, Vec<CrashPoint>)]) -> Vec<(Operation, CrashPoint)> {
    let filter = std::env::var("NESTOR_CRASH_CASES").unwrap_or_default();
    let mut met = BTreeSet::new();
    let mut cases = Vec::new();
    for (operation, crash_points) in table {
        for (index, crash_point) in crash_points.iter().enumerate() {
            let first = met.insert((crash_point.component, crash_point.point.clone()));
            let is_chosen = match filter.as_str() {
                "" => first,
                "all" => true,
                text => name(*operation, crash_point).contains(text),
            };
            if is_chosen {
                cases.push((*operation, index, crash_point.clone()));
            }
        }
    }
    cases.sort_by_key(|(operation, index, _)| (operation.pair(), *index));
    cases.into_iter().map(|(operation, _, crash_point)| (operation, crash_point)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Attach,
    Expand,
    Snapshot,
    CloneVolume,
    Restore,
    DeleteSnapshot,
    Create,
    Delete,
    Detach,
}

use Operation::{Attach, CloneVolume, Create, Delete, DeleteSnapshot, Detach, Expand, Restore, Snapshot};

const ALL: [Operation; 9] =
    [Attach, Expand, Snapshot, CloneVolume, Restore, DeleteSnapshot, Create, Delete, Detach];

impl Operation {
    /// The management sidecar that the operation needs.
    fn sidecar(self) -> Option<&'static str> {
        match self {
            Attach | Detach => None,
            Expand => Some("mgmt-resizer"),
            Snapshot | DeleteSnapshot => Some("mgmt-snapshotter"),
            CloneVolume | Restore | Create | Delete => Some("mgmt-provisioner"),
        }
    }

    /// Sort key: the same for two operations that undo each other.
    fn pair(self) -> u8 {
        match self {
            Attach | Detach => 0,
            Expand => 1,
            CloneVolume => 2,
            Snapshot | DeleteSnapshot => 3,
            Restore => 4,
            Create | Delete => 5,
        }
    }
}

#[derive(Clone)]
struct Volume {
    handle: String,
    bytes: u64,
}

struct Kept {
    handle: String,
    bytes: u64,
    /// Number of acknowledged records when the snapshot was requested.
    records: u64,
}

/// The expected state, and what is needed to change it.
struct State<'a> {
    s: &'a Scenario,
    node: LoopNode,
    /// The volume that is attached, expanded, snapshotted and cloned while records are written to it.
    subject: Volume,
    log: Log,
    /// While the subject is attached.
    writer: Option<Writer>,
    spares: Vec<Volume>,
    snapshots: Vec<Kept>,
    facts: Inventory,
}

impl<'a> State<'a> {
    async fn begin(s: &'a Scenario) -> Result<Self> {
        let node = s.node().await?;
        // An attachment of another driver, so that the repair does not detach disks of this node as dangling.
        s.k8s_attachments().attach_by("crash.test", &s.name, &node.name).await?;
        let subject = Volume { handle: s.volume().await?, bytes: SIZE };
        let file = s.file_of(&s.infra_volume(&subject.handle).await?).await?;
        let log = Records::begin(&file, RECORDS_SIZE)?.close();
        let facts = Inventory::now(s).await?;
        Ok(Self { s, node, subject, log, writer: None, spares: Vec::new(), snapshots: Vec::new(), facts })
    }

    /// Runs the operations that must precede this one.
    async fn prepare(&mut self, operation: Operation, crashes: &mut CrashInjector<'_>) -> Result<()> {
        while let Some(before) = self.prerequisite(operation) {
            if let Some(sidecar) = before.sidecar() {
                crashes.refresh_sidecar(sidecar).await?;
            }
            self.run(before).await.with_context(|| format!("{before:?} before {operation:?}"))?;
        }
        match operation.sidecar() {
            Some(sidecar) => crashes.refresh_sidecar(sidecar).await,
            None => Ok(()),
        }
    }

    fn prerequisite(&self, operation: Operation) -> Option<Operation> {
        let is_attached = self.writer.is_some();
        let (is_needed, before) = match operation {
            Attach => (is_attached, Detach),
            Detach | Expand | Snapshot | CloneVolume => (!is_attached, Attach),
            Restore | DeleteSnapshot => (self.snapshots.is_empty(), Snapshot),
            Create => return None,
            Delete => (self.spares.is_empty(), Create),
        };
        if !is_needed {
            return None;
        }
        Some(self.prerequisite(before).unwrap_or(before))
    }

    /// Runs the operation with an armed fail point. Returns false if it was not passed. An asynchronous write may be
    /// passed only after its operation; then another operation passes it.
    async fn crash(
        &mut self,
        operation: Operation,
        crash_point: &CrashPoint,
        crashes: &mut CrashInjector<'_>,
    ) -> Result<bool> {
        let others = ALL.into_iter().filter(|other| *other != operation);
        for operation in std::iter::repeat_n(operation, ATTEMPTS).chain(others) {
            self.prepare(operation, crashes).await?;
            let ((), died) =
                crashes.crash_during(crash_point, operation.sidecar(), self.run(operation)).await?;
            if died {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs the operation like a sidecar, and waits until exactly the expected objects exist.
    async fn run(&mut self, operation: Operation) -> Result<()> {
        match operation {
            Attach => self.attach().await,
            Detach => self.detach().await,
            Expand => self.expand().await,
            Snapshot => self.snapshot().await,
            DeleteSnapshot => self.delete_snapshot().await,
            Create => self.create(new_volume(&self.s.csi_name(), SIZE as i64, "nestor"), None).await,
            CloneVolume => {
                let (source, bytes) = (&self.subject.handle, self.subject.bytes as i64);
                let request = cloned_volume(&self.s.csi_name(), bytes, source);
                self.create(request, Some(self.log.acknowledged())).await
            }
            Restore => {
                let Kept { handle, bytes, records } = self.snapshots.last().context("no snapshot")?;
                let (records, bytes) = (*records, *bytes as i64);
                self.create(restored_volume(&self.s.csi_name(), bytes, handle), Some(records)).await
            }
            Delete => self.delete().await,
        }
    }

    async fn attach(&mut self) -> Result<()> {
        let (s, Volume { handle, bytes }) = (self.s, self.subject.clone());
        let disk = call_until_final("attach", || s.driver.publish(&handle, &self.node.name)).await?;
        let attached = Inventory::of_attached(&handle, bytes, &self.node);
        self.expect(Inventory::default(), attached).await?;
        let device = device(&self.node, &disk);
        self.log.verify(&device)?;
        self.writer = Some(self.log.clone().resume(&device)?.append_in_background());
        Ok(())
    }

    async fn detach(&mut self) -> Result<()> {
        // The writer stops before the detach, as with an unmount.
        let writer = self.writer.take().context("not attached")?;
        drop(writer.stop()?);
        let (s, Volume { handle, bytes }) = (self.s, self.subject.clone());
        call_until_final("detach", || s.driver.unpublish(&handle, &self.node.name)).await?;
        let attached = Inventory::of_attached(&handle, bytes, &self.node);
        self.expect(attached, Inventory::default()).await?;
        self.log.verify(&self.file(&handle).await?)
    }

    async fn expand(&mut self) -> Result<()> {
        let (s, Volume { handle, bytes }) = (self.s, self.subject.clone());
        let larger = bytes + MIB as u64;
        let has = call_until_final("expand", || s.driver.expand(&handle, larger as i64)).await?;
        ensure!(has == larger as i64, "it has {has} bytes, not {larger}");
        self.subject.bytes = larger;
        let of = |bytes| {
            Inventory::of_volume(&handle, bytes).with(Inventory::of_attached(&handle, bytes, &self.node))
        };
        let (before, after) = (of(bytes), of(larger));
        self.expect(before, after).await
    }

    async fn snapshot(&mut self) -> Result<()> {
        let (s, name, records) = (self.s, unique(&self.s.name), self.log.acknowledged());
        let Volume { handle: source, bytes } = self.subject.clone();
        let taken = call_until_final("snapshot", || async {
            let taken = s.csi_snapshot(&name, &source).await?;
            if taken.ready_to_use { Ok(taken) } else { Err(Status::aborted("not ready")) }
        })
        .await?;
        let handle = taken.snapshot_id;
        self.expect(Inventory::default(), Inventory::of_snapshot(&handle, &source, bytes)).await?;
        let file = retried("the snapshot's file", || async {
            let kept = s.infra_snapshot(&handle).await?;
            let pool = s.infra.get_pool(&kept.pool).await?.context("the snapshot's pool does not exist")?;
            Ok(PathBuf::from(pool.path).join(format!("{}.snap", kept.id)))
        });
        self.log.verify_since(records, &file.await?)?;
        self.snapshots.push(Kept { handle, bytes, records });
        Ok(())
    }

    async fn delete_snapshot(&mut self) -> Result<()> {
        let Kept { handle, bytes, .. } = self.snapshots.pop().context("no snapshot")?;
        let s = self.s;
        call_until_final("delete a snapshot", || s.driver.delete_snapshot(&handle)).await?;
        let gone = Inventory::of_snapshot(&handle, &self.subject.handle, bytes);
        self.expect(gone, Inventory::default()).await
    }

    /// Creates a volume and verifies the first `records` records of the subject in a clone or restored volume.
    async fn create(&mut self, request: CreateVolumeRequest, records: Option<u64>) -> Result<()> {
        let s = self.s;
        let volume = call_until_final("create", || s.driver.create(request.clone())).await?;
        let (handle, bytes) = (volume.volume_id, volume.capacity_bytes as u64);
        self.expect(Inventory::default(), Inventory::of_volume(&handle, bytes)).await?;
        if let Some(records) = records {
            self.log.verify_since(records, &self.file(&handle).await?)?;
        }
        self.spares.push(Volume { handle, bytes });
        Ok(())
    }

    async fn delete(&mut self) -> Result<()> {
        let Volume { handle, bytes } = self.spares.pop().context("no spare volume")?;
        let s = self.s;
        call_until_final("delete", || s.driver.delete(&handle)).await?;
        self.expect(Inventory::of_volume(&handle, bytes), Inventory::default()).await
    }

    /// Updates the expected inventory, and waits until it is observed.
    async fn expect(&mut self, without: Inventory, with: Inventory) -> Result<()> {
        self.facts = std::mem::take(&mut self.facts).without(&without).with(with);
        self.facts.wait_until_observed(self.s).await
    }

    async fn file(&self, handle: &str) -> Result<PathBuf> {
        retried("the volume's file", || async { self.s.file_of(&self.s.infra_volume(handle).await?).await })
            .await
    }
}

/// Retries a request to storage-infra, which may be restarting.
async fn retried<T, F, R>(what: &str, request: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T>>,
{
    eventually(what, PATIENCE, || async { Ok(request().await.map_err(|error| format!("{error:#}"))) }).await
}
