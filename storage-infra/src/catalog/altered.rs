//! Table of disks that are not as the server attached them.

use std::collections::HashMap;

use infra_api::VolumeId;
use uuid::Uuid;

use super::db::{self, Row, params};
use super::{Result, Tx, parse};

pub(super) const ALTERED_DISKS: &str = "
-- Attached disks that differ from what the server attached.
CREATE TABLE altered_disks (
    volume    TEXT NOT NULL REFERENCES volumes(id) ON DELETE CASCADE,
    -- Not a foreign key: the VM may be unregistered.
    node      TEXT NOT NULL,
    -- 1 if writes of the VM are, or may be, elsewhere than in the volume's data. It is cleared only when the disk was observed
    -- to be right again, or by an operator.
    diverted  INTEGER NOT NULL,
    message   TEXT NOT NULL,
    since     TEXT NOT NULL,
    PRIMARY KEY (volume, node)
) STRICT;
-- Independent of the code: the volume of such a disk is not attached.
CREATE TRIGGER volumes_of_altered_disks_are_not_attached BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM altered_disks WHERE volume = NEW.volume)
BEGIN SELECT RAISE(ABORT, 'a disk of the volume is not as it was attached'); END;
CREATE TRIGGER detached_disks_are_not_altered AFTER DELETE ON attachments
BEGIN DELETE FROM altered_disks WHERE volume = OLD.volume AND node = OLD.node AND NOT diverted; END;
";

/// The same in PostgreSQL.
pub(super) const ALTERED_DISKS_POSTGRES: &str = r#"
CREATE TABLE altered_disks (
    volume    TEXT COLLATE "C" NOT NULL REFERENCES volumes(id) ON DELETE CASCADE,
    node      TEXT COLLATE "C" NOT NULL,
    diverted  BIGINT NOT NULL,
    message   TEXT COLLATE "C" NOT NULL,
    since     TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (volume, node)
);
CREATE FUNCTION check_altered_disks() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM altered_disks WHERE volume = NEW.volume) THEN
        RAISE EXCEPTION 'a disk of the volume is not as it was attached';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER volumes_of_altered_disks_are_not_attached BEFORE INSERT ON attachments
FOR EACH ROW EXECUTE FUNCTION check_altered_disks();
CREATE FUNCTION forget_altered_disk() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM altered_disks WHERE volume = OLD.volume AND node = OLD.node AND diverted = 0;
    RETURN NULL;
END $$;
CREATE TRIGGER detached_disks_are_not_altered AFTER DELETE ON attachments
FOR EACH ROW EXECUTE FUNCTION forget_altered_disk();
"#;

/// A disk that is not as the server attached it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlteredDisk {
    /// The VM.
    pub node: Uuid,
    /// Whether writes of the VM are, or may be, elsewhere than in the volume's data.
    pub diverted: bool,
    /// What was found, and what to do.
    pub message: String,
    /// RFC 3339.
    pub since: String,
}

fn altered(row: &Row<'_>, first: usize) -> db::Result<(String, bool, String, String)> {
    Ok((row.get(first)?, row.get(first + 1)?, row.get(first + 2)?, row.get(first + 3)?))
}

fn decode((node, diverted, message, since): (String, bool, String, String)) -> Result<AlteredDisk> {
    Ok(AlteredDisk { node: parse("altered_disks.node", &node)?, diverted, message, since })
}

impl Tx<'_> {
    /// Disks of a volume that are not as the server attached them, first those whose writes are elsewhere.
    pub fn altered_disks(&self, volume: &VolumeId) -> Result<Vec<AlteredDisk>> {
        let sql = "SELECT node, diverted, message, since FROM altered_disks WHERE volume = ?1 ORDER BY diverted DESC, node";
        let rows = self.0.prepare_cached(sql)?.query_map([volume.as_str()], |row| altered(row, 0))?;
        rows.map(|row| decode(row?)).collect()
    }

    /// All disks that are not as the server attached them, by volume in the same order.
    pub fn all_altered_disks(&self) -> Result<HashMap<VolumeId, Vec<AlteredDisk>>> {
        let sql =
            "SELECT volume, node, diverted, message, since FROM altered_disks ORDER BY diverted DESC, node";
        let read = |row: &Row<'_>| Ok((row.get::<String>(0)?, altered(row, 1)?));
        let mut all: HashMap<VolumeId, Vec<AlteredDisk>> = HashMap::new();
        for row in self.0.prepare_cached(sql)?.query_map([], read)? {
            let (volume, disk) = row?;
            all.entry(parse("altered_disks.volume", &volume)?).or_default().push(decode(disk)?);
        }
        Ok(all)
    }

    /// Records a disk that is not as the server attached it. One whose writes are elsewhere remains so.
    pub fn set_altered_disk(&self, volume: &VolumeId, disk: &AlteredDisk) -> Result<()> {
        let sql = "INSERT INTO altered_disks (volume, node, diverted, message, since) VALUES (?1, ?2, ?3, ?4, ?5) \
                   ON CONFLICT (volume, node) DO UPDATE SET diverted = excluded.diverted, message = excluded.message";
        self.0.prepare_cached(sql)?.execute(params![
            volume.as_str(),
            disk.node.to_string(),
            disk.diverted,
            disk.message,
            disk.since
        ])?;
        Ok(())
    }

    /// Forgets that a disk is not as the server attached it. False if that is not known.
    pub fn clear_altered_disk(&self, volume: &VolumeId, node: Uuid) -> Result<bool> {
        let sql = "DELETE FROM altered_disks WHERE volume = ?1 AND node = ?2";
        Ok(self.0.prepare_cached(sql)?.execute(params![volume.as_str(), node.to_string()])? > 0)
    }

    /// Forgets all disks of a volume that are not as the server attached them. False if there are none.
    pub fn clear_altered_disks(&self, volume: &VolumeId) -> Result<bool> {
        let sql = "DELETE FROM altered_disks WHERE volume = ?1";
        Ok(self.0.prepare_cached(sql)?.execute([volume.as_str()])? > 0)
    }
}
