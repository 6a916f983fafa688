//! How many bytes go to and come from each cluster's API server: bodies, as they are before TLS.

use std::sync::LazyLock;

use http::Response;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body, Buf, Bytes};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tower::BoxError;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Way {
    cluster: &'static str,
    direction: &'static str,
}

/// Of the process: its clients are made long before its metrics are served.
static BYTES: LazyLock<Family<Way, Counter>> = LazyLock::new(Family::default);

/// Shows what every client of this process has sent and received.
pub(crate) fn register(registry: &mut Registry) {
    let help = "Bytes of requests to and answers of a cluster's API server, without headers";
    registry.register("kube_client_bytes", help, BYTES.clone());
}

/// The counts of the clients of one cluster.
#[derive(Debug, Clone)]
pub(super) struct Traffic {
    sent: Counter,
    received: Counter,
}

impl Traffic {
    pub(super) fn with(cluster: &'static str) -> Self {
        let of = |direction| BYTES.get_or_create_owned(&Way { cluster, direction });
        Self { sent: of("sent"), received: of("received") }
    }

    /// Counts a request that is about to be sent. Ours are all in memory, and so of known size.
    pub(super) fn count_sent(&self, body: &impl Body) {
        self.sent.inc_by(body.size_hint().lower());
    }

    /// Counts an answer as it comes in.
    pub(super) fn count_received<B>(&self, answer: Response<B>) -> Response<UnsyncBoxBody<Bytes, BoxError>>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let received = self.received.clone();
        answer.map(|body| {
            let counted = body.map_frame(move |frame| {
                received.inc_by(frame.data_ref().map_or(0, |data| data.remaining() as u64));
                frame
            });
            counted.map_err(Into::into).boxed_unsync()
        })
    }
}
