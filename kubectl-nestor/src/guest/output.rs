//! What `guest add` prints and writes: manifests of the management cluster, and values and Secret for the guest.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use k8s_openapi::api::core::v1::Secret;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::{Value, json};

use super::add::{AddArgs, Deletion};
use super::api::Outcome;
use super::objects::Request;
use crate::cli::Format;
use crate::error::Error;
use crate::render::{format, manifest, print};

/// What was done with an object.
#[derive(Debug, Serialize)]
pub(super) struct Change {
    pub(super) object: String,
    pub(super) outcome: Outcome,
}

/// Result of `guest add`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Added {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) cluster_id: String,
    pub(super) changes: Vec<Change>,
    /// Values of nestor-guest.
    pub(super) values: Value,
    /// The Secret that the guest needs.
    pub(super) secret: Secret,
}

/// Prints manifests: YAML documents, or a List as JSON.
pub(super) fn print_manifests(output: Format, objects: &[DynamicObject]) -> Result<(), Error> {
    if output == Format::Json {
        return print(&manifest(output, &objects)?);
    }
    let documents: Vec<String> = objects.iter().map(yaml).collect::<Result<_, _>>()?;
    print(&documents.join("---\n"))
}

/// Values of nestor-guest for a guest.
pub(super) fn values(args: &AddArgs, request: &Request, server: &str) -> Value {
    let guest = &request.manifests;
    let policy = match args.deletion {
        Deletion::Retain => json!({"onGuestDeletion": "Retain"}),
        Deletion::Delete => json!({"onGuestDeletion": "Delete", "clusterObject": guest.cluster_object}),
    };
    let mut values = json!({
        "clusterId": guest.cluster_id,
        "management": {
            "namespace": guest.namespace,
            "capacityNamespace": guest.system_namespace,
            "token": {"secret": args.secret, "server": args.server.as_deref().unwrap_or(server)},
        },
        "controller": policy,
    });
    if request.has_kubevirt {
        // VMs of KubeVirt have no zone.
        values["management"]["vmApi"] = json!("kubevirt");
        values["topology"] = json!({"enabled": false});
    }
    values
}

/// Writes the files for the guest and prints what is next; or prints all of it as data.
pub(super) fn show(args: &AddArgs, added: &Added) -> Result<(), Error> {
    if matches!(args.output, Format::Json | Format::Yaml) {
        return print(&format(args.output, added, |_| String::new())?);
    }
    let file = |suffix: &str| args.out.join(format!("{}-{suffix}.yaml", args.name));
    let (values, secret) = (file("guest-values"), file("management-secret"));
    write(&values, &yaml(&added.values)?, 0o644)?;
    write(&secret, &yaml(&added.secret)?, 0o600)?;
    print(&text(args, added, &values, &secret))
}

fn text(args: &AddArgs, added: &Added, values: &Path, secret: &Path) -> String {
    let changes: String =
        added.changes.iter().map(|one| format!("{}: {}\n", one.object, one.outcome.text())).collect();
    let Added { name, namespace, cluster_id, .. } = added;
    let (values, secret, system) = (values.display(), secret.display(), &args.secret_namespace);
    format!(
        "{changes}Guest {name} has the namespace {namespace} and the cluster ID {cluster_id}, which must never change.\n\
         Next:\n\
         1. Label the guest's VirtualMachines in {namespace}: nestor.dev/cluster-id={cluster_id}\n\
         2. In the guest, within half an hour: kubectl create namespace {system}; kubectl apply -f {secret}\n   \
         The file contains the token: delete it afterwards.\n\
         3. In the guest: helm install nestor charts/nestor-guest -n {system} -f {values}, with your values for image\n\
         4. `kubectl nestor guest show {name}` shows what is missing.\n"
    )
}

fn yaml(value: &impl Serialize) -> Result<String, Error> {
    let text = serde_saphyr::to_string(value).map_err(|error| Error::Encode(error.to_string()))?;
    Ok(format!("{}\n", text.trim_end()))
}

/// Replaces a file, so that it has this mode from the beginning.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let failed = |error| Error::Write(path.display().to_string(), error);
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_with_a_token_is_readable_by_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret.yaml");
        fs::write(&path, "earlier").unwrap();
        write(&path, "token", 0o600).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "token");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn manifests_are_the_same_after_yaml() {
        let guest = guest_manifests::Guest {
            namespace: "guest-shop".into(),
            account: "shop".into(),
            cluster_object: "shop".into(),
            cluster_id: "1e5".into(),
            classes: vec!["gold".into(), "silver".into()],
            takes_unlabelled_vms: false,
            system_namespace: "nestor-system".into(),
        };
        for text in [guest.account_objects(), guest.admission_policies()] {
            let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
            for object in objects {
                let read: Value = serde_saphyr::from_str(&yaml(&object).unwrap()).unwrap();
                assert_eq!(read, object);
            }
        }
    }
}
