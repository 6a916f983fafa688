//! Bearer tokens: claims of a ServiceAccount's JSON Web Token (RFC 7519), without verification; tokens in Secrets, and requests
//! for tokens that are bound to a Secret.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::Secret;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use serde_json::{Value, json};

/// Key of the token in the Secret that it is bound to.
pub const KEY: &str = "token";

/// Claims of a token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims {
    /// Unix time at which it was issued.
    pub issued: Option<i64>,
    /// Unix time at which it expires.
    pub expires: Option<i64>,
    /// The ServiceAccount.
    pub account: Option<String>,
    /// The Secret that it is bound to: it is invalid when that is deleted.
    pub secret: Option<BoundSecret>,
}

/// A Secret that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundSecret {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl Claims {
    /// Reads a token; `None` if it is not a JSON Web Token.
    pub fn of(token: &str) -> Option<Self> {
        let payload = token.trim().split('.').nth(1)?.replace('-', "+").replace('_', "/");
        let padded = format!("{payload}{}", "=".repeat((4 - payload.len() % 4) % 4));
        let ByteString(bytes) = serde_json::from_value(json!(padded)).ok()?;
        let claims: Value = serde_json::from_slice(&bytes).ok()?;
        let bound = &claims["kubernetes.io"];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Some(Self {
            issued: claims["iat"].as_i64(),
            expires: claims["exp"].as_i64(),
            account: text(&bound["serviceaccount"]["name"]),
            secret: (|| {
                Some(BoundSecret {
                    namespace: text(&bound["namespace"])?,
                    name: text(&bound["secret"]["name"])?,
                    uid: text(&bound["secret"]["uid"])?,
                })
            })(),
        })
    }
}

/// The token in credentials: inline, or what its file contains now.
pub fn of_credentials(credentials: &AuthInfo) -> Option<String> {
    // Serialized, the token is plain text; it stays in the result.
    let credentials = serde_json::to_value(credentials).ok()?;
    let text = |key: &str| credentials[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let file = || std::fs::read_to_string(text("tokenFile").or_else(|| text("token-file"))?).ok();
    Some(text("token").or_else(file)?.trim().to_owned())
}

/// The text of a key of a Secret.
pub fn of_secret(secret: &Secret, key: &str) -> Option<String> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.clone()).ok()
}

/// The request for a token that is bound to the Secret with this name and UID. Without audiences, it is for the API server.
pub fn bound_request(
    secret: &str,
    uid: Option<String>,
    audiences: &[String],
    lifetime: Duration,
) -> TokenRequest {
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Secret".to_owned()),
        name: Some(secret.to_owned()),
        uid,
    };
    let spec = TokenRequestSpec {
        audiences: (!audiences.is_empty()).then(|| audiences.to_vec()),
        bound_object_ref: Some(bound),
        expiration_seconds: i64::try_from(lifetime.as_secs()).ok(),
    };
    TokenRequest { spec: Some(spec), ..TokenRequest::default() }
}

/// The credentials in a kubeconfig.
pub async fn credentials(kubeconfig: &Path) -> Result<AuthInfo, KubeconfigError> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(config.auth_info)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsigned(claims: &Value) -> String {
        let encoded = serde_json::to_value(ByteString(claims.to_string().into_bytes())).unwrap();
        let payload = encoded.as_str().unwrap().replace('+', "-").replace('/', "_");
        format!("h.{}.s", payload.trim_end_matches('='))
    }

    #[test]
    fn the_claims_of_a_bound_token_are_read() {
        let token = unsigned(&json!({
            "iat": 1_700_000_000, "exp": 1_800_000_000,
            "kubernetes.io": {
                "namespace": "tenant-one", "serviceaccount": {"name": "gc-csi-one"},
                "secret": {"name": "gc-csi-one-credential", "uid": "u"},
            },
        }));
        let claims = Claims::of(&format!("{token}\n")).unwrap();
        assert_eq!((claims.issued, claims.expires), (Some(1_700_000_000), Some(1_800_000_000)));
        assert_eq!(claims.account.as_deref(), Some("gc-csi-one"));
        let secret = claims.secret.unwrap();
        let (namespace, name, uid) = ("tenant-one".into(), "gc-csi-one-credential".into(), "u".into());
        assert_eq!(secret, BoundSecret { namespace, name, uid });
    }

    #[test]
    fn a_token_without_these_claims_has_none_and_an_opaque_one_is_none() {
        // {"exp":1800000000}, without padding.
        let claims = Claims::of("h.eyJleHAiOjE4MDAwMDAwMDB9.s").unwrap();
        assert_eq!((claims.issued, claims.expires, claims.secret), (None, Some(1_800_000_000), None));
        assert_eq!(Claims::of("opaque"), None);
    }
}
