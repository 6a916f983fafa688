//! Output of the list of orphans as a table or as JSON.

use std::collections::BTreeMap;
use std::io::Write;

use kube_kit::quantity;
use process_kit::{duration, table};
use serde_json::{Value, json};

use super::find::{Kind, Orphan, Removal};

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// Human-readable table.
    Table,
    /// JSON for scripts.
    Json,
}

/// Result of each removal.
pub(super) type Outcomes = BTreeMap<(Kind, String), Result<(), String>>;

const HEADER: [&str; 6] = ["KIND", "NAME", "SIZE", "AGE", "REASON", "ACTION"];

/// Writes to standard output.
pub(super) fn print(
    format: Format,
    orphans: &[Orphan],
    remove: bool,
    outcomes: &Outcomes,
) -> std::io::Result<()> {
    let text = match format {
        Format::Table => list(orphans, remove, outcomes),
        Format::Json => json(orphans, remove, outcomes),
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn list(orphans: &[Orphan], remove: bool, outcomes: &Outcomes) -> String {
    if orphans.is_empty() {
        return "no orphans found\n".to_owned();
    }
    let row = |orphan: &Orphan| {
        vec![
            orphan.kind.to_string(),
            orphan.full_name(),
            orphan.bytes.map_or("-".to_owned(), |bytes| quantity::of(bytes).0),
            orphan.age.map_or("-".to_owned(), duration::show),
            orphan.reason.to_string(),
            action(orphan, remove, outcomes),
        ]
    };
    table::format(&HEADER, orphans.iter().map(row))
}

fn json(orphans: &[Orphan], remove: bool, outcomes: &Outcomes) -> String {
    let item = |orphan: &Orphan| {
        let mut item = json!({
            "kind": orphan.kind.to_string(),
            "namespace": orphan.namespace,
            "name": orphan.name,
            "sizeBytes": orphan.bytes,
            "ageSeconds": orphan.age.map(|age| age.as_secs()),
            "reason": orphan.reason.to_string(),
            "message": orphan.message,
            "removable": orphan.removal == Removal::Delete,
            "action": action(orphan, remove, outcomes),
        });
        if let Some(outcome) = outcomes.get(&(orphan.kind, orphan.full_name())) {
            item["removed"] = json!(outcome.is_ok());
        }
        item
    };
    let items: Vec<Value> = orphans.iter().map(item).collect();
    format!("{:#}\n", json!({"items": items}))
}

/// The action taken or proposed, or the reason for keeping the object.
fn action(orphan: &Orphan, remove: bool, outcomes: &Outcomes) -> String {
    match (&orphan.removal, outcomes.get(&(orphan.kind, orphan.full_name()))) {
        (_, Some(Ok(()))) => "removed".to_owned(),
        (_, Some(Err(error))) => format!("not removed: {error}"),
        (Removal::Delete, None) if remove => format!("would be removed: {}", orphan.message),
        (Removal::Delete, None) => orphan.message.clone(),
        (Removal::Keep(why), None) => format!("kept: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::reason::{OrphanReason, Reason};
    use super::*;

    fn orphan(name: &str, removal: Removal) -> Orphan {
        Orphan {
            kind: Kind::InfraVolume,
            namespace: None,
            name: name.to_owned(),
            uid: None,
            resource_version: None,
            bytes: Some(4 << 20),
            age: Some(Duration::from_secs(7200)),
            reason: Reason::Orphan(OrphanReason::NoPersistentVolume),
            message: "no PersistentVolume names it".to_owned(),
            removal,
        }
    }

    #[test]
    fn the_table_shows_proposed_and_completed_actions() {
        let orphans = [orphan("a", Removal::Delete), orphan("b", Removal::Keep("attached".to_owned()))];
        let shown = list(&orphans, true, &Outcomes::new());
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "KIND         NAME  SIZE  AGE  REASON              ACTION");
        assert_eq!(
            lines[1],
            "InfraVolume  a     4Mi   2h   NoPersistentVolume  would be removed: no PersistentVolume names it"
        );
        assert_eq!(lines[2], "InfraVolume  b     4Mi   2h   NoPersistentVolume  kept: attached");
        let outcomes = Outcomes::from([((Kind::InfraVolume, "a".to_owned()), Err("in use".to_owned()))]);
        assert!(list(&orphans, true, &outcomes).contains("not removed: in use"));
        let read: Value = serde_json::from_str(&json(&orphans, true, &outcomes)).unwrap();
        assert_eq!(read["items"][0]["removed"], json!(false));
        assert_eq!(
            (&read["items"][0]["ageSeconds"], &read["items"][1]["removable"]),
            (&json!(7200), &json!(false))
        );
    }
}
