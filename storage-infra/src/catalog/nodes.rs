//! The table of nodes, that is of virtual machines.

use infra_api::NodeSpec;
use rusqlite::{OptionalExtension, Row, params};
use uuid::Uuid;

use super::{Result, Tx, from_json, parse, to_json};

/// A node as the catalog keeps it.
#[derive(Debug, Clone)]
pub struct NodeRow {
    /// The virtual machine's UUID.
    pub uuid: Uuid,
    /// What was asked for.
    pub spec: NodeSpec,
}

fn read(row: &Row<'_>) -> rusqlite::Result<Result<NodeRow>> {
    let (uuid, spec): (String, String) = (row.get(0)?, row.get(1)?);
    Ok((|| Ok(NodeRow { uuid: parse("nodes.uuid", &uuid)?, spec: from_json("nodes.spec", &spec)? }))())
}

impl Tx<'_> {
    /// One node.
    pub fn node(&self, uuid: Uuid) -> Result<Option<NodeRow>> {
        self.0
            .prepare_cached("SELECT uuid, spec FROM nodes WHERE uuid = ?1")?
            .query_row([uuid.to_string()], read)
            .optional()?
            .transpose()
    }

    /// All nodes by UUID.
    pub fn nodes(&self) -> Result<Vec<NodeRow>> {
        self.0
            .prepare_cached("SELECT uuid, spec FROM nodes ORDER BY uuid")?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Adds or changes a node.
    pub fn put_node(&self, node: &NodeRow) -> Result<()> {
        self.0
            .prepare_cached(
                "INSERT INTO nodes (uuid, hypervisor, spec) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (uuid) DO UPDATE SET hypervisor = excluded.hypervisor, spec = excluded.spec",
            )?
            .execute(params![node.uuid.to_string(), node.spec.hypervisor, to_json(&node.spec)?])?;
        // Where to find the machine is noted with the bytes of what it has.
        self.0
            .prepare_cached(
                "UPDATE volumes SET record_due = 1 WHERE id IN (SELECT volume FROM attachments WHERE node = ?1)",
            )?
            .execute([node.uuid.to_string()])?;
        Ok(())
    }

    /// Removes a node. Fails while it has attachments.
    pub fn delete_node(&self, uuid: Uuid) -> Result<()> {
        self.0.prepare_cached("DELETE FROM nodes WHERE uuid = ?1")?.execute([uuid.to_string()])?;
        Ok(())
    }
}
