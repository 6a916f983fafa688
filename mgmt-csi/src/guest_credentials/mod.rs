//! Tokens of guests: short-lived, bound to a Secret, and renewed here, because a guest has no right to create tokens.
//!
//! A guest's ServiceAccount has a label with the namespace of its mgmt-csi. The Secret beside it has a name derived from the
//! account's. Whoever deletes the Secret revokes its tokens; it is never created here.

mod decide;

use std::collections::HashMap;
use std::time::Duration;

use crds::names::{LABEL_GUEST_ACCOUNT, credential_secret};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::token::{self, Claims};
use process_kit::duration;
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Interval between two checks of all tokens.
const INTERVAL: Duration = Duration::from_secs(15);

/// Flags of the guests' tokens.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GuestCredentialArgs {
    /// Renew the tokens of guests whose ServiceAccounts have the label nestor.dev/guest-account=NAMESPACE: the namespace of
    /// mgmt-csi. Without it, none are renewed.
    #[arg(long, value_name = "NAMESPACE")]
    guest_accounts: Option<String>,
    /// Lifetime of the guests' tokens, at least 10m. They are renewed after half of it.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = lifetime)]
    guest_token_lifetime: Duration,
    /// Audience of the guests' tokens. Repeatable. [default: the audience of the API server]
    #[arg(long = "guest-token-audience", value_name = "AUDIENCE")]
    guest_token_audiences: Vec<String>,
}

/// Parses a lifetime that an API server accepts.
fn lifetime(text: &str) -> Result<Duration, String> {
    let lifetime = duration::parse(text)?;
    if lifetime < Duration::from_secs(600) { Err("must be at least 10m".to_owned()) } else { Ok(lifetime) }
}

/// Failure to renew one guest's token.
#[derive(Debug, thiserror::Error)]
enum RenewError {
    #[error("cannot read Secret {0}: {reason}; it is part of the chart nestor-management", reason = chain(.1))]
    Read(String, kube::Error),
    #[error("cannot create a token of ServiceAccount {0}: {reason}", reason = chain(.1))]
    Token(String, kube::Error),
    #[error("the API server created no token of ServiceAccount {0}")]
    NoToken(String),
    #[error("cannot write the token to Secret {0}: {reason}", reason = chain(.1))]
    Write(String, kube::Error),
}

/// Renews the tokens of the guests.
pub(crate) struct GuestCredentials {
    client: Client,
    args: GuestCredentialArgs,
}

impl GuestCredentials {
    pub(crate) fn new(client: &Client, args: GuestCredentialArgs) -> Self {
        Self { client: client.clone(), args }
    }

    /// Renews tokens until `stop`. One replica does this: the leader.
    pub(crate) async fn run(&self, stop: CancellationToken) {
        let Some(namespace) = &self.args.guest_accounts else { return };
        let mut failures = HashMap::new();
        loop {
            self.renew_all(namespace, &mut failures).await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Renews the tokens that are due. The same failure of an account is logged once.
    async fn renew_all(&self, namespace: &str, failures: &mut HashMap<String, String>) {
        let accounts: Api<ServiceAccount> = Api::all(self.client.clone());
        let labelled = ListParams::default().labels(&format!("{LABEL_GUEST_ACCOUNT}={namespace}"));
        let accounts = match accounts.list(&labelled).await {
            Ok(accounts) => accounts,
            Err(error) => return tracing::warn!("cannot list the accounts of guests: {}", chain(&error)),
        };
        let mut still_failing = HashMap::new();
        for account in accounts {
            let (namespace, name) = (account.namespace().unwrap_or_default(), account.name_any());
            if let Err(error) = self.renew_if_due(&namespace, &name).await {
                let (key, text) = (format!("{namespace}/{name}"), error.to_string());
                if failures.get(&key) != Some(&text) {
                    tracing::warn!(account = key, "the guest's token is not renewed: {text}");
                }
                still_failing.insert(key, text);
            }
        }
        *failures = still_failing;
    }

    async fn renew_if_due(&self, namespace: &str, account: &str) -> Result<(), RenewError> {
        let name = credential_secret(account);
        let shown = format!("{namespace}/{name}");
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        // None while it is being replaced.
        let secret = secrets.get_opt(&name).await.map_err(|error| RenewError::Read(shown.clone(), error))?;
        let Some(secret) = secret else { return Ok(()) };
        let uid = secret.uid().unwrap_or_default();
        let claims = token::of_secret(&secret, token::KEY).and_then(|token| Claims::of(&token));
        if !decide::is_due(claims.as_ref(), &uid, Timestamp::now().as_second()) {
            return Ok(());
        }
        let token = self.token(namespace, account, &name, &uid).await?;
        // With its UID: a token of this Secret is worth nothing in another one with its name.
        let patch = json!({"metadata": {"uid": uid}, "data": {token::KEY: ByteString(token.into_bytes())}});
        let patched = secrets.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        patched.map_err(|error| RenewError::Write(shown.clone(), error))?;
        tracing::info!(account, namespace, secret = name, "renewed the guest's token");
        Ok(())
    }

    /// Requests a token that is bound to a Secret.
    async fn token(
        &self,
        namespace: &str,
        account: &str,
        secret: &str,
        uid: &str,
    ) -> Result<String, RenewError> {
        let shown = format!("{namespace}/{account}");
        let (audiences, lifetime) = (&self.args.guest_token_audiences, self.args.guest_token_lifetime);
        let request = token::bound_request(secret, Some(uid.to_owned()), audiences, lifetime);
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let answer = answer.map_err(|error| RenewError::Token(shown.clone(), error))?;
        answer.status.and_then(|status| status.token).ok_or(RenewError::NoToken(shown))
    }
}
