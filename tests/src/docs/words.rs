//! Checks: flags, chart values and YAML in the pages are those of the programs and charts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result};
use lab::run::repository;
use serde_json::Value;

use super::{Block, Directive, Page, pages};

/// The page with the help of all programs.
const FLAGS: &str = "docs/reference/flags.md";
/// Programs of other projects, and the flags with which the pages mention them.
const OTHERS: [(&str, &str); 12] = [
    (
        "kubectl",
        "--all-containers --as --containers --context --dry-run --field-selector --for --from-file --grace-period --ignore-not-found --kubeconfig --overwrite --previous --raw --sort-by --timeout --wait",
    ),
    ("helm", "--set --take-ownership --wait"),
    (
        "sidecars",
        "--enable-capacity --extra-create-metadata --feature-gates --http-endpoint --immediate-topology --kube-api-burst --kube-api-qps --leader-election --leader-election-namespace --retry-interval-max --retry-interval-start --snapshot-orphan-sweep-interval --strict-topology --timeout --worker-threads --workers",
    ),
    (
        "etcd, etcdutl and kube-apiserver",
        "--bump-revision --event-ttl --mark-compacted --watch-progress-notify-interval",
    ),
    (
        "virsh",
        "--abort --active --disk-only --pivot --state-paused --with-managed-save --live --persistent --undefinesource --copy-storage-all",
    ),
    ("ceph and rbd", "--allow-shrink --conf --image --long"),
    ("umount", "--lazy --force"),
    ("dpkg-query", "--show"),
    ("sha256sum", "--check"),
    ("cargo test", "--nocapture --test --test-threads"),
    ("cargo fuzz", "--sanitizer"),
    ("git", "--depth"),
];

/// Pages about what was, not what is.
const HISTORY: [&str; 1] = ["CHANGELOG.md"];

/// The flags in a text.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("--").filter_map(|(start, _)| {
        let is_start =
            text[..start].chars().next_back().is_none_or(|c| c.is_whitespace() || "([`/\"".contains(c));
        let name = &text[start + 2..];
        let end = name.find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '-');
        let end = end.unwrap_or(name.len());
        (is_start && name.starts_with(|c: char| c.is_ascii_lowercase()))
            .then(|| &text[start..start + 2 + end])
    })
}

/// The flags of a program or subcommand, by the heading of their group.
type Groups = BTreeMap<String, BTreeSet<String>>;

/// The flags of each of our programs and subcommands, by its words, such as `storage-infra pool add`.
fn own_flags() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut programs: BTreeMap<String, Groups> = BTreeMap::new();
    for Block { text, .. } in Page::read(FLAGS)?.blocks {
        let mut groups = Groups::new();
        for paragraph in text.split("\n\n") {
            let (heading, rest) = paragraph.split_once(':').unwrap_or((paragraph, ""));
            let flags = match rest.strip_prefix(" as of ") {
                Some(earlier) => earlier_group(&programs, earlier, heading)?,
                None => listed_flags(paragraph),
            };
            groups.insert(heading.to_owned(), flags);
        }
        programs.insert(usage_words(&text)?, groups);
    }
    let flatten = |(words, groups): (String, Groups)| (words, groups.into_values().flatten().collect());
    Ok(programs.into_iter().map(flatten).collect())
}

/// The words of a program or subcommand in its help.
fn usage_words(help: &str) -> Result<String> {
    let usage = help.lines().find_map(|line| line.strip_prefix("Usage: ")).context("no usage")?;
    let words = usage.split(' ').take_while(|word| !word.starts_with(['[', '<', '-']));
    Ok(words.collect::<Vec<_>>().join(" "))
}

/// The flags of a group that the page has printed for an earlier command. The page names plugins of kubectl by their file.
fn earlier_group(
    programs: &BTreeMap<String, Groups>,
    command: &str,
    heading: &str,
) -> Result<BTreeSet<String>> {
    let command = command.trim().replace("kubectl-", "kubectl ");
    let group = programs.get(&command).and_then(|groups| groups.get(heading)).cloned();
    group.with_context(|| format!("{FLAGS}: {command} has no {heading}"))
}

/// The flags that a part of a help describes.
fn listed_flags(paragraph: &str) -> BTreeSet<String> {
    let options = paragraph.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    options.filter_map(|line| flags(line).next().map(str::to_owned)).collect()
}

/// The flags that a command line of our programs may have: those of its program and subcommand, and of what is below it.
/// `None` for a line that does not start with a program.
fn of_line<'a>(own: &'a BTreeMap<String, BTreeSet<String>>, line: &str) -> Option<BTreeSet<&'a str>> {
    let is_of = |words: &str| line.strip_prefix(words).is_some_and(|rest| rest.starts_with(' '));
    let longest = own.keys().filter(|words| is_of(words)).max_by_key(|words| words.len())?;
    // The rest of these lines belongs to other programs.
    if ["cargo lab kubectl", "cargo lab bench"].contains(&longest.as_str()) {
        return None;
    }
    let below = own.iter().filter(|(words, _)| words.starts_with(longest.as_str()));
    Some(below.flat_map(|(_, flags)| flags.iter().map(String::as_str)).collect())
}

/// Whether the source of the benches has an argument of this name.
fn is_of_a_bench(flag: &str) -> Result<bool> {
    let field = format!("{}:", flag.trim_start_matches('-').replace('-', "_"));
    let files = super::files()?.into_iter().filter(|file| file.starts_with("bench/src/"));
    for file in files {
        if fs::read_to_string(repository().join(file))?.contains(&field) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Code of a page that may contain command lines.
fn command_lines(page: &Page) -> impl Iterator<Item = (usize, &str)> {
    let blocks = page.blocks.iter().filter(|block| ["", "sh", "console"].contains(&block.language.as_str()));
    let lines = blocks.flat_map(|block| block.text.lines().map(move |line| (block.line, line)));
    page.code.iter().map(|(line, code)| (*line, code.as_str())).chain(lines)
}

#[test]
fn every_flag_in_a_page_exists() -> Result<()> {
    let own = own_flags()?;
    let others = OTHERS.iter().flat_map(|(_, list)| list.split(' '));
    let known: BTreeSet<&str> = own.values().flatten().map(String::as_str).chain(others).collect();
    let mut problems = Vec::new();
    for page in pages()?.iter().filter(|page| page.path != FLAGS && !HISTORY.contains(&page.path.as_str())) {
        for (line, code) in command_lines(page) {
            let own_line = of_line(&own, code.trim_start_matches("$ ")).filter(|_| !code.contains(" | "));
            for flag in flags(code) {
                let is_known = match &own_line {
                    Some(of_line) => of_line.contains(flag) || is_of_a_bench(flag)?,
                    None => known.contains(flag) || is_of_a_bench(flag)?,
                };
                if !is_known {
                    problems.push(format!("{}:{line}: {flag} in `{code}`", page.path));
                }
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    Ok(())
}

#[test]
fn every_other_programs_flag_is_used() -> Result<()> {
    let pages = pages()?;
    let used: BTreeSet<&str> =
        pages.iter().flat_map(command_lines).flat_map(|(_, code)| flags(code)).collect();
    let hidden = pages.iter().flat_map(|page| &page.blocks).flat_map(|block| flags(&block.text));
    let used: BTreeSet<&str> = used.into_iter().chain(hidden).collect();
    let unused: Vec<&str> =
        OTHERS.iter().flat_map(|(_, list)| list.split(' ')).filter(|flag| !used.contains(flag)).collect();
    assert!(unused.is_empty(), "no page uses {unused:?}");
    Ok(())
}

/// The default values of both charts, by the chart's name.
fn charts() -> Result<BTreeMap<&'static str, Value>> {
    let read = |chart: &'static str| {
        let text = fs::read_to_string(repository().join("charts").join(chart).join("values.yaml"))?;
        Ok((chart, serde_saphyr::from_str(&text).with_context(|| chart)?))
    };
    ["nestor-management", "nestor-guest"].into_iter().map(read).collect()
}

/// Whether a chart has a value, written like `a.b`, `*.b`, `a[].b` or `a.b*`.
fn has(values: &Value, path: &[&str]) -> bool {
    let [first, rest @ ..] = path else { return true };
    let Value::Object(fields) = values else {
        // Fields of list items are in the schema only.
        return values.is_array();
    };
    let matching = fields.iter().filter(|(name, _)| match first.split_once('*') {
        Some((start, end)) => name.starts_with(start) && name.ends_with(end),
        None => name.as_str() == first.trim_end_matches("[]"),
    });
    let mut matching = matching.peekable();
    fields.is_empty() || matching.peek().is_some() && matching.any(|(_, value)| has(value, rest))
}

/// Code that looks like the path of a value: `a.b`, where `a` is a value of a chart.
fn value_path<'a>(code: &'a str, charts: &BTreeMap<&str, Value>) -> Option<Vec<&'a str>> {
    let code = code.split(['=', ':']).next()?;
    let is_path = code.chars().all(|c| c.is_ascii_alphanumeric() || ".*[]".contains(c));
    let parts: Vec<&str> = code.split('.').collect();
    let first = parts.first()?.trim_end_matches("[]");
    let is_file = ["md", "yaml", "yml", "rs", "json", "crt", "key"].contains(parts.last()?);
    let is_top = charts.values().any(|values| values.get(first).is_some());
    (is_path && parts.len() > 1 && !is_file && is_top).then_some(parts)
}

#[test]
fn every_chart_value_in_a_page_exists() -> Result<()> {
    let charts = charts()?;
    let (mut problems, mut seen) = (Vec::new(), 0);
    for page in pages()?.iter().filter(|page| page.path.starts_with("docs/guides/")) {
        let arguments = page.blocks.iter().flat_map(|block| {
            block.text.split("--set ").skip(1).flat_map(move |set| {
                let words = set.split_whitespace().next().unwrap_or_default().split(',');
                words.map(move |word| (block.line, word))
            })
        });
        for (line, code) in page.code.iter().map(|(line, code)| (*line, code.as_str())).chain(arguments) {
            let Some(path) = value_path(code, &charts) else { continue };
            seen += 1;
            if !charts.values().any(|values| has(values, &path)) {
                problems.push(format!("{}:{line}: no chart has the value {code}", page.path));
            }
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    assert!(seen > 30, "only {seen} values");
    Ok(())
}

/// Paths of all fields of a document.
fn leaves(value: &Value, path: &[String]) -> Vec<Vec<String>> {
    match value.as_object() {
        Some(fields) if !fields.is_empty() => fields
            .iter()
            .flat_map(|(name, value)| leaves(value, &[path, std::slice::from_ref(name)].concat()))
            .collect(),
        _ => vec![path.to_owned()],
    }
}

/// Whether an example of YAML abbreviates a name.
fn is_complete(block: &Block) -> bool {
    !block.text.lines().any(|line| line.trim() == "…")
}

#[test]
fn every_yaml_block_is_yaml_and_values_are_those_of_their_chart() -> Result<()> {
    let charts = charts()?;
    for page in pages()? {
        for block in page.blocks.iter().filter(|block| block.language == "yaml" && is_complete(block)) {
            let place = format!("{}:{}", page.path, block.line);
            let documents: Vec<Value> =
                serde_saphyr::from_multiple(&block.text).with_context(|| place.clone())?;
            let Some(Directive::Values(chart)) = &block.directive else { continue };
            let values = charts.get(chart.as_str()).with_context(|| format!("{place}: no chart {chart}"))?;
            for leaf in documents.iter().flat_map(|document| leaves(document, &[])) {
                let path: Vec<&str> = leaf.iter().map(String::as_str).collect();
                assert!(has(values, &path), "{place}: {chart} has no value {}", path.join("."));
            }
        }
    }
    Ok(())
}

#[test]
fn the_compatibility_page_has_the_versions_that_the_lab_builds() -> Result<()> {
    let modules = super::files()?.into_iter().filter(|file| file.ends_with("/go.mod"));
    let modules: String =
        modules.map(|file| fs::read_to_string(repository().join(file))).collect::<Result<_, _>>()?;
    let page = fs::read_to_string(repository().join("docs/reference/compatibility.md"))?;
    let mut seen = 0;
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, version, module] = cells[..] else { continue };
        let module = module.trim_matches('`');
        if module.contains(' ') || !module.contains('.') {
            continue;
        }
        let required = format!("{module} v{version} ");
        assert!(
            modules.lines().any(|line| line.trim_start().starts_with(&required)),
            "no go.mod has {required:?}"
        );
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} modules");
    Ok(())
}

#[test]
fn flags_and_values_are_found_in_code() {
    assert_eq!(flags("a --bc-d=1 x--y (--e) --- --F").collect::<Vec<_>>(), ["--bc-d", "--e"]);
    let charts = [("x", serde_json::json!({"a": {"b": {"c": 1}, "list": []}}))].into();
    assert_eq!(value_path("a.b.c=1", &charts), Some(vec!["a", "b", "c"]));
    assert_eq!(value_path("b.c", &charts), None);
    assert_eq!(value_path("a.yaml", &charts), None);
    let has = |path: &[&str]| has(&charts["x"], path);
    assert!(has(&["a", "b", "c"]) && has(&["a", "*", "c"]) && has(&["a", "list[]", "x"]));
    assert!(!has(&["a", "b", "d"]) && !has(&["a", "e"]));
}
