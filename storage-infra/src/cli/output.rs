//! What the client's verbs print: tables for people, JSON for scripts.

use std::io::Write;

use clap::ValueEnum;
use infra_api::{Attachment, Capacity, Labels, Node, Pool, Volume};
use serde::Serialize;

use super::size::show;

/// The shape of what is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For people.
    Table,
    /// For scripts: the API's own JSON.
    Json,
}

/// An object that has a row in a table.
pub(super) trait Row: Serialize {
    const HEAD: &'static [&'static str];
    fn cells(&self) -> Vec<String>;
}

fn labels(labels: &Labels) -> String {
    let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    dash(pairs.join(","))
}

fn dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

impl Row for Pool {
    const HEAD: &'static [&'static str] = &[
        "NAME", "HEALTHY", "CORDONED", "CAPACITY", "RESERVED", "FREE", "REFLINK", "LABELS", "PATH", "MESSAGE",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.to_string(),
            self.healthy.to_string(),
            self.cordoned.to_string(),
            show(self.capacity_bytes),
            show(self.reserved_bytes),
            show(self.free_bytes),
            self.reflink.to_string(),
            labels(&self.labels),
            self.path.clone(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Volume {
    const HEAD: &'static [&'static str] =
        &["ID", "CAPACITY", "POOL", "STATE", "DISK UUID", "ATTACHED TO", "CREATED"];

    fn cells(&self) -> Vec<String> {
        let nodes: Vec<String> = self.attached_to.iter().map(ToString::to_string).collect();
        vec![
            self.id.to_string(),
            show(self.capacity_bytes),
            self.pool.to_string(),
            self.state.to_string(),
            self.disk_uuid.to_string(),
            dash(nodes.join(",")),
            self.created_at.clone(),
        ]
    }
}

impl Row for Node {
    const HEAD: &'static [&'static str] = &["UUID", "NAME", "HYPERVISOR", "ZONE", "STATE", "MESSAGE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.uuid.to_string(),
            self.name.clone(),
            self.hypervisor.clone(),
            dash(self.zone.clone().unwrap_or_default()),
            self.state.to_string(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Attachment {
    const HEAD: &'static [&'static str] =
        &["ID", "VOLUME", "NODE", "STATE", "ACCESS", "READ-ONLY", "DISK UUID", "MESSAGE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.volume.to_string(),
            self.node.to_string(),
            self.state.to_string(),
            self.access.to_string(),
            self.read_only.to_string(),
            self.disk_uuid.to_string(),
            dash(self.message.clone().unwrap_or_default()),
        ]
    }
}

impl Row for Capacity {
    const HEAD: &'static [&'static str] = &["FREE", "LARGEST VOLUME"];

    fn cells(&self) -> Vec<String> {
        vec![show(self.free_bytes), show(self.max_volume_bytes)]
    }
}

fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&head).chain(rows) {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn put(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has read enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Prints a list.
pub(super) fn many<T: Row>(format: Format, items: &[T]) -> anyhow::Result<()> {
    match format {
        Format::Json => put(&format!("{}\n", serde_json::to_string_pretty(items)?)),
        Format::Table => {
            let rows: Vec<Vec<String>> = items.iter().map(Row::cells).collect();
            put(&table(T::HEAD, &rows))
        }
    }
}

/// Prints one object.
pub(super) fn one<T: Row>(format: Format, item: &T) -> anyhow::Result<()> {
    match format {
        Format::Json => put(&format!("{}\n", serde_json::to_string_pretty(item)?)),
        Format::Table => put(&table(T::HEAD, &[item.cells()])),
    }
}

/// Prints what was done, for people only.
pub(super) fn done(format: Format, text: &str) -> anyhow::Result<()> {
    match format {
        Format::Json => Ok(()),
        Format::Table => put(&format!("{text}\n")),
    }
}
