//! Which VM of KubeVirt may have a disk, and the requests of gc-csi for it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use crds::names::LABEL_CLUSTER_ID;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams, PropagationPolicy};
use lab::audit::{Entry, Mark};
use lab::kubevirt_qemu;
use serde_json::{Value, json};
use tests::driver::Driver;
use tests::{PATIENCE, eventually, unique};
use tonic::Code;
use uuid::Uuid;

use super::super::requests::{count_by_kind, settled_requests};
use super::{Clusters, Disk, GUEST};

/// A VM of the guest that is not a node. It has no boot loader.
pub(super) struct Spare {
    pub(super) name: String,
    pub(super) uuid: String,
}

impl Spare {
    /// Creates it from the template of a node. Returns when its instance runs.
    pub(super) async fn create(clusters: &Clusters, node: &str) -> Result<Self> {
        let (name, uuid) = (unique("spare"), Uuid::new_v4().to_string());
        let machines = clusters.kubevirt("VirtualMachine");
        let mut spec = machines.get(node).await?.data["spec"].clone();
        spec["template"]["metadata"] = json!({});
        let template = &mut spec["template"]["spec"];
        for list in ["/domain/devices/disks", "/volumes"] {
            let items = template.pointer_mut(list).and_then(Value::as_array_mut);
            items.with_context(|| format!("no {list}"))?.retain(|item| item["name"] == "root");
        }
        template["domain"]["memory"] = json!({"guest": "64Mi"});
        template["domain"]["firmware"] = json!({"uuid": uuid});
        let labels = json!({LABEL_CLUSTER_ID: clusters.lab.cluster_id(GUEST)?});
        let machine = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": name, "labels": labels}, "spec": spec,
        });
        machines.create(&PostParams::default(), &serde_json::from_value(machine)?).await?;
        let this = Self { name, uuid };
        this.runs(clusters, None).await?;
        Ok(this)
    }

    /// Waits until an instance other than `former` runs, with all its disks; returns its UID.
    pub(super) async fn runs(&self, clusters: &Clusters, former: Option<&str>) -> Result<String> {
        let instances = clusters.kubevirt("VirtualMachineInstance");
        eventually(&format!("an instance of {} runs", self.name), PATIENCE, || async {
            let Some(instance) = instances.get_opt(&self.name).await? else {
                return Ok(Err("none".to_owned()));
            };
            let status = &instance.data["status"];
            let mut volumes = status["volumeStatus"].as_array().into_iter().flatten();
            let has_all = volumes.all(|one| one["hotplugVolume"].is_null() || one["phase"] == "Ready");
            let uid = instance.uid().filter(|uid| Some(uid.as_str()) != former);
            let uid = uid.filter(|_| status["phase"] == "Running" && has_all);
            Ok(uid.ok_or_else(|| status.to_string()))
        })
        .await
    }

    /// Kills QEMU, and waits until KubeVirt has started the VM again.
    async fn crash(&self, clusters: &Clusters, meanwhile: impl AsyncFn() -> Result<()>) -> Result<()> {
        let former = self.runs(clusters, None).await?;
        let qemu = kubevirt_qemu(&self.uuid).with_context(|| format!("{} has no QEMU", self.name))?;
        qemu.stop(std::time::Duration::ZERO).await?;
        meanwhile().await?;
        self.runs(clusters, Some(&former)).await.map(drop)
    }

    /// Deletes the VM, but not its instance.
    async fn delete_vm(&self, clusters: &Clusters) -> Result<()> {
        let orphan =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        let machines = clusters.kubevirt("VirtualMachine");
        machines.delete(&self.name, &orphan).await?;
        eventually(&format!("VirtualMachine {} is gone", self.name), PATIENCE, || async {
            let left = machines.get_opt(&self.name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata))))
        })
        .await
    }

    async fn delete_instance(&self, clusters: &Clusters) -> Result<()> {
        let instances = clusters.kubevirt("VirtualMachineInstance");
        instances.delete(&self.name, &DeleteParams::default()).await.map(drop).map_err(Into::into)
    }
}

/// The requests of gc-csi to the management cluster since a mark, without watches.
async fn requests(clusters: &Clusters, mark: Mark) -> Result<BTreeMap<String, usize>> {
    let all = settled_requests(&clusters.lab.audit()?, mark).await?;
    Ok(count_by_kind(&all, |entry: &Entry| {
        entry.user_agent.starts_with("gc-csi") && entry.resource != "leases" && entry.verb != "watch"
    }))
}

/// The requests of an attach, and of a detach.
fn one_patch_each() -> BTreeMap<String, usize> {
    ["gc-csi patch persistentvolumeclaims", "gc-csi patch virtualmachines"]
        .map(|line| (line.to_owned(), 1))
        .into()
}

/// The test's VM has the disk, and another does not get it.
pub(super) async fn is_refused(driver: &Driver, disk: &Disk, holder: &str, other: &str) -> Result<()> {
    let refused = driver.publish(&disk.name, other).await.err();
    let refused = refused.with_context(|| format!("{other} got the disk of {holder}"))?;
    ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
    ensure!(refused.message().contains(&format!("VirtualMachine {holder}")), "{refused}");
    Ok(())
}

#[tokio::test]
async fn an_attach_and_a_detach_are_two_writes_each_and_a_vm_keeps_its_disk_until_it_is_proven_off()
-> Result<()> {
    let _alone = tests::alone().await;
    let clusters = Clusters::open().await?;
    let [node, _] = clusters.two_nodes().await?;
    let (disk, other) = (Disk::create(&clusters).await?, Disk::create(&clusters).await?);
    let spare = Spare::create(&clusters, &node).await?;
    let driver = Driver::connect(&clusters.lab.controller_socket(GUEST)?).await?;
    let held = async {
        // So that the VM has annotations.
        driver.publish(&other.name, &spare.name).await?;
        attach_and_detach(&clusters, &driver, &disk, &spare).await?;
        survive(&clusters, &driver, &disk, (&spare, &node)).await?;
        end(&clusters, &driver, &disk, (&spare, &node)).await?;
        driver.unpublish(&other.name, &spare.name).await.map_err(Into::into)
    }
    .await;
    let removed = disk.remove(&clusters).await.and(other.remove(&clusters).await);
    held.and(removed)
}

async fn attach_and_detach(clusters: &Clusters, driver: &Driver, disk: &Disk, spare: &Spare) -> Result<()> {
    let mark = clusters.lab.audit()?.mark()?;
    let serial = driver.publish(&disk.name, &spare.name).await?;
    assert_eq!(requests(clusters, mark).await?, one_patch_each(), "an attach");
    let machine = clusters.kubevirt("VirtualMachine").get(&spare.name).await?;
    let disks = &machine.data["spec"]["template"]["spec"]["domain"]["devices"]["disks"];
    let added = json!({"name": disk.name, "serial": serial, "disk": {"bus": "scsi"}});
    ensure!(disks.as_array().is_some_and(|disks| disks.contains(&added)), "{disks} has no {added}");
    let holder = disk.holder(clusters).await?.unwrap_or_default();
    ensure!(holder["vm"] == json!(spare.name) && holder["uid"] == json!(machine.uid()), "{holder}");

    let mark = clusters.lab.audit()?.mark()?;
    driver.unpublish(&disk.name, &spare.name).await?;
    assert_eq!(requests(clusters, mark).await?, one_patch_each(), "a detach");
    ensure!(disk.holder(clusters).await?.is_none());
    let status = clusters.status(&spare.name, &disk.name).await?;
    ensure!(status.is_none(), "the instance has the disk after its detach: {status:?}");
    let again = driver.publish(&disk.name, &spare.name).await?;
    ensure!(again == serial, "the serial was {serial} and is {again}");
    Ok(())
}

/// A VM that crashes and starts again keeps its disk.
async fn survive(
    clusters: &Clusters,
    driver: &Driver,
    disk: &Disk,
    (spare, node): (&Spare, &str),
) -> Result<()> {
    is_refused(driver, disk, &spare.name, node).await?;
    spare.crash(clusters, async || is_refused(driver, disk, &spare.name, node).await).await?;
    let status = clusters.status(&spare.name, &disk.name).await?.unwrap_or_default();
    ensure!(status["phase"] == "Ready", "after the restart: {status}");
    is_refused(driver, disk, &spare.name, node).await
}

/// A VM whose object is gone keeps its disk until its instance and its pod are gone.
async fn end(clusters: &Clusters, driver: &Driver, disk: &Disk, (spare, node): (&Spare, &str)) -> Result<()> {
    spare.delete_vm(clusters).await?;
    ensure!(kubevirt_qemu(&spare.uuid).is_some(), "the instance ended with its VirtualMachine");
    let kept =
        driver.unpublish(&disk.name, &spare.name).await.err().context("detached from a VM that runs")?;
    ensure!(kept.code() == Code::Unavailable && kept.message().contains("virt-launcher"), "{kept}");
    is_refused(driver, disk, &spare.name, node).await?;
    spare.delete_instance(clusters).await?;
    eventually("the disk is detached", PATIENCE, || async {
        let Err(refused) = driver.unpublish(&disk.name, &spare.name).await else { return Ok(Ok(())) };
        if refused.code() == Code::Unavailable { Ok(Err(refused.to_string())) } else { Err(anyhow!(refused)) }
    })
    .await?;
    ensure!(kubevirt_qemu(&spare.uuid).is_none(), "the disk was given up while QEMU runs");
    ensure!(disk.holder(clusters).await?.is_none());
    driver.publish(&disk.name, node).await?;
    driver.unpublish(&disk.name, node).await?;
    Ok(())
}
