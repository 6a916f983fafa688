//! Single reads: an object by name, the events of an object, the served version of VirtualMachines.

use std::fmt::Debug;

use crds::{VIRTUAL_MACHINE_GROUP, VirtualMachine};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event as ApiEvent;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIGroup;
use kube::api::ListParams;
use kube::core::ApiResource;
use kube::{Api, Client};
use kube_kit::client::chain;
use serde::de::DeserializeOwned;

use super::snapshot::{About, Event, Lookup, Object};
use crate::clusters::Cluster;
use crate::error::Error;

/// Reads an object by name. A refusal is part of the result; an unreachable cluster is an error.
pub async fn get<K>(
    cluster: &Cluster,
    api: Api<K>,
    namespace: Option<&str>,
    name: &str,
) -> Result<Object<K>, Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let lookup = match api.get_opt(name).await {
        Ok(Some(object)) => Lookup::Found(Box::new(object)),
        Ok(None) => Lookup::Missing,
        Err(error) if is_answer(&error) => Lookup::Refused(chain(&error)),
        Err(error) => return Err(Error::request(cluster.tier.name(), name, &error)),
    };
    Ok(Object { namespace: namespace.map(str::to_owned), name: name.to_owned(), lookup })
}

/// An object in a cluster that is not connected.
pub fn unseen<K>(namespace: Option<&str>, name: &str) -> Object<K> {
    Object { namespace: namespace.map(str::to_owned), name: name.to_owned(), lookup: Lookup::Unseen }
}

/// Whether the API server answered: it refused the request, or the object could not be decoded.
pub fn is_answer(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code != 401,
        kube::Error::SerdeError(_) => true,
        _ => false,
    }
}

/// Reads the events of one object by field selector.
pub async fn events(client: &Client, about: &About) -> Result<Vec<Event>, kube::Error> {
    // Events of cluster-scoped objects are in the namespace default.
    let namespace = about.namespace.as_deref().unwrap_or("default");
    let api: Api<ApiEvent> = Api::namespaced(client.clone(), namespace);
    let fields = format!("involvedObject.kind={},involvedObject.name={}", about.kind, about.name);
    let list = api.list(&ListParams::default().fields(&fields)).await?;
    Ok(list.items.into_iter().map(event).collect())
}

fn event(event: ApiEvent) -> Event {
    let series =
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    let first = event.event_time.as_ref().map(|time| time.0);
    Event {
        last: series.or(last).or(first),
        is_warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.unwrap_or_default(),
        message: event.message.unwrap_or_default(),
    }
}

/// API resource of VirtualMachines in the newest version that the cluster serves; an error text without one.
pub async fn vm_resource(client: &Client) -> Result<ApiResource, String> {
    let request = http::Request::get(format!("/apis/{VIRTUAL_MACHINE_GROUP}"))
        .body(Vec::new())
        .map_err(|error| error.to_string())?;
    let group: APIGroup = client.request(request).await.map_err(|error| chain(&error))?;
    let served: Vec<String> = group.versions.into_iter().map(|version| version.version).collect();
    let version = crds::newest_virtual_machine_version(&served);
    version
        .map(crds::virtual_machine_resource)
        .ok_or_else(|| format!("no supported version of VirtualMachine is served, only {served:?}"))
}

/// VirtualMachines of the guest's namespace.
pub fn vms(cluster: &Cluster, resource: &ApiResource) -> Api<VirtualMachine> {
    Api::namespaced_with(cluster.client.clone(), &cluster.namespace, resource)
}

/// Now.
pub fn now() -> Timestamp {
    Timestamp::now()
}
