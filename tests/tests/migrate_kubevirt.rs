//! `kubectl nestor migrate-kubevirt`: objects as kubevirt-csi leaves them, which the test writes because kubevirt-csi itself is not run.
//! Both tiers are namespaces of the guest's API server, which no program that uses KubeVirt or CDI watches. The module `kubevirt`
//! migrates a disk of a VM.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_ATTACHED_TO, CONTEXT_DISK_UUID, LABEL_CLUSTER_ID, LABEL_GUEST_ACCOUNT};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim, ServiceAccount};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams,
};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tests::program::binary;
use tests::{PATIENCE, Scenario, eventually, run, unique};
use tokio::process::Command;
use uuid::Uuid;

const GUEST: &str = "g1";

/// Kinds of KubeVirt and CDI: group, version, kind and plural.
const KINDS: [(&str, &str, &str, &str); 3] = [
    ("kubevirt.io", "v1", "VirtualMachine", "virtualmachines"),
    ("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances"),
    ("cdi.kubevirt.io", "v1beta1", "DataVolume", "datavolumes"),
];

/// Writes of a migration, in their order, and of its way back.
const FORTH: [&str; 7] = ["retain", "retain", "take", "show-disk", "orphan", "restore", "restore"];
const BACK: [&str; 7] = ["retain", "retain", "mark", "create", "give-back", "restore", "restore"];

/// What kubevirt-csi leaves for a volume of a VM that runs.
struct Left {
    client: Client,
    kubeconfig: String,
    /// Namespace of both tiers, and name of the guest's account.
    namespace: String,
    cluster_id: String,
    /// Name of all objects of the volume, but the PersistentVolume of the infra cluster.
    name: String,
    infra_volume: String,
    vm_uid: String,
    serial: String,
}

impl Left {
    async fn create(s: &Scenario) -> Result<Self> {
        let client = s.guest.clone();
        install(&client).await?;
        let (namespace, name) = (unique("migrate"), format!("pvc-{}", Uuid::new_v4()));
        let mut this = Self {
            kubeconfig: guest_kubeconfig(s)?,
            cluster_id: Uuid::new_v4().to_string(),
            infra_volume: unique("infra"),
            vm_uid: String::new(),
            serial: String::new(),
            client,
            namespace,
            name,
        };
        this.accounts().await?;
        this.disk().await?;
        this.infra().await?;
        this.guest().await?;
        Ok(this)
    }

    fn objects(&self, kind: &str) -> Result<Api<DynamicObject>> {
        let known = KINDS.iter().find(|(_, _, name, _)| *name == kind).context("unknown kind")?;
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(known.0, known.1, known.2));
        Ok(Api::namespaced_with(self.client.clone(), &self.namespace, &resource))
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    fn attachments(&self) -> Api<VolumeAttachment> {
        Api::all(self.client.clone())
    }

    async fn accounts(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = json!({"metadata": {"name": self.namespace}});
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace)?).await?;
        let labels = json!({LABEL_CLUSTER_ID: self.cluster_id, LABEL_GUEST_ACCOUNT: "nestor-system"});
        let account = json!({"metadata": {"name": self.namespace, "labels": labels}});
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        accounts.create(&PostParams::default(), &serde_json::from_value(account)?).await?;
        Ok(())
    }

    /// DataVolume, VM and instance.
    async fn disk(&mut self) -> Result<()> {
        let create = async |kind: &str, object: Value| -> Result<String> {
            let known = KINDS.iter().find(|(_, _, name, _)| *name == kind).context("unknown kind")?;
            let types = json!({"apiVersion": format!("{}/{}", known.0, known.1), "kind": kind});
            let mut object = object;
            json_patch::merge(&mut object, &types);
            let object = serde_json::from_value(object)?;
            let created = self.objects(kind)?.create(&PostParams::default(), &object).await?;
            created.uid().context("no UID")
        };
        let data_volume = json!({
            "metadata": {"name": self.name, "labels": {"csi-driver/cluster": "one"}},
            "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "1Gi"}}}},
            "status": {"phase": "Succeeded"},
        });
        let serial = create("DataVolume", data_volume).await?;
        let spec = json!({
            "volumes": [{"name": self.name, "dataVolume": {"name": self.name, "hotpluggable": true}}],
            "domain": {"devices": {"disks": [{"name": self.name, "serial": serial, "disk": {"bus": "scsi"}}]}},
        });
        let labels = json!({LABEL_CLUSTER_ID: self.cluster_id});
        let machine = json!({
            "metadata": {"name": "vm-1", "labels": labels}, "spec": {"template": {"spec": spec}},
        });
        let vm_uid = create("VirtualMachine", machine).await?;
        create("VirtualMachineInstance", json!({"metadata": {"name": "vm-1"}, "spec": spec})).await?;
        (self.serial, self.vm_uid) = (serial, vm_uid);
        Ok(())
    }

    /// Claim and PersistentVolume of the infra cluster.
    async fn infra(&self) -> Result<()> {
        let owner = json!([{
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": self.name, "uid": self.serial,
            "controller": true, "blockOwnerDeletion": true,
        }]);
        let claim = claim(&self.name, &self.infra_volume, json!({"ownerReferences": owner}));
        let volume = json!({
            "metadata": {"name": self.infra_volume},
            "spec": volume_spec(&self.namespace, &self.name, json!({"hostPath": {"path": "/none"}})),
        });
        self.bind(volume, claim).await
    }

    /// PersistentVolume, claim and VolumeAttachment of the guest.
    async fn guest(&self) -> Result<()> {
        let csi = json!({"csi": {
            "driver": "csi.kubevirt.io", "volumeHandle": self.name,
            "volumeAttributes": {"bus": "scsi", "serial": self.serial},
        }});
        let volume = json!({
            "metadata": {"name": self.name}, "spec": volume_spec(&self.namespace, "data", csi),
        });
        self.bind(volume, claim("data", &self.name, json!({}))).await?;
        let attachment = json!({
            "metadata": {"name": self.name},
            "spec": {
                "attacher": "csi.kubevirt.io", "nodeName": "vm-1", "source": {"persistentVolumeName": self.name},
            },
        });
        self.attachments().create(&PostParams::default(), &serde_json::from_value(attachment)?).await?;
        let attached = Patch::Merge(json!({"status": {"attached": true}}));
        self.attachments().patch_status(&self.name, &PatchParams::default(), &attached).await?;
        Ok(())
    }

    async fn bind(&self, volume: Value, claim: Value) -> Result<()> {
        let name = claim["metadata"]["name"].as_str().context("no name")?.to_owned();
        self.volumes().create(&PostParams::default(), &serde_json::from_value(volume)?).await?;
        self.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        tests::management::is_bound(&self.claims(), &name).await
    }

    /// Runs the command; `points` is a folder of fail points.
    async fn migrate(
        &self,
        s: &Scenario,
        more: &[&str],
        points: Option<&Path>,
    ) -> Result<std::process::Output> {
        let mut command = Command::new(binary(&s.lab, "kubectl-nestor"));
        command.args(["migrate-kubevirt", &self.name, "--guest", &self.namespace, "-o", "json"]).args(more);
        command.args(["--guest-kubeconfig", &self.kubeconfig, "--management-kubeconfig", &self.kubeconfig]);
        if let Some(points) = points {
            command.env(fail_point::DIRECTORY_VAR, points);
        }
        Ok(tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await??)
    }

    /// Runs the command, which must succeed; returns its steps.
    async fn migrated(&self, s: &Scenario, more: &[&str]) -> Result<Vec<String>> {
        let output = self.migrate(s, more, None).await?;
        ensure!(output.status.success(), "{output:?}");
        let outcomes: Value = serde_json::from_slice(&output.stdout)?;
        Ok(serde_json::from_value(outcomes[0]["steps"].clone())?)
    }

    /// Aborts the command at each of its writes, before it or after it, and completes it at last. No data is ever at risk.
    async fn migrated_through_crashes(&self, s: &Scenario, more: &[&str], writes: &[&str]) -> Result<()> {
        for side in ["before", "after"] {
            let points = tempfile::tempdir()?;
            let Some(write) = writes.first() else { break };
            std::fs::write(points.path().join("armed"), format!("migrate.{write}.{side}"))?;
            let output = self.migrate(s, more, Some(points.path())).await?;
            ensure!(!points.path().join("armed").exists(), "{write}.{side} was not passed: {output:?}");
            ensure!(!output.status.success(), "it survived {write}.{side}: {output:?}");
            self.has_data().await?;
        }
        if writes.len() > 1 {
            return Box::pin(self.migrated_through_crashes(s, more, &writes[1..])).await;
        }
        ensure!(self.migrated(s, more).await?.is_empty(), "steps are left after all writes");
        Ok(())
    }

    /// Nothing of the volume is being deleted, and the claim is bound to it.
    async fn has_data(&self) -> Result<()> {
        let claim = self.claims().get(&self.name).await?;
        ensure!(claim.metadata.deletion_timestamp.is_none(), "{claim:?}");
        for name in [&self.name, &self.infra_volume] {
            let volume = self.volumes().get(name).await?;
            let phase = volume.status.as_ref().and_then(|status| status.phase.clone());
            ensure!(phase.as_deref() == Some("Bound"), "{volume:?}");
        }
        Ok(())
    }

    async fn policies(&self) -> Result<[String; 2]> {
        let mut policies = [String::new(), String::new()];
        for (policy, name) in policies.iter_mut().zip([&self.name, &self.infra_volume]) {
            let volume = self.volumes().get(name).await?;
            ensure!(volume.annotations().keys().all(|key| !key.contains("nestor.dev")), "{volume:?}");
            *policy = volume.spec.and_then(|spec| spec.persistent_volume_reclaim_policy).unwrap_or_default();
        }
        Ok(policies)
    }

    async fn is_nestors(&self) -> Result<()> {
        let claim = self.claims().get(&self.name).await?;
        ensure!(claim.labels().get(LABEL_CLUSTER_ID) == Some(&self.cluster_id), "{claim:?}");
        ensure!(claim.metadata.owner_references.is_none(), "{claim:?}");
        let record: Value =
            serde_json::from_str(claim.annotations().get(ANNOTATION_ATTACHED_TO).context("no record")?)?;
        ensure!(record["vm"] == "vm-1" && record["uid"] == self.vm_uid.as_str(), "{record}");
        let attachment = self.attachments().get(&self.name).await?.status.unwrap_or_default();
        let disk = attachment.attachment_metadata.and_then(|all| all.get(CONTEXT_DISK_UUID).cloned());
        ensure!(attachment.attached && disk.as_ref() == Some(&self.serial), "{disk:?}");
        ensure!(self.objects("DataVolume")?.get_opt(&self.name).await?.is_none(), "the DataVolume is left");
        ensure!(self.policies().await? == ["Delete", "Delete"]);
        self.has_data().await
    }

    async fn is_kubevirt_csis(&self) -> Result<()> {
        let data_volume = self.objects("DataVolume")?.get(&self.name).await?;
        ensure!(data_volume.labels().get("csi-driver/cluster").map(String::as_str) == Some("one"));
        let filled = data_volume.annotations().get("cdi.kubevirt.io/storage.prePopulated");
        ensure!(filled == Some(&self.name), "{data_volume:?}");
        let claim = self.claims().get(&self.name).await?;
        let owners = claim.metadata.owner_references.clone().unwrap_or_default();
        ensure!(owners.len() == 1 && Some(&owners[0].uid) == data_volume.uid().as_ref(), "{owners:?}");
        ensure!(claim.annotations().keys().all(|key| !key.contains("nestor.dev")), "{claim:?}");
        ensure!(!claim.labels().contains_key(LABEL_CLUSTER_ID), "{claim:?}");
        ensure!(self.policies().await? == ["Delete", "Delete"]);
        self.has_data().await
    }

    async fn remove(self) -> Result<()> {
        self.attachments().delete(&self.name, &DeleteParams::default()).await?;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.delete(&self.namespace, &DeleteParams::default()).await?;
        for name in [&self.name, &self.infra_volume] {
            self.volumes().delete(name, &DeleteParams::default()).await?;
        }
        let definitions: Api<CustomResourceDefinition> = Api::all(self.client);
        for (group, _, _, plural) in KINDS {
            definitions.delete(&format!("{plural}.{group}"), &DeleteParams::default()).await?;
        }
        Ok(())
    }
}

fn guest_kubeconfig(s: &Scenario) -> Result<String> {
    let guest = s.lab.state().guests.get(GUEST).context("the lab has no guest")?;
    Ok(guest.cluster.kubeconfig.display().to_string())
}

fn volume_spec(namespace: &str, claim: &str, source: Value) -> Value {
    let mut spec = json!({
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "none",
        "persistentVolumeReclaimPolicy": "Delete", "claimRef": {"namespace": namespace, "name": claim},
    });
    json_patch::merge(&mut spec, &source);
    spec
}

fn claim(name: &str, volume: &str, more: Value) -> Value {
    let mut metadata = json!({"name": name});
    json_patch::merge(&mut metadata, &more);
    json!({
        "metadata": metadata,
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "none", "volumeName": volume,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

/// Installs the kinds, without their fields.
async fn install(client: &Client) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for (group, version, kind, plural) in KINDS {
        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}"), "annotations": {"api-approved.kubernetes.io": "unapproved"}},
            "spec": {
                "group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
                "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
            },
        });
        let name = format!("{plural}.{group}");
        let apply = PatchParams::apply("tests").force();
        definitions.patch(&name, &apply, &Patch::Apply(&definition)).await?;
        eventually(&format!("{name} is served"), PATIENCE, || async {
            let status = definitions.get(&name).await?.status.unwrap_or_default();
            let conditions = status.conditions.unwrap_or_default();
            let is_served = conditions.iter().any(|one| one.type_ == "Established" && one.status == "True");
            Ok(if is_served { Ok(()) } else { Err(format!("{conditions:?}")) })
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_volume_changes_hands_and_back_through_a_crash_at_each_write() -> Result<()> {
    run(|s| async move {
        let left = Left::create(&s).await?;
        let planned = left.migrated(&s, &["--dry-run"]).await?;
        ensure!(planned.len() == FORTH.len(), "{planned:?}");
        ensure!(!left.claims().get(&left.name).await?.labels().contains_key(LABEL_CLUSTER_ID), "a dry run");
        left.migrated_through_crashes(&s, &[], &FORTH).await?;
        left.is_nestors().await?;
        left.migrated_through_crashes(&s, &["--revert"], &BACK).await?;
        left.is_kubevirt_csis().await?;
        refused(&s, &left).await?;
        left.remove().await
    })
    .await
}

/// A volume that two VMs have is refused, and stays as it is.
async fn refused(s: &Scenario, left: &Left) -> Result<()> {
    let machine = left.objects("VirtualMachine")?.get("vm-1").await?;
    let mut other = json!(machine);
    other["metadata"] = json!({"name": "vm-2", "labels": machine.labels()});
    let create = PostParams::default();
    left.objects("VirtualMachine")?.create(&create, &serde_json::from_value(other)?).await?;
    let output = left.migrate(s, &[], None).await?;
    let outcomes: Value = serde_json::from_slice(&output.stdout)?;
    let why = outcomes[0]["refused"].as_str().unwrap_or_default();
    ensure!(output.status.code() == Some(1) && why.contains("vm-1 and vm-2 both have"), "{output:?}");
    left.is_kubevirt_csis().await
}
