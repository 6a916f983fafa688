//! Expiry of the client certificate and the token in a kubeconfig.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
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
        token(&credentials).map(|token| ("token", token_expiry(&token))),
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

/// The token: inline, or from its file.
fn token(credentials: &Value) -> Option<String> {
    let file = || {
        std::fs::read_to_string(text(credentials, "tokenFile").or_else(|| text(credentials, "token-file"))?)
            .ok()
    };
    text(credentials, "token").or_else(file)
}

/// Expiry of a JSON Web Token (RFC 7519, `exp`).
fn token_expiry(token: &str) -> Option<Timestamp> {
    let payload = token.trim().split('.').nth(1)?.replace('-', "+").replace('_', "/");
    let padded = format!("{payload}{}", "=".repeat((4 - payload.len() % 4) % 4));
    let claims: Value = serde_json::from_slice(&base64(&padded)?).ok()?;
    Timestamp::from_second(claims["exp"].as_i64()?).ok()
}

fn base64(text: &str) -> Option<Vec<u8>> {
    serde_json::from_value(json!(text)).ok().map(|ByteString(bytes)| bytes)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn the_expiry_of_a_token_is_read() {
        // {"exp":1800000000}, without padding.
        let token = "h.eyJleHAiOjE4MDAwMDAwMDB9.s";
        assert_eq!(token_expiry(token).map(jiff::Timestamp::as_second), Some(1_800_000_000));
        assert_eq!(token_expiry("opaque"), None);
    }

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
