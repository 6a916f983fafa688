//! The victim's objects, before and after the attempts.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use infra_api::SnapshotId;
use serde::Serialize;
use serde_json::{Value, json};
use tests::management::VM_GUESTS;
use tests::{PATIENCE, eventually};

use super::request::Kind;
use super::site::Site;

/// Finalizers that csi-provisioner and snapshot-controller set on the source of a copy, before mgmt-csi refuses the copy.
const OF_SOURCES: [&str; 3] = [
    "provisioner.storage.kubernetes.io/cloning-protection",
    "snapshot.storage.kubernetes.io/pvc-as-source-protection",
    "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection",
];

/// Objects by their names.
pub(super) type Objects = BTreeMap<String, Value>;

impl Site {
    /// Reads the victim's objects in the management cluster and the storage infra, and the data of its volumes.
    pub(super) async fn objects_of_the_victim(&self) -> Result<Objects> {
        let mut objects = Objects::new();
        for (kind, name) in self.victims_in_management().await? {
            let namespace =
                (!matches!(kind, Kind::Volume | Kind::Content)).then_some(&*self.victim.namespace.name);
            let object = kind.api(&self.s.management, namespace).get(&name).await;
            let object = object.with_context(|| format!("{kind:?} {name}"))?;
            objects.insert(format!("{kind:?} {name}"), comparable(serde_json::to_value(object)?));
        }
        let uid =
            self.victim.namespace.vms().get(&self.victim.node.name).await?.metadata.uid.context("no UID")?;
        let record = self.s.vm_guests().get(VM_GUESTS).await?.data.unwrap_or_default().remove(&uid);
        objects.insert("record of the VM".to_owned(), json!(record));
        self.add_infra(&mut objects).await?;
        Ok(objects)
    }

    async fn victims_in_management(&self) -> Result<Vec<(Kind, String)>> {
        let victim = &self.victim;
        let mut all = vec![
            (Kind::Vm, victim.node.name.clone()),
            (Kind::Attachment, victim.attachment.clone()),
            (Kind::Snapshot, victim.snapshot.clone()),
            (Kind::Content, victim.content.clone()),
            (Kind::Event, victim.event.clone()),
        ];
        for claim in [&victim.claim, &victim.idle] {
            let volume = victim.namespace.claims().get(claim).await?.spec.and_then(|spec| spec.volume_name);
            all.push((Kind::Claim, claim.clone()));
            all.push((Kind::Volume, volume.context("the claim has no volume")?));
        }
        Ok(all)
    }

    async fn add_infra(&self, objects: &mut Objects) -> Result<()> {
        let infra = &self.s.infra;
        for (id, file) in &self.victim.files {
            add(objects, &format!("infra volume {id}"), &infra.get_volume(id).await?)?;
            let data = tests::bytes::checksum(file).await?;
            objects.insert(format!("data of {id}"), json!(data));
        }
        let attachments = infra.list_attachments(Some(self.victim.node.uuid), None).await?;
        add(objects, "infra attachments", &attachments)?;
        let content = Kind::Content.api(&self.s.management, None).get(&self.victim.content).await?;
        let id = content.data["status"]["snapshotHandle"].as_str().context("the content has no handle")?;
        add(objects, "infra snapshot", &infra.get_snapshot(&SnapshotId::new(id)?).await?)
    }

    /// Waits until the victim's objects are as they were. Those that mgmt-csi repairs change for a moment.
    pub(super) async fn is_untouched(&self, before: &Objects) -> Result<()> {
        eventually("the victim's objects are as they were", PATIENCE, || async {
            let now = self.objects_of_the_victim().await?;
            let changed: Vec<String> = differences(before, &now);
            Ok(if changed.is_empty() { Ok(()) } else { Err(changed.join("\n")) })
        })
        .await
    }

    /// The victim's objects before the attempts: a disk must be attached, with data.
    pub(super) async fn objects_before(&self) -> Result<Objects> {
        let objects = self.objects_of_the_victim().await?;
        if objects["infra attachments"] == json!([]) {
            bail!("the victim has no disk");
        }
        Ok(objects)
    }
}

fn add(objects: &mut Objects, name: &str, object: &impl Serialize) -> Result<()> {
    objects.insert(name.to_owned(), serde_json::to_value(object)?);
    Ok(())
}

/// An object without what changes when nothing of it does: an object that was changed and repaired has another
/// resourceVersion, managers of its fields, and order of finalizers.
fn comparable(mut object: Value) -> Value {
    let Some(metadata) = object["metadata"].as_object_mut() else { return object };
    metadata.remove("resourceVersion");
    metadata.remove("managedFields");
    if let Some(finalizers) = metadata.get_mut("finalizers").and_then(Value::as_array_mut) {
        finalizers.retain(|one| !OF_SOURCES.iter().any(|of_source| one == of_source));
        finalizers.sort_by_key(Value::to_string);
    }
    if metadata.get("finalizers") == Some(&json!([])) {
        metadata.remove("finalizers");
    }
    object
}

fn differences(before: &Objects, now: &Objects) -> Vec<String> {
    let names = before.keys().chain(now.keys().filter(|name| !before.contains_key(*name)));
    let changed = names.filter(|name| before.get(*name) != now.get(*name));
    changed.map(|name| format!("{name} was {:?} and is {:?}", before.get(name), now.get(name))).collect()
}

#[test]
fn only_what_does_not_matter_is_ignored() {
    let object = |more: Value| {
        let mut object = json!({"metadata": {"name": "a", "finalizers": ["b", "a"], "labels": {"x": "y"}}});
        json_patch::merge(&mut object, &more);
        comparable(object)
    };
    let same = object(json!({"metadata": {
        "finalizers": ["a", "b", OF_SOURCES[0]], "resourceVersion": "7", "managedFields": [{}],
    }}));
    assert_eq!(object(json!({})), same);
    for other in [
        json!({"metadata": {"finalizers": ["a"]}}),
        json!({"metadata": {"labels": {"x": "z"}}}),
        json!({"metadata": {"generation": 2}}),
        json!({"status": {}}),
    ] {
        assert_ne!(object(json!({})), object(other));
    }
}
