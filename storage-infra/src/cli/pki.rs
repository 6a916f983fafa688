//! PKI bootstrap: `storage-infra pki` creates a CA, a server and a client certificate.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::engine::file::private_dir;

/// Validity of all certificates. Setups without certificate rotation must not break soon.
const YEARS: i32 = 10;

#[derive(Debug, Args)]
pub(super) struct PkiArgs {
    /// Directory for the files; created if missing. Existing files are never overwritten.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Host name or IP address for the server certificate. Repeatable.
    #[arg(long = "host", value_name = "NAME|IP", required = true)]
    hosts: Vec<String>,
}

/// Writes `ca.crt`, and certificates and keys named `server` and `client`. The CA key is not stored: to get more
/// certificates, create a new set.
pub(super) fn write(args: &PkiArgs) -> anyhow::Result<()> {
    private_dir(&args.dir).with_context(|| format!("cannot create {}", args.dir.display()))?;
    let names = ["ca.crt", "server.crt", "server.key", "client.crt", "client.key"];
    if let Some(existing) = names.iter().map(|name| args.dir.join(name)).find(|path| path.exists()) {
        anyhow::bail!("{} already exists; nothing was written", existing.display());
    }
    let mut ca = params("Nestor storage infra CA", Vec::new())?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_key = KeyPair::generate()?;
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let issuer = Issuer::new(ca, ca_key);

    let leaf = |name: &str, hosts: Vec<String>, usage: ExtendedKeyUsagePurpose| -> anyhow::Result<_> {
        let mut leaf = params(name, hosts)?;
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![usage];
        leaf.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        Ok((leaf.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
    };
    let (server, server_key) =
        leaf("storage-infra", args.hosts.clone(), ExtendedKeyUsagePurpose::ServerAuth)?;
    let (client, client_key) = leaf("storage-infra client", Vec::new(), ExtendedKeyUsagePurpose::ClientAuth)?;
    for (name, text) in names.iter().zip([ca_pem, server, server_key, client, client_key]) {
        save(&args.dir.join(name), &text, if name.ends_with(".key") { 0o600 } else { 0o644 })?;
    }
    Ok(())
}

fn params(name: &str, hosts: Vec<String>) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, name);
    let now = jiff::Zoned::now();
    let (year, month, day) = (i32::from(now.year()), now.month().unsigned_abs(), now.day().unsigned_abs());
    // The first of the month allows for clock skew; day 28 exists in every month.
    params.not_before = rcgen::date_time_ymd(year, month, 1);
    params.not_after = rcgen::date_time_ymd(year + YEARS, month, day.min(28));
    Ok(params)
}

fn save(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.with_context(|| format!("cannot create {}", path.display()))?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| format!("cannot write {}", path.display()))
}
