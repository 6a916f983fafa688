//! Zone annotations of the management claim: requested zones as input of `CreateVolume`, accessible zones as its result.

use std::sync::Arc;
use std::time::Duration;

use crds::names::{ANNOTATION_ACCESSIBLE_ZONES, ANNOTATION_REQUESTED_ZONES, MAX_REQUESTED_ZONES, MAX_ZONE};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::PersistentVolumeClaim;
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};

use super::read::read;
use crate::cluster::annotation;
use crate::infra::Message;

/// How long to wait until a cache shows what csi-provisioner saw, before the API server is read.
pub(super) const CACHE_LAG: Duration = Duration::from_millis(200);

/// Reads and annotates claims.
#[derive(Clone)]
pub(super) struct Claims {
    pub(super) client: Client,
    pub(super) cache: Informer<PersistentVolumeClaim>,
}

impl Claims {
    /// The claim, if it is there.
    pub(super) async fn find(
        &self,
        key: &Key,
        deadline: Instant,
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, Status> {
        // The cache of csi-provisioner can be ahead of ours.
        let soon = deadline.min(Instant::now() + CACHE_LAG);
        if let Some(cache) = self.cache.wait_for(key, soon, |claim| Some(claim?.clone())).await {
            return Ok(Some(cache));
        }
        Ok(self.read(key, deadline).await?.map(Arc::new))
    }

    /// The claim with all of its fields, from the API server; None if it does not exist.
    pub(super) async fn read(
        &self,
        key: &Key,
        deadline: Instant,
    ) -> Result<Option<PersistentVolumeClaim>, Status> {
        let what = format!("PersistentVolumeClaim {key}");
        read(&what, self.api(key).get_opt(&key.name), deadline).await
    }

    /// Writes the accessible zone of the volume to its claim, unless it is set already.
    pub(super) async fn annotate_zones(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        zones: &str,
        deadline: Instant,
    ) -> Result<(), Status> {
        if annotation(claim, ANNOTATION_ACCESSIBLE_ZONES) == Some(zones) {
            return Ok(());
        }
        // The UID is a precondition: a new claim of the same name is not changed.
        let patch = Patch::Merge(json!({"metadata": {
            "uid": claim.metadata.uid,
            "annotations": {ANNOTATION_ACCESSIBLE_ZONES: zones},
        }}));
        let params = PatchParams::default();
        match timeout_at(deadline, self.api(key).patch_metadata(&key.name, &params, &patch)).await {
            Ok(Ok(_)) => Ok(()),
            // The claim is gone.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
            Ok(Err(error)) => {
                let what =
                    format!("annotate PersistentVolumeClaim {key} with the zones {zones} of its volume");
                Err(Message::of_cluster(&what, &error).status(Code::Unavailable))
            }
            Err(_) => Err(Status::deadline_exceeded(format!(
                "the volume was created in {zones}; timed out annotating PersistentVolumeClaim {key} in the \
                 management cluster"
            ))),
        }
    }

    fn api(&self, key: &Key) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

/// Requested zones of a claim, preferred first; empty if any zone will do. The annotation is untrusted guest input.
pub(super) fn requested_zones(key: &Key, claim: &PersistentVolumeClaim) -> Result<Vec<String>, Status> {
    let zones = annotation(claim, ANNOTATION_REQUESTED_ZONES).unwrap_or_default().split(',').map(str::trim);
    let zones: Vec<&str> = zones.filter(|zone| !zone.is_empty()).collect();
    let longest = zones.iter().map(|zone| zone.len()).max().unwrap_or(0);
    if zones.len() > MAX_REQUESTED_ZONES || longest > MAX_ZONE {
        return Err(Status::invalid_argument(format!(
            "annotation {ANNOTATION_REQUESTED_ZONES} of PersistentVolumeClaim {key} has {} zones, the longest of {longest} \
             bytes; at most {MAX_REQUESTED_ZONES} zones of {MAX_ZONE} bytes each are allowed",
            zones.len()
        )));
    }
    Ok(zones.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(zones: &str) -> Result<Vec<String>, Status> {
        let mut claim = PersistentVolumeClaim::default();
        claim.metadata.annotations = Some([(ANNOTATION_REQUESTED_ZONES.to_owned(), zones.to_owned())].into());
        requested_zones(&Key::new("guest-a", "data"), &claim)
    }

    #[test]
    fn zones_keep_their_order_and_too_many_are_refused() {
        assert_eq!(requested("b, a,,").unwrap(), ["b", "a"]);
        assert_eq!(requested(&vec!["z"; MAX_REQUESTED_ZONES].join(",")).unwrap().len(), MAX_REQUESTED_ZONES);
        for (zones, expected) in [(vec!["z"; 17_000].join(","), "17000 zones"), ("z".repeat(64), "64 bytes")]
        {
            let status = requested(&zones).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().contains(expected) && status.message().contains("guest-a/data"),
                "{status}"
            );
        }
    }

    #[test]
    fn the_limits_on_zones_are_those_of_the_infra_api() {
        assert_eq!((MAX_REQUESTED_ZONES, MAX_ZONE), (infra_api::MAX_ZONES, infra_api::MAX_ZONE));
    }
}
