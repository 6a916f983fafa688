//! `volumes`: the guest's PersistentVolumes and their management claims.

use std::collections::BTreeMap;

use crds::names;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use serde::Serialize;

use super::{List, Row, or_dash, read, show};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::diagnose::claims::{phase, phase_of_volume};
use crate::error::Error;

const HEAD: [&str; 9] =
    ["CLAIM", "VOLUME", "PHASE", "SIZE", "MANAGEMENT-CLAIM", "BELOW", "SHARED", "CLASS", "RECLAIM"];

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    claim: Option<String>,
    volume: Option<String>,
    phase: Option<String>,
    size: Option<String>,
    management_claim: String,
    management_phase: Option<String>,
    shared: Option<String>,
    class: Option<String>,
    reclaim_policy: Option<String>,
}

impl Row for Volume {
    fn cells(&self) -> Vec<String> {
        vec![
            or_dash(self.claim.clone()),
            or_dash(self.volume.clone()),
            or_dash(self.phase.clone()),
            or_dash(self.size.clone()),
            self.management_claim.clone(),
            or_dash(self.management_phase.clone()),
            or_dash(self.shared.clone()),
            or_dash(self.class.clone()),
            or_dash(self.reclaim_policy.clone()),
        ]
    }
}

/// Lists from the guest, or else from the management claims alone.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let below = read::claims(clusters).await?;
    let mut list = List { head: &HEAD, narrow: 7, unseen: Vec::new() };
    let rows: Vec<Volume> = match &clusters.guest {
        Some(guest) => {
            let volumes = read::guest_volumes(guest).await?;
            volumes.iter().map(|volume| of_guest(volume, below.as_ref())).collect()
        }
        None => {
            list.unseen.push("the guest's objects; CLAIM and VOLUME are what gc-csi recorded".to_owned());
            below.iter().flatten().map(|(name, claim)| of_management(name, claim)).collect()
        }
    };
    if below.is_none() {
        list.unseen.push("management claims: the management cluster is not connected".to_owned());
    }
    show(output, &list, &rows).map(|()| true)
}

fn of_guest(volume: &PersistentVolume, below: Option<&BTreeMap<String, PersistentVolumeClaim>>) -> Volume {
    let spec = volume.spec.clone().unwrap_or_default();
    let handle = read::handle(volume).unwrap_or_default().to_owned();
    let claim = spec.claim_ref.and_then(|claim| Some(format!("{}/{}", claim.namespace?, claim.name?)));
    let size = spec.capacity.and_then(|all| all.get("storage").map(|size| size.0.clone()));
    Volume {
        claim,
        volume: Some(volume.name_any()),
        phase: Some(phase_of_volume(volume).to_owned()),
        size,
        management_phase: below.map(|all| all.get(&handle).map_or("absent", phase).to_owned()),
        shared: below.and_then(|all| shared(all.get(&handle)?)),
        management_claim: handle,
        class: spec.storage_class_name,
        reclaim_policy: spec.persistent_volume_reclaim_policy,
    }
}

fn of_management(name: &str, claim: &PersistentVolumeClaim) -> Volume {
    let annotation = |key: &str| claim.annotations().get(key).cloned();
    let names = annotation(names::ANNOTATION_GUEST_NAMESPACE).zip(annotation(names::ANNOTATION_GUEST_PVC));
    let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref()?.get("storage"));
    Volume {
        claim: names.map(|(namespace, name)| format!("{namespace}/{name}")),
        volume: annotation(names::ANNOTATION_GUEST_PV),
        phase: None,
        size: capacity.map(|size| size.0.clone()),
        management_claim: name.to_owned(),
        management_phase: Some(phase(claim).to_owned()),
        shared: shared(claim),
        class: annotation(names::ANNOTATION_GUEST_STORAGE_CLASS),
        reclaim_policy: annotation(names::ANNOTATION_GUEST_RECLAIM_POLICY),
    }
}

/// Who shares the volume of a claim, as mgmt-csi shows it there: the guest whose volume it is, or the guests that may use it too.
fn shared(claim: &PersistentVolumeClaim) -> Option<String> {
    let mut guests: BTreeMap<String, String> = claim
        .labels()
        .iter()
        .filter_map(|(key, mode)| {
            Some((key.strip_prefix(names::LABEL_SHARE_PREFIX)?.to_owned(), mode.clone()))
        })
        .collect();
    if let Some(owner) = claim.annotations().get(names::ANNOTATION_SHARED_FROM) {
        let owner = if owner.is_empty() { "the platform team" } else { owner };
        let modes: Vec<_> = guests.into_values().collect();
        return Some(format!("from {owner} ({})", modes.join(", ")));
    }
    let elsewhere = claim.annotations().get(names::ANNOTATION_SHARED_WITH);
    let elsewhere: Option<BTreeMap<String, String>> =
        elsewhere.and_then(|text| serde_json::from_str(text).ok());
    guests.extend(elsewhere.unwrap_or_default());
    let guests: Vec<_> = guests.iter().map(|(guest, mode)| format!("{guest} ({mode})")).collect();
    (!guests.is_empty()).then(|| format!("with {}", guests.join(", ")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_claim_shows_the_guests_of_its_own_and_of_other_namespaces() {
        let shown = |labels: Value, annotations: Value| {
            let metadata = json!({"name": "data", "labels": labels, "annotations": annotations});
            shared(&serde_json::from_value(json!({"metadata": metadata})).unwrap())
        };
        let own = json!({names::LABEL_CLUSTER_ID: "g1"});
        assert_eq!(shown(own.clone(), json!({})), None);
        let elsewhere = json!({names::ANNOTATION_SHARED_WITH: r#"{"g2":"ro","g3":"rw"}"#});
        assert_eq!(shown(own, elsewhere).as_deref(), Some("with g2 (ro), g3 (rw)"));
        let label = json!({"share.nestor.dev/g2": "ro"});
        assert_eq!(shown(label.clone(), json!({})).as_deref(), Some("with g2 (ro)"));
        let from = |owner: &str| shown(label.clone(), json!({names::ANNOTATION_SHARED_FROM: owner}));
        assert_eq!(from("g1").as_deref(), Some("from g1 (ro)"));
        assert_eq!(from("").as_deref(), Some("from the platform team (ro)"));
    }
}
