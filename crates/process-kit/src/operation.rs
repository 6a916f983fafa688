//! Operations: a CSI call, a reconcile or a request, with a span and an id for the logs. The id is passed on in requests to
//! other programs, so that one search in the logs of all programs finds the whole operation. So is the operation's
//! [trace context](crate::trace), if spans are exported.

use std::fmt::{Display, Formatter};
use std::future::Future;
use std::sync::{Arc, OnceLock};

use tracing::{Instrument, Span};

use crate::trace::{self, TraceParent};

/// Maximum length of an id in bytes.
const MAX_ID: usize = 64;

tokio::task_local! {
    static CURRENT: Operation;
}

/// What a task works on.
#[derive(Debug, Clone)]
struct Operation {
    id: OperationId,
    span: Span,
    /// Whether the span has the id of the trace; a field that is recorded twice would be logged twice.
    has_trace_id: Arc<OnceLock<()>>,
}

impl Operation {
    /// The context of the span, if it is exported. From now on, log lines have the id of the trace.
    fn trace_parent(&self) -> Option<TraceParent> {
        let parent = TraceParent::of(&self.span).filter(TraceParent::is_sampled)?;
        self.has_trace_id.get_or_init(|| {
            self.span.record("trace_id", parent.trace_id());
        });
        Some(parent)
    }
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
        CURRENT.try_with(|operation| operation.id.clone()).unwrap_or_else(|_| Self::random())
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

/// Runs the work of an operation. If the span has a field `trace_id`, it gets the id of the trace.
pub async fn run<F: Future>(id: OperationId, span: Span, work: F) -> F::Output {
    let operation = Operation { id, span: span.clone(), has_trace_id: Arc::default() };
    CURRENT.scope(operation, work).instrument(span).await
}

/// Continues the trace of another program, from which this text comes; ignores it if it is malformed. Only the first call in
/// an operation has an effect, and only before the operation sends its own context anywhere.
pub fn continue_trace(parent: Option<&str>) {
    let Some(parent) = parent.and_then(TraceParent::parse) else { return };
    let _ = CURRENT.try_with(|operation| {
        trace::continue_from(&operation.span, &parent);
        operation.trace_parent();
    });
}

/// The context of the operation that this task works on, for other programs; None if its trace is not exported.
pub fn trace_parent() -> Option<TraceParent> {
    CURRENT.try_with(Operation::trace_parent).ok().flatten()
}

/// Whether an operation only reads, by its CSI or HTTP method. Callers poll such operations.
pub fn is_read(method: &str) -> bool {
    matches!(method, "Probe" | "Check" | "Watch" | "GET" | "HEAD" | "OPTIONS")
        || method.starts_with("List")
        || method.contains("Get")
}

/// Keeps the operation and the span of this task for work that another task will do.
pub fn inherit<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let operation = CURRENT.try_with(Operation::clone).ok();
    let work = async move {
        match operation {
            Some(operation) => CURRENT.scope(operation, work).await,
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

    #[test]
    fn polled_methods_are_reads() {
        for method in
            ["Probe", "NodeGetCapabilities", "NodeGetVolumeStats", "ListVolumes", "GetCapacity", "GET"]
        {
            assert!(is_read(method), "{method}");
        }
        for method in ["CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "DeleteSnapshot", "PUT"]
        {
            assert!(!is_read(method), "{method}");
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
