//! When a guest's token is renewed.

use kube_kit::token::Claims;

/// Whether a Secret with this UID needs a new token. A token is renewed after half of its lifetime, so that several attempts
/// are possible before it expires.
pub(super) fn is_due(token: Option<&Claims>, uid: &str, now: i64) -> bool {
    let Some(Claims { issued: Some(issued), expires: Some(expires), secret: Some(secret), .. }) = token
    else {
        return true;
    };
    secret.uid != uid || now >= issued + (expires - issued) / 2
}

#[cfg(test)]
mod tests {
    use kube_kit::token::BoundSecret;

    use super::*;

    fn token(uid: &str) -> Claims {
        let secret = BoundSecret { namespace: "n".into(), name: "s".into(), uid: uid.into() };
        Claims { issued: Some(1000), expires: Some(4600), account: None, secret: Some(secret) }
    }

    #[test]
    fn a_token_is_renewed_after_half_of_its_lifetime() {
        let is_due = |now| is_due(Some(&token("u")), "u", now);
        assert_eq!([1000, 2799, 2800, 9999].map(is_due), [false, false, true, true]);
    }

    #[test]
    fn a_missing_or_unbound_token_and_one_of_an_earlier_secret_is_replaced() {
        let unbound = Claims { secret: None, ..token("u") };
        let without_expiry = Claims { expires: None, ..token("u") };
        for token in [None, Some(unbound), Some(without_expiry), Some(token("earlier"))] {
            assert!(is_due(token.as_ref(), "u", 1000), "{token:?}");
        }
    }
}
