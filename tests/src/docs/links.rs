//! Checks: links, anchors, and paths of files lead somewhere.

use std::collections::BTreeSet;

use anyhow::Result;
use lab::run::repository;

use super::{Page, files, pages};

/// A path relative to the folder of a page, as a path of the repository. `None` outside of the repository.
fn resolve(page: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Whether a path is a file of the repository, or a folder with files.
fn exists(files: &BTreeSet<String>, path: &str) -> bool {
    let folder = format!("{path}/");
    path.is_empty() || files.contains(path) || files.iter().any(|file| file.starts_with(&folder))
}

fn is_external(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

/// What is wrong with a relative link.
fn problem(page: &Page, target: &str, files: &BTreeSet<String>, pages: &[Page]) -> Option<String> {
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() { page.path.clone() } else { resolve(&page.path, path)? };
    if target.starts_with('/') || !exists(files, &path) {
        return Some(format!("{target}: no such file"));
    }
    let lacks = |page: &Page| !page.anchors.contains(anchor);
    let leads_nowhere = pages.iter().find(|page| page.path == path).is_none_or(lacks);
    (!anchor.is_empty() && leads_nowhere).then(|| format!("{target}: no such anchor"))
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn every_relative_link_leads_to_a_file_and_an_anchor() -> Result<()> {
    let (files, pages) = (files()?, pages()?);
    let mut problems = Vec::new();
    for page in &pages {
        for (line, target) in page.links.iter().filter(|(_, target)| !is_external(target)) {
            let found = problem(page, target, &files, &pages);
            problems.extend(found.map(|problem| format!("{}:{line}: {problem}", page.path)));
        }
    }
    assert_none(&problems);
    Ok(())
}

#[test]
fn every_external_link_is_a_url_with_a_host() -> Result<()> {
    let mut problems = Vec::new();
    for page in pages()? {
        for (line, target) in page.links.iter().filter(|(_, target)| is_external(target)) {
            let is_url = target.parse::<http::Uri>().is_ok_and(|url| {
                matches!(url.scheme_str(), Some("http" | "https"))
                    && url.host().is_some_and(|h| h.contains('.'))
            });
            if !is_url && !target.starts_with("mailto:") {
                problems.push(format!("{}:{line}: {target} is no URL", page.path));
            }
        }
    }
    assert_none(&problems);
    Ok(())
}

/// A path in code, as a pattern: `a/<name>.rs` is `a/*.rs`. `None` if the code is no path of the repository.
fn pattern(code: &str, folders: &BTreeSet<&str>) -> Option<String> {
    let code = code.trim_end_matches('/');
    let (first, _) = code.split_once('/')?;
    let is_path = code.chars().all(|c| c.is_ascii_alphanumeric() || "/._-*<>".contains(c));
    (is_path && folders.contains(first)).then(|| {
        let mut parts = code.split('<');
        let start = parts.next().unwrap_or_default().to_owned();
        parts
            .fold(start, |all, part| format!("{all}*{}", part.split_once('>').map_or(part, |(_, rest)| rest)))
    })
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|tail| {
            let ends = tail.char_indices().map(|(end, _)| end).chain([tail.len()]);
            ends.into_iter().any(|end| matches(rest, &tail[end..]))
        }),
    }
}

/// Whether a pattern is the path of a file, or of one of its folders.
fn is_path_of(pattern: &str, file: &str) -> bool {
    let (mut patterns, mut parts) = (pattern.split('/'), file.split('/'));
    patterns.all(|pattern| parts.next().is_some_and(|part| matches(pattern, part)))
}

#[test]
fn every_path_in_code_exists() -> Result<()> {
    let files = files()?;
    let folders: BTreeSet<&str> = files.iter().filter_map(|file| Some(file.split_once('/')?.0)).collect();
    let mut problems = Vec::new();
    for page in pages()? {
        for (line, code) in &page.code {
            let Some(pattern) = pattern(code, &folders) else { continue };
            if !files.iter().any(|file| is_path_of(&pattern, file)) {
                problems.push(format!("{}:{line}: `{code}` does not exist", page.path));
            }
        }
    }
    assert_none(&problems);
    Ok(())
}

#[test]
fn patterns_match_files_and_folders() {
    let folders = ["gc-csi", "charts"].into();
    let of = |code| pattern(code, &folders);
    assert_eq!(of("gc-csi/src/<call>.rs").as_deref(), Some("gc-csi/src/*.rs"));
    assert_eq!(of("kubernetes.io/name"), None);
    assert_eq!(of("charts/a -n b"), None);
    assert!(is_path_of("charts/*/files/*rules.yaml", "charts/a/files/b-rules.yaml"));
    assert!(is_path_of("gc-csi/src", "gc-csi/src/lib.rs"));
    assert!(!is_path_of("gc-csi/sr", "gc-csi/src/lib.rs"));
    assert!(!is_path_of("gc-csi/src/lib.rs/x", "gc-csi/src/lib.rs"));
}

#[test]
fn the_summary_and_the_overview_name_every_page() -> Result<()> {
    let pages = pages()?;
    let of_docs: BTreeSet<&str> =
        pages.iter().map(|page| page.path.as_str()).filter(|path| path.starts_with("docs/")).collect();
    for overview in ["docs/SUMMARY.md", "docs/README.md"] {
        let page = Page::read(overview)?;
        let linked: BTreeSet<String> = page
            .links
            .iter()
            .filter_map(|(_, target)| resolve(overview, target.split('#').next()?))
            .collect();
        let missing: Vec<&&str> = of_docs
            .iter()
            .filter(|path| !path.ends_with("/SUMMARY.md") && **path != overview && !linked.contains(**path))
            .collect();
        assert!(missing.is_empty(), "{overview} does not name {missing:?}");
    }
    Ok(())
}

/// References to pages in a text that is not Markdown, such as `docs/guides/repair.md#cost`.
fn references(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("docs/").filter_map(|(start, _)| {
        let is_inside = text[..start].ends_with(|c: char| c.is_ascii_alphanumeric() || "/.-".contains(c));
        let end = text[start..].find(|c: char| !c.is_ascii_alphanumeric() && !"/._-#".contains(c));
        let found = text[start..].get(..end.unwrap_or(text.len() - start))?.trim_end_matches('.');
        (!is_inside && found.contains(".md")).then_some(found)
    })
}

#[test]
fn every_page_that_a_program_a_chart_or_an_alert_names_exists() -> Result<()> {
    let (files, pages) = (files()?, pages()?);
    let root = Page::default();
    let is_text = |file: &&String| {
        [".rs", ".yaml", ".tpl", ".txt", ".json", ".toml"].iter().any(|ending| file.ends_with(ending))
    };
    let (mut problems, mut seen) = (Vec::new(), 0);
    for file in files.iter().filter(is_text).filter(|file| *file != "tests/src/docs/links.rs") {
        let path = repository().join(file);
        if path.is_dir() {
            continue;
        }
        let text = std::fs::read_to_string(path)?;
        for target in references(&text) {
            seen += 1;
            let found = problem(&root, target, &files, &pages);
            problems.extend(found.map(|problem| format!("{file}: {problem}")));
        }
    }
    assert_none(&problems);
    assert!(seen > 50, "only {seen} references");
    Ok(())
}
