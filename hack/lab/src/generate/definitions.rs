//! Page of the custom resources, from the schemas of their types.

use anyhow::{Context, Result};
use crds::{AttachReason, BudgetReason, PoolReason};
use serde_json::Value;

use super::Generated;
use super::markdown::{cell, code, page as new_page, paragraph, table};

pub(super) fn page() -> Result<Generated> {
    let mut text = new_page("Custom resources", "the types in crds/");
    paragraph(
        &mut text,
        "The definitions are in [crds/yaml](../../crds/yaml), and in the chart nestor-management. \
         [Objects](objects.md) explains the names of the objects, and Nestor's labels and annotations.",
    );
    let mut definitions = crds::generate::all();
    definitions.reverse();
    for (file, yaml) in definitions {
        let definition: Value = serde_saphyr::from_str(&yaml).with_context(|| file)?;
        section(&mut text, &definition["spec"])?;
    }
    reasons(&mut text);
    Ok(Generated::page("crds", text))
}

fn section(page: &mut String, spec: &Value) -> Result<()> {
    let versions = spec["versions"].as_array().context("no versions")?;
    let names: Vec<&str> = versions.iter().filter_map(|version| version["name"].as_str()).collect();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let short = spec["names"]["shortNames"].as_array().into_iter().flatten().map(text);
    let schema = &versions[0]["schema"]["openAPIV3Schema"];
    let kind = text(&spec["names"]["kind"]);
    page.push_str(&format!("\n## {kind}\n"));
    paragraph(page, &cell(&text(&schema["description"])));
    let rows = [
        ("API group", code(&text(&spec["group"]))),
        ("versions", names.iter().map(|name| code(name)).collect::<Vec<_>>().join(", ")),
        (
            "names for kubectl",
            [text(&spec["names"]["plural"])]
                .into_iter()
                .chain(short)
                .map(|name| code(&name))
                .collect::<Vec<_>>()
                .join(", "),
        ),
        ("scope", text(&spec["scope"])),
        ("field selectors", selectors(&versions[0])),
    ];
    table(page, &["", ""], &rows.map(|(name, value)| vec![name.to_owned(), value]));
    let mut fields = Vec::new();
    for part in ["spec", "status"] {
        rules(page, part, &schema["properties"][part]);
        walk(part, &schema["properties"][part], &mut fields);
    }
    table(page, &["field", "type", "meaning"], &fields);
    Ok(())
}

/// Fields by which objects can be selected, besides name and namespace.
fn selectors(version: &Value) -> String {
    let fields = version["selectableFields"].as_array().into_iter().flatten();
    let paths = fields.filter_map(|field| field["jsonPath"].as_str());
    let paths: Vec<String> = paths.map(|path| code(path.trim_start_matches('.'))).collect();
    if paths.is_empty() { "–".to_owned() } else { paths.join(", ") }
}

/// The validation rules of a part.
fn rules(page: &mut String, part: &str, schema: &Value) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let (rule, message) = (&rule["rule"], rule["message"].as_str().unwrap_or_default());
        let rule = code(rule.as_str().unwrap_or_default());
        paragraph(page, &format!("The API server enforces {rule} for `{part}`: {}.", cell(message)));
    }
}

/// Rows of all fields below a path. Those of Kubernetes' own type Condition are left out.
fn walk(path: &str, schema: &Value, rows: &mut Vec<Vec<String>>) {
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        let description = field["description"].as_str().unwrap_or_default();
        rows.push(vec![code(&path), kind(field, required.contains(&name.as_str())), cell(description)]);
        if name == "conditions" {
            continue;
        }
        walk(&path, field, rows);
        walk(&format!("{path}[]"), &field["items"], rows);
    }
}

/// The type of a field, with its limits.
fn kind(field: &Value, is_required: bool) -> String {
    let own = |field: &Value| field["type"].as_str().unwrap_or("any").to_owned();
    let mut words = match own(field).as_str() {
        "array" => vec![format!("list of {}", own(&field["items"]))],
        other => vec![field["format"].as_str().unwrap_or(other).to_owned()],
    };
    for (limit, unit) in [
        ("minLength", "or more characters"),
        ("maxLength", "characters at most"),
        ("maxItems", "items at most"),
    ] {
        words.extend(field[limit].as_u64().map(|limit| format!("{limit} {unit}")));
    }
    if is_required {
        words.push("required".to_owned());
    }
    words.join(", ")
}

fn reasons(page: &mut String) {
    page.push_str("\n## Reasons of a VolumeAttachment\n");
    paragraph(page, "Values of `status.error.reason`, and of `reason` in the condition `Attached`:");
    let row = |(reason, meaning): (&str, &str)| vec![code(reason), cell(meaning)];
    let rows: Vec<_> = AttachReason::ALL.iter().map(|(one, meaning)| row((one.as_str(), meaning))).collect();
    table(page, &["reason", "meaning"], &rows);
    page.push_str("\n## Reasons of a StorageBudget\n");
    paragraph(page, "Values of `reason` in the condition `Applied`:");
    let rows: Vec<_> = BudgetReason::ALL.iter().map(|(one, meaning)| row((one.as_str(), meaning))).collect();
    table(page, &["reason", "meaning"], &rows);
    page.push_str("\n## Reasons of a StoragePool\n");
    paragraph(page, "Values of `reason` in the conditions `Healthy` and `Schedulable`:");
    let rows: Vec<_> = PoolReason::ALL.iter().map(|(one, meaning)| row((one.as_str(), meaning))).collect();
    table(page, &["reason", "meaning"], &rows);
}
