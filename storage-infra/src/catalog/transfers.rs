//! Tables of exports, imports, adoptions and releases.

use std::fmt;
use std::path::{Path, PathBuf};

use infra_api::stream::{Checksum, Position};
use infra_api::{MovePhase, PoolName, ProblemCode, Suspension, VolumeId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::altered::AlteredDisk;
use super::db::{self, OptionalExtension, Row, params};
use super::suspensions::Suspended;
use super::{CatalogError, Result, Tx, from_word, parse};

pub(super) const TRANSFERS: &str = "
-- Where the content of the volume came from.
ALTER TABLE volumes ADD COLUMN origin TEXT NOT NULL DEFAULT 'created' CHECK (origin IN ('created', 'imported', 'adopted'));
-- Running exports of volumes. They end with the server, so its start removes them.
CREATE TABLE exports (
    id      TEXT PRIMARY KEY,
    volume  TEXT NOT NULL REFERENCES volumes(id) ON DELETE CASCADE
) STRICT;
CREATE INDEX exports_by_volume ON exports(volume);
-- Imports that are not complete.
CREATE TABLE imports (
    volume    TEXT PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    -- Checksum of the stream's header; NULL until the first extents are durable.
    header    BLOB,
    -- End of the last extent that is durable, and the checksum of the stream up to there.
    received  INTEGER NOT NULL DEFAULT 0,
    checksum  BLOB,
    -- 1 once all of the stream is verified and durable.
    verified  INTEGER NOT NULL DEFAULT 0
) STRICT;
-- Adoptions that are not complete.
CREATE TABLE adoptions (
    volume  TEXT PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    -- The file, and its inode number.
    path    TEXT NOT NULL,
    inode   INTEGER NOT NULL,
    method  TEXT NOT NULL CHECK (method IN ('rename', 'copy', 'convert'))
) STRICT;
-- Releases that are not complete.
CREATE TABLE releases (
    volume  TEXT PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    path    TEXT NOT NULL,
    inode   INTEGER NOT NULL
) STRICT;
-- Independent of the code: nothing writes to a volume while it is exported or released.
CREATE TRIGGER held_volumes_are_not_attached BEFORE INSERT ON attachments
WHEN (NOT NEW.read_only AND EXISTS (SELECT 1 FROM exports WHERE volume = NEW.volume))
     OR EXISTS (SELECT 1 FROM releases WHERE volume = NEW.volume)
BEGIN SELECT RAISE(ABORT, 'the volume is being exported or released'); END;
";

/// An operation that holds a volume against others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hold {
    /// It is being exported: its content must not change.
    Export,
    /// It is being released to this path: it must not be used.
    Release(PathBuf),
    /// It is suspended, by itself or with its pool: it must be neither attached nor changed.
    Suspended(Suspended, Suspension),
    /// A disk of it in a VM is not as the server attached it: its content may be elsewhere.
    Altered(AlteredDisk),
    /// It is being moved to or from this pool: its size must not change, and its file must exist.
    Moved(PoolName, MovePhase),
}

impl Hold {
    /// Whether it allows operations that read the volume only.
    pub fn allows_reading(&self) -> bool {
        match self {
            Self::Export | Self::Suspended(..) => true,
            Self::Moved(_, phase) => *phase != MovePhase::Switching,
            Self::Release(_) | Self::Altered(_) => false,
        }
    }

    /// Whether it allows this kind of attachment.
    pub fn allows_attaching(&self, read_only: bool) -> bool {
        match self {
            Self::Export => read_only,
            Self::Release(_)
            | Self::Suspended(..)
            | Self::Altered(_)
            | Self::Moved(_, MovePhase::Switching) => false,
            Self::Moved(..) => true,
        }
    }

    /// The code of a request that it does not allow.
    pub fn code(&self, otherwise: ProblemCode) -> ProblemCode {
        match self {
            Self::Suspended(..) => ProblemCode::Suspended,
            Self::Moved(..) => ProblemCode::Unavailable,
            Self::Altered(_) => ProblemCode::InUse,
            Self::Export | Self::Release(_) => otherwise,
        }
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Export => f.write_str("is being exported; retry after the export, or end it"),
            Self::Release(path) => write!(f, "is being released to {}; retry", path.display()),
            Self::Altered(AlteredDisk { message, since, .. }) => {
                write!(f, "is not used since {since}: {message}")
            }
            Self::Moved(pool, MovePhase::Removing) => {
                write!(f, "was moved, and its old file in the pool {pool} is being removed; retry")
            }
            Self::Moved(pool, phase) => write!(
                f,
                "is being moved to the pool {pool} ({phase}); retry after the move, or cancel it: storage-infra volume move \
                 --cancel"
            ),
            Self::Suspended(Suspended::Volume(id), Suspension { reason, since }) => {
                write!(
                    f,
                    "is suspended since {since}: {reason}; run storage-infra volume resume {id} to use it again"
                )
            }
            Self::Suspended(Suspended::Pool(pool), Suspension { reason, since }) => write!(
                f,
                "is in the pool {pool}, which is suspended since {since}: {reason}; run storage-infra pool resume {pool} to use \
                 it again"
            ),
        }
    }
}

/// An import that is not complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportRow {
    /// Checksum of the stream's header, and the durable position; `None` until the first extents are durable.
    pub received: Option<(Checksum, Position)>,
    /// Whether all of the stream is verified and durable.
    pub verified: bool,
}

/// How an adopted file becomes the file of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdoptionMethod {
    /// The file is renamed.
    Rename,
    /// The file is copied; it stays where it is.
    Copy,
    /// The file is a qcow2 image, whose content is copied; it stays where it is.
    Convert,
}

impl fmt::Display for AdoptionMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rename => "rename",
            Self::Copy => "copy",
            Self::Convert => "convert",
        })
    }
}

/// An adoption that is not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptionRow {
    /// The file.
    pub path: PathBuf,
    /// Its inode number.
    pub inode: u64,
    /// How it becomes the volume's.
    pub method: AdoptionMethod,
}

/// A release that is not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReleaseRow {
    /// The volume.
    pub volume: VolumeId,
    /// Where its file goes.
    pub path: PathBuf,
    /// Inode number of its file.
    pub inode: u64,
}

fn release(row: &Row<'_>) -> db::Result<Result<ReleaseRow>> {
    let (volume, path, inode): (String, String, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
    Ok(parse("releases.volume", &volume).map(|volume| ReleaseRow {
        volume,
        path: path.into(),
        inode: inode.cast_unsigned(),
    }))
}

/// A path as text. Paths that are not UTF-8 are refused before they get here.
fn path_text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| CatalogError::Corrupt(format!("the path {} is not UTF-8", path.display())))
}

fn import(row: &Row<'_>) -> db::Result<Result<ImportRow>> {
    let (header, offset, checksum): (Option<Vec<u8>>, u64, Option<Vec<u8>>) =
        (row.get(0)?, row.get(1)?, row.get(2)?);
    let verified = row.get(3)?;
    let decode = |bytes: Vec<u8>| {
        Checksum::from_bytes(&bytes)
            .ok_or_else(|| CatalogError::Corrupt("imports: a checksum has not 32 bytes".into()))
    };
    let received = header
        .zip(checksum)
        .map(|(header, checksum)| Ok((decode(header)?, Position { offset, checksum: decode(checksum)? })));
    Ok(received.transpose().map(|received| ImportRow { received, verified }))
}

impl Tx<'_> {
    /// The operation that holds a volume, if any.
    pub fn hold(&self, volume: &VolumeId) -> Result<Option<Hold>> {
        if let Some(release) = self.release(volume)? {
            return Ok(Some(Hold::Release(release.path)));
        }
        if let Some(suspended) = self.suspended_hold(volume)? {
            return Ok(Some(suspended));
        }
        if let Some(altered) = self.altered_disks(volume)?.into_iter().next() {
            return Ok(Some(Hold::Altered(altered)));
        }
        let sql = "SELECT 1 FROM exports WHERE volume = ?1 LIMIT 1";
        if self.0.prepare_cached(sql)?.exists([volume.as_str()])? {
            return Ok(Some(Hold::Export));
        }
        Ok(self.volume_move(volume)?.map(|row| Hold::Moved(row.pool, row.phase)))
    }

    /// Records that an export of a volume is running.
    pub fn insert_export(&self, id: Uuid, volume: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached("INSERT INTO exports (id, volume) VALUES (?1, ?2)")?
            .execute(params![id.to_string(), volume.as_str()])?;
        Ok(())
    }

    /// Records that an export has ended.
    pub fn delete_export(&self, id: Uuid) -> Result<()> {
        self.0.prepare_cached("DELETE FROM exports WHERE id = ?1")?.execute([id.to_string()])?;
        Ok(())
    }

    /// Records that all exports have ended. Returns how many were running.
    pub fn delete_exports(&self) -> Result<usize> {
        Ok(self.0.prepare_cached("DELETE FROM exports")?.execute([])?)
    }

    /// Begins the import of a volume.
    pub fn insert_import(&self, volume: &VolumeId) -> Result<()> {
        self.0.prepare_cached("INSERT INTO imports (volume) VALUES (?1)")?.execute([volume.as_str()])?;
        Ok(())
    }

    /// The import of a volume, until it is complete.
    pub fn import(&self, volume: &VolumeId) -> Result<Option<ImportRow>> {
        self.0
            .prepare_cached("SELECT header, received, checksum, verified FROM imports WHERE volume = ?1")?
            .query_row([volume.as_str()], import)
            .optional()?
            .transpose()
    }

    /// Sets what is durable of an import.
    pub fn set_import(&self, volume: &VolumeId, row: &ImportRow) -> Result<()> {
        let (header, position) = row.received.unzip();
        self.0
            .prepare_cached(
                "UPDATE imports SET header = ?2, received = ?3, checksum = ?4, verified = ?5 WHERE volume = ?1",
            )?
            .execute(params![
                volume.as_str(),
                header.as_ref().map(Checksum::as_bytes),
                position.map_or(0, |position| position.offset),
                position.as_ref().map(|position| position.checksum.as_bytes()),
                row.verified,
            ])?;
        Ok(())
    }

    /// Ends the import of a volume.
    pub fn delete_import(&self, volume: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM imports WHERE volume = ?1")?.execute([volume.as_str()])?;
        Ok(())
    }

    /// Begins the adoption of a file.
    pub fn insert_adoption(&self, volume: &VolumeId, row: &AdoptionRow) -> Result<()> {
        self.0
            .prepare_cached("INSERT INTO adoptions (volume, path, inode, method) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![
                volume.as_str(),
                path_text(&row.path)?,
                row.inode.cast_signed(),
                row.method.to_string()
            ])?;
        Ok(())
    }

    /// The adoption of a volume, until it is complete.
    pub fn adoption(&self, volume: &VolumeId) -> Result<Option<AdoptionRow>> {
        let read = |row: &Row<'_>| {
            let (path, inode, method): (String, i64, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
            Ok(from_word("adoptions.method", &method).map(|method| AdoptionRow {
                path: path.into(),
                inode: inode.cast_unsigned(),
                method,
            }))
        };
        self.0
            .prepare_cached("SELECT path, inode, method FROM adoptions WHERE volume = ?1")?
            .query_row([volume.as_str()], read)
            .optional()?
            .transpose()
    }

    /// Ends the adoption of a volume.
    pub fn delete_adoption(&self, volume: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM adoptions WHERE volume = ?1")?.execute([volume.as_str()])?;
        Ok(())
    }

    /// Begins a release.
    pub fn insert_release(&self, row: &ReleaseRow) -> Result<()> {
        self.0
            .prepare_cached("INSERT INTO releases (volume, path, inode) VALUES (?1, ?2, ?3)")?
            .execute(params![row.volume.as_str(), path_text(&row.path)?, row.inode.cast_signed()])?;
        Ok(())
    }

    /// The release of a volume, until it is complete.
    pub fn release(&self, volume: &VolumeId) -> Result<Option<ReleaseRow>> {
        self.0
            .prepare_cached("SELECT volume, path, inode FROM releases WHERE volume = ?1")?
            .query_row([volume.as_str()], release)
            .optional()?
            .transpose()
    }

    /// Releases that are not complete.
    pub fn releases(&self) -> Result<Vec<ReleaseRow>> {
        self.0
            .prepare_cached("SELECT volume, path, inode FROM releases ORDER BY volume")?
            .query_map([], release)?
            .map(|row| row?)
            .collect()
    }

    /// Cancels a release.
    pub fn delete_release(&self, volume: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM releases WHERE volume = ?1")?.execute([volume.as_str()])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::db::params;
    use super::super::postgres::testing::{Backend, Scratch};

    #[test]
    fn the_schema_rejects_writers_of_an_exported_volume_and_all_attachments_of_a_released_one() {
        Backend::each().iter().for_each(|backend| backend.scratch(rejects));
    }

    fn rejects(catalog: &Scratch<'_>) {
        let volume = |id: &str| {
            format!(
                "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at) \
                 VALUES ('{id}', 'p', 1, '{id}', 'ready', '{{}}', 'now');"
            )
        };
        let rows = [
            "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
             VALUES ('p', 'u', 'file', '/p', '{}', FALSE, TRUE);"
                .to_owned(),
            volume("exported"),
            volume("released"),
            volume("free"),
            "INSERT INTO nodes VALUES ('n', 'h', '{}');".to_owned(),
            "INSERT INTO exports VALUES ('e', 'exported');".to_owned(),
            "INSERT INTO releases VALUES ('released', '/x', 1);".to_owned(),
        ];
        catalog.run(&rows.concat());
        let attach = |volume: &str, read_only: bool| {
            let access = if read_only { "multi-node-read-only" } else { "single-node" };
            let sql = "INSERT INTO attachments (id, volume, node, read_only, access, state, created_at) \
                       VALUES (?1, ?1, 'n', ?2, ?3, 'attaching', 'now')";
            catalog.execute(sql, params![volume, read_only, access])
        };
        for (volume, read_only) in [("exported", false), ("released", false), ("released", true)] {
            assert!(attach(volume, read_only).unwrap_err().contains("exported or released"), "{volume}");
        }
        for (volume, read_only) in [("exported", true), ("free", false)] {
            assert_eq!(attach(volume, read_only), Ok(1), "{volume}");
        }
    }
}
