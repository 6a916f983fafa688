//! Metric of the certificates for the storage infra.

use std::time::Duration;

use infra_api::Client;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tokio_util::sync::CancellationToken;

/// Interval between two checks of the files, so that a renewal is also noticed without calls.
const INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    certificate: &'static str,
}

/// The metric.
pub struct Certificates(Family<Labels, Gauge>);

impl Certificates {
    /// Registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        let expiry = Family::default();
        let help = "Unix time at which a certificate for the storage infra expires";
        registry.register_with_unit("certificate_expiry_timestamp", help, Unit::Seconds, expiry.clone());
        Self(expiry)
    }

    /// Follows the files until `stop`.
    pub async fn watch(&self, client: &Client, stop: CancellationToken) {
        loop {
            let expiry = client.certificates();
            for (certificate, time) in [("client", expiry.own), ("server-ca", expiry.ca)] {
                if let Some(time) = time {
                    self.0.get_or_create(&Labels { certificate }).set(time);
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }
}
