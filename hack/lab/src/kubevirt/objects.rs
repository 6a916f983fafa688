//! What KubeVirt's operator would install, from the program in `hack/tools/kubevirt`.

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use serde::Deserialize;
use serde_json::{Value, json};

use super::NAMESPACE;
use crate::cache::KubeVirt;
use crate::cluster::objects::{apply_definitions, apply_one};
use crate::kubeconfig;
use crate::pki::{Authority, write_private};
use crate::process::{command, run as run_helper};
use crate::run::Run;
use crate::state::Cluster;

/// Features that are off by default: plugging disks by the VirtualMachine's template, disks of the host, growth.
const FEATURES: [&str; 3] = ["DeclarativeHotplugVolumes", "HostDisk", "ExpandDisks"];

/// The output of the program.
#[derive(Deserialize)]
struct Generated {
    definitions: Vec<Value>,
    objects: Vec<Value>,
    hooks: Vec<Value>,
}

/// What the API server calls: webhooks, and virt-api for subresources.
pub(super) struct Hooks {
    objects: Vec<Value>,
    port: u16,
}

/// The authority of the components that listen on this host, and what they answer.
pub(super) struct Serving {
    pub(super) authority: Authority,
    hooks: Vec<Value>,
}

impl Serving {
    /// The hooks, at the port of virt-api.
    pub(super) fn at(&self, port: u16) -> Hooks {
        Hooks { objects: self.hooks.clone(), port }
    }
}

/// Applies everything but the hooks, and writes the certificates of the components.
pub(super) async fn apply_all(
    run: &Run,
    cluster: &Cluster,
    built: &KubeVirt,
    is_emulated: bool,
) -> Result<Serving> {
    let text =
        run_helper(&mut command(&built.programs.join("kubevirt").display().to_string(), [""; 0])).await?;
    let generated: Generated = serde_json::from_str(&text).context("bad output of hack/tools/kubevirt")?;
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    apply_one(&client, namespace).await?;
    let definitions: Vec<_> = generated.definitions.into_iter().map(definition).collect();
    apply_definitions(&client, &definitions).await?;
    for object in generated.objects {
        write_certificates(run, &object)?;
        apply_one(&client, object).await?;
    }
    apply_one(&client, configuration(is_emulated)).await?;
    report_deployed(&client).await?;
    Ok(Serving { authority: Authority::new("KubeVirt of the lab")?, hooks: generated.hooks })
}

/// The name and text of a definition. Checksums are larger than the 32 bits that KubeVirt declares, which newer API servers
/// check.
fn definition(mut definition: Value) -> (String, String) {
    if let Some(object) = definition.as_object_mut() {
        object.remove("status");
    }
    widen_checksums(&mut definition);
    let name = definition["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    (name, definition.to_string())
}

fn widen_checksums(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if name == "checksum" && field["format"] == "int32" {
                    field["format"] = json!("int64");
                }
                widen_checksums(field);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(widen_checksums),
        _ => {}
    }
}

fn write_certificates(run: &Run, object: &Value) -> Result<()> {
    if object["kind"] != "Secret" {
        return Ok(());
    }
    let folder = run.path("kubevirt").join(object["metadata"]["name"].as_str().unwrap_or_default());
    for (file, bytes) in object["data"].as_object().into_iter().flatten() {
        let ByteString(bytes) = serde_json::from_value(bytes.clone())?;
        write_private(&folder.join(file), &String::from_utf8(bytes)?)?;
    }
    Ok(())
}

fn configuration(is_emulated: bool) -> Value {
    let developer = json!({"useEmulation": is_emulated, "featureGates": FEATURES});
    let settings = json!({"imagePullPolicy": "IfNotPresent", "developerConfiguration": developer});
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
        "spec": {"imagePullPolicy": "IfNotPresent", "configuration": settings},
    })
}

/// As the operator does it: the components ignore a configuration that is not deployed.
async fn report_deployed(client: &kube::Client) -> Result<()> {
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("kubevirt.io", "v1", "KubeVirt"),
        "kubevirts",
    );
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &resource);
    let status = Patch::Merge(json!({"status": {"phase": "Deployed", "defaultArchitecture": "amd64"}}));
    api.patch_status("kubevirt", &PatchParams::default(), &status).await?;
    Ok(())
}

/// Applies webhooks, the Service and the API services.
pub(super) async fn apply_hooks(cluster: &Cluster, hooks: Hooks, serving: &Serving) -> Result<()> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    let ca = ByteString(serving.authority.cert().into_bytes());
    for object in hooks.objects {
        apply_one(&client, at_host(object, hooks.port, &ca)).await?;
    }
    Ok(())
}

/// The object of a virt-api that listens on this host. A Service of the type ExternalName is the only one with a loopback
/// address.
fn at_host(mut object: Value, port: u16, ca: &ByteString) -> Value {
    match object["kind"].as_str() {
        Some("Service") => {
            let ports = json!([{"port": port, "targetPort": port, "protocol": "TCP"}]);
            object["spec"] = json!({"type": "ExternalName", "externalName": "127.0.0.1", "ports": ports});
        }
        Some("APIService") => {
            object["spec"]["service"]["port"] = json!(port);
            object["spec"]["caBundle"] = json!(ca);
        }
        _ => {
            for webhook in object["webhooks"].as_array_mut().into_iter().flatten() {
                webhook["clientConfig"]["service"]["port"] = json!(port);
                webhook["clientConfig"]["caBundle"] = json!(ca);
            }
        }
    }
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_have_64_bits() {
        let number = |format: &str| json!({"type": "integer", "format": format});
        let made = definition(json!({
            "metadata": {"name": "a"}, "status": {},
            "spec": {"versions": [{"checksum": number("int32"), "size": number("int32")}]},
        }));
        let expected = json!({
            "metadata": {"name": "a"},
            "spec": {"versions": [{"checksum": number("int64"), "size": number("int32")}]},
        });
        assert_eq!((made.0.as_str(), made.1), ("a", expected.to_string()));
    }

    #[test]
    fn hooks_are_called_at_the_port_of_virt_api() {
        let ca = ByteString(b"x".to_vec());
        let webhook = json!({"kind": "ValidatingWebhookConfiguration", "webhooks": [{"clientConfig": {"service": {"name": "virt-api"}}}]});
        let client = &at_host(webhook, 7, &ca)["webhooks"][0]["clientConfig"];
        assert_eq!(*client, json!({"service": {"name": "virt-api", "port": 7}, "caBundle": "eA=="}));
        let service = at_host(json!({"kind": "Service", "spec": {"clusterIP": "1.2.3.4"}}), 7, &ca);
        assert_eq!(service["spec"]["externalName"], "127.0.0.1");
        assert_eq!(service["spec"]["clusterIP"], Value::Null);
    }
}
