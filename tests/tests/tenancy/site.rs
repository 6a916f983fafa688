//! The site of the attempts: a guest that attacks, and a guest whose objects must not change.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::bytes::{noise, write};
use tests::own_namespace::OwnNamespace;
use tests::tenants::Tenant;
use tests::{PATIENCE, Scenario, eventually, unique};

use super::attempt::{By, Seen, Setting};
use super::request::{Kind, Request, entry, label, seen, spec};

/// Size of a volume of 4 MiB.
pub(super) const ALL: usize = 4 << 20;

/// Two guests.
pub(super) struct Site {
    pub(super) s: Arc<Scenario>,
    pub(super) setting: Setting,
    pub(super) attacker: Attacker,
    pub(super) victim: Victim,
}

/// A guest whose credential is used without gc-csi.
pub(super) struct Attacker {
    pub(super) tenant: Tenant,
    pub(super) namespace: OwnNamespace,
    pub(super) node: LoopNode,
    /// Its bound claim.
    pub(super) claim: String,
}

/// A guest whose objects must not change.
pub(super) struct Victim {
    pub(super) cluster_id: String,
    pub(super) namespace: OwnNamespace,
    pub(super) node: LoopNode,
    /// A claim whose disk is attached to the node.
    pub(super) claim: String,
    /// The VolumeAttachment of that disk.
    pub(super) attachment: String,
    /// A claim that is not attached.
    pub(super) idle: String,
    /// The PersistentVolume of the idle claim.
    pub(super) volume: String,
    /// The storage infra's volumes of both claims, and their files.
    pub(super) files: Vec<(VolumeId, PathBuf)>,
    /// A VolumeSnapshot of the idle claim.
    pub(super) snapshot: String,
    /// Its VolumeSnapshotContent.
    pub(super) content: String,
    /// An event about the idle claim.
    pub(super) event: String,
}

impl Site {
    /// Creates both guests.
    pub(super) async fn create(s: &Arc<Scenario>, setting: Setting) -> Result<Self> {
        let namespace = s.own_namespace().await?;
        let victims = if setting.shared { namespace.clone() } else { s.own_namespace().await? };
        let victim = Victim::create(s, victims).await?;
        let attacker = Attacker::create(s, namespace, setting.policies).await?;
        let site = Self { s: s.clone(), setting, attacker, victim };
        if setting.policies {
            site.policies_are_in_effect().await?;
        }
        Ok(site)
    }

    /// Waits until the policies of all kinds refuse requests; they take effect some time after their creation.
    async fn policies_are_in_effect(&self) -> Result<()> {
        let unlisted =
            self.own(Kind::Claim).create(self.claim(spec(json!({"storageClassName": "nestor-retain"}))));
        let snapshot =
            self.own(Kind::Snapshot).create(self.snapshot("data", label(names::LABEL_CLUSTER_ID, "x")));
        let vm = self.own(Kind::Vm).patch(&self.attacker.node.name, label("team", "x"));
        for probe in [unlisted, snapshot, vm] {
            eventually(&format!("a policy refuses {probe:?}"), PATIENCE, || async {
                Ok(match probe.make(self, true).await? {
                    Seen::Refused(By::Policy, _) => Ok(()),
                    other => Err(other.to_string()),
                })
            })
            .await?;
        }
        Ok(())
    }

    /// Fails if the message of a refusal names the other guest, which the request did not.
    pub(super) fn learns_nothing(&self, seen: &Seen, sent: &str) -> Result<()> {
        let Seen::Refused(_, message) = seen else { return Ok(()) };
        let is_named = |text: &str| text.contains(&self.victim.cluster_id);
        ensure!(is_named(sent) || !is_named(message), "the message names the other guest: {message}");
        Ok(())
    }

    // ---- objects of the attacker ----

    /// A new claim of the attacker, with these changes.
    pub(super) fn claim(&self, changes: Value) -> Value {
        let mut claim = claim(&unique("attempt"), &self.attacker.tenant.cluster_id);
        json_patch::merge(&mut claim, &changes);
        claim
    }

    /// A new VolumeSnapshot of the attacker, with these changes.
    pub(super) fn snapshot(&self, claim: &str, changes: Value) -> Value {
        let mut snapshot = snapshot(&unique("attempt"), &self.attacker.tenant.cluster_id, claim);
        json_patch::merge(&mut snapshot, &changes);
        snapshot
    }

    /// Creates an object as the attacker; returns its name, or the refusal.
    pub(super) async fn create_own(&self, kind: Kind, object: Value) -> Result<Result<String, Seen>> {
        let name = object["metadata"]["name"].as_str().context("no name")?.to_owned();
        let made: Request = self.own(kind).create(object);
        Ok(match made.make(self, false).await? {
            Seen::Permitted => Ok(name),
            refused @ Seen::Refused(..) => Err(refused),
        })
    }

    /// Deletes an object of the attacker.
    pub(super) async fn delete_own(&self, kind: Kind, name: &str) -> Result<()> {
        self.own(kind).delete(name).make(self, false).await.map(drop)
    }

    /// Sets the entries of the attacker's VM.
    pub(super) async fn set_entries(&self, entries: &[Value]) -> Result<Seen> {
        let patch = Patch::Merge(spec(json!({"volumes": entries})));
        let vms = Kind::Vm.api(&self.attacker.tenant.client, Some(&self.attacker.namespace.name));
        seen(vms.patch(&self.attacker.node.name, &PatchParams::default(), &patch).await)
    }

    /// Waits until the attacker's VM reports `count` disks, none of which is attached; returns their errors.
    pub(super) async fn errors_of_disks(&self, count: usize) -> Result<Vec<String>> {
        let vms = self.attacker.namespace.vms();
        eventually(&format!("{count} disks of the attacker's VM fail"), PATIENCE, || async {
            let disks = vms.get(&self.attacker.node.name).await?.status.unwrap_or_default().volumes;
            ensure!(disks.iter().all(|disk| !disk.attached), "a disk was attached: {disks:?}");
            let errors: Vec<String> = disks.iter().filter_map(|disk| disk.error.clone()).collect();
            let is_complete = disks.len() == count && errors.len() == count;
            Ok(if is_complete { Ok(errors) } else { Err(format!("{} of {}", errors.len(), disks.len())) })
        })
        .await
    }

    /// Removes the entries of the attacker's VM, and waits until nothing of them is left.
    pub(super) async fn remove_entries(&self) -> Result<()> {
        self.set_entries(&[]).await?;
        self.errors_of_disks(0).await?;
        self.s.no_attachments(&self.attacker.node).await
    }

    /// Tries to attach a claim to the attacker's VM; returns who refuses it.
    pub(super) async fn attach(&self, claim: &str) -> Result<Seen> {
        if let refused @ Seen::Refused(..) = self.set_entries(&[entry(claim)]).await? {
            return Ok(refused);
        }
        let error = self.errors_of_disks(1).await?.concat();
        let attached = self.s.infra.list_attachments(Some(self.attacker.node.uuid), None).await?;
        ensure!(attached.is_empty(), "the disk was plugged: {attached:?}");
        self.remove_entries().await?;
        let by = if error.starts_with("ClaimNotFound") { By::VmOperator } else { By::MgmtCsi };
        Ok(Seen::Refused(by, error))
    }

    /// Waits for a warning about an object of the attacker with one of these texts; returns the text's refuser.
    pub(super) async fn warned(&self, object: &str, texts: &[(&str, By)]) -> Result<Seen> {
        let events: Api<Event> = Api::namespaced(self.s.management.clone(), &self.attacker.namespace.name);
        let about = ListParams::default().fields(&format!("involvedObject.name={object},type=Warning"));
        eventually(&format!("a warning about {object} with {texts:?}"), PATIENCE, || async {
            let found = events.list(&about).await?.items;
            let messages: Vec<String> = found.into_iter().filter_map(|event| event.message).collect();
            Ok(refusal_in(&messages, texts).ok_or_else(|| messages.join(" | ")))
        })
        .await
    }

    /// Waits until a VolumeSnapshot of the attacker has an error with one of these texts; returns the text's refuser.
    pub(super) async fn snapshot_fails(&self, name: &str, texts: &[(&str, By)]) -> Result<Seen> {
        eventually(&format!("VolumeSnapshot {name} fails with {texts:?}"), PATIENCE, || async {
            let status = self.attacker.namespace.snapshots().get(name).await?.data["status"].clone();
            ensure!(status["readyToUse"] != true, "VolumeSnapshot {name} is ready");
            let message = status["error"]["message"].as_str().unwrap_or_default().to_owned();
            Ok(refusal_in(&[message], texts).ok_or_else(|| status.to_string()))
        })
        .await
    }

    /// Fails if a claim of the attacker is bound.
    pub(super) async fn is_unbound(&self, claim: &str) -> Result<()> {
        let status = self.attacker.namespace.claims().get(claim).await?.status.unwrap_or_default();
        ensure!(status.phase.as_deref() != Some("Bound"), "claim {claim} is bound");
        Ok(())
    }

    // ---- end ----

    /// Detaches the disks of both guests and deletes their snapshots, so that their namespaces can be deleted.
    pub(super) async fn clear(&self) -> Result<()> {
        let ends =
            [(&self.attacker.namespace, &self.attacker.node), (&self.victim.namespace, &self.victim.node)];
        for (namespace, node) in ends {
            let none = Patch::Merge(spec(json!({"volumes": []})));
            namespace.vms().patch(&node.name, &PatchParams::default(), &none).await?;
            self.s.no_attachments(node).await?;
            let snapshots = namespace.snapshots();
            snapshots.delete_collection(&Default::default(), &ListParams::default()).await?;
            eventually("the snapshots are deleted", PATIENCE, || async {
                let left = snapshots.list(&ListParams::default()).await?.items;
                let names: Vec<String> = left.iter().map(ResourceExt::name_any).collect();
                Ok(if names.is_empty() { Ok(()) } else { Err(format!("{names:?}")) })
            })
            .await?;
        }
        Ok(())
    }
}

/// The refusal in these messages, by one of the texts.
fn refusal_in(messages: &[String], texts: &[(&str, By)]) -> Option<Seen> {
    texts.iter().find_map(|(text, by)| {
        let message = messages.iter().find(|message| !message.is_empty() && message.contains(text))?;
        Some(Seen::Refused(*by, message.clone()))
    })
}

impl Attacker {
    async fn create(s: &Scenario, namespace: OwnNamespace, policies: bool) -> Result<Self> {
        let tenant = if policies {
            let tenant = s.tenant(&namespace).await?;
            tenant.apply_policies(s, &json!({"classes": ["nestor"]})).await?;
            tenant
        } else {
            s.tenant_without_policies(&namespace).await?
        };
        let node = s.node_in(&namespace, &tenant.cluster_id).await?;
        let claim = bound_claim(&namespace, &tenant.cluster_id).await?;
        Ok(Self { tenant, namespace, node, claim })
    }
}

impl Victim {
    async fn create(s: &Scenario, namespace: OwnNamespace) -> Result<Self> {
        let cluster_id = unique("victim");
        let node = s.node_in(&namespace, &cluster_id).await?;
        let claim = bound_claim(&namespace, &cluster_id).await?;
        let idle = bound_claim(&namespace, &cluster_id).await?;
        let mut files = Vec::new();
        for claim in [&claim, &idle] {
            let id = namespace.volume_of(claim).await?;
            let volume = s.infra.get_volume(&id).await?.context("no volume")?;
            let file = s.file_of(&volume).await?;
            write(&file, &noise(9, ALL))?;
            files.push((id, file));
        }
        let (snapshot, content) = ready_snapshot(&namespace, &cluster_id, &idle).await?;
        attach(&namespace, &node, &claim).await?;
        let volume = namespace.claims().get(&idle).await?.spec.and_then(|spec| spec.volume_name);
        let event = event(s, &namespace, &idle).await?;
        Ok(Self {
            attachment: names::volume_attachment(&(&node.name).into(), &(&claim).into()),
            volume: volume.context("no volume")?,
            cluster_id,
            namespace,
            node,
            claim,
            idle,
            files,
            snapshot,
            content,
            event,
        })
    }
}

/// A new claim of a guest.
fn claim(name: &str, guest: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: guest}},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        },
    })
}

/// A new VolumeSnapshot of a guest.
fn snapshot(name: &str, guest: &str, claim: &str) -> Value {
    json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": name, "labels": {names::LABEL_CLUSTER_ID: guest}},
        "spec": {"volumeSnapshotClassName": "nestor", "source": {"persistentVolumeClaimName": claim}},
    })
}

/// Creates a claim of a guest as the platform team, and waits until it is bound.
async fn bound_claim(namespace: &OwnNamespace, guest: &str) -> Result<String> {
    let name = unique("claim");
    let claim: PersistentVolumeClaim = serde_json::from_value(claim(&name, guest))?;
    namespace.claims().create(&PostParams::default(), &claim).await?;
    is_bound(namespace, &name).await?;
    Ok(name)
}

/// Waits until a claim is bound.
pub(super) async fn is_bound(namespace: &OwnNamespace, claim: &str) -> Result<()> {
    eventually(&format!("claim {claim} is bound"), PATIENCE, || async {
        let status = namespace.claims().get(claim).await?.status.unwrap_or_default();
        Ok(if status.phase.as_deref() == Some("Bound") { Ok(()) } else { Err(format!("{status:?}")) })
    })
    .await
}

/// Creates a VolumeSnapshot of a guest as the platform team, and waits until it is ready; returns its name and that of its
/// content.
async fn ready_snapshot(namespace: &OwnNamespace, guest: &str, claim: &str) -> Result<(String, String)> {
    let name = unique("snapshot");
    let snapshot = serde_json::from_value(snapshot(&name, guest, claim))?;
    namespace.snapshots().create(&PostParams::default(), &snapshot).await?;
    let content = is_ready(namespace, &name).await?;
    Ok((name, content))
}

/// Waits until a VolumeSnapshot is ready; returns the name of its content.
pub(super) async fn is_ready(namespace: &OwnNamespace, snapshot: &str) -> Result<String> {
    eventually(&format!("VolumeSnapshot {snapshot} is ready"), PATIENCE, || async {
        let status = namespace.snapshots().get(snapshot).await?.data["status"].clone();
        let content =
            status["boundVolumeSnapshotContentName"].as_str().filter(|_| status["readyToUse"] == true);
        Ok(content.map(str::to_owned).ok_or_else(|| status.to_string()))
    })
    .await
}

/// Attaches a claim to a VM as the platform team.
async fn attach(namespace: &OwnNamespace, node: &LoopNode, claim: &str) -> Result<()> {
    let patch = Patch::Merge(spec(json!({"volumes": [entry(claim)]})));
    namespace.vms().patch(&node.name, &PatchParams::default(), &patch).await?;
    eventually(&format!("claim {claim} is attached"), PATIENCE, || async {
        let disks = namespace.vms().get(&node.name).await?.status.unwrap_or_default().volumes;
        Ok(if disks.iter().any(|disk| disk.attached) { Ok(()) } else { Err(format!("{disks:?}")) })
    })
    .await
}

/// Creates an event about a claim, as a controller would.
async fn event(s: &Scenario, namespace: &OwnNamespace, claim: &str) -> Result<String> {
    let name = unique("event");
    let event: Event = serde_json::from_value(json!({
        "metadata": {"name": name}, "type": "Normal", "reason": "Test", "message": "an event of the victim",
        "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Test",
        "reportingComponent": names::MANAGEMENT_DRIVER, "reportingInstance": "test",
        "involvedObject": {"kind": "PersistentVolumeClaim", "namespace": namespace.name, "name": claim},
    }))?;
    let events: Api<Event> = Api::namespaced(s.management.clone(), &namespace.name);
    events.create(&PostParams::default(), &event).await?;
    Ok(name)
}
