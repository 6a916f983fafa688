//! The core controllers of Cluster API, with their definitions and webhooks.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::Built;
use crate::cluster::argv;
use crate::cluster::objects::{apply, apply_definitions, apply_one};
use crate::kubeconfig;
use crate::pki::Authority;
use crate::ports;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;

/// The component.
const COMPONENT: &str = "cluster-api";
/// File with the webhooks beside the definitions.
const WEBHOOKS: &str = "manifests.yaml";
const PROVIDER: &str = include_str!("../../manifests/cluster-api-provider.yaml");
const RIGHTS: &str = include_str!("../../../../charts/nestor-management/files/cluster-api.yaml");

/// Where the API server reaches the webhooks.
struct Webhooks {
    port: u16,
    /// The certificate of their authority.
    ca: ByteString,
}

/// Applies definitions and webhooks, and starts the controllers.
pub(super) async fn start(run: &Run, built: &Built) -> Result<()> {
    let free = ports::free(3)?;
    let dir = run.path("cluster-api");
    let authority = Authority::new("Cluster API webhooks")?;
    authority.server("webhooks", &["127.0.0.1"])?.write(&dir, "tls")?;
    let webhooks = Webhooks { port: free[0], ca: ByteString(authority.cert().into_bytes()) };
    let management = run.state()?.management.context("no management cluster")?;
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let mut definitions = vec![("manifests/cluster-api-provider.yaml".to_owned(), PROVIDER.to_owned())];
    definitions.extend(webhooks.definitions(&built.manifests)?);
    apply_definitions(&client, &definitions).await?;
    let rights = RIGHTS.replace("${NAMESPACE}", crate::cluster::MANAGEMENT_NAMESPACE);
    apply(&client, "nestor-management/files/cluster-api.yaml", &rights).await?;
    let flags = [
        ("kubeconfig", management.kubeconfig.display().to_string()),
        ("webhook-port", webhooks.port.to_string()),
        ("webhook-cert-dir", dir.display().to_string()),
        ("health-addr", format!("127.0.0.1:{}", free[1])),
        ("diagnostics-address", format!("127.0.0.1:{}", free[2])),
        ("insecure-diagnostics", "true".to_owned()),
        // Of a node that does not respond: 50 s by default.
        ("remote-connection-grace-period", "20s".to_owned()),
    ];
    let component = Component {
        argv: argv(&built.controllers, "core", &flags),
        env: [("POD_NAMESPACE".to_owned(), "capi-system".to_owned())].into(),
        ready: Ready::http(free[1], "/readyz"),
        http: Some(format!("http://127.0.0.1:{}", free[2])),
        grace: 5,
        driver: None,
    };
    run.launch(COMPONENT, component).await?;
    for object in webhooks.configurations(&built.manifests)? {
        apply_one(&client, object).await?;
    }
    Ok(())
}

impl Webhooks {
    fn client_config(&self, path: &str) -> Value {
        json!({"url": format!("https://127.0.0.1:{}{path}", self.port), "caBundle": self.ca})
    }

    /// The definitions in a folder, which convert between versions with the webhook.
    fn definitions(&self, folder: &Path) -> Result<Vec<(String, String)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != WEBHOOKS {
                let mut definition: Value = serde_saphyr::from_str(&read(folder, &name)?)?;
                let webhook = json!({"conversionReviewVersions": ["v1"], "clientConfig": self.client_config("/convert")});
                definition["spec"]["conversion"] = json!({"strategy": "Webhook", "webhook": webhook});
                all.push((name, definition.to_string()));
            }
        }
        Ok(all)
    }

    /// The configurations of the admission webhooks, with an address instead of a Service.
    fn configurations(&self, folder: &Path) -> Result<Vec<Value>> {
        let mut all: Vec<Value> = serde_saphyr::from_multiple(&read(folder, WEBHOOKS)?)?;
        for configuration in &mut all {
            let name =
                format!("cluster-api-{}", configuration["kind"].as_str().unwrap_or_default().to_lowercase());
            configuration["metadata"]["name"] = json!(name);
            for webhook in configuration["webhooks"].as_array_mut().context("no webhooks")? {
                let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap_or_default().to_owned();
                webhook["clientConfig"] = self.client_config(&path);
            }
        }
        Ok(all)
    }
}

fn read(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}
