//! Operations: a CSI call, a reconcile or a request, with a span and an id for the logs. The id is passed on in requests to
//! other programs, so that one search in the logs of all programs finds the whole operation.

use std::fmt::{Display, Formatter};
use std::future::Future;
use std::sync::Arc;

use tracing::{Instrument, Span};

/// Maximum length of an id in bytes.
const MAX_ID: usize = 64;

tokio::task_local! {
    static CURRENT: OperationId;
}

/// Id of an operation in logs: 1 to 64 letters, digits, `-`, `_` or `.`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationId(Arc<str>);

impl OperationId {
    /// A random id.
    pub fn random() -> Self {
        Self(format!("{:016x}", fastrand::u64(..)).into())
    }

    /// The id of the operation that this task works on; a random one outside of operations.
    pub fn current() -> Self {
        CURRENT.try_with(Self::clone).unwrap_or_else(|_| Self::random())
    }

    /// An id that another program sent; None if it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_id = (1..=MAX_ID).contains(&text.len()) && text.bytes().all(legal);
        is_id.then(|| Self(text.into()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Display for OperationId {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Runs the work of an operation.
pub async fn run<F: Future>(id: OperationId, span: Span, work: F) -> F::Output {
    CURRENT.scope(id, work).instrument(span).await
}

/// Keeps the operation and the span of this task for work that another task will do.
pub fn inherit<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let id = CURRENT.try_with(OperationId::clone).ok();
    let work = async move {
        match id {
            Some(id) => CURRENT.scope(id, work).await,
            None => work.await,
        }
    };
    work.in_current_span()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_another_program_is_short_and_plain() {
        assert_eq!(OperationId::parse("a-B_3.x").unwrap().as_str(), "a-B_3.x");
        assert!(OperationId::parse(OperationId::random().as_str()).is_some());
        for bad in ["", "a b", "a\nb", "\u{fc}", &"x".repeat(MAX_ID + 1)] {
            assert_eq!(OperationId::parse(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_spawned_task_inherits_the_operation() {
        let id = OperationId::random();
        let inherited = run(id.clone(), Span::none(), async {
            let plain = tokio::spawn(async { OperationId::current() }).await.unwrap();
            assert_ne!(plain, OperationId::current());
            tokio::spawn(inherit(async { OperationId::current() })).await.unwrap()
        });
        assert_eq!(inherited.await, id);
        assert_ne!(OperationId::current(), OperationId::current());
    }
}
