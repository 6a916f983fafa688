//! Inventory: everything that both tiers and the storage infra hold for the first guest, as a list of facts. Missing,
//! unexpected and duplicate objects are differences between two inventories.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::api::{ListParams, ResourceExt};
use lab::LoopNode;
use serde_json::Value;

use crate::sizes::{bytes, requested};
use crate::{PATIENCE, Scenario, eventually};

/// Sorted lines; a duplicate object has two equal lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory(Vec<String>);

impl Inventory {
    /// What exists for a detached volume of `bytes` bytes, by the name of its management claim.
    pub fn of_volume(claim: &str, bytes: u64) -> Self {
        Self::new(vec![
            format!("claim {claim}: Bound, requests {bytes}, has {bytes}"),
            format!("PersistentVolume of {claim}: Bound, {bytes}"),
            format!("infra volume of {claim}: ready, {bytes}"),
            format!("file of {claim}: {bytes}"),
        ])
    }

    /// What exists in addition while the volume is attached to a loop node.
    pub fn of_attached(claim: &str, bytes: u64, node: &LoopNode) -> Self {
        let node = &node.name;
        Self::new(vec![
            format!("VM {node}: spec has {claim}"),
            format!("VM {node}: status has {claim}, attached"),
            format!("VolumeAttachment of {claim} to {node}: attached"),
            format!("infra attachment of {claim} to {node}: attached"),
            format!("disk of {claim} in {node}"),
            format!("device of {claim}: {bytes}"),
        ])
    }

    /// What exists for a snapshot of a volume of `bytes` bytes, by the name of the management snapshot.
    pub fn of_snapshot(name: &str, claim: &str, bytes: u64) -> Self {
        Self::new(vec![
            format!("VolumeSnapshot {name} of {claim}: ready"),
            format!("VolumeSnapshotContent of {name}: ready"),
            format!("infra snapshot of {name}: ready, {bytes}"),
            format!("file of {name}: {bytes}"),
        ])
    }

    /// The union with `more`.
    pub fn with(mut self, more: Self) -> Self {
        self.0.extend(more.0);
        Self::new(self.0)
    }

    /// The difference to `less`.
    pub fn without(self, less: &Self) -> Self {
        Self(difference(&self.0, &less.0))
    }

    /// Waits until exactly this inventory is observed.
    pub async fn wait_until_observed(&self, s: &Scenario) -> Result<()> {
        eventually("exactly the expected objects exist", PATIENCE, || async {
            // storage-infra may be restarting.
            Ok(Self::now(s)
                .await
                .map_err(|error| format!("{error:#}"))
                .and_then(|observed| self.compare(&observed)))
        })
        .await
    }

    fn new(mut facts: Vec<String>) -> Self {
        facts.sort();
        Self(facts)
    }

    fn compare(&self, observed: &Self) -> Result<(), String> {
        let (missing, unexpected) = (difference(&self.0, &observed.0), difference(&observed.0, &self.0));
        if missing.is_empty() && unexpected.is_empty() {
            return Ok(());
        }
        Err(format!("missing: {missing:#?}, unexpected: {unexpected:#?}"))
    }

    /// Reads the current inventory.
    pub async fn now(s: &Scenario) -> Result<Self> {
        let names = Names::read(s).await?;
        let facts = [of_management(s).await?, names.of_infra(s).await?, names.of_pools(s).await?];
        Ok(Self::new(facts.concat()))
    }
}

/// The items of `these` that are not in `those`, counting duplicates.
fn difference(these: &[String], those: &[String]) -> Vec<String> {
    let mut left = those.to_vec();
    let is_absent = |fact: &&String| match left.iter().position(|one| one == *fact) {
        Some(at) => {
            left.swap_remove(at);
            false
        }
        None => true,
    };
    these.iter().filter(is_absent).cloned().collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("none")
}

async fn of_management(s: &Scenario) -> Result<Vec<String>> {
    let mut facts = Vec::new();
    let all = ListParams::default();
    for claim in s.claims().list(&all).await? {
        let status = claim.status.as_ref();
        let (requests, has) = (requested(&claim), bytes(status.and_then(|status| status.capacity.as_ref())));
        let phase = phase(&claim, status.and_then(|status| status.phase.as_deref()));
        facts.push(format!("claim {}: {phase}, requests {requests}, has {has}", claim.name_any()));
    }
    for volume in s.volumes().list(&all).await? {
        let phase = phase(&volume, volume.status.as_ref().and_then(|status| status.phase.as_deref()));
        let Some(spec) = volume.spec else { continue };
        let claim = spec.claim_ref.and_then(|claim| claim.name).unwrap_or_default();
        facts.push(format!("PersistentVolume of {claim}: {phase}, {}", bytes(spec.capacity.as_ref())));
    }
    for snapshot in s.snapshots().list(&all).await? {
        let source = text(&snapshot.data["spec"]["source"]["persistentVolumeClaimName"]);
        let ready = ready(&snapshot, &snapshot.data["status"]["readyToUse"]);
        facts.push(format!("VolumeSnapshot {} of {source}: {ready}", snapshot.name_any()));
    }
    for content in s.contents().list(&all).await? {
        let of = text(&content.data["spec"]["volumeSnapshotRef"]["name"]);
        let ready = ready(&content, &content.data["status"]["readyToUse"]);
        facts.push(format!("VolumeSnapshotContent of {of}: {ready}"));
    }
    let vms = s.vms().list(&all).await?;
    for vm in &vms {
        let name = vm.name_any();
        facts.extend(vm.spec.volumes.iter().map(|disk| format!("VM {name}: spec has {}", disk.name)));
        for disk in vm.status.iter().flat_map(|status| &status.volumes) {
            let attached = if disk.attached { "attached" } else { "not attached" };
            facts.push(format!("VM {name}: status has {}, {attached}", disk.name));
        }
    }
    for attachment in s.attachments().list(&all).await? {
        let owner = attachment.owner_references().first().map_or("no owner", |owner| owner.name.as_str());
        let claim = &attachment.spec.volume_name;
        let attached = match &attachment.status {
            _ if attachment.metadata.deletion_timestamp.is_some() => "terminating",
            Some(status) if status.attached => "attached",
            _ => "not attached",
        };
        facts.push(format!("VolumeAttachment of {claim} to {owner}: {attached}"));
    }
    Ok(facts)
}

fn phase<'a>(object: &impl ResourceExt, phase: Option<&'a str>) -> &'a str {
    if object.meta().deletion_timestamp.is_some() { "terminating" } else { phase.unwrap_or("no phase") }
}

fn ready(object: &impl ResourceExt, ready: &Value) -> &'static str {
    match ready.as_bool() {
        _ if object.meta().deletion_timestamp.is_some() => "terminating",
        Some(true) => "ready",
        _ => "not ready",
    }
}

/// Names of the management cluster for objects of the storage infra: volumes and snapshots by ID, VMs by UUID. An object
/// without a name is an orphan and is shown with its ID.
struct Names(BTreeMap<String, String>);

impl Names {
    async fn read(s: &Scenario) -> Result<Self> {
        let mut names = BTreeMap::new();
        let all = ListParams::default();
        for volume in s.volumes().list(&all).await? {
            let Some(spec) = volume.spec else { continue };
            let claim = spec.claim_ref.and_then(|claim| claim.name);
            names.extend(spec.csi.map(|csi| csi.volume_handle).zip(claim));
        }
        for content in s.contents().list(&all).await? {
            let handle = content.data["status"]["snapshotHandle"].as_str();
            let of = content.data["spec"]["volumeSnapshotRef"]["name"].as_str();
            names.extend(handle.zip(of).map(|(handle, of)| (handle.to_owned(), of.to_owned())));
        }
        for vm in s.vms().list(&all).await? {
            let uuid = vm.status.as_ref().and_then(crds::node_uuid);
            names.extend(uuid.map(|uuid| (uuid, vm.name_any())));
        }
        Ok(Self(names))
    }

    fn of(&self, id: impl ToString) -> String {
        let id = id.to_string();
        self.0.get(&id).cloned().unwrap_or(id)
    }

    async fn of_infra(&self, s: &Scenario) -> Result<Vec<String>> {
        let mut facts = Vec::new();
        for volume in s.infra.list_volumes(None, None).await?.items {
            let (state, bytes) = (volume.state, volume.capacity_bytes);
            facts.push(format!("infra volume of {}: {state}, {bytes}", self.of(&volume.id)));
        }
        for snapshot in s.infra.list_snapshots(None, None, None).await?.items {
            let (state, bytes) = (snapshot.state, snapshot.capacity_bytes);
            facts.push(format!("infra snapshot of {}: {state}, {bytes}", self.of(&snapshot.id)));
        }
        for one in s.infra.list_attachments(None, None).await? {
            let (volume, node) = (self.of(&one.volume), self.of(one.node));
            facts.push(format!("infra attachment of {volume} to {node}: {}", one.state));
        }
        Ok(facts)
    }

    /// The files of the pools, the loop devices over them, and the device links of loop nodes.
    async fn of_pools(&self, s: &Scenario) -> Result<Vec<String>> {
        let infra = s.lab.state().infra.as_ref().context("the lab has no infra")?;
        let mut facts = Vec::new();
        for (file, bytes) in
            infra.pools.values().map(|pool| files(pool)).collect::<Result<Vec<_>>>()?.concat()
        {
            facts.push(format!("file of {}: {bytes}", self.of(file)));
        }
        let devices = devices().await?;
        for (device, file) in &devices {
            // Size in sectors of 512 bytes: Linux, `Documentation/ABI/stable/sysfs-block`.
            let size = Path::new("/sys/block").join(device.file_name().unwrap_or_default()).join("size");
            let sectors: u64 = std::fs::read_to_string(size).unwrap_or_default().trim().parse().unwrap_or(0);
            if let Some(id) = id_of(file).filter(|_| infra.pools.values().any(|pool| file.starts_with(pool)))
            {
                facts.push(format!("device of {}: {}", self.of(id), sectors * 512));
            }
        }
        for folder in entries(&infra.loop_root)? {
            let node = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            for link in entries(&folder)? {
                let device = std::fs::read_link(&link).unwrap_or_default();
                let disk = match devices.get(&device).and_then(|file| id_of(file)) {
                    Some(id) => self.of(id),
                    None => format!("no device ({})", link.display()),
                };
                facts.push(format!("disk of {disk} in {}", self.of(&node)));
            }
        }
        Ok(facts)
    }
}

/// The ID of the object that a pool file holds, complete or not.
fn id_of(file: &Path) -> Option<String> {
    // The epoch of a server may follow the kind.
    let kind = file.extension()?.to_str()?.split('-').next()?;
    let id = file.file_stem()?.to_string_lossy();
    match kind {
        "raw" | "snap" => Some(id.into_owned()),
        "vpart" | "spart" => Some(format!("{id} (unfinished)")),
        _ => None,
    }
}

/// The data files of a pool: object ID and size in bytes.
fn files(pool: &Path) -> Result<Vec<(String, u64)>> {
    let found = entries(pool)?.into_iter().filter_map(|path| {
        let bytes = std::fs::metadata(&path).ok()?.len();
        Some((id_of(&path)?, bytes))
    });
    Ok(found.collect())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Ok(entries) => Ok(entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()),
        // A node's folder exists from its first attach until the node is removed.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", folder.display())),
    }
}

/// All loop devices and their backing files.
async fn devices() -> Result<BTreeMap<PathBuf, PathBuf>> {
    let columns = ["--list", "--json", "--output", "NAME,BACK-FILE"];
    let list = lab::process::run(&mut lab::process::command("losetup", columns)).await?;
    if list.trim().is_empty() {
        return Ok(BTreeMap::new());
    }
    let list: Value = serde_json::from_str(&list)?;
    let devices = list["loopdevices"].as_array().into_iter().flatten();
    let path = |value: &Value| value.as_str().map(PathBuf::from);
    Ok(devices.filter_map(|one| path(&one["name"]).zip(path(&one["back-file"]))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_duplicate_objects_are_reported() {
        let facts = |all: &[&str]| Inventory::new(all.iter().map(|fact| (*fact).to_owned()).collect());
        let expected = facts(&["a"]).with(facts(&["c", "b"]));
        assert!(expected.compare(&facts(&["c", "b", "a"])).is_ok());
        let difference = expected.compare(&facts(&["a", "a", "b"])).unwrap_err();
        assert!(
            difference.contains("missing: [\n    \"c\",\n], unexpected: [\n    \"a\",\n]"),
            "{difference}"
        );
        assert_eq!(expected.without(&facts(&["b"])), facts(&["a", "c"]));
    }
}
