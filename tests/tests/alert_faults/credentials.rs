//! Faults of credentials: nobody renews them.

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Api, PostParams};
use tests::infra_pki::InfraPki;

use super::faults::Watch;
use crate::alerts::site::Site;

/// The replica of gc-csi that gets the short token.
const REPLICA: &str = "g1-gc-csi";
/// The shortest lifetime that an API server accepts.
const SHORT: i64 = 600;

/// The certificates of both sides of the connection to storage-infra expire within a day.
pub(super) async fn certificates_expire(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let pki = InfraPki::of(&site.s)?;
    pki.begin_rotation().await?;
    pki.renew_all("1d").await?;
    let fired = alerts.fire().await;
    pki.renew_all("30d").await?;
    pki.run(&["rotate-ca", "--finish"]).await?;
    fired
}

/// A replica of gc-csi has a token that expires within minutes.
pub(super) async fn token_expires(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let account = s.lab.state().guests.get("g1").context("no guest")?.account();
    let file = site.links.kubeconfig(&account);
    let kept = std::fs::read_to_string(&file)?;
    let accounts: Api<ServiceAccount> = Api::namespaced(s.management.clone(), &s.namespace);
    let spec = TokenRequestSpec { expiration_seconds: Some(SHORT), ..Default::default() };
    let request = TokenRequest { spec: Some(spec), ..Default::default() };
    let answer = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
    let token = answer.status.and_then(|status| status.token).context("no token")?;
    let mut config: serde_json::Value = serde_json::from_str(&kept)?;
    config["users"][0]["user"]["token"] = token.into();
    std::fs::write(&file, config.to_string())?;
    s.lab.restart(REPLICA).await?;
    let fired = alerts.fire().await;
    std::fs::write(&file, kept)?;
    s.lab.restart(REPLICA).await?;
    fired
}
