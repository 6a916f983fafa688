//! Metrics of the certificates in use.

use infra_api::Expiry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    certificate: &'static str,
}

/// Expiry of the certificates in use. Cheap to clone.
#[derive(Clone, Default)]
pub struct CertificateMetrics(Family<Labels, Gauge>);

impl CertificateMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Unix time at which a certificate expires";
        registry.register_with_unit("certificate_expiry_timestamp", help, Unit::Seconds, self.0.clone());
    }

    /// The server uses these certificates.
    pub fn set(&self, expiry: Expiry) {
        for (certificate, time) in [("server", expiry.own), ("client-ca", expiry.ca)] {
            if let Some(time) = time {
                self.0.get_or_create(&Labels { certificate }).set(time);
            }
        }
    }
}
