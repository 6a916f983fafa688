//! Traffic metrics: bytes sent to and received from each cluster's API server (bodies before TLS).

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
struct TrafficLabels {
    cluster: &'static str,
    direction: &'static str,
}

/// Global, because clients are created long before the metrics are served.
static BYTES: LazyLock<Family<TrafficLabels, Counter>> = LazyLock::new(Family::default);

/// Registers the metric of all clients of this process.
pub(crate) fn register(registry: &mut Registry) {
    let help = "Bytes sent to and received from the API server of a cluster, without headers";
    registry.register("kube_client_bytes", help, BYTES.clone());
}

/// Counters of the clients of one cluster.
#[derive(Debug, Clone)]
pub(super) struct Traffic {
    sent: Counter,
    received: Counter,
}

impl Traffic {
    pub(super) fn with(cluster: &'static str) -> Self {
        let of = |direction| BYTES.get_or_create_owned(&TrafficLabels { cluster, direction });
        Self { sent: of("sent"), received: of("received") }
    }

    /// Counts a request. Its body is in memory, so its size is known.
    pub(super) fn count_sent(&self, body: &impl Body) {
        self.sent.inc_by(body.size_hint().lower());
    }

    /// Counts a response while it is received.
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
