//! `kubectl nestor guest rotate`: the Secret that the tokens are bound to is deleted, which revokes them, and created again.
//!
//! A token gives access to its Secret, and so to every token that is renewed there. The new token is therefore written only when
//! no API server accepts an earlier one any more.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use crds::names::{LABEL_GUEST_ACCOUNT, credential_secret};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt};
use kube_kit::token;
use process_kit::duration;
use serde_json::json;
use tokio::time::Instant;

use super::MANAGEMENT;
use super::secret::{self, Place};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::render;

/// Longest time for which an API server accepts a token from its cache after its revocation: 10 s, and a margin.
/// <https://github.com/kubernetes/kubernetes/blob/v1.34.0/pkg/kubeapiserver/options/authentication.go>
const CACHED: Duration = Duration::from_secs(12);
/// Time limit for the refusal of the earlier token.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two questions whether it is refused.
const REVIEW_INTERVAL: Duration = Duration::from_secs(1);
/// Type of Secrets with tokens that do not expire, and the annotation that names their account.
const LASTING: &str = "kubernetes.io/service-account-token";
const ACCOUNT: &str = "kubernetes.io/service-account.name";
/// Annotations with which Helm recognizes its objects.
const HELM: &str = "meta.helm.sh/";

/// Flags of `guest rotate`.
#[derive(Debug, Clone, Args)]
pub struct RotateArgs {
    /// The guest: name of its ServiceAccount, guests[].name in the values of nestor-management.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Secret with the token in the guest: management.token.secret in the values of nestor-guest.
    #[arg(long, value_name = "NAME", default_value = "management")]
    pub secret: String,
    /// Namespace of that Secret.
    #[arg(long, value_name = "NAMESPACE", default_value = "nestor-system")]
    pub secret_namespace: String,
    /// Lifetime of the first new token, at least 10m. mgmt-csi renews it with its own flags.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration::parse)]
    pub lifetime: Duration,
    /// Audience of the first new token. Repeatable. [default: the audience of the API server]
    #[arg(long = "audience", value_name = "AUDIENCE")]
    pub audiences: Vec<String>,
    /// Print the guest's Secret instead of writing it. No access to the guest is needed.
    #[arg(long)]
    pub print_secret: bool,
}

/// Rotates the credential of a guest.
pub async fn run(clusters: &Clusters, args: &RotateArgs) -> Result<(), Error> {
    let management = clusters.management_for("guest rotate")?;
    // Before the revocation: without the guest there is nowhere to write the new token.
    let guest = if args.print_secret { None } else { Some(clusters.guest_for("guest rotate")?) };
    let account = Account::read(management, &args.name).await?;
    let ca = secret::ca(management, &management.namespace).await?;
    account.revoke().await?;
    let token = account.issue(args).await?;
    let place = Place { name: &args.secret, namespace: &args.secret_namespace };
    let secret = secret::of_guest(&place, &token, &ca);
    for name in account.secrets_with_lasting_tokens().await? {
        eprintln!(
            "kubectl-nestor: Secret {}/{name} still has a token of {} that does not expire and is not revoked: delete the Secret, \
             or set createToken: false for this guest in the values of nestor-management",
            management.namespace, args.name
        );
    }
    match guest {
        Some(guest) => write(guest, args, &secret).await?,
        None => return render::print(&yaml(&secret)?),
    }
    render::print(&format!(
        "The earlier tokens of {} that mgmt-csi renewed are revoked. The new one is in Secret {}/{} of the guest; kubelet updates \
         it in gc-csi's pods, by default within two minutes.\n",
        args.name, args.secret_namespace, args.secret
    ))
}

/// The account of a guest in the management cluster.
struct Account<'a> {
    cluster: &'a Cluster,
    object: ServiceAccount,
}

impl<'a> Account<'a> {
    async fn read(cluster: &'a Cluster, name: &str) -> Result<Self, Error> {
        let accounts: Api<ServiceAccount> = cluster.namespaced();
        let what = format!("ServiceAccount {}/{name}", cluster.namespace);
        let found =
            accounts.get_opt(name).await.map_err(|error| Error::request(MANAGEMENT, &*what, &error))?;
        let object = found.ok_or_else(|| {
            let hint = "; --management-namespace is the guest's namespace, and NAME its account".to_owned();
            Error::NoSubject(what, hint)
        })?;
        Ok(Self { cluster, object })
    }

    fn secrets(&self) -> Api<Secret> {
        self.cluster.namespaced()
    }

    fn secret_name(&self) -> String {
        credential_secret(&self.object.name_any())
    }

    fn failed<'e>(&self, verb: &'e str) -> impl FnOnce(kube::Error) -> Error + 'e {
        let what = format!("Secret {}/{}", self.cluster.namespace, self.secret_name());
        move |error| Error::change(verb, what, &error)
    }

    /// Deletes the Secret, and waits until tokens that are bound to it are refused.
    async fn revoke(&self) -> Result<(), Error> {
        let name = self.secret_name();
        let found = self.secrets().get_opt(&name).await.map_err(self.failed("read"))?;
        let Some(secret) = found else { return Ok(()) };
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: secret.uid(), resource_version: None }),
            ..Default::default()
        };
        self.secrets().delete(&name, &params).await.map_err(self.failed("delete"))?;
        let deleted = Instant::now();
        if let Some(token) = token::of_secret(&secret, token::KEY) {
            self.is_refused(&token, deleted + REFUSAL_TIMEOUT).await?;
        }
        // Another API server of the cluster may have it in its cache, and the thief's token may be another one.
        tokio::time::sleep_until(deleted + CACHED).await;
        Ok(())
    }

    async fn is_refused(&self, token: &str, deadline: Instant) -> Result<(), Error> {
        while is_accepted(&self.cluster.client, token).await? {
            if Instant::now() > deadline {
                return Err(Error::StillAccepted(self.object.name_any()));
            }
            tokio::time::sleep(REVIEW_INTERVAL).await;
        }
        Ok(())
    }

    /// Secrets with tokens of this account that do not expire.
    async fn secrets_with_lasting_tokens(&self) -> Result<Vec<String>, Error> {
        let what = format!("the Secrets in {}", self.cluster.namespace);
        let params = ListParams::default().fields(&format!("type={LASTING}"));
        let list = self.secrets().list_metadata(&params).await;
        let list = list.map_err(|error| Error::request(MANAGEMENT, &*what, &error))?;
        let account = self.object.name_any();
        let is_own = |annotations: &BTreeMap<String, String>| annotations.get(ACCOUNT) == Some(&account);
        Ok(list.iter().filter(|secret| is_own(secret.annotations())).map(ResourceExt::name_any).collect())
    }

    /// Creates the Secret with a new token, which is bound to it.
    async fn issue(&self, args: &RotateArgs) -> Result<String, Error> {
        let name = self.secret_name();
        let secret =
            Secret { metadata: self.metadata(), type_: Some("Opaque".to_owned()), ..Default::default() };
        let secret = self.secrets().create(&PostParams::default(), &secret).await;
        let secret = secret.map_err(self.failed("create"))?;
        let token = self.token(args, &name, secret.uid()).await?;
        let patch = json!({"metadata": {"uid": secret.uid()}, "data": {token::KEY: ByteString(token.clone().into_bytes())}});
        let patched =
            self.secrets().patch_metadata(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        patched.map_err(self.failed("write"))?;
        Ok(token)
    }

    /// Metadata of the Secret: Helm recognizes it like the account, which is of the same release.
    fn metadata(&self) -> ObjectMeta {
        let own = &self.object;
        let kept = |map: &BTreeMap<String, String>, keep: &dyn Fn(&str) -> bool| {
            Some(map.iter().filter(|(key, _)| keep(key)).map(|(k, v)| (k.clone(), v.clone())).collect())
        };
        ObjectMeta {
            name: Some(self.secret_name()),
            labels: kept(own.labels(), &|key| key != LABEL_GUEST_ACCOUNT),
            annotations: kept(own.annotations(), &|key| key.starts_with(HELM)),
            ..Default::default()
        }
    }

    async fn token(&self, args: &RotateArgs, secret: &str, uid: Option<String>) -> Result<String, Error> {
        let account = self.object.name_any();
        let request = token::bound_request(secret, uid, &args.audiences, args.lifetime);
        let accounts: Api<ServiceAccount> = self.cluster.namespaced();
        let what = format!("a token of ServiceAccount {}/{account}", self.cluster.namespace);
        let answer = accounts.create_token_request(&account, &PostParams::default(), &request).await;
        let answer = answer.map_err(|error| Error::change("create", &*what, &error))?;
        let token = answer.status.and_then(|status| status.token);
        token.ok_or_else(|| Error::NoSubject(what, String::new()))
    }
}

/// Whether the API server accepts a token.
async fn is_accepted(client: &Client, token: &str) -> Result<bool, Error> {
    let reviews: Api<TokenReview> = Api::all(client.clone());
    let review = TokenReview {
        spec: TokenReviewSpec { token: token.to_owned(), ..Default::default() },
        ..Default::default()
    };
    let reviewed = reviews.create(&PostParams::default(), &review).await;
    let reviewed = reviewed.map_err(|error| Error::change("create", "a TokenReview", &error))?;
    Ok(reviewed.status.and_then(|status| status.authenticated).unwrap_or_default())
}

/// Writes the Secret of the guest; other keys in it stay.
async fn write(guest: &Cluster, args: &RotateArgs, secret: &Secret) -> Result<(), Error> {
    let secrets: Api<Secret> = Api::namespaced(guest.client.clone(), &args.secret_namespace);
    let failed = |error: kube::Error| {
        let what = format!("Secret {}/{} of the guest", args.secret_namespace, args.secret);
        let hint = "run the command again when the guest is reachable, or with --print-secret";
        Error::change("write", format!("{what} ({hint})"), &error)
    };
    let patch = json!({"data": secret.data});
    let patched = secrets.patch_metadata(&args.secret, &PatchParams::default(), &Patch::Merge(&patch)).await;
    match patched {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            secrets.create(&PostParams::default(), secret).await.map(drop).map_err(failed)
        }
        patched => patched.map(drop).map_err(failed),
    }
}

fn yaml(secret: &Secret) -> Result<String, Error> {
    serde_saphyr::to_string(secret).map_err(|error| Error::Encode(error.to_string()))
}
