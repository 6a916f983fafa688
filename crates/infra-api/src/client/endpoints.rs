//! The servers of one storage infra: one of them is active, and calls go to that one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::error::{ClientError, Result};
use crate::problem::ProblemCode;

/// How long a call looks for the active server, at most. Another server becomes active within a few seconds.
pub(super) const SEARCH: Duration = Duration::from_secs(10);
/// Pause after all servers were asked in vain.
pub(super) const PAUSE: Duration = Duration::from_millis(200);

/// Base URLs. Clones share which one calls go to.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    bases: Arc<[String]>,
    current: Arc<AtomicUsize>,
}

impl Endpoints {
    /// Reads one URL, or several with commas between them.
    pub(super) fn new(urls: &str) -> Result<Self> {
        let bases: Arc<[String]> =
            urls.split(',').map(|url| url.trim().trim_end_matches('/').to_owned()).collect();
        match bases.iter().find(|base| !base.starts_with("https://")) {
            Some(base) => Err(ClientError::Config(format!("the URL {base:?} must start with https://"))),
            None => Ok(Self { bases, current: Arc::default() }),
        }
    }

    /// Whether there are several servers.
    pub(super) fn are_several(&self) -> bool {
        self.bases.len() > 1
    }

    /// The server of the next call: its number, and its base URL.
    pub(super) fn current(&self) -> (usize, &str) {
        let number = self.current.load(Ordering::Relaxed);
        (number, &self.bases[number % self.bases.len()])
    }

    /// All servers, for messages.
    pub(super) fn joined(&self) -> String {
        self.bases.join(", ")
    }

    /// Whether another server may be active: this one did not receive the request, is not active, or has gone.
    pub(super) fn may_be_another(&self, error: &ClientError) -> bool {
        let is_gone = match error {
            ClientError::Connect { .. } | ClientError::Interrupted { .. } => true,
            ClientError::Problem { problem, .. } => problem.code == ProblemCode::NotActive,
            _ => false,
        };
        self.are_several() && is_gone
    }

    /// Turns to the next server, unless another call did so. True once all were asked.
    pub(super) fn leave(&self, number: usize) -> bool {
        let _ = self.current.compare_exchange(number, number + 1, Ordering::Relaxed, Ordering::Relaxed);
        (number + 1).is_multiple_of(self.bases.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Problem;

    fn problem(code: ProblemCode) -> ClientError {
        ClientError::Problem { call: "GET /v1/x".into(), problem: Box::new(Problem::new(code, "text")) }
    }

    #[test]
    fn calls_turn_to_the_next_server_once_for_all_and_come_back() {
        let servers = Endpoints::new("https://a:1/, https://b:2").unwrap();
        assert_eq!(
            (servers.current(), servers.joined().as_str()),
            ((0, "https://a:1"), "https://a:1, https://b:2")
        );
        let other = servers.clone();
        assert!(!servers.leave(0) && !other.leave(0), "both calls had asked the first one");
        assert_eq!(other.current(), (1, "https://b:2"));
        assert!(servers.leave(1));
        assert_eq!(servers.current(), (2, "https://a:1"));
    }

    #[test]
    fn only_a_server_that_is_not_active_is_left() {
        let (one, two) =
            (Endpoints::new("https://a").unwrap(), Endpoints::new("https://a,https://b").unwrap());
        assert!(two.may_be_another(&problem(ProblemCode::NotActive)));
        assert!(!one.may_be_another(&problem(ProblemCode::NotActive)));
        assert!(!two.may_be_another(&problem(ProblemCode::Unavailable)));
        Endpoints::new("https://a,http://b").unwrap_err();
    }
}
