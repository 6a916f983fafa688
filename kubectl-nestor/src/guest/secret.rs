//! The token of a guest's account: in the management cluster, and as the Secret that the guest needs.

use crds::names::credential_secret;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::ObjectMeta;
use kube_kit::token::{KEY, of_secret};

use super::MANAGEMENT;
use crate::clusters::Cluster;
use crate::error::Error;

/// Key of the CA certificate in the guest's Secret, and in the ConfigMap.
const CA: &str = "ca.crt";
/// The ConfigMap with the CA certificate of the API server, in every namespace.
const ROOT_CA: &str = "kube-root-ca.crt";

/// Where the guest has its Secret.
pub(super) struct Place<'a> {
    pub(super) name: &'a str,
    pub(super) namespace: &'a str,
}

/// CA certificate of the API server, as a namespace of the management cluster has it.
pub(super) async fn ca(cluster: &Cluster, namespace: &str) -> Result<String, Error> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let what = format!("ConfigMap {namespace}/{ROOT_CA}");
    let map = maps.get(ROOT_CA).await.map_err(|error| Error::request(MANAGEMENT, &*what, &error))?;
    let ca = map.data.and_then(|mut data| data.remove(CA));
    ca.ok_or_else(|| Error::NoSubject(what, format!(" with the key {CA}")))
}

/// The token that mgmt-csi has written for an account; None if there is none.
pub(super) async fn token(
    cluster: &Cluster,
    namespace: &str,
    account: &str,
) -> Result<Option<String>, Error> {
    let name = credential_secret(account);
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), namespace);
    let secret = secrets.get_opt(&name).await;
    let secret =
        secret.map_err(|error| Error::request(MANAGEMENT, format!("Secret {namespace}/{name}"), &error))?;
    Ok(secret.and_then(|secret| of_secret(&secret, KEY)).filter(|token| !token.is_empty()))
}

/// The Secret of the guest.
pub(super) fn of_guest(place: &Place<'_>, token: &str, ca: &str) -> Secret {
    let data = [(KEY, token), (CA, ca)];
    Secret {
        metadata: ObjectMeta {
            name: Some(place.name.to_owned()),
            namespace: Some(place.namespace.to_owned()),
            ..Default::default()
        },
        type_: Some("Opaque".to_owned()),
        data: Some(data.map(|(key, text)| (key.to_owned(), ByteString(text.as_bytes().to_vec()))).into()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_guests_secret_is_one_that_kubectl_applies() {
        let place = Place { name: "management", namespace: "nestor-system" };
        let text = serde_saphyr::to_string(&of_guest(&place, "the-token", "the-ca")).unwrap();
        let object: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!((&object["kind"], &object["apiVersion"]), (&json!("Secret"), &json!("v1")));
        assert_eq!(object["metadata"], json!({"name": "management", "namespace": "nestor-system"}));
        assert_eq!(object["data"]["token"], json!(ByteString(b"the-token".to_vec())));
    }
}
