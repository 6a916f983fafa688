//! `share`: creates the sibling and its claim. A repetition changes nothing, except the mode and a binding that was lost.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use kube_kit::informer::Key;
use serde_json::{Value, json};

use super::guests::{self, Guest};
use super::objects::{Share, claim_of, guest_volume, reason_to_keep, reason_to_refuse};
use super::output::show;
use super::{labels, named, read_claim, read_volume};
use crate::cli::ShareArgs;
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::render::{manifest, print};

/// Runs `share`.
pub async fn run(clusters: &Clusters, args: &ShareArgs) -> Result<bool, Error> {
    let cluster = clusters.management_for("share")?;
    let source = Key::new(cluster.namespace.clone(), args.claim.clone());
    let guest = guests::find(cluster, &args.with, args.to_namespace.as_deref()).await?;
    let share = read(cluster, &source, guest, args).await?;
    if share.guest.namespace == source.namespace {
        return labels::share(cluster, &source, &share, args).await;
    }
    if args.dry_run {
        let objects = (share.management_claim(), share.management_volume(None));
        return print(&manifest(args.output, &objects)?).map(|()| true);
    }
    let sibling = create(cluster, &share).await?;
    check_source(cluster, &source, &share).await?;
    let volume = guest_volume(&share.claim.name, &sibling, share.is_read_only);
    let head = format!(
        "The volume of PersistentVolumeClaim {source} is shared with guest {} ({}), as PersistentVolumeClaim {}.\n",
        share.guest.id,
        share.mode(),
        share.claim
    );
    show(args.output, &head, &volume).map(|()| true)
}

/// Reads what is shared, and refuses what can't be.
async fn read(cluster: &Cluster, source: &Key, guest: Guest, args: &ShareArgs) -> Result<Share, Error> {
    let (claim, owner) = read_source(cluster, source).await?;
    if let Some(why) = reason_to_refuse(&claim, &owner, &guest.id) {
        return Err(Error::Refused(why));
    }
    let name = crds::names::sibling(&source.namespace, &source.name, &guest.id);
    let claim = Key::new(guest.namespace.clone(), args.name.clone().unwrap_or_else(|| name.clone()));
    Ok(Share { owner, guest, is_read_only: args.read_only, name, claim })
}

async fn read_source(
    cluster: &Cluster,
    source: &Key,
) -> Result<(PersistentVolumeClaim, PersistentVolume), Error> {
    let missing = |what: String, hint: &str| Error::NoSubject(what, hint.to_owned());
    let claim = read_claim(cluster, source).await?.ok_or_else(|| {
        let hint = " in the management cluster; set its namespace with --management-namespace";
        missing(named::<PersistentVolumeClaim>(source), hint)
    })?;
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
    if name.is_empty() {
        let why = "is not bound: repeat the command when it is";
        return Err(Error::Refused(format!("PersistentVolumeClaim {source} {why}")));
    }
    let volume = read_volume(cluster, &name).await?;
    Ok((
        claim,
        volume.ok_or_else(|| missing(named::<PersistentVolume>(&name), " in the management cluster"))?,
    ))
}

/// Creates the claim first: a quota that refuses it leaves nothing behind.
async fn create(cluster: &Cluster, share: &Share) -> Result<PersistentVolume, Error> {
    let existing = read_volume(cluster, &share.name).await?;
    if let Some(why) = existing.as_ref().and_then(|existing| reason_to_keep(existing, share)) {
        return Err(Error::Refused(why));
    }
    let claim = create_claim(cluster, share).await?;
    match existing {
        Some(existing) => update(cluster, share, &existing, claim.metadata.uid).await,
        None => {
            let volume = share.management_volume(claim.metadata.uid);
            let created = cluster.all().create(&PostParams::default(), &volume).await;
            created.map_err(|error| Error::change("create", named::<PersistentVolume>(&share.name), &error))
        }
    }
}

async fn create_claim(cluster: &Cluster, share: &Share) -> Result<PersistentVolumeClaim, Error> {
    let claims = cluster.claims_of(&share.claim.namespace);
    match claims.create(&PostParams::default(), &share.management_claim()).await {
        Ok(claim) => return Ok(claim),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(error) => {
            return Err(Error::change("create", named::<PersistentVolumeClaim>(&share.claim), &error));
        }
    }
    let existing = read_claim(cluster, &share.claim).await?.unwrap_or_default();
    let volume = existing.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    let why = if volume != Some(share.name.as_str()) {
        "exists and is not of this share: set --name"
    } else if existing.metadata.deletion_timestamp.is_some() {
        "is being deleted: repeat the command when it is gone"
    } else {
        return Ok(existing);
    };
    Err(Error::Refused(format!("PersistentVolumeClaim {} {why}", share.claim)))
}

/// Sets the mode, and binds a sibling whose claim was deleted to the new claim.
async fn update(
    cluster: &Cluster,
    share: &Share,
    existing: &PersistentVolume,
    claim_uid: Option<String>,
) -> Result<PersistentVolume, Error> {
    let Some(patch) = difference(share, existing, claim_uid) else { return Ok(existing.clone()) };
    let patched = cluster.all().patch(&share.name, &PatchParams::default(), &Patch::Merge(patch)).await;
    patched.map_err(|error| Error::change("change", named::<PersistentVolume>(&share.name), &error))
}

fn difference(share: &Share, existing: &PersistentVolume, claim_uid: Option<String>) -> Option<Value> {
    let is_labelled = share.label().iter().all(|(key, mode)| existing.labels().get(key) == Some(mode));
    let is_bound = claim_of(existing).is_some_and(|(_, uid)| uid == claim_uid.as_deref());
    if is_labelled && is_bound {
        return None;
    }
    let mut patch = json!({"metadata": {"labels": share.label()}});
    if !is_bound {
        let claim = share.management_volume(claim_uid).spec.and_then(|spec| spec.claim_ref);
        patch["spec"]["claimRef"] = json!(claim);
        patch["spec"]["claimRef"]["resourceVersion"] = Value::Null;
    }
    Some(patch)
}

/// Whether the owner still has the volume. If its claim was deleted meanwhile, mgmt-csi may have deleted the volume before it
/// could see the sibling; otherwise it sees the sibling before it deletes the volume.
async fn check_source(cluster: &Cluster, source: &Key, share: &Share) -> Result<(), Error> {
    let is_refused = match read_source(cluster, source).await {
        Ok((claim, volume)) => {
            volume.name_any() != share.owner.name_any()
                || reason_to_refuse(&claim, &volume, &share.guest.id).is_some()
        }
        Err(Error::NoSubject(..) | Error::Refused(_)) => true,
        Err(error) => return Err(error),
    };
    if is_refused {
        return Err(Error::Refused(format!(
            "PersistentVolumeClaim {source} was deleted or replaced meanwhile: remove what was created with `kubectl nestor \
             unshare {} --with {}`",
            source.name, share.guest.id
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(is_read_only: bool) -> Share {
        let owner = json!({
            "metadata": {"name": "pvc-1"},
            "spec": {"csi": {"driver": crds::names::MANAGEMENT_DRIVER, "volumeHandle": "v"}},
        });
        Share {
            owner: serde_json::from_value(owner).unwrap(),
            guest: Guest { id: "g2".to_owned(), namespace: "guest-2".to_owned() },
            is_read_only,
            name: "share-1".to_owned(),
            claim: Key::new("guest-2", "share-1"),
        }
    }

    #[test]
    fn a_repetition_changes_only_the_mode_and_a_lost_binding() {
        let uid = || Some("u".to_owned());
        let existing = share(false).management_volume(uid());
        assert_eq!(difference(&share(false), &existing, uid()), None);
        let patch = difference(&share(true), &existing, uid()).unwrap();
        assert_eq!(patch, json!({"metadata": {"labels": {"share.nestor.dev/g2": "ro"}}}));
        let patch = difference(&share(false), &existing, Some("new".to_owned())).unwrap();
        assert_eq!(patch["spec"]["claimRef"]["uid"], "new");
    }
}
