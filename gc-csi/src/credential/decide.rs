//! What to do about a token.

use kube_kit::token::Claims;

/// State of the token in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It is valid until this Unix time.
    Valid(i64),
    /// It expired at this Unix time.
    Expired(i64),
    /// It does not expire, or its expiry cannot be read.
    Unlimited,
}

/// State of a token at a Unix time.
pub(super) fn state(token: Option<&Claims>, now: i64) -> State {
    match token.and_then(|claims| claims.expires) {
        None => State::Unlimited,
        Some(expires) if now >= expires => State::Expired(expires),
        Some(expires) => State::Valid(expires),
    }
}

/// Whether the token of the management cluster replaces the stored one: it expires later, and both are bound to the same
/// Secret. A stored token of another Secret is the newer one, of a rotation.
pub(super) fn replaces(renewed: &Claims, stored: &Claims) -> bool {
    renewed.secret.is_some() && renewed.secret == stored.secret && renewed.expires > stored.expires
}

#[cfg(test)]
mod tests {
    use kube_kit::token::BoundSecret;

    use super::*;

    fn token(uid: &str, expires: i64) -> Claims {
        let secret = BoundSecret { namespace: "n".into(), name: "s".into(), uid: uid.into() };
        Claims { expires: Some(expires), secret: Some(secret), ..Claims::default() }
    }

    #[test]
    fn a_token_is_valid_until_it_expires() {
        let token = token("u", 100);
        assert_eq!(state(Some(&token), 99), State::Valid(100));
        assert_eq!(state(Some(&token), 100), State::Expired(100));
        assert_eq!(state(Some(&Claims::default()), 100), State::Unlimited);
        assert_eq!(state(None, 100), State::Unlimited);
    }

    #[test]
    fn a_later_token_of_the_same_secret_replaces_the_stored_one() {
        assert!(replaces(&token("u", 200), &token("u", 100)));
        assert!(!replaces(&token("u", 100), &token("u", 100)));
        assert!(!replaces(&token("u", 100), &token("u", 200)));
        assert!(!replaces(&token("earlier", 200), &token("later", 100)));
        assert!(!replaces(&Claims { expires: Some(200), ..Claims::default() }, &token("u", 100)));
    }
}
