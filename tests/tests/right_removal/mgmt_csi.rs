//! Rights of mgmt-csi.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use crds::{StoragePool, StoragePoolSpec, names};
use infra_api::{Access, AttachmentId, AttachmentSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Event, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::accounts::{Account, Tier, Withheld};
use tests::guest_token::TokenGuest;
use tests::management::VM_GUESTS;
use tests::own_namespace::OwnNamespace;
use tests::program::{Running, binary};
use tests::{PATIENCE, Scenario, eventually, run_alone, unique};

use super::shim::{SHORT_LEASE, detach_all, entry, is_attached, leads};
use super::table::{How, MgmtCsi, is_silent, rights_of, steps};

const PROGRAM: &str = "mgmt-csi";

/// A claim that is bound to a PersistentVolume that was created by hand.
const BY_HAND: &str = "by-hand";

/// A mgmt-csi in place of the lab's, with an account of its own, and the objects of its steps.
struct Replacement<'a> {
    s: &'a Scenario,
    account: Account,
    /// Namespace of its Lease, its capacities and its record of VMs.
    own: OwnNamespace,
    guest: TokenGuest,
    node: LoopNode,
    claim: String,
    snapshot: String,
    /// Cluster ID of a guest with which the snapshot is shared.
    other: String,
}

impl<'a> Replacement<'a> {
    async fn create(s: &'a Scenario) -> Result<Self> {
        let own = s.own_namespace().await?;
        let guest = TokenGuest::create(s, &own).await?;
        let roles = [
            ("ClusterRole nestor:mgmt-csi", ""),
            ("ClusterRole nestor:vm-status-writer", ""),
            ("Role nestor:capacity-writer", &*own.name),
            ("Role nestor:vm-guests-writer", &*own.name),
            ("Role nestor:leader-election", &*own.name),
            ("Role ACCOUNT-credential", &*own.name),
        ];
        let account = Account::create(s, Tier::Management, &own.name, &roles).await?;
        let account = account.named("ACCOUNT", &guest.account).await?;
        let node = s.node().await?;
        let labels = [(names::LABEL_CLUSTER_ID, s.cluster_id.as_str())];
        let claim = s.management_claim(&labels, json!({})).await?;
        let snapshot = s.management_snapshot(&labels, &claim).await?;
        let other = unique("other");
        share_content(s, &snapshot, &other).await?;
        s.stop_component(PROGRAM).await?;
        Ok(Self { s, account, own, guest, node, claim, snapshot, other })
    }

    async fn spawn(&self) -> Result<Running> {
        let infra = self.s.lab.state().infra.as_ref().context("the lab has no storage infra")?;
        let file = |flag: &str, name: &str| format!("--infra-{flag}={}", infra.pki.join(name).display());
        let own = &self.own.name;
        let words = [
            format!("--endpoint=unix://{}", infra.mgmt_socket.display()),
            format!("--kubeconfig={}", self.account.kubeconfig.display()),
            format!("--infra-url={}", infra.url),
            file("ca", "ca.crt"),
            file("cert", "driver.crt"),
            file("key", "driver.key"),
            format!("--capacity-namespace={own}"),
            format!("--vm-record-namespace={own}"),
            format!("--lease-namespace={own}"),
            "--guest-accounts=nestor-system".to_owned(),
            "--max-clock-skew=0s".to_owned(),
            "--vm-status-writer=mgmt-csi".to_owned(),
            "--repair-interval=5s".to_owned(),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).chain(SHORT_LEASE).collect();
        Running::start(&binary(&self.s.lab, PROGRAM), &words).await
    }

    async fn withheld(&self, step: MgmtCsi) -> Result<Withheld<'_>> {
        println!("{step:?}");
        Withheld::take(&[&self.account], rights_of(How::MgmtCsi(step))?, is_silent).await
    }

    /// Starts it, and the sidecars of the lab's mgmt-csi, which has the same socket.
    async fn start(&self) -> Result<Running> {
        let withheld = self.withheld(MgmtCsi::Start).await?;
        let program = self.spawn().await?;
        let is_recorded = || async {
            if let Err(why) = leads(&program, "nestor_mgmt_csi").await? {
                return Ok(Err(why));
            }
            let record = self.record().get_opt(VM_GUESTS).await?;
            Ok(record.map(drop).ok_or_else(|| "no record of the guests of VMs".to_owned()))
        };
        withheld.until_refused(|| program.log(), is_recorded).await?;
        for sidecar in self.s.lab.sidecars(PROGRAM)? {
            self.s.lab.stop(&sidecar).await?;
            self.s.lab.start_alone(&sidecar).await?;
        }
        Ok(program)
    }

    fn record(&self) -> Api<ConfigMap> {
        Api::namespaced(self.s.management.clone(), &self.own.name)
    }

    async fn run(&self, step: MgmtCsi, program: &Running) -> Result<()> {
        if step == MgmtCsi::Predecessor {
            self.attach_as_an_earlier_one().await?;
        }
        let withheld = self.withheld(step).await?;
        let subject = self.begin(step).await?;
        let outcome = withheld.until_refused(|| program.log(), || self.attempt(step, &subject)).await;
        if step == MgmtCsi::Abnormal {
            self.show_file().await?;
        }
        outcome?;
        if step == MgmtCsi::NoRecord {
            self.own.claims().delete(BY_HAND, &DeleteParams::default()).await?;
            self.s.volumes().delete(&subject, &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// What needs the rights; returns the name of the object that shows the outcome.
    async fn begin(&self, step: MgmtCsi) -> Result<String> {
        let (s, vm) = (self.s, self.node.name.as_str());
        Ok(match step {
            MgmtCsi::Start => anyhow::bail!("it has started"),
            MgmtCsi::RenewToken => self.guest.make_due(s).await.map(|()| self.guest.secret_name())?,
            MgmtCsi::NewVm => {
                let vm = s.node().await?.name;
                s.vms().get(&vm).await?.uid().context("the VM has no UID")?
            }
            MgmtCsi::VmStatus => {
                let patch = Patch::Merge(json!({"status": {"powerState": null}}));
                s.vms().patch_status(vm, &PatchParams::default(), &patch).await?;
                vm.to_owned()
            }
            MgmtCsi::EndedProof => s.annotate_as_proven_off(vm).await.map(|()| vm.to_owned())?,
            MgmtCsi::NewClass => s.management_class(&[]).await?,
            MgmtCsi::ChangedCapacity => {
                let one = self.a_capacity().await?.name_any();
                let patch = Patch::Merge(json!({"capacity": "1"}));
                self.capacities().patch(&one, &PatchParams::default(), &patch).await?;
                one
            }
            MgmtCsi::StaleCapacity => self.stale_capacity().await?,
            MgmtCsi::Budget => s.new_budget(&unique("account"), &json!({"bytes": "1Gi"})).await?,
            MgmtCsi::LostPool => {
                let name = self.a_pool().await?.name_any();
                s.storage_pools().delete(&name, &DeleteParams::default()).await?;
                name
            }
            MgmtCsi::ChangedPool => {
                let name = self.a_pool().await?.name_any();
                let patch = Patch::Merge(json!({"spec": {"engine": "changed"}}));
                s.storage_pools().patch(&name, &PatchParams::default(), &patch).await?;
                name
            }
            MgmtCsi::StalePool => {
                let mut stale = StoragePool::new("stale-pool", StoragePoolSpec::default());
                stale.status = self.a_pool().await?.status;
                s.storage_pools().create(&PostParams::default(), &stale).await?.name_any()
            }
            MgmtCsi::NoRecord => self.bind_by_hand().await?,
            MgmtCsi::Retain => {
                s.set_reclaim_policy(&self.claim, "Retain").await.map(|_| self.claim.clone())?
            }
            MgmtCsi::DeleteAgain => {
                s.set_reclaim_policy(&self.claim, "Delete").await.map(|_| self.claim.clone())?
            }
            MgmtCsi::Abnormal => self.claim.clone(),
            MgmtCsi::RestoreShared => self.restore().await?,
            MgmtCsi::Attach | MgmtCsi::Predecessor => {
                s.add_entry(vm, entry(&self.claim)).await?;
                self.claim.clone()
            }
            MgmtCsi::Detach => s.remove_entries(vm, |_| true).await.map(|()| self.claim.clone())?,
            MgmtCsi::LoseAttachment => {
                let node = self.node.uuid.to_string().parse()?;
                let attached = s.infra.list_attachments(Some(node), None).await?;
                let lost = attached.first().context("no attachment")?;
                s.infra.detach(&lost.id, PATIENCE).await?;
                lost.id.to_string()
            }
        })
    }

    async fn attempt(&self, step: MgmtCsi, subject: &str) -> Result<Result<(), String>> {
        let (s, vm) = (self.s, self.node.name.as_str());
        match step {
            MgmtCsi::Start => anyhow::bail!("it has started"),
            MgmtCsi::RenewToken => {
                let secret = self.guest.management_secrets(s).get(subject).await?;
                let token = secret.data.is_some_and(|data| data.contains_key("token"));
                Ok(if token { Ok(()) } else { Err("no token".to_owned()) })
            }
            MgmtCsi::NewVm => {
                let record = self.record().get(VM_GUESTS).await?.data.unwrap_or_default();
                Ok(if record.contains_key(subject) { Ok(()) } else { Err(format!("{record:?}")) })
            }
            MgmtCsi::VmStatus => {
                let status = s.vms().get(subject).await?.status.unwrap_or_default();
                Ok(status.power_state.map(drop).ok_or_else(|| "no power state".to_owned()))
            }
            MgmtCsi::EndedProof => s.is_proven_off(subject, false).await,
            MgmtCsi::NewClass => {
                let all = self.capacities().list(&ListParams::default()).await?.items;
                let is_there = all.iter().any(|one| one.storage_class_name == subject);
                Ok(if is_there { Ok(()) } else { Err(format!("{} other capacities", all.len())) })
            }
            MgmtCsi::ChangedCapacity => {
                let free = self.capacities().get(subject).await?.capacity.map(|free| free.0);
                Ok(if free.as_deref() == Some("1") { Err("the changed capacity".to_owned()) } else { Ok(()) })
            }
            MgmtCsi::StaleCapacity => {
                let left = self.capacities().get_opt(subject).await?;
                Ok(left.map_or(Ok(()), |_| Err("the capacity is there".to_owned())))
            }
            MgmtCsi::Budget => {
                let status = s.budgets().get(subject).await?.status;
                Ok(status.map(drop).ok_or_else(|| "no status".to_owned()))
            }
            MgmtCsi::LostPool => {
                let found = s.storage_pools().get_opt(subject).await?;
                Ok(found.map(drop).ok_or_else(|| "no StoragePool".to_owned()))
            }
            MgmtCsi::ChangedPool => {
                let engine = s.storage_pools().get(subject).await?.spec.engine;
                Ok(if engine == "changed" { Err(engine) } else { Ok(()) })
            }
            MgmtCsi::StalePool => {
                let left = s.storage_pools().get_opt(subject).await?;
                Ok(left.map_or(Ok(()), |_| Err("the StoragePool is there".to_owned())))
            }
            MgmtCsi::NoRecord => {
                let labels = s.volumes().get(subject).await?.labels().clone();
                let is_there = labels.contains_key(names::LABEL_CLUSTER_ID);
                Ok(if is_there { Ok(()) } else { Err(format!("{labels:?}")) })
            }
            MgmtCsi::Retain => {
                let shown = s.claims().get(subject).await?.annotations().clone();
                let is_there = shown.contains_key(names::ANNOTATION_RECLAIM_POLICY);
                Ok(if is_there { Ok(()) } else { Err(format!("{shown:?}")) })
            }
            MgmtCsi::DeleteAgain => {
                let shown = s.claims().get(subject).await?.annotations().clone();
                let is_there = shown.contains_key(names::ANNOTATION_RECLAIM_POLICY);
                Ok(if is_there { Err(format!("{shown:?}")) } else { Ok(()) })
            }
            MgmtCsi::Abnormal => self.toggle_health(subject).await,
            MgmtCsi::RestoreShared => {
                let status = s.claims().get(subject).await?.status.unwrap_or_default();
                let is_bound = status.phase.as_deref() == Some("Bound");
                let events = s.management_events_of("PersistentVolumeClaim", subject).await?;
                Ok(if is_bound { Ok(()) } else { Err(format!("{events:?}")) })
            }
            MgmtCsi::Attach | MgmtCsi::Predecessor => is_attached(s, vm, subject).await,
            MgmtCsi::Detach => {
                let left = s.attachment(vm, subject).await?;
                Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
            }
            MgmtCsi::LoseAttachment => {
                let node = self.node.uuid.to_string().parse()?;
                let now = s.infra.list_attachments(Some(node), None).await?;
                let is_new = now.iter().any(|one| {
                    one.id.as_str() != subject && one.state == infra_api::AttachmentState::Attached
                });
                Ok(if is_new { Ok(()) } else { Err(format!("{now:?}")) })
            }
        }
    }

    /// Creates a PersistentVolume of the claim's volume, and a claim of a guest that is bound to it; returns the PersistentVolume.
    async fn bind_by_hand(&self) -> Result<String> {
        let (handle, volume) = (self.s.infra_volume(&self.claim).await?.id, unique("static"));
        let object = json!({
            "metadata": {"name": volume},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "4Mi"}, "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": handle},
                "claimRef": {"namespace": self.own.name, "name": BY_HAND},
            },
        });
        self.s.volumes().create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        let claim = json!({
            "metadata": {"name": BY_HAND, "labels": {names::LABEL_CLUSTER_ID: self.s.cluster_id}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                "resources": {"requests": {"storage": "4Mi"}},
            },
        });
        self.own.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        Ok(volume)
    }

    // ---- capacity ----

    fn capacities(&self) -> Api<CSIStorageCapacity> {
        Api::namespaced(self.s.management.clone(), &self.own.name)
    }

    /// One that it has published.
    async fn a_capacity(&self) -> Result<CSIStorageCapacity> {
        eventually("a published capacity", PATIENCE, || async {
            let list = self.capacities().list(&ListParams::default()).await?;
            Ok(list.items.into_iter().next().ok_or_else(|| "none".to_owned()))
        })
        .await
    }

    /// Creates a capacity like one that it has published, for no class; returns its name.
    async fn stale_capacity(&self) -> Result<String> {
        let like = self.a_capacity().await?;
        let mut stale = CSIStorageCapacity { storage_class_name: "absent".to_owned(), ..like };
        let labels = stale.metadata.labels.take();
        let name = Some("nestor-stale".to_owned());
        stale.metadata = ObjectMeta { name, labels, ..Default::default() };
        self.capacities().create(&PostParams::default(), &stale).await?;
        Ok(stale.name_any())
    }

    /// The StoragePool of a pool.
    async fn a_pool(&self) -> Result<StoragePool> {
        eventually("a StoragePool", PATIENCE, || async {
            let list = self.s.storage_pools().list(&ListParams::default()).await?;
            Ok(list.items.into_iter().next().ok_or_else(|| "none".to_owned()))
        })
        .await
    }

    // ---- health ----

    /// Hides the file of a claim's volume while the claim's condition is normal, and shows it while it is abnormal, until an event
    /// has been repeated.
    async fn toggle_health(&self, claim: &str) -> Result<Result<(), String>> {
        let (file, hidden) = self.file(claim).await?;
        let conditions = self.s.claims().get(claim).await?.status.and_then(|status| status.conditions);
        let mut conditions = conditions.into_iter().flatten();
        let health = conditions.find(|one| one.type_ == names::CONDITION_HEALTHY);
        let is_abnormal = health.as_ref().is_some_and(|health| health.status == "False");
        match (hidden.exists(), is_abnormal) {
            (true, true) => std::fs::rename(&hidden, &file)?,
            (false, false) => std::fs::rename(&file, &hidden)?,
            // The condition follows.
            (true, false) | (false, true) => {}
        }
        let events: Api<Event> = Api::namespaced(self.s.management.clone(), &self.s.namespace);
        let about = ListParams::default().fields(&format!("involvedObject.name={claim}"));
        let events = events.list(&about).await?.items;
        let is_repeated = events.iter().any(|event| {
            event.reason.as_deref() == Some("VolumeConditionAbnormal") && event.series.is_some()
        });
        Ok(if is_repeated { Ok(()) } else { Err(format!("{health:?}, {} events", events.len())) })
    }

    /// The file of a claim's volume, and where it is hidden.
    async fn file(&self, claim: &str) -> Result<(PathBuf, PathBuf)> {
        let file = self.s.file_of(&self.s.infra_volume(claim).await?).await?;
        let hidden = file.with_extension("away");
        Ok((file, hidden))
    }

    /// Shows the file of the claim's volume again, and waits until the claim is healthy.
    async fn show_file(&self) -> Result<()> {
        let (file, hidden) = self.file(&self.claim).await?;
        if hidden.exists() {
            std::fs::rename(&hidden, &file)?;
        }
        eventually("the volume is healthy again", PATIENCE, || async {
            let conditions =
                self.s.claims().get(&self.claim).await?.status.and_then(|status| status.conditions);
            let mut conditions = conditions.into_iter().flatten();
            let is_abnormal =
                conditions.any(|one| one.type_ == names::CONDITION_HEALTHY && one.status == "False");
            Ok(if is_abnormal { Err("abnormal".to_owned()) } else { Ok(()) })
        })
        .await
    }

    // ---- snapshots ----

    /// Creates a claim of another guest that restores the shared snapshot.
    async fn restore(&self) -> Result<String> {
        let name = self.s.new_management_claim();
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: self.other}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                "resources": {"requests": {"storage": "4Mi"}},
                "dataSource": {
                    "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": self.snapshot,
                },
            },
        }))?;
        self.s.claims().create(&PostParams::default(), &claim).await?;
        Ok(name)
    }

    // ---- attachments ----

    /// Attaches the disk in the storage infra with an id of an earlier VolumeAttachment of the same name.
    async fn attach_as_an_earlier_one(&self) -> Result<()> {
        let s = self.s;
        detach_all(s, &self.node.name).await?;
        let name = names::volume_attachment(&(&self.node.name).into(), &(&self.claim).into());
        let id = AttachmentId::new(format!("{}.{name}.{}", s.namespace, uuid::Uuid::new_v4()))?;
        let volume = s.infra_volume(&self.claim).await?.id;
        let node = self.node.uuid.to_string().parse()?;
        let spec = AttachmentSpec { volume, node, read_only: false, access: Access::SingleNode };
        s.infra.attach(&id, &spec, PATIENCE).await?;
        Ok(())
    }
}

/// Shares a snapshot with a guest, as the platform team does: by a label of its content.
async fn share_content(s: &Scenario, snapshot: &str, guest: &str) -> Result<()> {
    let bound = s.snapshots().get(snapshot).await?.data["status"]["boundVolumeSnapshotContentName"].clone();
    let name = bound.as_str().context("the snapshot has no content")?;
    let label: Value = json!({format!("{}{guest}", names::LABEL_SHARE_PREFIX): "ro"});
    let patch = Patch::Merge(json!({"metadata": {"labels": label}}));
    s.contents().patch(name, &PatchParams::default(), &patch).await?;
    Ok(())
}

#[tokio::test]
async fn each_right_of_mgmt_csi_is_needed() -> Result<()> {
    run_alone(|s| async move {
        let own = Replacement::create(&s).await?;
        let program = own.start().await?;
        let later = steps(|how| if let How::MgmtCsi(step) = how { Some(step) } else { None });
        let mut failed = Vec::new();
        for step in later.into_iter().filter(|step| *step != MgmtCsi::Start) {
            failed.extend(own.run(step, &program).await.err().map(|error| format!("{step:?}: {error:#}")));
        }
        program.stop().await?;
        ensure!(failed.is_empty(), "{}", failed.join("\n"));
        Ok(())
    })
    .await
}
