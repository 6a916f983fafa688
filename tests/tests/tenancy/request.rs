//! Requests of a guest to the API server of the management cluster, and who refuses them.

use anyhow::Result;
use kube::Client;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams,
};
use lab::cluster::MANAGEMENT_NAMESPACE;
use serde_json::{Value, json};

use super::attempt::{By, Seen};
use super::site::Site;

/// Kinds of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Claim,
    Snapshot,
    Vm,
    /// nestor.dev, not storage.k8s.io.
    Attachment,
    Volume,
    Content,
    Event,
    Secret,
    ConfigMap,
    Namespace,
    Pod,
    RoleBinding,
    Policy,
}

impl Kind {
    pub(super) fn resource(self) -> ApiResource {
        let of = |group, version, kind| ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        match self {
            Self::Claim => of("", "v1", "PersistentVolumeClaim"),
            Self::Snapshot => of("snapshot.storage.k8s.io", "v1", "VolumeSnapshot"),
            Self::Vm => crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0]),
            Self::Attachment => ApiResource::erase::<crds::VolumeAttachment>(&()),
            Self::Volume => of("", "v1", "PersistentVolume"),
            Self::Content => of("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent"),
            Self::Event => of("events.k8s.io", "v1", "Event"),
            Self::Secret => of("", "v1", "Secret"),
            Self::ConfigMap => of("", "v1", "ConfigMap"),
            Self::Namespace => of("", "v1", "Namespace"),
            Self::Pod => of("", "v1", "Pod"),
            Self::RoleBinding => of("rbac.authorization.k8s.io", "v1", "RoleBinding"),
            Self::Policy => of("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicy"),
        }
    }

    /// Objects in a namespace, or of all namespaces.
    pub(super) fn api(self, client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.resource()),
            None => Api::all_with(client.clone(), &self.resource()),
        }
    }
}

/// Objects of a kind, in a namespace or in all.
#[derive(Debug, Clone)]
pub(super) struct Objects {
    kind: Kind,
    namespace: Option<String>,
}

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Request {
    objects: Objects,
    verb: Verb,
}

#[derive(Debug, Clone)]
enum Verb {
    Get(String),
    List,
    Create(Value),
    Patch(String, Value),
    Status(String, Value),
    Delete(String),
    DeleteAll,
    /// Method, path, header and body.
    Raw(http::Method, String, Option<(&'static str, String)>, String),
}

impl Objects {
    pub(super) fn get(self, name: &str) -> Request {
        self.with(Verb::Get(name.to_owned()))
    }

    pub(super) fn list(self) -> Request {
        self.with(Verb::List)
    }

    /// Creates an object; its kind is added.
    pub(super) fn create(self, mut object: Value) -> Request {
        let resource = self.kind.resource();
        object["apiVersion"] = json!(resource.api_version);
        object["kind"] = json!(resource.kind);
        self.with(Verb::Create(object))
    }

    /// A merge patch.
    pub(super) fn patch(self, name: &str, patch: Value) -> Request {
        self.with(Verb::Patch(name.to_owned(), patch))
    }

    /// A merge patch of the status.
    pub(super) fn status(self, name: &str, status: Value) -> Request {
        self.with(Verb::Status(name.to_owned(), json!({"status": status})))
    }

    pub(super) fn delete(self, name: &str) -> Request {
        self.with(Verb::Delete(name.to_owned()))
    }

    pub(super) fn delete_all(self) -> Request {
        self.with(Verb::DeleteAll)
    }

    /// Creates an object from any bytes.
    pub(super) fn post(self, body: &str) -> Request {
        let path = self.path();
        self.with(Verb::Raw(http::Method::POST, path, None, body.to_owned()))
    }

    /// Requests a token of a ServiceAccount in the namespace of these objects.
    pub(super) fn token(self, account: &str, body: &str) -> Request {
        let namespace = self.namespace.clone().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        self.with(Verb::Raw(http::Method::POST, path, None, body.to_owned()))
    }

    /// Lists the objects as another user.
    pub(super) fn list_as(self, user: &str) -> Request {
        let path = self.path();
        let header = Some(("Impersonate-User", user.to_owned()));
        self.with(Verb::Raw(http::Method::GET, path, header, String::new()))
    }

    fn path(&self) -> String {
        let resource = self.kind.resource();
        let root = if resource.group.is_empty() { "/api" } else { "/apis" };
        let place = self.namespace.as_ref().map(|name| format!("/namespaces/{name}")).unwrap_or_default();
        format!("{root}/{}{place}/{}", resource.api_version, resource.plural)
    }

    fn with(self, verb: Verb) -> Request {
        Request { objects: self, verb }
    }
}

/// Reads a path of the API server that is not an object.
pub(super) fn read_path(path: &str) -> Request {
    let objects = Objects { kind: Kind::Namespace, namespace: None };
    objects.with(Verb::Raw(http::Method::GET, path.to_owned(), None, String::new()))
}

impl Site {
    /// Objects in the attacker's namespace.
    pub(super) fn own(&self, kind: Kind) -> Objects {
        Objects { kind, namespace: Some(self.attacker.namespace.name.clone()) }
    }

    /// Objects in the victim's namespace.
    pub(super) fn victims(&self, kind: Kind) -> Objects {
        Objects { kind, namespace: Some(self.victim.namespace.name.clone()) }
    }
}

/// Objects in the namespace of mgmt-csi.
pub(super) fn system(kind: Kind) -> Objects {
    Objects { kind, namespace: Some(MANAGEMENT_NAMESPACE.to_owned()) }
}

/// Objects of all namespaces, or without one.
pub(super) fn cluster(kind: Kind) -> Objects {
    Objects { kind, namespace: None }
}

impl Request {
    /// Sends the request as the attacker.
    pub(super) async fn make(&self, site: &Site, dry_run: bool) -> Result<Seen> {
        seen(self.send(&site.attacker.tenant.client, dry_run).await)
    }

    async fn send(&self, client: &Client, dry_run: bool) -> kube::Result<()> {
        let api = self.objects.kind.api(client, self.objects.namespace.as_deref());
        let posting = PostParams { dry_run, ..Default::default() };
        let patching = PatchParams { dry_run, ..Default::default() };
        let deleting = DeleteParams { dry_run, ..Default::default() };
        match &self.verb {
            Verb::Get(name) => api.get(name).await.map(drop),
            Verb::List => api.list(&ListParams::default().limit(1)).await.map(drop),
            Verb::Create(object) => {
                let object = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
                api.create(&posting, &object).await.map(drop)
            }
            Verb::Patch(name, patch) => api.patch(name, &patching, &Patch::Merge(patch)).await.map(drop),
            Verb::Status(name, patch) => {
                api.patch_status(name, &patching, &Patch::Merge(patch)).await.map(drop)
            }
            Verb::Delete(name) => api.delete(name, &deleting).await.map(drop),
            Verb::DeleteAll => {
                let none = ListParams::default().labels("test=no-such-label");
                api.delete_collection(&deleting, &none).await.map(drop)
            }
            Verb::Raw(method, path, header, body) => {
                let mut request = http::Request::builder().method(method).uri(path);
                if let Some((name, value)) = header {
                    request = request.header(*name, value);
                }
                let request =
                    request.header("Content-Type", "application/json").body(body.clone().into_bytes());
                client.request_text(request.map_err(kube::Error::HttpError)?).await.map(drop)
            }
        }
    }
}

/// What the API server's response says. An error that is not a refusal is an error of the test.
pub(super) fn seen<T>(outcome: kube::Result<T>) -> Result<Seen> {
    match outcome {
        Ok(_) => Ok(Seen::Permitted),
        Err(kube::Error::Api(status)) => match refuser(status.code, &status.message) {
            Some(by) => Ok(Seen::Refused(by, status.message.clone())),
            None => Err(kube::Error::Api(status).into()),
        },
        Err(error) => Err(error.into()),
    }
}

/// Who refuses a request, by the code and the message of the response.
fn refuser(code: u16, message: &str) -> Option<By> {
    match code {
        403 if message.contains("ValidatingAdmissionPolicy") => Some(By::Policy),
        403 if message.contains(" cannot ") => Some(By::Rbac),
        400 | 405 | 409 | 413 | 422 => Some(By::ApiServer),
        _ => None,
    }
}

// ---- bodies ----

pub(super) fn labels(labels: Value) -> Value {
    json!({"metadata": {"labels": labels}})
}

/// A patch with one label.
pub(super) fn label(key: &str, value: &str) -> Value {
    labels(json!({key: value}))
}

/// A patch with one annotation.
pub(super) fn annotation(key: &str, value: &str) -> Value {
    json!({"metadata": {"annotations": {key: value}}})
}

/// A patch with these finalizers and no others.
pub(super) fn finalizers(finalizers: &[&str]) -> Value {
    json!({"metadata": {"finalizers": finalizers}})
}

pub(super) fn spec(spec: Value) -> Value {
    json!({"spec": spec})
}

/// An object after a merge patch.
pub(super) fn with(mut object: Value, patch: &Value) -> Value {
    json_patch::merge(&mut object, patch);
    object
}

/// An entry of `spec.volumes`.
pub(super) fn entry(claim: &str) -> Value {
    json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
}

#[test]
fn refusals_are_told_apart() {
    let policy =
        "pvc is forbidden: ValidatingAdmissionPolicy 'claims' denied request: a guest cannot do that";
    for (code, message, by) in [
        (403, policy, Some(By::Policy)),
        (403, "pods is forbidden: User \"a\" cannot list resource \"pods\"", Some(By::Rbac)),
        (403, "exceeded quota", None),
        (422, "spec is immutable", Some(By::ApiServer)),
        (404, "not found", None),
        (500, "internal error", None),
    ] {
        assert_eq!(refuser(code, message), by, "{message}");
    }
}
