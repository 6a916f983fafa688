//! Tables of suspensions: volumes and pools that must not be used, and the nodes that are paused for them.

use std::collections::HashMap;

use infra_api::{PoolName, Suspension, VolumeId};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::transfers::Hold;
use super::volumes::VolumeRow;
use super::{Result, Tx, parse};

pub(super) const SUSPENSIONS: &str = "
CREATE TABLE suspended_volumes (
    volume  TEXT PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    reason  TEXT NOT NULL,
    since   TEXT NOT NULL
) STRICT;
CREATE TABLE suspended_pools (
    pool    TEXT PRIMARY KEY REFERENCES pools(name) ON DELETE CASCADE,
    reason  TEXT NOT NULL,
    since   TEXT NOT NULL
) STRICT;
-- Nodes that the server paused, or was about to pause, because of a suspension. Only these are resumed.
CREATE TABLE paused_nodes (
    node    TEXT PRIMARY KEY REFERENCES nodes(uuid) ON DELETE CASCADE
) STRICT;
-- Independent of the code: a suspended volume is not attached.
CREATE TRIGGER suspended_volumes_are_not_attached BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM suspended_volumes WHERE volume = NEW.volume)
     OR EXISTS (SELECT 1 FROM suspended_pools s JOIN volumes v ON v.pool = s.pool WHERE v.id = NEW.volume)
BEGIN SELECT RAISE(ABORT, 'the volume or its pool is suspended'); END;
";

/// Condition of suspended volumes, by themselves or with their pool.
const SUSPENDED: &str =
    "(id IN (SELECT volume FROM suspended_volumes) OR pool IN (SELECT pool FROM suspended_pools))";

/// What is suspended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Suspended {
    /// A volume.
    Volume(VolumeId),
    /// A pool with all its volumes.
    Pool(PoolName),
}

impl Suspended {
    fn table(&self) -> (&'static str, &'static str, &str) {
        match self {
            Self::Volume(id) => ("suspended_volumes", "volume", id.as_str()),
            Self::Pool(name) => ("suspended_pools", "pool", name.as_str()),
        }
    }
}

fn suspension(row: &Row<'_>) -> db::Result<Suspension> {
    Ok(Suspension { reason: row.get(0)?, since: row.get(1)? })
}

/// All suspensions.
#[derive(Debug, Default)]
pub struct AllSuspensions {
    volumes: HashMap<VolumeId, Suspension>,
    pools: HashMap<PoolName, Suspension>,
}

impl AllSuspensions {
    /// The suspension of a volume itself.
    pub fn of(&self, volume: &VolumeId) -> Option<&Suspension> {
        self.volumes.get(volume)
    }

    /// The suspension that holds a volume: its own, or that of its pool.
    pub fn hold(&self, row: &VolumeRow) -> Option<Hold> {
        let own = || Some((Suspended::Volume(row.id.clone()), self.volumes.get(&row.id)?));
        let pool = || Some((Suspended::Pool(row.pool.clone()), self.pools.get(&row.pool)?));
        own().or_else(pool).map(|(what, suspension)| Hold::Suspended(what, suspension.clone()))
    }
}

impl Tx<'_> {
    /// All suspensions.
    pub fn suspensions(&self) -> Result<AllSuspensions> {
        let mut all = AllSuspensions::default();
        for (id, suspension) in self.suspended("SELECT volume, reason, since FROM suspended_volumes")? {
            all.volumes.insert(parse("suspended_volumes.volume", &id)?, suspension);
        }
        for (name, suspension) in self.suspended("SELECT pool, reason, since FROM suspended_pools")? {
            all.pools.insert(parse("suspended_pools.pool", &name)?, suspension);
        }
        Ok(all)
    }

    fn suspended(&self, sql: &str) -> Result<Vec<(String, Suspension)>> {
        let read = |row: &Row<'_>| Ok((row.get(0)?, Suspension { reason: row.get(1)?, since: row.get(2)? }));
        Ok(self.0.prepare_cached(sql)?.query_map([], read)?.collect::<db::Result<_>>()?)
    }

    /// Whether anything is suspended, or still paused because of that.
    pub fn has_suspensions(&self) -> Result<bool> {
        let sql = "SELECT 1 WHERE EXISTS (SELECT 1 FROM suspended_volumes) OR EXISTS (SELECT 1 FROM suspended_pools) \
                   OR EXISTS (SELECT 1 FROM paused_nodes)";
        Ok(self.0.prepare_cached(sql)?.exists([])?)
    }

    /// The suspension of a volume itself, or of a pool.
    pub fn suspension(&self, of: &Suspended) -> Result<Option<Suspension>> {
        let (table, key, id) = of.table();
        let sql = format!("SELECT reason, since FROM {table} WHERE {key} = ?1");
        Ok(self.0.prepare_cached(&sql)?.query_row([id], suspension).optional()?)
    }

    /// The suspension that holds a volume: its own, or that of its pool.
    pub fn suspended_hold(&self, volume: &VolumeId) -> Result<Option<Hold>> {
        let own = Suspended::Volume(volume.clone());
        if let Some(suspension) = self.suspension(&own)? {
            return Ok(Some(Hold::Suspended(own, suspension)));
        }
        let sql = "SELECT s.pool, s.reason, s.since FROM suspended_pools s JOIN volumes v ON v.pool = s.pool WHERE v.id = ?1";
        let read = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        let found: Option<(String, String, String)> =
            self.0.prepare_cached(sql)?.query_row([volume.as_str()], read).optional()?;
        let Some((pool, reason, since)) = found else { return Ok(None) };
        let pool = Suspended::Pool(parse("suspended_pools.pool", &pool)?);
        Ok(Some(Hold::Suspended(pool, Suspension { reason, since })))
    }

    /// Suspends a volume or a pool. Of one that is suspended, only the reason changes.
    pub fn suspend(&self, what: &Suspended, suspension: &Suspension) -> Result<()> {
        let (table, key, id) = what.table();
        let sql = format!(
            "INSERT INTO {table} ({key}, reason, since) VALUES (?1, ?2, ?3) \
             ON CONFLICT ({key}) DO UPDATE SET reason = excluded.reason"
        );
        self.0.prepare_cached(&sql)?.execute(params![id, suspension.reason, suspension.since])?;
        Ok(())
    }

    /// Ends a suspension. False if there was none.
    pub fn end_suspension(&self, of: &Suspended) -> Result<bool> {
        let (table, key, id) = of.table();
        let sql = format!("DELETE FROM {table} WHERE {key} = ?1");
        Ok(self.0.prepare_cached(&sql)?.execute([id])? > 0)
    }

    /// Volumes of a suspension.
    pub fn volumes_of(&self, suspended: &Suspended) -> Result<Vec<VolumeId>> {
        let sql = match suspended {
            Suspended::Volume(_) => "SELECT id FROM volumes WHERE id = ?1",
            Suspended::Pool(_) => "SELECT id FROM volumes WHERE pool = ?1 ORDER BY id",
        };
        let (_, _, id) = suspended.table();
        self.0
            .prepare_cached(sql)?
            .query_map([id], |row| row.get::<String>(0))?
            .map(|id| parse("volumes.id", &id?))
            .collect()
    }

    /// Attachments of suspended volumes, in any state: the node, and the UUID of the disk.
    pub fn suspended_disks(&self) -> Result<Vec<(Uuid, Uuid)>> {
        let sql = format!(
            "SELECT a.node, v.disk_uuid FROM (SELECT id, disk_uuid FROM volumes WHERE {SUSPENDED}) v \
             JOIN attachments a ON a.volume = v.id"
        );
        self.0
            .prepare_cached(&sql)?
            .query_map([], |row| Ok((row.get::<String>(0)?, row.get::<String>(1)?)))?
            .map(|row| {
                let (node, disk) = row?;
                Ok((parse("attachments.node", &node)?, parse("volumes.disk_uuid", &disk)?))
            })
            .collect()
    }

    /// Nodes that the server paused, or was about to pause.
    pub fn paused_nodes(&self) -> Result<Vec<Uuid>> {
        self.0
            .prepare_cached("SELECT node FROM paused_nodes ORDER BY node")?
            .query_map([], |row| row.get::<String>(0))?
            .map(|uuid| parse("paused_nodes.node", &uuid?))
            .collect()
    }

    /// Sets whether the server paused a node.
    pub fn set_paused(&self, node: Uuid, paused: bool) -> Result<()> {
        let sql = match paused {
            true => "INSERT INTO paused_nodes (node) VALUES (?1) ON CONFLICT DO NOTHING",
            false => "DELETE FROM paused_nodes WHERE node = ?1",
        };
        self.0.prepare_cached(sql)?.execute([node.to_string()])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::postgres::testing::{Backend, Scratch};

    #[test]
    fn the_schema_rejects_attachments_of_suspended_volumes_and_pools() {
        Backend::each().iter().for_each(|backend| backend.scratch(rejects));
    }

    fn rejects(catalog: &Scratch<'_>) {
        let pool = |name: &str| {
            format!(
                "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
                 VALUES ('{name}', '{name}', 'file', '/{name}', '{{}}', FALSE, TRUE);"
            )
        };
        let volume = |id: &str, pool: &str| {
            format!(
                "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at) \
                 VALUES ('{id}', '{pool}', 1, '{id}', 'ready', '{{}}', 'now');"
            )
        };
        let rows = [
            pool("p"),
            pool("q"),
            volume("itself", "p"),
            volume("with-pool", "q"),
            volume("free", "p"),
            "INSERT INTO nodes VALUES ('n', 'h', '{}');".to_owned(),
            "INSERT INTO suspended_volumes VALUES ('itself', 'r', 'now');".to_owned(),
            "INSERT INTO suspended_pools VALUES ('q', 'r', 'now');".to_owned(),
        ];
        catalog.run(&rows.concat());
        let attach = |volume: &str| {
            let sql = "INSERT INTO attachments (id, volume, node, read_only, access, state, created_at) \
                       VALUES (?1, ?1, 'n', TRUE, 'multi-node-read-only', 'attaching', 'now')";
            catalog.execute(sql, [volume])
        };
        for volume in ["itself", "with-pool"] {
            assert!(attach(volume).unwrap_err().contains("suspended"), "{volume}");
        }
        assert_eq!(attach("free"), Ok(1));
    }
}
