//! User: executes operations like a sidecar, with retries until the status is final, and checks the resulting state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use infra_api::{AttachmentState, VolumeState};
use lab::LoopNode;
use tests::driver::{self, Driver};
use tests::records::{Log, Records};
use tests::{MIB, PATIENCE, Scenario, bytes, eventually};
use tonic::{Code, Status};

use super::plan::{Number, Operation, Plan, VMS};

/// Timeout of an operation, during which components may fail repeatedly.
const STUCK: Duration = Duration::from_secs(600);
/// Size of the records' area of a volume.
const RECORDS_SIZE: u64 = 256 << 10;

/// A user of a guest, with its own nodes.
pub struct User {
    scenario: Arc<Scenario>,
    name: String,
    socket: PathBuf,
    vms: Vec<LoopNode>,
    plan: Plan,
    /// The CSI handles of its volumes and snapshots.
    handles: BTreeMap<Number, String>,
    /// The disks of attached volumes.
    disks: BTreeMap<Number, PathBuf>,
    /// The written records, by the volume that they were first written to.
    records: BTreeMap<Number, Log>,
}

impl User {
    pub async fn new(s: &Arc<Scenario>, guest: &str, number: u64, seed: u64) -> Result<Self> {
        let second = if guest == "g1" { None } else { Some(s.second_guest().await?) };
        let mut vms = Vec::new();
        for _ in 0..VMS {
            vms.push(match &second {
                None => s.node().await?,
                Some(second) => second.node().await?,
            });
        }
        Ok(Self {
            scenario: s.clone(),
            name: format!("{}-{guest}-{number}", s.name),
            socket: s.lab.controller_socket(guest)?,
            vms,
            plan: Plan::new(seed),
            handles: BTreeMap::new(),
            disks: BTreeMap::new(),
            records: BTreeMap::new(),
        })
    }

    /// Runs the plan until `until`, and then removes everything. Returns the number of operations by kind.
    pub async fn until(mut self, until: Instant) -> Result<BTreeMap<&'static str, usize>> {
        let mut counts = BTreeMap::new();
        while Instant::now() < until {
            let operation = self.plan.next();
            self.carry_out(&operation, &mut counts).await?;
        }
        for operation in self.plan.end() {
            self.carry_out(&operation, &mut counts).await?;
        }
        Ok(counts)
    }

    async fn carry_out(
        &mut self,
        operation: &Operation,
        counts: &mut BTreeMap<&'static str, usize>,
    ) -> Result<()> {
        let nth: usize = counts.values().sum();
        let context = format!("user {}, operation {nth}: {operation:?}", self.name);
        let what = self.act(operation).await.with_context(|| context.clone())?;
        self.plan.done(operation);
        self.check(operation).await.with_context(|| format!("after {context}"))?;
        *counts.entry(what).or_default() += 1;
        Ok(())
    }

    async fn act(&mut self, operation: &Operation) -> Result<&'static str> {
        Ok(match *operation {
            Operation::Create { volume, mib } => {
                let request = driver::new_volume(&self.csi_name(volume), mib * MIB, "nestor");
                self.make(volume, request).await?;
                "create"
            }
            Operation::Restore { volume, snapshot, mib } => {
                let from = &self.handles[&snapshot];
                let request = driver::restored_volume(&self.csi_name(volume), mib * MIB, from);
                self.make(volume, request).await?;
                "restore"
            }
            Operation::Clone { volume, source, mib } => {
                let from = &self.handles[&source];
                let request = driver::cloned_volume(&self.csi_name(volume), mib * MIB, from);
                self.make(volume, request).await?;
                "clone"
            }
            Operation::Attach { volume, vm } => {
                let (handle, node) = (self.handle(volume), &*self.vms[vm].name);
                let disk =
                    self.call_until_final(|driver| async move { driver.publish(handle, node).await }).await?;
                self.disks.insert(volume, bytes::device(&self.vms[vm], &disk));
                "attach"
            }
            Operation::Contend { volume, vm } => {
                let (handle, node) = (self.handle(volume), &*self.vms[vm].name);
                let refused = self
                    .call_until_final(|driver| async move {
                        match driver.publish(handle, node).await {
                            Err(status) if status.code() == Code::FailedPrecondition => Ok(Err(status)),
                            answer => answer.map(Ok),
                        }
                    })
                    .await?;
                let Err(refused) = refused else { bail!("two nodes have {handle}") };
                let first = &self.vms[(vm + 1) % VMS].name;
                ensure!(
                    refused.message().contains(first.as_str()),
                    "the error does not name the other VM: {refused}"
                );
                self.call_until_final(|driver| async move { driver.unpublish(handle, node).await }).await?;
                "contend"
            }
            Operation::Write { volume, records } => {
                let disk = &self.disks[&volume];
                // Open only while it is written: a volume whose file is open is not attached.
                let mut own = match self.records.remove(&volume) {
                    Some(log) => log.resume(disk)?,
                    None => Records::begin(disk, RECORDS_SIZE)?,
                };
                let appended =
                    tokio::task::block_in_place(|| (0..records).try_for_each(|_| own.append().map(drop)));
                self.records.insert(volume, own.close());
                appended?;
                "write"
            }
            Operation::Verify { .. } => "verify",
            Operation::Expand { volume, mib } => {
                let handle = self.handle(volume);
                let has = self
                    .call_until_final(|driver| async move { driver.expand(handle, mib * MIB).await })
                    .await?;
                ensure!(has == mib * MIB, "{has} bytes");
                "expand"
            }
            Operation::Detach { volume, vm } => {
                self.disks.remove(&volume);
                let (handle, node) = (self.handle(volume), &*self.vms[vm].name);
                self.call_until_final(|driver| async move { driver.unpublish(handle, node).await }).await?;
                "detach"
            }
            Operation::Delete { volume } => {
                let handle = self.handle(volume);
                self.call_until_final(|driver| async move { driver.delete(handle).await }).await?;
                "delete"
            }
            Operation::Snapshot { snapshot, volume } => {
                let (name, of) = (&*self.csi_name(snapshot), self.handle(volume));
                let made = self
                    .call_until_final(|driver| async move {
                        match driver.snapshot(name, of, "nestor").await {
                            Ok(made) if !made.ready_to_use => Err(Status::unavailable("not ready to use")),
                            answer => answer,
                        }
                    })
                    .await?;
                self.handles.insert(snapshot, made.snapshot_id);
                "snapshot"
            }
            Operation::DeleteSnapshot { snapshot } => {
                let handle = self.handle(snapshot);
                self.call_until_final(|driver| async move { driver.delete_snapshot(handle).await }).await?;
                "delete snapshot"
            }
        })
    }

    async fn make(&mut self, volume: Number, request: csi::proto::CreateVolumeRequest) -> Result<()> {
        let requested = request.capacity_range.unwrap_or_default().required_bytes;
        let request = &request;
        let made =
            self.call_until_final(|driver| async move { driver.create(request.clone()).await }).await?;
        ensure!(made.capacity_bytes == requested, "{made:?}");
        self.handles.insert(volume, made.volume_id);
        Ok(())
    }

    /// Calls the driver until the status is final, like a sidecar: retries while the operation may be running or the driver
    /// does not respond.
    async fn call_until_final<T, Answer>(&self, call: impl Fn(Driver) -> Answer) -> Result<T>
    where
        Answer: Future<Output = Result<T, Status>>,
    {
        eventually("a final status", STUCK, || async {
            let driver = match Driver::connect(&self.socket).await {
                Ok(driver) => driver,
                Err(error) => return Ok(Err(format!("{error:#}"))),
            };
            match call(driver).await {
                Ok(answer) => Ok(Ok(answer)),
                Err(status) if may_be_under_way(&status) => Ok(Err(status.to_string())),
                Err(status) => bail!("final status: {status}"),
            }
        })
        .await
    }

    /// Checks the volume or snapshot of an operation in the storage infra, and its records.
    async fn check(&self, operation: &Operation) -> Result<()> {
        match *operation {
            Operation::Create { volume, .. }
            | Operation::Restore { volume, .. }
            | Operation::Clone { volume, .. }
            | Operation::Attach { volume, .. }
            | Operation::Contend { volume, .. }
            | Operation::Write { volume, .. }
            | Operation::Verify { volume }
            | Operation::Expand { volume, .. }
            | Operation::Detach { volume, .. }
            | Operation::Snapshot { volume, .. } => self.check_volume(volume).await,
            Operation::Delete { volume } => {
                let claim = &self.handles[&volume];
                let left = self.scenario.claims().get_opt(claim).await?;
                ensure!(left.is_none(), "the claim is left: {left:?}");
                Ok(())
            }
            Operation::DeleteSnapshot { snapshot } => {
                let left = self.scenario.snapshots().get_opt(&self.handles[&snapshot]).await?;
                ensure!(left.is_none(), "the snapshot is left: {left:?}");
                Ok(())
            }
        }
    }

    async fn check_volume(&self, number: Number) -> Result<()> {
        let expected = &self.plan.volumes[&number];
        let claim = &self.handles[&number];
        let size = u64::try_from(expected.mib * MIB)?;
        let node = expected.at.map(|vm| self.vms[vm].uuid);
        // Retried, because storage-infra may be down.
        let file = eventually(&format!("volume {claim} is {expected:?}"), PATIENCE, || async {
            let volume = match self.scenario.infra_volume(claim).await {
                Ok(volume) => volume,
                Err(error) => return Ok(Err(format!("{error:#}"))),
            };
            let attachments = match self.scenario.infra.list_attachments(None, Some(&volume.id)).await {
                Ok(attachments) => attachments,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let nodes: Vec<_> = attachments.iter().map(|one| one.node).collect();
            let attached = attachments.iter().all(|one| one.state == AttachmentState::Attached);
            let matches = volume.state == VolumeState::Ready
                && volume.capacity_bytes == size
                && attached
                && nodes == Vec::from_iter(node);
            if !matches {
                return Ok(Err(format!("{volume:?} {attachments:?}")));
            }
            Ok(self.scenario.file_of(&volume).await.map_err(|error| format!("{error:#}")))
        })
        .await?;
        if let Some((writer, count)) = expected.records {
            let path = self.disks.get(&number).unwrap_or(&file);
            tokio::task::block_in_place(|| self.records[&writer].verify_since(count, path))?;
        }
        Ok(())
    }

    fn handle(&self, number: Number) -> &str {
        &self.handles[&number]
    }

    fn csi_name(&self, number: Number) -> String {
        format!("{}-{number}", self.name)
    }
}

fn may_be_under_way(status: &Status) -> bool {
    // The transport reports UNKNOWN if the driver died during the call.
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Aborted | Code::Cancelled | Code::Unknown
    )
}
