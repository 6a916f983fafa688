//! `storage-infra pki`: certificates for a start, or for where there is no other authority.

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

/// Longer than a pool lives would be unwise, and shorter would break setups that nobody watches.
const YEARS: i32 = 10;

#[derive(Debug, Args)]
pub(super) struct PkiArgs {
    /// Where the files go; made where it is not there. Nothing is overwritten.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// A name or address that the server is reached by. Repeatable.
    #[arg(long = "host", value_name = "NAME|IP", required = true)]
    hosts: Vec<String>,
}

/// Writes `ca.crt`, and `server` and `client` certificates with their keys. The authority's key is not kept: who
/// needs more certificates makes a new set.
pub(super) fn write(args: &PkiArgs) -> anyhow::Result<()> {
    private_dir(&args.dir).with_context(|| format!("cannot make {}", args.dir.display()))?;
    let names = ["ca.crt", "server.crt", "server.key", "client.crt", "client.key"];
    if let Some(there) = names.iter().map(|name| args.dir.join(name)).find(|path| path.exists()) {
        anyhow::bail!("{} is there already; nothing was written", there.display());
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
    // The first of the month: clocks differ, and so do the lengths of months.
    params.not_before = rcgen::date_time_ymd(year, month, 1);
    params.not_after = rcgen::date_time_ymd(year + YEARS, month, day.min(28));
    Ok(params)
}

fn save(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = file.with_context(|| format!("cannot make {}", path.display()))?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| format!("cannot write {}", path.display()))
}
