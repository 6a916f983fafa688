//! Expiry of certificates in PEM texts.

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

/// When the certificates of one side of the connection expire, as Unix times; `None` if a certificate is unreadable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiry {
    /// The side's own certificate.
    pub own: Option<i64>,
    /// The trusted CA certificate that expires last: during a rotation there are two.
    pub ca: Option<i64>,
}

impl Expiry {
    /// Reads a certificate chain and the trusted CA certificates, both PEM.
    pub fn of(chain: &[u8], ca: &[u8]) -> Self {
        Self { own: expiries(chain).next(), ca: expiries(ca).max() }
    }
}

/// Expiry of each readable certificate, as Unix times.
fn expiries(pem: &[u8]) -> impl Iterator<Item = i64> + '_ {
    CertificateDer::pem_slice_iter(pem).filter_map(|certificate| {
        let der = certificate.ok()?;
        let (_, certificate) = x509_parser::parse_x509_certificate(&der).ok()?;
        Some(certificate.validity().not_after.timestamp())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expiring_in(year: i32) -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        params.self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_chain_expires_with_its_first_certificate_and_a_bundle_with_its_last() {
        let (near, far) = (expiring_in(2030), expiring_in(2031));
        let both = format!("{near}{far}");
        let expiry = Expiry::of(both.as_bytes(), both.as_bytes());
        assert_eq!(expiry, Expiry { own: Some(1_893_456_000), ca: Some(1_924_992_000) });
        assert_eq!(Expiry::of(b"none", b""), Expiry { own: None, ca: None });
    }
}
