//! Expiry of the client certificate and the token in a kubeconfig.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use kube_kit::token::{self, Claims};
use process_kit::duration;
use serde_json::{Value, json};

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};

/// Remaining lifetime below which a certificate is reported.
const SOON: SignedDuration = SignedDuration::from_hours(14 * 24);

/// Checks the credentials of a cluster's kubeconfig.
pub fn check(cluster: &Cluster) -> Vec<Finding> {
    // Serialized, the secrets are plain text; they stay in this function.
    let credentials = serde_json::to_value(&cluster.credentials).unwrap_or_default();
    let found = [
        certificate(&credentials).map(|pem| ("client certificate", certificate_expiry(&pem))),
        token::of_credentials(&cluster.credentials).map(|token| ("token", token_expiry(&token))),
    ];
    let now = Timestamp::now();
    let found = found.into_iter().flatten();
    found.map(|(what, expiry)| judge(cluster.tier, what, expiry, now)).collect()
}

fn judge(tier: Tier, what: &str, expiry: Option<Timestamp>, now: Timestamp) -> Finding {
    let what = format!("{what} of the kubeconfig");
    let Some(expiry) = expiry else {
        return Finding::skipped(tier, what).because("its expiry cannot be read");
    };
    let left = expiry.duration_since(now);
    let shown = std::time::Duration::try_from(left).map(duration::show).unwrap_or_default();
    // Tokens are short-lived by design: only certificates are reported early.
    let is_soon = left < SOON && what.starts_with("client");
    match (left.is_negative(), is_soon) {
        (true, _) => {
            Finding::error(tier, what).because(format!("expired at {expiry}")).next("renew the kubeconfig")
        }
        (_, true) => {
            Finding::warning(tier, what).because(format!("expires in {shown}")).next("renew the kubeconfig")
        }
        _ => Finding::ok(tier, what).because(format!("expires in {shown}")),
    }
}

fn text(credentials: &Value, inline: &str) -> Option<String> {
    credentials[inline].as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

/// The client certificate as PEM: inline, or from its file.
fn certificate(credentials: &Value) -> Option<Vec<u8>> {
    let inline = text(credentials, "client-certificate-data").and_then(|data| base64(&data));
    inline.or_else(|| std::fs::read(text(credentials, "client-certificate")?).ok())
}

fn certificate_expiry(pem: &[u8]) -> Option<Timestamp> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
    let certificate = pem.parse_x509().ok()?;
    Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()
}

/// Expiry of a token.
fn token_expiry(token: &str) -> Option<Timestamp> {
    Timestamp::from_second(Claims::of(token)?.expires?).ok()
}

fn base64(text: &str) -> Option<Vec<u8>> {
    serde_json::from_value(json!(text)).ok().map(|ByteString(bytes)| bytes)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn expired_credentials_are_errors_and_certificates_are_reported_early() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        let level = |what, expiry: &str| judge(Tier::Guest, what, expiry.parse().ok(), now).level;
        assert_eq!(level("token", "2026-01-10T01:00:00Z"), Level::Ok);
        assert_eq!(level("client certificate", "2026-01-12T00:00:00Z"), Level::Warning);
        assert_eq!(level("client certificate", "2026-03-12T00:00:00Z"), Level::Ok);
        assert_eq!(level("token", "2026-01-01T00:00:00Z"), Level::Error);
        assert_eq!(level("token", "opaque"), Level::Skipped);
    }
}
