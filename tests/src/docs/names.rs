//! Checks: the pages name every label, annotation, condition and reason of the code, and no others.

use std::collections::BTreeSet;
use std::fs;

use anyhow::Result;
use lab::run::repository;

use super::{files, pages};

/// The page of labels, annotations and conditions.
const OBJECTS: &str = "docs/reference/objects.md";

fn read(path: &str) -> Result<String> {
    Ok(fs::read_to_string(repository().join(path))?)
}

/// The source files of the programs and libraries.
fn sources() -> Result<Vec<String>> {
    let sources = files()?.into_iter().filter(|file| file.ends_with(".rs") && !file.starts_with("tests/"));
    sources.map(|file| read(&file)).collect()
}

/// Keys of labels, annotations and conditions in a text, with their domains.
fn keys(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
    let found = text.match_indices("nestor.dev/").map(|(at, domain)| {
        let before = text[..at].char_indices().rev().take_while(|(_, c)| is_part(*c));
        let start = before.last().map_or(at, |(start, _)| start);
        let rest = &text[at + domain.len()..];
        let end = rest.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(rest.len());
        text[start..at + domain.len() + end].to_owned()
    });
    // API versions have the same shape; the lab has labels of its own.
    found.filter(|key| !key.ends_with("/v") && !key.starts_with("lab.")).collect()
}

#[test]
fn every_label_and_annotation_is_documented_and_every_documented_one_exists() -> Result<()> {
    let documented = keys(&read(OBJECTS)?);
    let missing: Vec<_> =
        keys(&read("crds/src/names.rs")?).into_iter().filter(|key| !documented.contains(key)).collect();
    assert!(missing.is_empty(), "{OBJECTS} does not name {missing:?}");
    let known = keys(&sources()?.concat());
    for page in pages()? {
        for key in page.code.iter().flat_map(|(_, code)| keys(code)) {
            assert!(known.contains(&key), "{}: no code has {key}", page.path);
        }
    }
    Ok(())
}

/// The variants in the definitions of reasons.
fn reasons(source: &str) -> Vec<&str> {
    let definitions = source.split("reasons! {\n").skip(1);
    let bodies = definitions.map(|text| text.split_once("\n}").map_or(text, |(body, _)| body));
    let lines = bodies.flat_map(str::lines).filter_map(|line| line.trim().strip_suffix(','));
    lines.filter(|name| name.chars().all(char::is_alphanumeric)).collect()
}

#[test]
fn every_reason_is_documented() -> Result<()> {
    let mut words = BTreeSet::new();
    for file in files()?.iter().filter(|file| file.starts_with("docs/") && file.ends_with(".md")) {
        let text = read(file)?;
        words.extend(text.split(|c: char| !c.is_alphanumeric()).map(str::to_owned));
    }
    let sources = sources()?;
    let reasons: Vec<&str> = sources.iter().flat_map(|source| reasons(source)).collect();
    let missing: Vec<&&str> = reasons.iter().filter(|reason| !words.contains(**reason)).collect();
    assert!(missing.is_empty(), "no page names {missing:?}");
    assert!(reasons.len() > 40, "only {} reasons", reasons.len());
    Ok(())
}

#[test]
fn keys_and_reasons_are_found() {
    let found = keys("`a.nestor.dev/b-c=1`, nestor.dev/D and nestor.dev/v1alpha1");
    assert_eq!(found, ["a.nestor.dev/b-c", "nestor.dev/D"].map(str::to_owned).into());
    assert_eq!(
        reasons("x! {\n}\nreasons! {\n    enum A {\n        /// B, C,\n        Bc,\n        D,\n    }\n}\n"),
        ["Bc", "D"]
    );
}
