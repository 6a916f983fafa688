//! Volumes that guests of different management namespaces share with `kubectl nestor share`. The first guest owns the volume; the
//! second one is a guest of the scenario's own namespace.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::{AttachmentState, Volume};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use lab::LoopNode;
use serde_json::{Value, json};
use tests::bytes::{device, noise, read, write};
use tests::driver::Driver;
use tests::kubectl_plugin::{Answer, on_management};
use tests::own_namespace::OwnNamespace;
use tests::tenants::Tenant;
use tests::{PATIENCE, Scenario, eventually, run};
use tonic::Code;

/// Size of a volume of 4 MiB.
const ALL: usize = 4 << 20;

/// A volume of the first guest with known content, and a guest in another namespace.
struct Shared {
    /// The owner's claim.
    claim: String,
    /// Its PersistentVolume.
    owner: String,
    volume: Volume,
    file: PathBuf,
    namespace: OwnNamespace,
    guest: Tenant,
}

impl Shared {
    async fn begin(s: &Scenario) -> Result<Self> {
        let claim = s.volume().await?;
        let volume = s.infra_volume(&claim).await?;
        let file = s.file_of(&volume).await?;
        write(&file, &noise(11, ALL))?;
        let owner = s.claims().get(&claim).await?.spec.and_then(|spec| spec.volume_name);
        let namespace = s.own_namespace().await?;
        let guest = s.tenant(&namespace).await?;
        Ok(Self { claim, owner: owner.context("not bound")?, volume, file, namespace, guest })
    }

    async fn plugin(&self, s: &Scenario, command: &str, more: &[&str]) -> Result<Answer> {
        let words = [command, &self.claim, "--with", &self.guest.cluster_id];
        on_management(s, &[&words[..], more].concat()).await
    }

    /// Shares the volume; returns the guest's PersistentVolume and the name of the claim in its namespace.
    async fn share(&self, s: &Scenario, more: &[&str]) -> Result<(PersistentVolume, String)> {
        let answer = self.plugin(s, "share", &[more, &["-o", "json"]].concat()).await?;
        answer.expect(0, &[]);
        let volume: PersistentVolume = serde_json::from_str(&answer.out)?;
        let sibling = tests::guest::handle(&volume)?;
        self.bound(&sibling).await?;
        Ok((volume, sibling))
    }

    /// Waits until the claim in the guest's namespace is bound.
    async fn bound(&self, sibling: &str) -> Result<()> {
        tests::management::is_bound(&self.namespace.claims(), sibling).await
    }

    /// Waits until the owner's claim shows this annotation.
    async fn owner_shows(&self, s: &Scenario, expected: Option<&Value>) -> Result<()> {
        eventually(&format!("{} shows {expected:?}", self.claim), PATIENCE, || async {
            let claim = s.claims().get(&self.claim).await?;
            let shown = claim.annotations().get(names::ANNOTATION_SHARED_WITH).cloned();
            let parsed: Option<Value> = shown.as_deref().map(serde_json::from_str).transpose()?;
            Ok(if parsed.as_ref() == expected { Ok(()) } else { Err(format!("{shown:?}")) })
        })
        .await
    }

    /// Waits until the claim in the guest's namespace shows the owner, and nothing of others.
    async fn sibling_shows_owner(&self, s: &Scenario, sibling: &str) -> Result<()> {
        eventually(&format!("{sibling} shows its owner"), PATIENCE, || async {
            let annotations = self.namespace.claims().get(sibling).await?.annotations().clone();
            let is_shown = annotations.get(names::ANNOTATION_SHARED_FROM) == Some(&s.cluster_id)
                && !annotations.contains_key(names::ANNOTATION_SHARED_WITH);
            Ok(if is_shown { Ok(()) } else { Err(format!("{annotations:?}")) })
        })
        .await
    }

    /// Ends the share; afterwards the guest has nothing of it, and the volume is as it was.
    async fn unshare(&self, s: &Scenario, sibling: &str) -> Result<()> {
        self.plugin(s, "unshare", &[]).await?.expect(0, &["no longer shared"]);
        ensure!(self.namespace.claims().get_opt(sibling).await?.is_none(), "the claim is still there");
        let name = names::sibling(&s.namespace, &self.claim, &self.guest.cluster_id);
        eventually(&format!("PersistentVolume {name} is gone"), PATIENCE, || async {
            let left = s.volumes().get_opt(&name).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await
    }

    fn has_its_bytes(&self) -> Result<()> {
        ensure!(read(&self.file, ALL)? == noise(11, ALL), "the data was changed");
        Ok(())
    }

    /// Sets the entries of the VM's `spec.volumes`.
    async fn request(&self, node: &LoopNode, claims: &[&str]) -> Result<()> {
        let entry = |claim: &&str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
        let patch = json!({"spec": {"volumes": claims.iter().map(entry).collect::<Vec<_>>()}});
        self.namespace.vms().patch(&node.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }
}

/// Creates the printed PersistentVolume in the guest's cluster; it is removed when the scenario ends.
async fn create_in_guest(s: &Scenario, mut volume: PersistentVolume) -> Result<()> {
    volume.metadata.labels = Some([("test".to_owned(), s.name.clone())].into());
    s.guest_volumes().create(&PostParams::default(), &volume).await?;
    Ok(())
}

/// Waits until an attach fails because the other guest has the disk; returns the message.
async fn refused(driver: &Driver, claim: &str, node: &LoopNode) -> Result<String> {
    eventually(&format!("{claim} is refused on {}", node.name), PATIENCE, || async {
        let outcome = driver.publish(claim, &node.name).await;
        let message = outcome.err().context("it was attached")?.message().to_owned();
        Ok(if message.contains("another guest") { Ok(message) } else { Err(message) })
    })
    .await
}

async fn attached(driver: &Driver, claim: &str, node: &LoopNode) -> Result<String> {
    eventually(&format!("{claim} is attached to {}", node.name), PATIENCE, || async {
        Ok(driver.publish(claim, &node.name).await.map_err(|status| status.to_string()))
    })
    .await
}

#[tokio::test]
async fn two_guests_use_one_volume_in_turn_and_each_sees_who_shares_it() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let (volume, sibling) = shared.share(&s, &[]).await?;
        shared.owner_shows(&s, Some(&json!({&shared.guest.cluster_id: "rw"}))).await?;
        shared.sibling_shows_owner(&s, &sibling).await?;
        let listed = on_management(&s, &["volumes", "--management-namespace", &s.namespace]).await?;
        listed.expect(0, &["SHARED", &format!("with {} (rw)", shared.guest.cluster_id)]);

        // The PersistentVolume is pinned, and its pin is that of the sibling.
        create_in_guest(&s, volume).await?;
        let gc_csi = shared.guest.start(&s, &[]).await?;
        let (here, there) = (s.node().await?, s.node_in(&shared.namespace, &shared.guest.cluster_id).await?);
        let disk = s.driver.publish(&shared.claim, &here.name).await?;
        write(&device(&here, &disk), b"written by the owner")?;

        let message = refused(&gc_csi.driver, &sibling, &there).await?;
        let hidden = [here.name.clone(), here.uuid.to_string(), s.namespace.clone(), shared.claim.clone()];
        ensure!(!hidden.iter().any(|word| message.contains(word)), "it names the other guest: {message}");
        ensure!(s.infra.list_attachments(Some(there.uuid), None).await?.is_empty(), "the disk was plugged");

        s.driver.unpublish(&shared.claim, &here.name).await?;
        ensure!(attached(&gc_csi.driver, &sibling, &there).await? == disk, "another disk");
        ensure!(read(&device(&there, &disk), 20)? == b"written by the owner");
        let message = refused(&s.driver, &shared.claim, &here).await?;
        let hidden = [there.name.clone(), there.uuid.to_string(), shared.namespace.name.clone()];
        ensure!(!hidden.iter().any(|word| message.contains(word)), "it names the other guest: {message}");
        s.driver.unpublish(&shared.claim, &here.name).await?;

        let consumer = format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, shared.guest.cluster_id);
        let recorded = shared.namespace.claims().get(&sibling).await?.annotations().contains_key(&consumer);
        ensure!(recorded, "the guest is not recorded as a consumer");
        let attached = shared.plugin(&s, "unshare", &[]).await?;
        attached.expect_refusal(&[&sibling, &there.name, "delete the pods"]);
        gc_csi.driver.unpublish(&sibling, &there.name).await?;
        gc_csi.stop().await?;
        shared.unshare(&s, &sibling).await?;
        shared.owner_shows(&s, None).await?;
        ensure!(read(&shared.file, 20)? == b"written by the owner");
        s.no_attachments(&there).await
    })
    .await
}

#[tokio::test]
async fn a_share_for_reading_is_plugged_read_only_whatever_the_entry_says() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let (volume, sibling) = shared.share(&s, &["--read-only"]).await?;
        let csi = volume.spec.and_then(|spec| spec.csi).context("no CSI volume")?;
        ensure!(csi.read_only == Some(true), "the printed PersistentVolume is writable");
        shared.owner_shows(&s, Some(&json!({&shared.guest.cluster_id: "ro"}))).await?;
        let node = s.node_in(&shared.namespace, &shared.guest.cluster_id).await?;
        shared.request(&node, &[&sibling]).await?;
        plugged(&s, &node, true).await?;
        shared.request(&node, &[]).await?;
        s.no_attachments(&node).await?;

        // A repetition with another mode changes only the mode.
        let (_, again) = shared.share(&s, &[]).await?;
        ensure!(again == sibling, "{again}");
        shared.owner_shows(&s, Some(&json!({&shared.guest.cluster_id: "rw"}))).await?;
        shared.request(&node, &[&sibling]).await?;
        plugged(&s, &node, false).await?;
        shared.request(&node, &[]).await?;
        s.no_attachments(&node).await?;
        shared.unshare(&s, &sibling).await?;
        shared.has_its_bytes()
    })
    .await
}

/// Waits until the node has one disk, read-only or not.
async fn plugged(s: &Scenario, node: &LoopNode, read_only: bool) -> Result<()> {
    eventually(&format!("a disk on {}", node.name), PATIENCE, || async {
        let all = s.infra.list_attachments(Some(node.uuid), None).await?;
        let attached: Vec<_> = all.iter().filter(|one| one.state == AttachmentState::Attached).collect();
        ensure!(attached.iter().all(|one| one.read_only == read_only), "{attached:?}");
        Ok(if attached.len() == 1 { Ok(()) } else { Err(format!("{all:?}")) })
    })
    .await
}

#[tokio::test]
async fn a_volume_outlives_its_owners_claim_until_the_share_ends() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let (_, sibling) = shared.share(&s, &[]).await?;
        let guest = shared.guest.cluster_id.as_str();
        shared.owner_shows(&s, Some(&json!({guest: "rw"}))).await?;

        // The owner can't delete the volume, with or without gc-csi.
        let refused = eventually("gc-csi refuses the deletion", PATIENCE, || async {
            let refused = s.driver.delete(&shared.claim).await.err().context("it was deleted")?;
            Ok(if refused.code() == Code::Aborted { Err(refused.to_string()) } else { Ok(refused) })
        })
        .await?;
        ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
        let texts = [shared.claim.as_str(), guest, "kubectl nestor unshare"];
        ensure!(texts.iter().all(|text| refused.message().contains(text)), "{refused}");
        let account = s.lab.management_as_guest("g1").await?;
        let claims = Api::<PersistentVolumeClaim>::namespaced(account, &s.namespace);
        let refused = claims.delete(&shared.claim, &DeleteParams::default()).await;
        let refused = refused.err().context("the account deleted the claim")?.to_string();
        ensure!(refused.contains(names::ANNOTATION_SHARED_WITH), "{refused}");

        // The platform team can, but the volume stays.
        s.claims().delete(&shared.claim, &DeleteParams::default()).await?;
        let texts = ["shares it with guest", guest, "kubectl nestor unshare"];
        s.wait_for_management_event_of("PersistentVolume", &shared.owner, &texts).await?;
        ensure!(s.infra.get_volume(&shared.volume.id).await?.is_some(), "the volume was deleted");
        shared.has_its_bytes()?;
        let node = s.node_in(&shared.namespace, guest).await?;
        shared.request(&node, &[&sibling]).await?;
        plugged(&s, &node, false).await?;
        shared.request(&node, &[]).await?;
        s.no_attachments(&node).await?;

        shared.unshare(&s, &sibling).await?;
        eventually("the volume is deleted", PATIENCE, || async {
            let left = s.infra.get_volume(&shared.volume.id).await?;
            Ok(left.map_or(Ok(()), |left| Err(left.state.to_string())))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_deleted_share_keeps_the_bytes_and_is_repeatable() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let (first, sibling) = shared.share(&s, &[]).await?;
        let (again, _) = shared.share(&s, &[]).await?;
        ensure!(first == again, "{first:?}, then {again:?}");

        shared.namespace.claims().delete(&sibling, &DeleteParams::default()).await?;
        shared.namespace.claims_gone(&[&sibling]).await?;
        let volume = s.infra.get_volume(&shared.volume.id).await?;
        ensure!(volume.is_some(), "the volume was deleted with the claim of its sibling");
        shared.has_its_bytes()?;
        shared.owner_shows(&s, Some(&json!({&shared.guest.cluster_id: "rw"}))).await?;

        // The PersistentVolume is bound to a new claim.
        let (bound_again, _) = shared.share(&s, &[]).await?;
        ensure!(bound_again == first, "{bound_again:?}");
        shared.sibling_shows_owner(&s, &sibling).await?;
        shared.unshare(&s, &sibling).await?;
        shared.owner_shows(&s, None).await?;
        shared.plugin(&s, "unshare", &[]).await?.expect(0, &["is not shared"]);
        shared.has_its_bytes()
    })
    .await
}

#[tokio::test]
async fn a_sibling_has_the_size_of_the_volume_after_its_owner_expands_it() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let (_, sibling) = shared.share(&s, &[]).await?;
        s.driver.expand(&shared.claim, 8 << 20).await?;
        let name = names::sibling(&s.namespace, &shared.claim, &shared.guest.cluster_id);
        eventually("the sibling has 8 MiB", PATIENCE, || async {
            let claim = shared.namespace.claims().get(&sibling).await?.status.and_then(|one| one.capacity);
            let volume = s.volumes().get(&name).await?.spec.and_then(|spec| spec.capacity);
            let sizes = [claim, volume].map(|all| all.and_then(|all| all.get("storage").cloned()));
            let is_grown = sizes.iter().flatten().filter(|size| size.0 == "8Mi").count() == 2;
            Ok(if is_grown { Ok(()) } else { Err(format!("{sizes:?}")) })
        })
        .await?;
        let larger = json!({"spec": {"resources": {"requests": {"storage": "16Mi"}}}});
        let patched = shared.namespace.claims();
        let patched = patched.patch(&sibling, &PatchParams::default(), &Patch::Merge(larger)).await;
        ensure!(patched.is_err(), "the claim of a sibling was expanded");
        // A repetition does not request the new size.
        shared.share(&s, &[]).await?;
        shared.unshare(&s, &sibling).await
    })
    .await
}

#[tokio::test]
async fn what_cannot_be_shared_is_refused_with_a_reason() -> Result<()> {
    run(|s| async move {
        let shared = Shared::begin(&s).await?;
        let unknown = on_management(&s, &["share", &shared.claim, "--with", "no-such-guest"]).await?;
        unknown.expect_refusal(&["no-such-guest", "is not known", "--to-namespace"]);
        let absent =
            on_management(&s, &["share", "no-such-claim", "--with", &shared.guest.cluster_id]).await?;
        absent.expect_refusal(&["no-such-claim", "does not exist"]);
        let own = on_management(&s, &["share", &shared.claim, "--with", &s.cluster_id]).await?;
        own.expect_refusal(&["own"]);

        let planned = shared.plugin(&s, "share", &["--dry-run", "-o", "yaml"]).await?;
        planned.expect(0, &["PersistentVolumeClaim", shared.volume.id.as_ref(), "Retain"]);
        let claims = shared.namespace.claims().list(&Default::default()).await?;
        ensure!(claims.items.is_empty(), "a dry run created {claims:?}");

        let (_, sibling) = shared.share(&s, &[]).await?;
        let renamed = shared.plugin(&s, "share", &["--name", "other"]).await?;
        renamed.expect_refusal(&[&sibling, "already"]);
        let second = ["share", &sibling, "--with", &s.cluster_id, "--management-namespace"];
        let nested = on_management(&s, &[&second[..], &[shared.namespace.name.as_str()]].concat()).await?;
        nested.expect_refusal(&["itself a share", &shared.owner]);
        shared.unshare(&s, &sibling).await
    })
    .await
}

#[tokio::test]
async fn guests_of_one_namespace_share_a_claim_by_labels() -> Result<()> {
    run(|s| async move {
        let (claim, second) = (s.volume().await?, s.second_guest().await?);
        let words = [claim.as_str(), "--with", &second.cluster_id];
        let shared = on_management(&s, &[&["share"][..], &words, &["--read-only"]].concat()).await?;
        let handle = format!("volumeHandle: {claim}");
        shared.expect(0, &["one namespace", &handle, "readOnly: true"]);
        let label = format!("{}{}", names::LABEL_SHARE_PREFIX, second.cluster_id);
        let name = s.claims().get(&claim).await?.spec.and_then(|spec| spec.volume_name).context("unbound")?;
        let mode = s.volumes().get(&name).await?.labels().get(&label).cloned();
        ensure!(mode.as_deref() == Some("ro"), "{mode:?}");
        let ended = on_management(&s, &[&["unshare"][..], &words].concat()).await?;
        ended.expect(0, &["no longer shared"]);
        ensure!(!s.volumes().get(&name).await?.labels().contains_key(&label), "the label is still there");
        ensure!(!s.claims().get(&claim).await?.labels().contains_key(&label), "the label is still there");
        Ok(())
    })
    .await
}
