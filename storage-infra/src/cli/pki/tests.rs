use std::fs;
use std::os::unix::fs::PermissionsExt;

use clap::Parser;
use infra_api::{Account, RoleClaim};

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    command: PkiCommand,
}

/// Runs a command line in a directory.
fn pki(dir: &Path, words: &[&str]) -> anyhow::Result<()> {
    let line = ["pki"].iter().chain(words).copied().chain(["--dir", dir.to_str().unwrap()]);
    run(&Line::try_parse_from(line)?.command)
}

fn read(dir: &Path, name: &str) -> String {
    fs::read_to_string(dir.join(name)).unwrap()
}

/// Common name, claim, and whether it is valid for less than a month and a day.
fn subject(pem: &str) -> (String, RoleClaim, bool) {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).unwrap();
    let certificate = pem.parse_x509().unwrap();
    let organizations = certificate.subject().iter_organization().filter_map(|one| one.as_str().ok());
    let name = certificate.subject().iter_common_name().next().unwrap().as_str().unwrap().to_owned();
    let validity = certificate.validity();
    let seconds = validity.not_after.timestamp() - validity.not_before.timestamp();
    (name, RoleClaim::of(organizations), seconds < 31 * 24 * 3600)
}

#[test]
fn init_creates_a_ca_that_is_kept_and_a_short_certificate_of_each_role() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pki(dir, &["init", "--host", "infra.example"]).unwrap();
    assert_eq!(subject(&read(dir, "server.crt")), ("storage-infra".into(), RoleClaim::None, true));
    for role in [Role::Driver, Role::Operator, Role::Reader] {
        let (_, claim, is_short) = subject(&read(dir, &format!("{role}.crt")));
        assert_eq!((claim, is_short), (RoleClaim::Role(role), true));
    }
    for key in ["ca.key", "server.key", "driver.key"] {
        assert_eq!(fs::metadata(dir.join(key)).unwrap().permissions().mode() & 0o777, 0o600, "{key}");
    }
    let refused = pki(dir, &["init", "--host", "x"]).unwrap_err().to_string();
    assert!(refused.contains("nothing was written"), "{refused}");
}

#[test]
fn issue_overwrites_only_when_asked_and_signs_with_the_kept_ca() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pki(dir, &["init", "--host", "infra.example"]).unwrap();
    pki(dir, &["issue", "--role", "reader", "--name", "nightly", "--lifetime", "12h"]).unwrap();
    let (name, claim, _) = subject(&read(dir, "nightly.crt"));
    assert_eq!((name.as_str(), claim), ("nightly", RoleClaim::Role(Role::Reader)));
    assert!(authority::is_signed_by(&read(dir, "nightly.crt"), &read(dir, "ca.crt")));
    let before = read(dir, "driver.crt");
    let refused = pki(dir, &["issue", "--role", "driver"]).unwrap_err().to_string();
    assert!(refused.contains("--overwrite"), "{refused}");
    assert_eq!(read(dir, "driver.crt"), before);
    pki(dir, &["issue", "--role", "driver", "--overwrite"]).unwrap();
    assert_ne!(read(dir, "driver.crt"), before);
    assert!(pki(dir, &["issue", "--role", "server"]).is_err(), "a server has a host");
    assert!(pki(dir, &["issue", "--role", "reader", "--name", "../x"]).is_err());
    assert!(pki(dir, &["issue", "--role", "reader", "--lifetime", "1s"]).is_err());
}

#[test]
fn the_certificate_of_a_backup_names_one_account_and_no_other_does() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pki(dir, &["init", "--host", "infra.example"]).unwrap();
    // As long as an account can be.
    for account in ["a", "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab", &"A".repeat(63)] {
        pki(dir, &["issue", "--role", "backup", "--account", account, "--overwrite"]).unwrap();
        let (_, claim, _) = subject(&read(dir, "backup.crt"));
        assert_eq!(claim, RoleClaim::OfAccount(Role::Backup, Account::new(account).unwrap()));
    }
    let before = read(dir, "backup.crt");
    for words in [
        &["--role", "backup"][..],
        &["--role", "backup", "--account", ""],
        &["--role", "backup", "--account", "a/b"],
    ] {
        let refused = pki(dir, &[&["issue", "--overwrite"], words].concat()).unwrap_err().to_string();
        assert!(refused.contains("--account"), "{refused}");
    }
    for role in ["driver", "operator", "reader", "server"] {
        let words = ["issue", "--role", role, "--host", "x", "--account", "a", "--name", "limited"];
        let refused = pki(dir, &words).unwrap_err().to_string();
        assert!(refused.contains("--account is not possible"), "{refused}");
    }
    assert_eq!(read(dir, "backup.crt"), before);
    assert!(!dir.join("limited.crt").exists());
}

#[test]
fn a_ca_is_replaced_in_two_steps_and_the_last_needs_new_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pki(dir, &["init", "--host", "infra.example"]).unwrap();
    let previous = read(dir, "ca.crt");
    pki(dir, &["rotate-ca"]).unwrap();
    let both = read(dir, "ca.crt");
    assert!(both.ends_with(&previous) && both.len() > previous.len());
    assert!(pki(dir, &["rotate-ca"]).unwrap_err().to_string().contains("--finish"));
    let refused = pki(dir, &["rotate-ca", "--finish"]).unwrap_err().to_string();
    assert!(refused.contains("driver.crt") && refused.contains("server.crt"), "{refused}");
    for role in ["driver", "operator", "reader"] {
        pki(dir, &["issue", "--role", role, "--overwrite"]).unwrap();
    }
    pki(dir, &["issue", "--role", "server", "--host", "infra.example", "--overwrite"]).unwrap();
    pki(dir, &["rotate-ca", "--finish"]).unwrap();
    assert_eq!(format!("{}{previous}", read(dir, "ca.crt")), both);
    // A repetition changes nothing.
    pki(dir, &["rotate-ca", "--finish"]).unwrap();
    assert!(authority::is_signed_by(&read(dir, "driver.crt"), &read(dir, "ca.crt")));
}

#[test]
fn the_ca_of_an_earlier_version_without_its_key_can_be_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    pki(dir, &["init", "--host", "infra.example"]).unwrap();
    fs::remove_file(dir.join("ca.key")).unwrap();
    let refused = format!("{:#}", pki(dir, &["issue", "--role", "driver", "--overwrite"]).unwrap_err());
    assert!(refused.contains("ca.key"), "{refused}");
    pki(dir, &["rotate-ca"]).unwrap();
    pki(dir, &["issue", "--role", "driver", "--overwrite"]).unwrap();
    assert!(authority::is_signed_by(&read(dir, "driver.crt"), &read(dir, "ca.crt")));
}
