//! The only room that talks to the management cluster. Everything is read from shared informers; the
//! writes are claims made and deleted ([`claims`]) and disks put into and taken out of
//! `VirtualMachine.spec.volumes` ([`disks`]).

pub mod claims;
pub mod commit;
pub mod disks;
mod warnings;

use crds::VirtualMachine;
use crds::names::ClusterId;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer, Key};
use tokio_util::sync::CancellationToken;

use commit::Committer;
use warnings::Warnings;

/// Where this guest lives in the management cluster, and how its objects are named.
#[derive(Debug, Clone)]
pub struct Home {
    /// The guest's namespace.
    pub namespace: String,
    /// The guest's identity, on the label of everything it owns.
    pub cluster: ClusterId,
    /// First part of the names of its claims.
    pub prefix: String,
}

/// The management cluster, as one guest sees it.
#[derive(Clone, Debug)]
pub struct Management {
    home: Home,
    claims_api: Api<PersistentVolumeClaim>,
    claims: Informer<PersistentVolumeClaim>,
    classes: Informer<StorageClass>,
    machines_api: Api<VirtualMachine>,
    machines: Informer<VirtualMachine>,
    warnings: Warnings,
    committer: Committer,
}

/// Why a request to the management API failed, as far as a caller must know.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ApiError {
    /// A quota of the namespace is used up.
    #[error("{0}")]
    Quota(String),
    /// The guest may not do this: RBAC, admission, or credentials.
    #[error("the management cluster refused: {0}")]
    Forbidden(String),
    /// The object is not valid to the API server or an admission check.
    #[error("the management cluster refused the object as invalid: {0}")]
    Invalid(String),
    /// Somebody changed the object in between.
    #[error("the object was changed by somebody else: {0}")]
    Conflict(String),
    /// There is no such object.
    #[error("not found in the management cluster: {0}")]
    NotFound(String),
    /// There is such an object already.
    #[error("exists in the management cluster: {0}")]
    Exists(String),
    /// No answer, or an answer that says to come back: the request may or may not have been carried out.
    #[error("the management API did not answer: {0}")]
    Unavailable(String),
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        let kube::Error::Api(status) = &error else {
            return Self::Unavailable(chain(&error));
        };
        let message = status.message.clone();
        match (status.code, status.reason.as_str()) {
            (403, _) if message.contains("exceeded quota") => Self::Quota(message),
            (401 | 403, _) => Self::Forbidden(message),
            (404, _) => Self::NotFound(message),
            (409, "AlreadyExists") => Self::Exists(message),
            (409, _) => Self::Conflict(message),
            (400 | 413 | 422, _) => Self::Invalid(message),
            _ => Self::Unavailable(message),
        }
    }
}

impl Management {
    /// Starts the informers. `version` is the served version of `VirtualMachine`; `machine_changed` is
    /// told of every change of a machine.
    pub fn start(
        client: &Client,
        home: Home,
        version: &str,
        ready: &Health,
        stop: &CancellationToken,
        machine_changed: impl Fn(&Change<'_, VirtualMachine>) + Send + Sync + 'static,
    ) -> Self {
        let namespace = home.namespace.as_str();
        let unread = "not read yet";
        let resource = crds::virtual_machine_resource(version);

        let claims = Informer::builder(
            "management PersistentVolumeClaims",
            Api::namespaced(client.clone(), namespace),
        )
        .trim(trim_claim)
        .start(ready.check("management-claims", unread), stop.clone());
        let classes = Informer::builder("management StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| {
                class.metadata.annotations = None;
                class.parameters = None;
            })
            .start(ready.check("management-classes", unread), stop.clone());
        let machines =
            Informer::builder("VirtualMachines", Api::namespaced_with(client.clone(), namespace, &resource))
                .trim(trim_machine)
                .on_change(machine_changed)
                .start(ready.check("virtual-machines", unread), stop.clone());
        let warnings = Warnings::start(
            client,
            namespace,
            claims.clone(),
            ready.check("management-events", unread),
            stop,
        );

        let machines_api: Api<VirtualMachine> = Api::namespaced_with(client.clone(), namespace, &resource);
        Self {
            claims_api: Api::namespaced(client.clone(), namespace),
            committer: Committer::new(machines_api.clone(), machines.clone(), namespace),
            home,
            claims,
            classes,
            machines_api,
            machines,
            warnings,
        }
    }

    /// The machines, for reading.
    pub fn machines(&self) -> &Informer<VirtualMachine> {
        &self.machines
    }

    /// Whether everything was read once; no call is answered before.
    pub fn is_synced(&self) -> bool {
        self.claims.is_synced() && self.machines.is_synced() && self.classes.is_synced()
    }

    fn key(&self, name: &str) -> Key {
        Key::new(self.home.namespace.clone(), name)
    }
}

/// Whether an object can have this name: a DNS subdomain (RFC 1123), as the API server demands.
fn is_object_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty() && label.chars().all(legal) && !label.starts_with('-') && !label.ends_with('-')
        })
}

/// Keeps identity, ownership, size and phase.
fn trim_claim(claim: &mut PersistentVolumeClaim) {
    claim.metadata.owner_references = None;
    if let Some(annotations) = &mut claim.metadata.annotations {
        annotations.retain(|key, _| key.starts_with("nestor.dev/"));
    }
    if let Some(spec) = &mut claim.spec {
        spec.selector = None;
        spec.data_source_ref = None;
    }
    if let Some(status) = &mut claim.status {
        status.conditions = None;
    }
}

/// Keeps identity and disks: all of them, since a change names an entry by its place in the list.
fn trim_machine(machine: &mut VirtualMachine) {
    machine.metadata.annotations = None;
    machine.metadata.labels = None;
    machine.metadata.owner_references = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_lead_elsewhere_in_a_url_is_no_object() {
        for good in ["vm-1", "a", "a.b-c.9"] {
            assert!(is_object_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "../a", "a b", "A", "a?x", "a%2f", "-a", "a.", &"a".repeat(254)] {
            assert!(!is_object_name(bad), "{bad}");
        }
    }
}
