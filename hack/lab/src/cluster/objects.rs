//! Manifests and credentials: server-side apply and token requests.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use serde_json::Value;

use crate::wait::eventually;

/// How long the API server may take to accept an object.
const PATIENCE: Duration = Duration::from_secs(180);
/// Lifetime of the lab's tokens: longer than any lab runs.
const TOKEN_SECONDS: i64 = 30 * 24 * 3600;

/// Applies every document of a YAML text (server-side apply, so repeating it changes nothing).
pub async fn apply(client: &Client, what: &str, yaml: &str) -> Result<()> {
    apply_without(client, what, yaml, None).await
}

/// Applies every document of a YAML text, except those of this kind.
pub async fn apply_without(client: &Client, what: &str, yaml: &str, kind: Option<&str>) -> Result<()> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).with_context(|| format!("{what} is not valid YAML"))?;
    for document in documents.into_iter().filter(|document| kind.is_none_or(|kind| document["kind"] != kind))
    {
        apply_one(client, document).await.with_context(|| format!("cannot apply {what}"))?;
    }
    Ok(())
}

/// Deletes every document of a YAML text, except those of one kind and those that do not exist.
pub async fn delete_all(client: &Client, yaml: &str, kept: &str) -> Result<()> {
    for document in serde_saphyr::from_multiple::<Value>(yaml).context("not valid YAML")? {
        let object: DynamicObject = serde_json::from_value(document).context("not a Kubernetes object")?;
        if object.types.as_ref().is_some_and(|types| types.kind != kept) {
            delete_one(client, &object)
                .await
                .with_context(|| format!("cannot delete {}", object.name_any()))?;
        }
    }
    Ok(())
}

async fn delete_one(client: &Client, object: &DynamicObject) -> Result<()> {
    let api = api_of(client, &kind_of(object)?, object).await?;
    match api.delete(&object.name_any(), &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn kind_of(object: &DynamicObject) -> Result<GroupVersionKind> {
    Ok(GroupVersionKind::try_from(object.types.as_ref().context("no kind")?)?)
}

/// The API of an object's kind, in its namespace.
async fn api_of(
    client: &Client,
    kind: &GroupVersionKind,
    object: &DynamicObject,
) -> kube::Result<Api<DynamicObject>> {
    let (resource, _) = kube::discovery::pinned_kind(client, kind).await?;
    Ok(match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    })
}

/// Applies one object. Retries while the definition is not served yet or the API server does not respond.
pub async fn apply_one(client: &Client, document: Value) -> Result<DynamicObject> {
    let object: DynamicObject = serde_json::from_value(document).context("not a Kubernetes object")?;
    let types = object.types.clone().context("no kind")?;
    let kind = kind_of(&object)?;
    let name = object.name_any();
    let attempt = async || {
        let api = api_of(client, &kind, &object).await?;
        api.patch(&name, &PatchParams::apply("lab").force(), &Patch::Apply(&object)).await
    };
    eventually(&format!("{} {} {name} is applied", types.api_version, types.kind), PATIENCE, || async {
        match attempt().await {
            Ok(applied) => Ok(Ok(applied)),
            // Errors that a retry does not fix.
            Err(kube::Error::Api(status)) if matches!(status.code, 400..=403 | 422) => {
                Err(kube::Error::Api(status)).with_context(|| format!("{} {name}", types.kind))
            }
            Err(error) => Ok(Err(kube_kit::client::chain(&error))),
        }
    })
    .await
}

/// Applies every definition and waits until the API server serves it.
pub async fn apply_definitions(client: &Client, definitions: &[(String, String)]) -> Result<()> {
    for (file, yaml) in definitions {
        apply(client, file, yaml).await?;
    }
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    eventually("CustomResourceDefinitions established", PATIENCE, || async {
        let listed = api.list(&Default::default()).await?;
        let waiting: Vec<String> = listed
            .iter()
            .filter(|crd| {
                let conditions = crd.status.as_ref().and_then(|status| status.conditions.as_ref());
                !conditions
                    .is_some_and(|all| all.iter().any(|c| c.type_ == "Established" && c.status == "True"))
            })
            .map(ResourceExt::name_any)
            .collect();
        let enough = listed.items.len() >= definitions.len();
        Ok(if waiting.is_empty() && enough { Ok(()) } else { Err(format!("still waiting for {waiting:?}")) })
    })
    .await
}

/// Requests a bearer token of a ServiceAccount.
pub async fn token(client: &Client, namespace: &str, account: &str) -> Result<String> {
    let api: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..Default::default() }),
        ..Default::default()
    };
    let answer = api
        .create_token_request(account, &PostParams::default(), &request)
        .await
        .with_context(|| format!("no token for ServiceAccount {namespace}/{account}"))?;
    answer.status.and_then(|status| status.token).context("the TokenRequest returned no token")
}
