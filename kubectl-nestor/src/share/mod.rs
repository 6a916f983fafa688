//! `share` and `unshare`: let a guest in another management namespace use a volume, through a sibling PersistentVolume and a claim
//! in that namespace. They need the rights of the platform team.

mod end;
mod guests;
mod labels;
pub(crate) mod objects;
mod output;
mod start;

pub use end::run as unshare;
pub use start::run as share;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Resource;
use kube_kit::informer::Key;

use crate::clusters::Cluster;
use crate::error::Error;

/// Cluster, for errors.
const MANAGEMENT: &str = "management";

/// An object of a kind, for messages.
fn named<K: Resource<DynamicType = ()>>(name: &impl std::fmt::Display) -> String {
    format!("{} {name}", K::kind(&()))
}

/// Reads a claim; None if it does not exist.
async fn read_claim(cluster: &Cluster, key: &Key) -> Result<Option<PersistentVolumeClaim>, Error> {
    let found = cluster.claims_of(&key.namespace).get_opt(&key.name).await;
    found.map_err(|error| Error::request(MANAGEMENT, named::<PersistentVolumeClaim>(key), &error))
}

/// Reads a PersistentVolume; None if it does not exist.
async fn read_volume(cluster: &Cluster, name: &str) -> Result<Option<PersistentVolume>, Error> {
    let found = cluster.all::<PersistentVolume>().get_opt(name).await;
    found.map_err(|error| Error::request(MANAGEMENT, named::<PersistentVolume>(&name), &error))
}
