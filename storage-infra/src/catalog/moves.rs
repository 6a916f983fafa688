//! Table of moves: volumes whose data is being brought to another pool. The pool in the volume's own row has the data at
//! every moment; the row of the move names the pool of the other file.

use std::collections::HashMap;

use infra_api::{MovePhase, PoolName, VolumeId};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::{CatalogError, Result, Tx, from_word, parse};

pub(super) const MOVES: &str = "
CREATE TABLE moves (
    volume      TEXT PRIMARY KEY REFERENCES volumes(id),
    -- The pool of the other file: the target until the volume's row names it, from then on the source.
    pool        TEXT NOT NULL REFERENCES pools(name),
    phase       TEXT NOT NULL CHECK (phase IN ('waiting', 'copying', 'mirroring', 'switching', 'removing')),
    -- Bytes reserved in that pool.
    reserved    INTEGER NOT NULL,
    -- Bytes per second.
    rate        INTEGER,
    -- 1 once the cancellation was requested.
    cancelled   INTEGER NOT NULL DEFAULT 0,
    -- The node that is paused for the switch.
    paused      TEXT,
    message     TEXT,
    started_at  TEXT NOT NULL
) STRICT;
CREATE INDEX moves_by_pool ON moves(pool);
CREATE TRIGGER new_move_reserves AFTER INSERT ON moves
BEGIN UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool; END;
CREATE TRIGGER old_move_frees AFTER DELETE ON moves
BEGIN UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool; END;
CREATE TRIGGER changed_move_reserves AFTER UPDATE OF pool, reserved ON moves
BEGIN
    UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool;
    UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool;
END;
-- Independent of the code: nothing gets the disk while its file is copied without a VM, or is exchanged.
CREATE TRIGGER moving_volumes_are_not_attached BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM moves WHERE volume = NEW.volume AND phase IN ('copying', 'switching'))
BEGIN SELECT RAISE(ABORT, 'the file of the volume is being moved'); END;
-- The pool of a volume changes only by a move.
CREATE TRIGGER volumes_change_their_pool_by_moves BEFORE UPDATE OF pool ON volumes
WHEN NEW.pool <> OLD.pool
     AND NOT EXISTS (SELECT 1 FROM moves WHERE volume = NEW.id AND pool = NEW.pool AND phase IN ('copying', 'switching'))
BEGIN SELECT RAISE(ABORT, 'the volume is not being moved to that pool'); END;
-- The record beside the data names the move.
CREATE TRIGGER revision_after_new_pool AFTER UPDATE OF pool ON volumes
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision), record_due = 1 WHERE id = NEW.id;
END;
CREATE TRIGGER record_due_after_move AFTER DELETE ON moves
BEGIN UPDATE volumes SET record_due = 1 WHERE id = OLD.volume; END;
";

pub(super) const MOVE_NOTES: &str = "
-- What is durably known about the other file, beyond the phase.
ALTER TABLE moves ADD COLUMN note TEXT CHECK (note IN ('pivot-asked', 'abort-asked', 'used'));
-- The file that an operator chose where it could not be known which one the VM had used.
ALTER TABLE moves ADD COLUMN chosen TEXT CHECK (chosen IN ('old', 'new'));
";

/// What is durably known about the new file of a move. Written before the effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveNote {
    /// This server asked the VM to change to it.
    PivotAsked,
    /// This server asked to end the copy into it.
    AbortAsked,
    /// A VM had it open as its disk: it has everything that the old file has.
    Used,
}

/// One of the two files of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one from which the volume is moved.
    Old,
    /// The one to which it is moved.
    New,
}

const NOTES: [(MoveNote, &str); 3] =
    [(MoveNote::PivotAsked, "pivot-asked"), (MoveNote::AbortAsked, "abort-asked"), (MoveNote::Used, "used")];
const SIDES: [(Side, &str); 2] = [(Side::Old, "old"), (Side::New, "new")];

fn word<T: PartialEq>(words: &[(T, &'static str)], value: &T) -> Option<&'static str> {
    words.iter().find(|(one, _)| one == value).map(|(_, word)| *word)
}

fn value<T: Copy>(column: &str, words: &[(T, &str)], text: &str) -> Result<T> {
    let found = words.iter().find(|(_, word)| *word == text).map(|(one, _)| *one);
    found.ok_or_else(|| CatalogError::Corrupt(format!("{column} {text:?} is unknown")))
}

/// A move that is not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveRow {
    /// The volume.
    pub volume: VolumeId,
    /// The pool of the other file: the target until the volume's row names it, from then on the source.
    pub pool: PoolName,
    /// Its step.
    pub phase: MovePhase,
    /// Bytes reserved in that pool.
    pub reserved: u64,
    /// Maximum bytes copied per second.
    pub rate: Option<u64>,
    /// Whether its cancellation was requested.
    pub cancelled: bool,
    /// The node that is paused for the switch.
    pub paused: Option<Uuid>,
    /// What is known about the new file.
    pub note: Option<MoveNote>,
    /// The file that an operator chose.
    pub chosen: Option<Side>,
    /// What it waits for.
    pub message: Option<String>,
    /// Since when, RFC 3339.
    pub started_at: String,
}

const COLUMNS: &str =
    "volume, pool, phase, reserved, rate, cancelled, paused, message, started_at, note, chosen";

fn read(row: &Row<'_>) -> db::Result<Result<MoveRow>> {
    let (volume, pool, phase): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
    let (reserved, rate, cancelled) = (row.get(3)?, row.get(4)?, row.get(5)?);
    let (paused, message, started_at): (Option<String>, _, _) = (row.get(6)?, row.get(7)?, row.get(8)?);
    let (note, chosen): (Option<String>, Option<String>) = (row.get(9)?, row.get(10)?);
    Ok((|| {
        Ok(MoveRow {
            volume: parse("moves.volume", &volume)?,
            pool: parse("moves.pool", &pool)?,
            phase: from_word("moves.phase", &phase)?,
            reserved,
            rate,
            cancelled,
            paused: paused.map(|uuid| parse("moves.paused", &uuid)).transpose()?,
            note: note.map(|text| value("moves.note", &NOTES, &text)).transpose()?,
            chosen: chosen.map(|text| value("moves.chosen", &SIDES, &text)).transpose()?,
            message,
            started_at,
        })
    })())
}

impl Tx<'_> {
    /// The move of a volume.
    pub fn volume_move(&self, volume: &VolumeId) -> Result<Option<MoveRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM moves WHERE volume = ?1"))?
            .query_row([volume.as_str()], read)
            .optional()?
            .transpose()
    }

    /// All moves, the oldest first.
    pub fn moves(&self) -> Result<Vec<MoveRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM moves ORDER BY started_at, volume"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// All moves by volume.
    pub fn moves_by_volume(&self) -> Result<HashMap<VolumeId, MoveRow>> {
        Ok(self.moves()?.into_iter().map(|row| (row.volume.clone(), row)).collect())
    }

    /// Begins a move.
    pub fn insert_move(&self, row: &MoveRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO moves ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)"
            ))?
            .execute(params![
                row.volume.as_str(),
                row.pool.as_str(),
                row.phase.as_str(),
                row.reserved,
                row.rate,
                row.cancelled,
                row.paused.map(|node| node.to_string()),
                row.message,
                row.started_at,
                row.note.and_then(|note| word(&NOTES, &note)),
                row.chosen.and_then(|side| word(&SIDES, &side)),
            ])?;
        Ok(())
    }

    /// Sets the step of a move, and forgets what the earlier one waited for.
    pub fn set_move_phase(&self, volume: &VolumeId, phase: MovePhase) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET phase = ?2, message = NULL WHERE volume = ?1")?
            .execute(params![volume.as_str(), phase.as_str()])?;
        Ok(())
    }

    /// Sets what is known about the new file of a move.
    pub fn set_move_note(&self, volume: &VolumeId, note: MoveNote) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET note = ?2 WHERE volume = ?1")?
            .execute(params![volume.as_str(), word(&NOTES, &note)])?;
        Ok(())
    }

    /// Sets the file that an operator chose.
    pub fn set_move_choice(&self, volume: &VolumeId, side: Side) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET chosen = ?2 WHERE volume = ?1")?
            .execute(params![volume.as_str(), word(&SIDES, &side)])?;
        Ok(())
    }

    /// Lets a move begin again, whose new file was no VM's source.
    pub fn settle_move(&self, volume: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached(
                "UPDATE moves SET phase = 'waiting', note = NULL, chosen = NULL, message = NULL WHERE volume = ?1",
            )?
            .execute([volume.as_str()])?;
        Ok(())
    }

    /// Whether a node may be paused for a move.
    pub fn is_paused_for_move(&self, node: Uuid) -> Result<bool> {
        let mut found = self.0.prepare_cached("SELECT 1 FROM moves WHERE paused = ?1")?;
        Ok(found.exists([node.to_string().as_str()])?)
    }

    /// Sets what a move waits for. False if that was known.
    pub fn set_move_message(&self, volume: &VolumeId, message: Option<&str>) -> Result<bool> {
        let sql = "UPDATE moves SET message = ?2 WHERE volume = ?1 AND message IS DISTINCT FROM ?2";
        Ok(self.0.prepare_cached(sql)?.execute(params![volume.as_str(), message])? > 0)
    }

    /// Sets the rate of a move.
    pub fn set_move_rate(&self, volume: &VolumeId, rate: Option<u64>) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET rate = ?2 WHERE volume = ?1")?
            .execute(params![volume.as_str(), rate])?;
        Ok(())
    }

    /// Requests the cancellation of a move. One that has switched is completed instead.
    pub fn cancel_move(&self, volume: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET cancelled = TRUE WHERE volume = ?1 AND phase <> 'removing'")?
            .execute([volume.as_str()])?;
        Ok(())
    }

    /// Records which node is paused for a move; none once it runs again.
    pub fn set_move_paused(&self, volume: &VolumeId, node: Option<Uuid>) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET paused = ?2 WHERE volume = ?1")?
            .execute(params![volume.as_str(), node.map(|node| node.to_string())])?;
        Ok(())
    }

    /// Gives up the copy of a detached volume, which is about to be attached.
    pub fn interrupt_copy(&self, volume: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE moves SET phase = 'waiting' WHERE volume = ?1 AND phase = 'copying'")?
            .execute([volume.as_str()])?;
        Ok(())
    }

    /// Makes the other file the file of the volume: the pool of its data changes in the catalog.
    pub fn switch_pool(&self, row: &MoveRow, from: &PoolName) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET pool = ?2 WHERE id = ?1")?
            .execute(params![row.volume.as_str(), row.pool.as_str()])?;
        self.0
            .prepare_cached(
                "UPDATE moves SET pool = ?2, phase = 'removing', cancelled = FALSE, note = NULL, message = NULL WHERE volume = ?1",
            )?
            .execute(params![row.volume.as_str(), from.as_str()])?;
        Ok(())
    }

    /// Ends a move.
    pub fn delete_move(&self, volume: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM moves WHERE volume = ?1")?.execute([volume.as_str()])?;
        Ok(())
    }

    /// What is being made from the data of a volume: volumes, snapshots and exports, as text for messages.
    pub fn readers_of(&self, volume: &VolumeId) -> Result<Vec<String>> {
        self.0
            .prepare_cached(
                "SELECT 'volume ' || id FROM volumes WHERE state = 'creating' AND spec ->> '$.source.volume' = ?1 \
                 UNION ALL SELECT 'snapshot ' || id FROM snapshots WHERE state = 'creating' AND volume = ?1 \
                 UNION ALL SELECT 'an export' FROM exports WHERE volume = ?1",
            )?
            .query_map([volume.as_str()], |row| row.get(0))?
            .map(|row| Ok(row?))
            .collect()
    }

    /// The volumes whose other file is in a pool: they are moved to it, or their old file is being removed.
    pub fn moves_with(&self, pool: &PoolName) -> Result<Vec<VolumeId>> {
        self.0
            .prepare_cached("SELECT volume FROM moves WHERE pool = ?1 ORDER BY volume")?
            .query_map([pool.as_str()], |row| row.get::<String>(0))?
            .map(|row| parse("moves.volume", &row?))
            .collect()
    }

    /// The volumes whose data is in a pool, ordered by ID.
    pub fn ids_in_pool(&self, pool: &PoolName) -> Result<Vec<VolumeId>> {
        self.0
            .prepare_cached("SELECT id FROM volumes WHERE pool = ?1 ORDER BY id")?
            .query_map([pool.as_str()], |row| row.get::<String>(0))?
            .map(|row| parse("volumes.id", &row?))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::postgres::testing::{Backend, Scratch};

    /// Runs a test on both databases, with a volume that is to be moved.
    fn on_each(test: impl Fn(&Scratch<'_>) + Sync) {
        let rows = "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) VALUES
                        ('p', 'p', 'file', '/p', '{}', FALSE, TRUE), ('q', 'q', 'file', '/q', '{}', FALSE, TRUE);
                    INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at, record_due) VALUES
                        ('v', 'p', 7, 'd', 'ready', '{}', 'now', FALSE);
                    INSERT INTO nodes VALUES ('n', 'h', '{}');
                    INSERT INTO moves (volume, pool, phase, reserved, started_at) VALUES ('v', 'q', 'waiting', 7, 'now');";
        let filled = |catalog: &Scratch<'_>| {
            catalog.run(rows);
            test(catalog);
        };
        Backend::each().iter().for_each(|backend| backend.scratch(filled));
    }

    fn set(catalog: &Scratch<'_>, phase: &str) {
        catalog.execute("UPDATE moves SET phase = ?1", [phase]).unwrap();
    }

    #[test]
    fn the_schema_rejects_attachments_while_the_file_is_copied_or_exchanged() {
        on_each(|catalog| {
            let attach = || {
                let sql = "INSERT INTO attachments (id, volume, node, read_only, access, state, created_at) \
                           VALUES ('a', 'v', 'n', FALSE, 'single-node', 'attaching', 'now')";
                catalog.execute(sql, [])
            };
            for phase in ["copying", "switching"] {
                set(catalog, phase);
                assert!(attach().unwrap_err().contains("is being moved"), "{phase}");
            }
            set(catalog, "mirroring");
            assert_eq!(attach(), Ok(1));
        });
    }

    #[test]
    fn a_volume_changes_its_pool_only_by_its_move_and_its_record_is_due_then() {
        on_each(|catalog| {
            let switch = |pool: &str| catalog.execute("UPDATE volumes SET pool = ?1 WHERE id = 'v'", [pool]);
            assert!(switch("q").unwrap_err().contains("not being moved"), "it is not copied yet");
            set(catalog, "switching");
            let revision = || catalog.value::<i64>("SELECT number FROM revision", []);
            let before = revision();
            assert_eq!(switch("q"), Ok(1));
            let is_due: bool =
                catalog.value("SELECT record_due AND revision = ?1 FROM volumes", [before + 1]);
            assert!(is_due && revision() == before + 1);
            assert!(switch("p").unwrap_err().contains("not being moved"));
        });
    }

    #[test]
    fn a_volume_that_is_being_moved_cannot_be_forgotten() {
        on_each(|catalog| {
            catalog.execute("UPDATE volumes SET state = 'deleting'", []).unwrap();
            catalog.execute("DELETE FROM volumes", []).unwrap_err();
            catalog.execute("DELETE FROM moves", []).unwrap();
            catalog.execute("DELETE FROM volumes", []).unwrap();
        });
    }
}
