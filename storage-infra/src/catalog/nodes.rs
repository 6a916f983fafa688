//! Table of nodes (VMs).

use infra_api::NodeSpec;
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::{Result, Tx, from_json, parse, to_json};

/// A node in the catalog.
#[derive(Debug, Clone)]
pub struct NodeRow {
    /// UUID of the VM.
    pub uuid: Uuid,
    /// The spec of the last request.
    pub spec: NodeSpec,
}

fn read(row: &Row<'_>) -> db::Result<Result<NodeRow>> {
    let (uuid, spec): (String, String) = (row.get(0)?, row.get(1)?);
    Ok((|| Ok(NodeRow { uuid: parse("nodes.uuid", &uuid)?, spec: from_json("nodes.spec", &spec)? }))())
}

impl Tx<'_> {
    /// Reads one node.
    pub fn node(&self, uuid: Uuid) -> Result<Option<NodeRow>> {
        self.0
            .prepare_cached("SELECT uuid, spec FROM nodes WHERE uuid = ?1")?
            .query_row([uuid.to_string()], read)
            .optional()?
            .transpose()
    }

    /// Reads all nodes, ordered by UUID.
    pub fn nodes(&self) -> Result<Vec<NodeRow>> {
        self.0
            .prepare_cached("SELECT uuid, spec FROM nodes ORDER BY uuid")?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Inserts or updates a node.
    pub fn put_node(&self, node: &NodeRow) -> Result<()> {
        self.0
            .prepare_cached(
                "INSERT INTO nodes (uuid, hypervisor, spec) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (uuid) DO UPDATE SET hypervisor = excluded.hypervisor, spec = excluded.spec",
            )?
            .execute(params![node.uuid.to_string(), node.spec.hypervisor, to_json(&node.spec)?])?;
        // The on-disk records of attached volumes contain the node's spec.
        self.0
            .prepare_cached(
                "UPDATE volumes SET record_due = TRUE WHERE id IN (SELECT volume FROM attachments WHERE node = ?1)",
            )?
            .execute([node.uuid.to_string()])?;
        Ok(())
    }

    /// Whether the VM was saved and was not observed running since.
    pub fn is_saved(&self, uuid: Uuid) -> Result<bool> {
        Ok(self.0.prepare_cached("SELECT 1 FROM saved_nodes WHERE node = ?1")?.exists([uuid.to_string()])?)
    }

    /// Sets since when the VM is saved (RFC 3339), or that it is not.
    pub fn set_saved(&self, uuid: Uuid, since: Option<&str>) -> Result<()> {
        let uuid = uuid.to_string();
        match since {
            Some(since) => self
                .0
                .prepare_cached(
                    "INSERT INTO saved_nodes (node, since) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
                )?
                .execute([uuid.as_str(), since])?,
            None => self.0.prepare_cached("DELETE FROM saved_nodes WHERE node = ?1")?.execute([uuid])?,
        };
        Ok(())
    }

    /// The recorded host of a hypervisor.
    pub fn host(&self, hypervisor: &str) -> Result<Option<Uuid>> {
        let found: Option<String> = self
            .0
            .prepare_cached("SELECT host FROM hypervisor_hosts WHERE hypervisor = ?1")?
            .query_row([hypervisor], |row| row.get(0))
            .optional()?;
        found.map(|host| parse("hypervisor_hosts.host", &host)).transpose()
    }

    /// Records the host of a hypervisor if none is recorded.
    pub fn note_host(&self, hypervisor: &str, host: Uuid) -> Result<()> {
        self.0
            .prepare_cached(
                "INSERT INTO hypervisor_hosts (hypervisor, host) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
            )?
            .execute([hypervisor, &host.to_string()])?;
        Ok(())
    }

    /// Removes the recorded host of a hypervisor.
    pub fn forget_host(&self, hypervisor: &str) -> Result<()> {
        self.0.prepare_cached("DELETE FROM hypervisor_hosts WHERE hypervisor = ?1")?.execute([hypervisor])?;
        Ok(())
    }

    /// Deletes a node. Fails while it has attachments.
    pub fn delete_node(&self, uuid: Uuid) -> Result<()> {
        self.0.prepare_cached("DELETE FROM nodes WHERE uuid = ?1")?.execute([uuid.to_string()])?;
        Ok(())
    }
}
