//! Kubernetes objects that may not exist any more.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Resource;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::{PATIENCE, eventually};

/// Changes the reclaim policy of a volume, if it exists.
pub(crate) async fn set_policy(volumes: &Api<PersistentVolume>, name: &str, policy: &str) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": policy}}));
    match volumes.patch(name, &PatchParams::default(), &patch).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot set the policy of {name} to {policy}")),
    }
}

/// Deletes an object, if it exists.
pub(crate) async fn delete<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete {name}")),
    }
}

/// Waits until a list is empty.
pub(crate) async fn gone<F, R>(what: &str, list: F) -> Result<()>
where
    F: Fn() -> R,
    R: Future<Output = Result<Vec<String>>>,
{
    eventually(&format!("no {what} left"), PATIENCE, || async {
        let left = list().await?;
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
    })
    .await
}
