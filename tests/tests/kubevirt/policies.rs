//! Which VM may have a claim, as the admission policies of the management cluster check it: with the accounts of two guests of one
//! namespace, without gc-csi. All requests are dry runs.

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_ATTACHED_TO, LABEL_CLUSTER_ID, LABEL_SHARE_PREFIX};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use lab::cluster::{prepare_guest_kubevirt, prepare_guest_namespace, remove_guest_account};
use lab::state::Guest;
use serde_json::{Value, json};
use tests::{PATIENCE, eventually, unique};
use uuid::Uuid;

use super::shared_block::only_shareable_claims_are_shared;
use super::{Clusters, GUEST};

/// The account of a guest of the namespace.
pub(super) struct Account {
    client: Client,
    pub(super) cluster_id: String,
    /// End of the names of its policies.
    policies: String,
    namespace: String,
}

impl Account {
    async fn of(clusters: &Clusters, guest: &Guest) -> Result<Self> {
        Ok(Self {
            client: clusters.lab.management_as(guest).await?,
            cluster_id: guest.cluster_id.clone(),
            policies: format!("{}.{}.nestor.dev", guest.account(), clusters.namespace),
            namespace: clusters.namespace.clone(),
        })
    }

    /// Sends a patch of a VM or claim as a dry run.
    pub(super) async fn patch(&self, kind: &str, name: &str, patch: &Value) -> kube::Result<()> {
        let group = if kind == "VirtualMachine" { "kubevirt.io" } else { "" };
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let dry_run = PatchParams { dry_run: true, ..PatchParams::default() };
        api.patch(name, &dry_run, &Patch::Merge(patch)).await.map(drop)
    }

    /// Waits until a policy refuses the patch with this text: policies see changes some time after they are made. No other policy
    /// may refuse it, because the API server names only one of them, in no fixed order.
    pub(super) async fn is_refused(
        &self,
        by: &str,
        kind: &str,
        name: &str,
        patch: &Value,
        text: &str,
    ) -> Result<()> {
        let policy = format!("ValidatingAdmissionPolicy '{by}.{}'", self.policies);
        eventually(&format!("{policy} refuses {patch} of {name}"), PATIENCE, || async {
            Ok(match self.patch(kind, name, patch).await {
                Err(kube::Error::Api(status))
                    if status.message.contains(&policy) && status.message.contains(text) =>
                {
                    ensure!(status.code == 403, "{status:?}");
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    pub(super) async fn is_permitted(&self, kind: &str, name: &str, patch: &Value) -> Result<()> {
        eventually(&format!("{patch} of {name} is permitted"), PATIENCE, || async {
            Ok(self.patch(kind, name, patch).await.map_err(|error| error.to_string()))
        })
        .await
    }
}

/// A stopped VM of a guest.
pub(super) struct Machine {
    pub(super) name: String,
    uid: String,
    pub(super) volumes: Vec<Value>,
    pub(super) disks: Vec<Value>,
}

impl Machine {
    /// Creates one with a fixed volume and this hot-plugged claim.
    pub(super) async fn create(clusters: &Clusters, guest: &str, plugged: &str) -> Result<Self> {
        let name = unique("stopped");
        let root = json!({"name": "root", "containerDisk": {"image": "none.example/none:1"}});
        let volumes = vec![root, volume(plugged)];
        let disks = vec![json!({"name": "root", "disk": {"bus": "virtio"}}), disk(plugged)];
        let machine = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": name, "labels": {LABEL_CLUSTER_ID: guest}},
            "spec": {"runStrategy": "Halted", "template": {"spec": {
                "domain": {"devices": {"disks": disks}, "memory": {"guest": "64Mi"}}, "volumes": volumes,
            }}},
        });
        let machines = clusters.kubevirt("VirtualMachine");
        let created = machines.create(&PostParams::default(), &serde_json::from_value(machine)?).await?;
        Ok(Self { name, uid: created.uid().context("no UID")?, volumes, disks })
    }

    /// The record that names it.
    pub(super) fn record(&self) -> String {
        json!({"take": "0123456789abcdef", "uid": self.uid, "vm": self.name}).to_string()
    }

    /// A patch that adds these to its lists.
    pub(super) fn with(&self, volumes: &[Value], disks: &[Value]) -> Value {
        template(&[&self.volumes, volumes].concat(), &[&self.disks, disks].concat())
    }

    /// A patch that attaches a claim as gc-csi does.
    pub(super) fn attach(&self, claim: &str) -> Value {
        self.with(&[volume(claim)], &[disk(claim)])
    }
}

pub(super) fn template(volumes: &[Value], disks: &[Value]) -> Value {
    json!({"spec": {"template": {"spec": {
        "domain": {"devices": {"disks": disks}}, "volumes": volumes,
    }}}})
}

pub(super) fn volume(claim: &str) -> Value {
    json!({"name": claim, "persistentVolumeClaim": {"claimName": claim, "hotpluggable": true}})
}

pub(super) fn disk(name: &str) -> Value {
    json!({"name": name, "serial": Uuid::new_v4(), "disk": {"bus": "scsi"}})
}

pub(super) fn recorded(record: impl Into<Option<String>>) -> Value {
    json!({"metadata": {"annotations": {ANNOTATION_ATTACHED_TO: record.into()}}})
}

/// A claim that is not bound.
async fn claim(clusters: &Clusters, labels: Value, annotations: Value) -> Result<String> {
    let mode = json!({"accessModes": ["ReadWriteOnce"], "volumeMode": "Block"});
    claim_with(clusters, labels, annotations, mode).await
}

/// A claim with this spec that is not bound.
pub(super) async fn claim_with(
    clusters: &Clusters,
    labels: Value,
    annotations: Value,
    mode: Value,
) -> Result<String> {
    let name = unique("claim");
    let mut spec = json!({"storageClassName": "none", "resources": {"requests": {"storage": "4Mi"}}});
    json_patch::merge(&mut spec, &mode);
    let claim = json!({
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": spec,
    });
    clusters.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    Ok(name)
}

pub(super) async fn record(
    clusters: &Clusters,
    claim: &str,
    record: impl Into<Option<String>>,
) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = clusters.claims();
    claims.patch(claim, &PatchParams::default(), &Patch::Merge(recorded(record))).await?;
    Ok(())
}

/// Two guests of one namespace, each with a stopped VM and a claim that is plugged into it.
pub(super) struct Two {
    pub(super) guest: Account,
    pub(super) neighbour: Account,
    pub(super) own: Machine,
    pub(super) others: Machine,
    own_claim: String,
}

impl Two {
    async fn create(clusters: &Clusters, neighbour: &Guest) -> Result<Self> {
        let state = clusters.lab.state();
        let management = state.management.as_ref().context("the lab has no management cluster")?;
        prepare_guest_namespace(management, neighbour).await?;
        prepare_guest_kubevirt(management, neighbour).await?;
        let guest = Account::of(clusters, state.guests.get(GUEST).context("no guest")?).await?;
        let neighbour = Account::of(clusters, neighbour).await?;
        let (own_claim, others_claim) = (of(clusters, &guest).await?, of(clusters, &neighbour).await?);
        let own = Machine::create(clusters, &guest.cluster_id, &own_claim).await?;
        let others = Machine::create(clusters, &neighbour.cluster_id, &others_claim).await?;
        record(clusters, &own_claim, own.record()).await?;
        record(clusters, &others_claim, others.record()).await?;
        Ok(Self { guest, neighbour, own, others, own_claim })
    }
}

/// A claim of a guest.
async fn of(clusters: &Clusters, guest: &Account) -> Result<String> {
    claim(clusters, json!({LABEL_CLUSTER_ID: guest.cluster_id}), json!({})).await
}

#[tokio::test]
async fn the_api_server_checks_which_vm_of_which_guest_may_have_a_claim() -> Result<()> {
    let _alone = tests::alone().await;
    let clusters = Clusters::open().await?;
    let like = clusters.lab.state().guests.get(GUEST).context("no guest")?;
    let mut neighbour = Guest { cluster_id: Uuid::new_v4().to_string(), ..like.clone() };
    neighbour.cluster.name = unique("neighbour");
    let two = Two::create(&clusters, &neighbour).await?;
    entries_need_the_record(&clusters, &two).await?;
    entries_have_no_other_fields(&clusters, &two).await?;
    only_shareable_claims_are_shared(&clusters, &two).await?;
    records_name_own_machines(&clusters, &two).await?;
    records_are_kept_while_a_vm_has_the_claim(&clusters, &two).await?;
    instances_keep_records(&clusters, &two).await?;
    for machine in [&two.own, &two.others] {
        clusters.kubevirt("VirtualMachine").delete(&machine.name, &DeleteParams::default()).await?;
    }
    let management = clusters.lab.state().management.as_ref().context("no management cluster")?;
    remove_guest_account(management, &neighbour).await
}

/// A guest plugs in claims that it may use, and only into the VM that the claim's record names.
async fn entries_need_the_record(clusters: &Clusters, two: &Two) -> Result<()> {
    let Two { guest, neighbour, own, others, .. } = two;
    let vm = "VirtualMachine";
    let share = |mode: &str| {
        let key = format!("{LABEL_SHARE_PREFIX}{}", guest.cluster_id);
        json!({LABEL_CLUSTER_ID: neighbour.cluster_id, key: mode})
    };
    let claims = [
        (of(clusters, neighbour).await?, "not this guest's"),
        (claim(clusters, json!({}), json!({})).await?, "not this guest's"),
        (claim(clusters, share("ro"), json!({})).await?, "not this guest's"),
    ];
    for (name, text) in claims {
        record(clusters, &name, own.record()).await?;
        guest.is_refused("kubevirt-claims", vm, &own.name, &own.attach(&name), text).await?;
    }
    let shared = claim(clusters, share("rw"), json!({})).await?;
    let siblings = json!({"nestor.dev/shared-with": "{\"other\":\"rw\"}"});
    let spread = claim(clusters, json!({LABEL_CLUSTER_ID: guest.cluster_id}), siblings).await?;
    record(clusters, &spread, own.record()).await?;
    let attach = own.attach(&spread);
    guest.is_refused("kubevirt-claims", vm, &own.name, &attach, "shared over").await?;

    for free in [&of(clusters, guest).await?, &shared] {
        let attach = own.attach(free);
        guest.is_refused("kubevirt-claims", vm, &own.name, &attach, "names no VirtualMachine").await?;
        record(clusters, free, others.record()).await?;
        guest.is_refused("kubevirt-claims", vm, &own.name, &attach, "names another").await?;
        guest.is_refused("kubevirt", vm, &others.name, &others.attach(free), "not this guest's").await?;
        record(clusters, free, own.record()).await?;
        guest.is_permitted(vm, &own.name, &attach).await?;
    }
    guest.is_permitted(vm, &own.name, &template(&own.volumes[..1], &own.disks[..1])).await?;
    let detach = template(&own.volumes[..1], &own.disks[..1]);
    neighbour.is_refused("kubevirt", vm, &own.name, &detach, "not this guest's").await
}

/// A guest adds nothing but hot-pluggable claims with their disks.
async fn entries_have_no_other_fields(clusters: &Clusters, two: &Two) -> Result<()> {
    let Two { guest, own, .. } = two;
    let free = of(clusters, guest).await?;
    record(clusters, &free, own.record()).await?;
    let fixed = json!({"name": free, "persistentVolumeClaim": {"claimName": free}});
    let by_data_volume = json!({"name": free, "dataVolume": {"name": free, "hotpluggable": true}});
    let host = json!({"name": free, "hostDisk": {"path": "/etc/passwd", "type": "Disk"}});
    for one in [fixed, by_data_volume, host] {
        let patch = own.with(&[one], &[disk(&free)]);
        guest.is_refused("kubevirt", "VirtualMachine", &own.name, &patch, "hot-pluggable claims").await?;
    }
    let mut cached = disk(&free);
    cached["cache"] = json!("writeback");
    let lun = json!({"name": free, "lun": {"bus": "scsi", "reservation": true}});
    for one in [cached, lun] {
        let patch = own.with(&[volume(&free)], &[one]);
        guest.is_refused("kubevirt", "VirtualMachine", &own.name, &patch, "such as lun").await?;
    }
    let root = json!({"name": "root", "persistentVolumeClaim": {"claimName": free, "hotpluggable": true}});
    let patch = own.with(&[root], &[]);
    guest.is_refused("kubevirt", "VirtualMachine", &own.name, &patch, "hot-pluggable claims").await?;
    guest.is_permitted("VirtualMachine", &own.name, &own.attach(&free)).await
}

/// A guest records its own VMs, on claims that it may use.
async fn records_name_own_machines(clusters: &Clusters, two: &Two) -> Result<()> {
    let Two { guest, neighbour, own, others, .. } = two;
    let (kind, free) = ("PersistentVolumeClaim", of(clusters, guest).await?);
    for text in ["vm-1".to_owned(), json!({"uid": own.uid, "vm": own.name}).to_string()] {
        guest.is_refused("claims", kind, &free, &recorded(text), "not one that gc-csi writes").await?;
    }
    let foreign = recorded(others.record());
    guest.is_refused("kubevirt-records", kind, &free, &foreign, "is not this guest's").await?;
    guest.is_permitted(kind, &free, &recorded(own.record())).await?;
    // No other policy refuses this: the claim is in no VM.
    let others_claim = of(clusters, neighbour).await?;
    record(clusters, &others_claim, others.record()).await?;
    for record in [None, Some(own.record())] {
        guest.is_refused("claims", kind, &others_claim, &recorded(record), "not this guest's").await?;
    }
    Ok(())
}

/// A record is neither removed nor replaced while the template of its VM has the claim.
async fn records_are_kept_while_a_vm_has_the_claim(clusters: &Clusters, two: &Two) -> Result<()> {
    let Two { guest, own, own_claim, .. } = two;
    let (kind, text) = ("PersistentVolumeClaim", "the template of VirtualMachine");
    let other = Machine::create(clusters, &guest.cluster_id, &of(clusters, guest).await?).await?;
    for record in [None, Some(other.record())] {
        guest.is_refused("kubevirt-records", kind, own_claim, &recorded(record), text).await?;
    }
    let again = own.record().replace("0123456789abcdef", "fedcba9876543210");
    guest.is_permitted(kind, own_claim, &recorded(again)).await?;
    let machines = clusters.kubevirt("VirtualMachine");
    let detach = template(&own.volumes[..1], &own.disks[..1]);
    machines.patch(&own.name, &PatchParams::default(), &Patch::Merge(detach)).await?;
    for record in [None, Some(other.record())] {
        guest.is_permitted(kind, own_claim, &recorded(record)).await?;
    }
    machines.delete(&other.name, &DeleteParams::default()).await?;
    Ok(())
}

/// A record is kept while the instance of its VM has the claim, and no other VM takes the claim over before the instance has ended.
async fn instances_keep_records(clusters: &Clusters, two: &Two) -> Result<()> {
    let Two { guest, own, .. } = two;
    let (kind, instances) = ("PersistentVolumeClaim", clusters.kubevirt("VirtualMachineInstance"));
    let (held, free) = (of(clusters, guest).await?, of(clusters, guest).await?);
    // Its claim is not bound, so it never starts.
    let name = unique("orphan");
    let instance = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": name},
        "spec": {
            "domain": {"devices": {"disks": [{"name": held, "disk": {"bus": "virtio"}}]}, "memory": {"guest": "64Mi"}},
            "volumes": [{"name": held, "persistentVolumeClaim": {"claimName": held}}],
        },
    });
    instances.create(&PostParams::default(), &serde_json::from_value(instance)?).await?;
    let of_it = json!({"take": "0123456789abcdef", "uid": Uuid::new_v4(), "vm": name}).to_string();
    for claim in [&held, &free] {
        record(clusters, claim, of_it.clone()).await?;
    }
    let policy = "kubevirt-instances";
    guest.is_refused(policy, kind, &held, &recorded(None), "the instance of VirtualMachine").await?;
    let taken = recorded(own.record());
    guest.is_refused(policy, kind, &held, &taken, "the instance of VirtualMachine").await?;
    guest.is_refused(policy, kind, &free, &taken, "has not ended").await?;
    guest.is_permitted(kind, &free, &recorded(None)).await?;
    instances.delete(&name, &DeleteParams::default()).await?;
    for (claim, record) in [(&held, None), (&free, Some(own.record()))] {
        guest.is_permitted(kind, claim, &recorded(record)).await?;
    }
    Ok(())
}
