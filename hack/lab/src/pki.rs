//! PKI: one certificate authority per cluster, and the certificates it signs.
//!
//! The authority's key exists only in this process, since everything a lab needs is signed while it starts. Only a lab with
//! Cluster API, whose VMs come and go, keeps that of its guest.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

const LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// The clocks of VMs may be slow.
const BACKDATED: Duration = Duration::from_secs(24 * 3600);

/// A certificate and its key, PEM.
#[derive(Clone)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// The private key (PKCS#8).
    pub key: String,
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pair: Pair,
}

impl Authority {
    /// A new authority.
    pub fn new(name: &str) -> Result<Self> {
        let (params, key) = (authority_params(name)?, KeyPair::generate()?);
        let cert = params.self_signed(&key)?.pem();
        let pair = Pair { cert, key: key.serialize_pem() };
        Ok(Self { issuer: Issuer::new(params, key), pair })
    }

    /// The authority with this name whose certificate and key [`Pair::write`] has written.
    pub fn read(name: &str, dir: &Path, file: &str) -> Result<Self> {
        let read = |end: &str| {
            let path = dir.join(format!("{file}.{end}"));
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let pair = Pair { cert: read("crt")?, key: read("key")? };
        let key = KeyPair::from_pem(&pair.key)?;
        Ok(Self { issuer: Issuer::new(authority_params(name)?, key), pair })
    }

    /// The authority's certificate, PEM.
    pub fn cert(&self) -> String {
        self.pair.cert.clone()
    }

    /// Its certificate and key.
    pub fn pair(&self) -> &Pair {
        &self.pair
    }

    /// A server certificate for these host names and addresses.
    pub fn server(&self, name: &str, hosts: &[&str]) -> Result<Pair> {
        self.sign(params(name, hosts)?, &[ExtendedKeyUsagePurpose::ServerAuth])
    }

    /// A certificate of a server that is also a client: etcd calls itself with it.
    pub fn peer(&self, name: &str, hosts: &[&str]) -> Result<Pair> {
        let usages = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(params(name, hosts)?, &usages)
    }

    /// A client certificate with at most two organizations. Kubernetes reads the user and its groups from it, the storage infra
    /// a role and an account.
    pub fn client<'a>(&self, user: &str, organizations: impl IntoIterator<Item = &'a str>) -> Result<Pair> {
        let mut params = params(user, &[])?;
        // rcgen keeps one value of each of its types: the second is the same type by its OID.
        let mut kinds = [DnType::OrganizationName, DnType::CustomDnType(vec![2, 5, 4, 10])].into_iter();
        for organization in organizations {
            let kind = kinds.next().context("a certificate has at most two organizations")?;
            params.distinguished_name.push(kind, organization);
        }
        self.sign(params, &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    fn sign(&self, mut params: CertificateParams, usages: &[ExtendedKeyUsagePurpose]) -> Result<Pair> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages.to_vec();
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok(Pair { cert: cert.pem(), key: key.serialize_pem() })
    }
}

fn authority_params(name: &str) -> Result<CertificateParams> {
    let mut params = params(name, &[])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages =
        vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

fn params(name: &str, hosts: &[&str]) -> Result<CertificateParams> {
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = SystemTime::now();
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + LIFETIME).into();
    Ok(params)
}

/// A key that signs ServiceAccount tokens, and its public half.
pub fn token_key() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

impl Pair {
    /// Writes `<name>.crt` and `<name>.key` into a folder.
    pub fn write(&self, dir: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        let (cert, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        write_private(&cert, &self.cert)?;
        write_private(&key, &self.key)?;
        Ok((cert, key))
    }
}

/// Writes a file that only its owner can read.
pub fn write_private(path: &Path, text: &str) -> Result<()> {
    let write = || -> std::io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
        file.write_all(text.as_bytes())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
