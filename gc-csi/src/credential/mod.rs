//! The token for the management cluster: mgmt-csi renews it in a Secret there, and gc-csi copies it to the guest's Secret, from
//! which kubelet updates the file that the client reads.
//!
//! Each replica does this. They write the same token, or the later one.

mod decide;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, Patch, PatchParams};
use kube::config::AuthInfo;
use kube::{Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::health::{Check, Health};
use kube_kit::token::{self, Claims};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use decide::{State, replaces, state};

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(15);

type NoLabels = [(&'static str, &'static str); 0];

/// Flags of the token.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CredentialArgs {
    /// Secret of the guest from which the token in the management kubeconfig's file comes. gc-csi stores renewed tokens there.
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = object)]
    management_token_secret: Option<ObjectName>,
    /// Key of the token in that Secret.
    #[arg(long, value_name = "KEY", default_value = token::KEY)]
    management_token_key: String,
}

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ObjectName {
    namespace: String,
    name: String,
}

fn object(text: &str) -> Result<ObjectName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ObjectName { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        _ => Err("must be NAMESPACE/NAME".to_owned()),
    }
}

/// Why a token was not renewed.
#[derive(Debug, thiserror::Error)]
enum RenewError {
    #[error("the management cluster refuses the token of this guest: it was revoked. {HEAL}")]
    Revoked,
    #[error("cannot read Secret {0} in the management cluster: {reason}", reason = chain(.1))]
    Renewed(String, kube::Error),
    #[error("cannot read Secret {0} in the guest: {reason}", reason = chain(.1))]
    Stored(String, kube::Error),
    #[error("cannot write the renewed token to Secret {0} in the guest: {reason}", reason = chain(.1))]
    Store(String, kube::Error),
}

/// What heals a token that is not valid any more.
const HEAL: &str =
    "If no new one arrives within minutes, the platform team issues one with `kubectl nestor guest rotate`";

/// Follows the token for the management cluster.
pub(crate) struct Credential {
    args: CredentialArgs,
    credentials: AuthInfo,
    guest: Client,
    management: Client,
    expiry: Family<NoLabels, Gauge>,
    check: Check,
}

/// The metric.
#[derive(Clone)]
pub(crate) struct Expiry(Family<NoLabels, Gauge>);

impl Expiry {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let expiry = Family::default();
        let help = "Unix time at which the token for the management cluster expires";
        let name = "management_credential_expiry_timestamp";
        registry.register_with_unit(name, help, Unit::Seconds, expiry.clone());
        Self(expiry)
    }
}

impl Credential {
    pub(crate) fn new(
        args: CredentialArgs,
        credentials: AuthInfo,
        (guest, management): (Client, Client),
        Expiry(expiry): Expiry,
        ready: &Health,
    ) -> Self {
        let check = ready.check("management credential", "not checked yet");
        Self { args, credentials, guest, management, expiry, check }
    }

    /// Follows the token until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut last = None;
        loop {
            let failure = self.pass().await;
            match &failure {
                Some(text) if last.as_ref() != Some(text) => tracing::warn!("{text}"),
                None if last.is_some() => tracing::info!("the token for the management cluster is valid"),
                _ => {}
            }
            last = failure;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Checks and renews the token once; returns what is wrong.
    async fn pass(&self) -> Option<String> {
        let token = token::of_credentials(&self.credentials);
        let claims = token.as_deref().and_then(Claims::of);
        let state = state(claims.as_ref(), Timestamp::now().as_second());
        if let State::Valid(time) | State::Expired(time) = state {
            self.expiry.get_or_create(&[]).set(time);
        }
        if let State::Expired(time) = state {
            let since = Timestamp::from_second(time).map(|time| time.to_string()).unwrap_or_default();
            return self.failed(format!("the token for the management cluster expired at {since}. {HEAL}"));
        }
        match self.renew(claims.as_ref()).await {
            Err(error @ RenewError::Revoked) => self.failed(error.to_string()),
            // The token is still valid.
            Err(error) => {
                self.check.pass();
                Some(format!("the token for the management cluster is not renewed: {error}"))
            }
            Ok(()) => {
                self.check.pass();
                None
            }
        }
    }

    fn failed(&self, text: String) -> Option<String> {
        self.check.fail(text.clone());
        Some(text)
    }

    /// Copies a renewed token to the guest's Secret. Nothing to do for a token that is not bound to a Secret.
    async fn renew(&self, token: Option<&Claims>) -> Result<(), RenewError> {
        let (Some(bound), Some(object)) =
            (token.and_then(|claims| claims.secret.as_ref()), &self.args.management_token_secret)
        else {
            return Ok(());
        };
        let stored_in: Api<Secret> = Api::namespaced(self.guest.clone(), &object.namespace);
        let shown = format!("{}/{}", object.namespace, object.name);
        // Read before the renewed one: if a rotation replaces it meanwhile, its resourceVersion differs, and nothing is written.
        let stored = stored_in.get(&object.name).await;
        let stored = stored.map_err(|error| RenewError::Stored(shown.clone(), error))?;
        let renewed_in: Api<Secret> = Api::namespaced(self.management.clone(), &bound.namespace);
        let renewed = match renewed_in.get(&bound.name).await {
            Ok(secret) => secret,
            Err(kube::Error::Api(status)) if status.code == 401 => return Err(RenewError::Revoked),
            Err(error) => {
                return Err(RenewError::Renewed(format!("{}/{}", bound.namespace, bound.name), error));
            }
        };
        let key = &self.args.management_token_key;
        let Some(renewed) = token::of_secret(&renewed, token::KEY) else { return Ok(()) };
        let claims =
            (Claims::of(&renewed), token::of_secret(&stored, key).and_then(|stored| Claims::of(&stored)));
        let (Some(new), Some(old)) = claims else { return Ok(()) };
        if !replaces(&new, &old) {
            return Ok(());
        }
        let patch = json!({
            "metadata": {"resourceVersion": stored.resource_version()},
            "data": {key: ByteString(renewed.into_bytes())},
        });
        match stored_in.patch_metadata(&object.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => tracing::info!(secret = shown, "stored the renewed token for the management cluster"),
            // Another replica, or a rotation, was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(RenewError::Store(shown, error)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_named_with_its_namespace() {
        let name = ObjectName { namespace: "nestor-system".into(), name: "management".into() };
        assert_eq!(object("nestor-system/management"), Ok(name));
        for bad in ["management", "/management", "a/", "a/b/c"] {
            assert!(object(bad).is_err(), "{bad}");
        }
    }
}
