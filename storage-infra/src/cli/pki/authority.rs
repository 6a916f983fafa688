//! The CA: signs certificates.

use std::time::{Duration, SystemTime};

use anyhow::Context;
use infra_api::{Account, Role, account_organization};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData,
};
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Validity of a CA.
pub(super) const CA_LIFETIME: Duration = Duration::from_secs(3652 * 24 * 3600);
/// Clocks of clients and the server may differ by this much.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
/// Common name of each CA. Those of a rotation differ by their keys.
const NAME: &str = "Nestor storage infra CA";

/// Who a certificate is for.
pub(super) struct Subject<'a> {
    /// Common name.
    pub(super) name: &'a str,
    /// Role of a client; None for the server.
    pub(super) role: Option<Role>,
    /// Account of a client whose role is for one account.
    pub(super) account: Option<&'a Account>,
    /// Host names and addresses of the server.
    pub(super) hosts: &'a [String],
}

/// A CA with its key.
pub(super) struct Authority(KeyPair);

impl Authority {
    pub(super) fn generate() -> anyhow::Result<Self> {
        Ok(Self(KeyPair::generate()?))
    }

    /// The CA with this key, whose certificate is the first of `trusted`.
    pub(super) fn load(key: &str, trusted: &[String]) -> anyhow::Result<Self> {
        let key = KeyPair::from_pem(key).context("the key of the CA is not a private key in PEM")?;
        let first = trusted.first().context("ca.crt has no certificate")?;
        let is_ours = with_certificate(first, |certificate| {
            certificate.public_key().raw == key.subject_public_key_info().as_slice()
                && certificate.subject().to_string() == format!("CN={NAME}")
        });
        anyhow::ensure!(
            is_ours == Some(true),
            "the key of the CA is not that of the first certificate in ca.crt, or `storage-infra pki` did not create it: repeat \
             an interrupted `storage-infra pki rotate-ca`, or issue the certificate with the tool that created the CA"
        );
        Ok(Self(key))
    }

    pub(super) fn key_pem(&self) -> String {
        self.0.serialize_pem()
    }

    pub(super) fn certificate_pem(&self) -> anyhow::Result<String> {
        Ok(ca_params()?.self_signed(&self.0)?.pem())
    }

    /// Signs a certificate for a new key; both in PEM.
    pub(super) fn sign(&self, subject: &Subject<'_>, lifetime: Duration) -> anyhow::Result<(String, String)> {
        let mut leaf = params(subject.name, subject.hosts, lifetime)?;
        if let Some(role) = subject.role {
            leaf.distinguished_name.push(DnType::OrganizationName, role.organization());
        }
        if let Some(account) = subject.account {
            leaf.distinguished_name.push(second_organization(), account_organization(account));
        }
        // libvirt refuses certificates without key encipherment, whatever their key is.
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        leaf.extended_key_usages = vec![match subject.role {
            Some(_) => ExtendedKeyUsagePurpose::ClientAuth,
            None => ExtendedKeyUsagePurpose::ServerAuth,
        }];
        leaf.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let issuer = Issuer::new(ca_params()?, &self.0);
        Ok((leaf.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
    }
}

/// The attribute type O once more, by its OID 2.5.4.10: rcgen keeps one value of each of its types.
fn second_organization() -> DnType {
    DnType::CustomDnType(vec![2, 5, 4, 10])
}

fn ca_params() -> anyhow::Result<CertificateParams> {
    let mut ca = params(NAME, &[], CA_LIFETIME)?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(ca)
}

fn params(name: &str, hosts: &[String], lifetime: Duration) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(hosts.to_vec())?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = SystemTime::now();
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + lifetime).into();
    Ok(params)
}

/// Whether a CA signed a certificate: the identifier of its key is that in the certificate.
pub(super) fn is_signed_by(certificate: &str, ca: &str) -> bool {
    let issuer = with_certificate(certificate, |certificate| {
        certificate.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0.to_vec()),
            _ => None,
        })
    });
    let key = with_certificate(ca, |ca| {
        ca.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
            _ => None,
        })
    });
    issuer.flatten().is_some_and(|issuer| key.flatten() == Some(issuer))
}

/// Reads the first certificate of a PEM text; None if there is none.
fn with_certificate<T>(pem: &str, read: impl FnOnce(&X509Certificate<'_>) -> T) -> Option<T> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&pem.contents).ok()?;
    Some(read(&certificate))
}
