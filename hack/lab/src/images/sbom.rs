//! SBOM (CycloneDX) of an image or a program: its Debian packages, and the crates linked into the program. It has no time
//! and no serial number, so the same content gives the same document.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::base::Package;
use crate::cache::cargo;
use crate::process::{command, run};
use crate::run::repository;

/// The SBOM of a `container` or an `application`.
pub(crate) async fn write(
    kind: &str,
    name: &str,
    program: &str,
    version: &str,
    packages: &[Package],
) -> Result<Vec<u8>> {
    let mut components: Vec<Value> = packages.iter().map(of_package).collect();
    components.extend(crates(program).await?);
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": kind, "bom-ref": name, "name": name, "version": version}},
        "components": components,
    });
    Ok(serde_json::to_vec_pretty(&document)?)
}

fn of_package(package: &Package) -> Value {
    let Package { name, version, architecture, sha256 } = package;
    let url = format!("pkg:deb/debian/{name}@{}?arch={architecture}", escaped(version));
    json!({
        "type": "library", "bom-ref": url, "name": name, "version": version, "purl": url,
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    })
}

/// A version, escaped for a package URL.
fn escaped(version: &str) -> String {
    version.replace('%', "%25").replace('+', "%2B").replace(':', "%3A")
}

async fn crates(program: &str) -> Result<Vec<Value>> {
    let args =
        ["tree", "--locked", "--package", program, "--edges", "normal", "--prefix", "none", "--no-dedupe"];
    let mut tree = command(&cargo::program(), args);
    let listed = run(tree.args(["--format", "{p}|{l}"]).current_dir(repository())).await?;
    let mut lines: Vec<&str> = listed.lines().collect();
    lines.sort_unstable();
    lines.dedup();
    let lock = fs::read_to_string(repository().join("Cargo.lock"))?;
    let digests = digests(&lock);
    lines.into_iter().map(|line| of_crate(line, &digests)).collect()
}

/// Digests of the crates of a lockfile, by name and version. The crates of this repository have none.
fn digests(lock: &str) -> BTreeMap<(&str, &str), &str> {
    let packages = lock.split("[[package]]");
    let digests = packages.filter_map(|package| {
        let id = (value(package, "name")?, value(package, "version")?);
        Some((id, value(package, "checksum")?))
    });
    digests.collect()
}

/// A value of a package in a lockfile.
fn value<'a>(package: &'a str, key: &str) -> Option<&'a str> {
    package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'))
}

/// Parses a line of `cargo tree`: `name vVERSION (path)|LICENCE`.
fn of_crate(line: &str, digests: &BTreeMap<(&str, &str), &str>) -> Result<Value> {
    let (package, licence) =
        line.split_once('|').with_context(|| format!("bad line of cargo tree: {line:?}"))?;
    let mut words = package.split(' ');
    let name = words.next().unwrap_or_default();
    let version = words.next().and_then(|word| word.strip_prefix('v'));
    let version = version.with_context(|| format!("bad line of cargo tree: {line:?}"))?;
    let url = format!("pkg:cargo/{name}@{}", escaped(version));
    let mut component =
        json!({"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url});
    if let Some(digest) = digests.get(&(name, version)) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": digest}]);
    }
    if !licence.is_empty() {
        // Cargo accepts the deprecated "/" for OR.
        component["licenses"] = json!([{"expression": licence.replace('/', " OR ")}]);
    }
    Ok(component)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn crates_and_packages_have_package_urls() {
        let digests = digests("[[package]]\nname = \"kube\"\nversion = \"5.0.0\"\nchecksum = \"ab\"\n");
        let one = of_crate("kube v5.0.0|Apache-2.0", &digests).unwrap();
        assert_eq!(
            (&one["purl"], &one["hashes"][0]["content"]),
            (&json!("pkg:cargo/kube@5.0.0"), &json!("ab"))
        );
        let own = of_crate("gc-csi v0.1.0 (/src/gc-csi)|MIT/Apache-2.0", &digests).unwrap();
        assert_eq!(own["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert!(own["hashes"].is_null() && of_crate("nonsense", &digests).is_err());
        assert_eq!(escaped("1:2.38+b1~deb12"), "1%3A2.38%2Bb1~deb12");
    }

    #[tokio::test]
    async fn every_crate_of_a_program_is_listed_once_with_its_digest_and_licence() {
        let bytes = write("application", "gc-csi", "gc-csi", "1", &[]).await.unwrap();
        let document: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((&document["bomFormat"], &document["specVersion"]), (&json!("CycloneDX"), &json!("1.5")));
        let components = document["components"].as_array().unwrap();
        let references: BTreeSet<&str> =
            components.iter().map(|one| one["bom-ref"].as_str().unwrap()).collect();
        assert!(references.len() == components.len() && components.len() > 100, "{}", components.len());
        for one in components {
            let is_own = one["version"] == env!("CARGO_PKG_VERSION") && one["hashes"].is_null();
            let digest = one["hashes"][0]["content"].as_str().unwrap_or_default();
            assert!(is_own || digest.len() == 64, "{one}");
            assert!(one["licenses"][0]["expression"].is_string(), "{one}");
        }
    }
}
