//! Page of the charts' values, from the comments in values.yaml and the types in values.schema.json.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Generated;
use super::markdown::{cell, code, page as new_page, paragraph, table};
use crate::run::repository;

const CHARTS: [&str; 2] = ["nestor-management", "nestor-guest"];

/// A value of a chart, in the order of the file.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    path: Vec<String>,
    comment: String,
    /// Whether its fields are values of their own.
    is_section: bool,
}

pub(super) fn page() -> Result<Generated> {
    let mut text = new_page("Chart values", "values.yaml and values.schema.json of the charts");
    paragraph(
        &mut text,
        "[Install Nestor](../guides/install.md) explains the most important values. The schemas refuse values that are not \
         listed here.",
    );
    for chart in CHARTS {
        text.push_str(&format!("\n## {chart}\n"));
        table(&mut text, &["value", "default", "type", "meaning"], &rows(chart)?);
    }
    Ok(Generated::page("chart-values", text))
}

fn rows(chart: &str) -> Result<Vec<Vec<String>>> {
    let folder = repository().join("charts").join(chart);
    let read = |name: &str| fs::read_to_string(folder.join(name)).with_context(|| format!("{chart}/{name}"));
    let text = read("values.yaml")?;
    let values: Value = serde_saphyr::from_str(&text).context("values.yaml")?;
    let schema: Value = serde_json::from_str(&read("values.schema.json")?).context("values.schema.json")?;
    Ok(entries(&text).iter().map(|entry| row(entry, &values, &schema)).collect())
}

fn row(entry: &Entry, values: &Value, schema: &Value) -> Vec<String> {
    let default = entry.path.iter().fold(values, |value, name| &value[name]);
    let kind = entry.path.iter().fold(schema, |part, name| field(resolved(part, schema), name));
    let kind = if entry.is_section { String::new() } else { kind_of(resolved(kind, schema)) };
    let default = if entry.is_section { String::new() } else { shown(default) };
    vec![code(&entry.path.join(".")), default, kind, fields_listed(&entry.comment)]
}

fn shown(default: &Value) -> String {
    match default {
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => code(text),
        other => code(&other.to_string()),
    }
}

fn resolved<'a>(part: &'a Value, schema: &'a Value) -> &'a Value {
    match part["$ref"].as_str().and_then(|path| path.strip_prefix("#/definitions/")) {
        Some(name) => &schema["definitions"][name],
        None => part,
    }
}

fn field<'a>(part: &'a Value, name: &str) -> &'a Value {
    let own = &part["properties"][name];
    if own.is_null() { &part["additionalProperties"] } else { own }
}

fn kind_of(part: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match (part["enum"].as_array(), part["type"].as_str()) {
        (Some(choices), _) => choices.iter().map(|choice| code(&text(choice))).collect::<Vec<_>>().join(", "),
        (None, Some("array")) => "list".to_owned(),
        (None, Some(kind)) => kind.to_owned(),
        (None, None) => {
            part["type"].as_array().into_iter().flatten().map(text).collect::<Vec<_>>().join(", ")
        }
    }
}

/// The values in a file with the comments before them. Values whose fields are on lines of their own are listed if they
/// have a comment.
fn entries(text: &str) -> Vec<Entry> {
    let mut reader = Reader::default();
    text.lines().for_each(|line| reader.read(line));
    reader.found
}

#[derive(Default)]
struct Reader {
    found: Vec<Entry>,
    /// Names of the current value, with their indentation.
    path: Vec<(usize, String)>,
    comment: String,
    /// Indentation of a value with any fields, which are not values of their own.
    free_form: Option<usize>,
}

impl Reader {
    fn read(&mut self, line: &str) {
        let trimmed = line.trim_start();
        let depth = line.len() - trimmed.len();
        if let Some(text) = trimmed.strip_prefix('#') {
            self.comment.push_str(text);
            self.comment.push('\n');
        } else if self.free_form.is_none_or(|above| depth <= above) {
            self.free_form = None;
            match trimmed.split_once(':') {
                Some((name, value)) => self.add(depth, name, value.trim()),
                None => self.comment.clear(),
            }
        }
    }

    fn add(&mut self, depth: usize, name: &str, value: &str) {
        self.path.retain(|(above, _)| *above < depth);
        self.path.push((depth, name.to_owned()));
        if value.is_empty() && ["resources", "tolerations"].contains(&name) {
            self.free_form = Some(depth);
        }
        let is_section = value.is_empty() && self.free_form.is_none();
        if !is_section || !self.comment.is_empty() {
            let path = self.path.iter().map(|(_, name)| name.clone()).collect();
            self.found.push(Entry { path, comment: std::mem::take(&mut self.comment), is_section });
        }
    }
}

/// A comment as the text of a cell. Indented lines of a comment are fields of a list's items.
fn fields_listed(comment: &str) -> String {
    let mut text = String::new();
    for line in comment.lines() {
        let field = line.strip_prefix("   ").filter(|rest| !rest.starts_with(' '));
        match field.and_then(|line| line.split_once("  ")) {
            Some((name, meaning)) => {
                let separator = if text.ends_with(':') { "" } else { ";" };
                text.push_str(&format!("{separator} {}: {}", code(name.trim()), cell(meaning)));
            }
            None => text.push_str(&format!(" {}", cell(line))),
        }
    }
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_listed_with_their_comments() {
        let text =
            "# First.\na:\n  b: 1\n  # Two\n  # lines.\n  resources:\n    requests: {cpu: 1}\n\nlist: []\n";
        let entry = |path: &[&str], comment: &str, is_section| Entry {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            comment: comment.to_owned(),
            is_section,
        };
        let expected = [
            entry(&["a"], " First.\n", true),
            entry(&["a", "b"], "", false),
            entry(&["a", "resources"], " Two\n lines.\n", false),
            entry(&["list"], "", false),
        ];
        assert_eq!(entries(text), expected);
    }

    #[test]
    fn fields_of_items_become_a_list() {
        let comment =
            " Accounts. Fields:\n   name       its name\n              and more\n   size       bytes\n";
        assert_eq!(fields_listed(comment), "Accounts. Fields: `name`: its name and more; `size`: bytes");
    }
}
