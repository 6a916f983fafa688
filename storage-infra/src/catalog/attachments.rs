//! Table of attachments.

use infra_api::{Access, AttachmentId, AttachmentSpec, AttachmentState, VolumeId};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::{Result, Tx, from_word, parse};

/// Whether a disk was attested blank before it was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blank {
    /// Not decided yet; the disk is not attached yet.
    Undecided,
    /// It may hold data.
    No,
    /// It held no data; the UUID identifies the attestation.
    Attested(Uuid),
}

impl Blank {
    /// The attestation, if there is one.
    pub fn attestation(self) -> Option<Uuid> {
        match self {
            Self::Attested(id) => Some(id),
            Self::Undecided | Self::No => None,
        }
    }

    fn to_column(self) -> Option<String> {
        match self {
            Self::Undecided => None,
            Self::No => Some(NOT_BLANK.to_owned()),
            Self::Attested(id) => Some(id.to_string()),
        }
    }

    fn from_column(text: Option<&str>) -> Result<Self> {
        match text {
            None => Ok(Self::Undecided),
            Some(NOT_BLANK) => Ok(Self::No),
            Some(id) => Ok(Self::Attested(parse("attachments.blank", id)?)),
        }
    }
}

/// Value of column `blank` for a disk that may hold data.
const NOT_BLANK: &str = "no";

/// An attachment in the catalog.
#[derive(Debug, Clone)]
pub struct AttachmentRow {
    /// Its ID.
    pub id: AttachmentId,
    /// The volume.
    pub volume: VolumeId,
    /// The node.
    pub node: Uuid,
    /// Whether the disk is read-only.
    pub read_only: bool,
    /// Access mode: which other attachments of the volume are allowed.
    pub access: Access,
    /// Lifecycle state.
    pub state: AttachmentState,
    /// Last error.
    pub message: Option<String>,
    /// Creation time, RFC 3339.
    pub created_at: String,
    /// Whether the disk was blank before it was attached.
    pub blank: Blank,
}

impl AttachmentRow {
    /// The spec of the request.
    pub fn spec(&self) -> AttachmentSpec {
        AttachmentSpec {
            volume: self.volume.clone(),
            node: self.node,
            read_only: self.read_only,
            access: self.access,
        }
    }
}

const COLUMNS: &str = "id, volume, node, read_only, access, state, message, created_at, blank";

fn read(row: &Row<'_>) -> db::Result<Result<AttachmentRow>> {
    let (id, volume, node, read_only): (String, String, String, bool) =
        (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
    let (access, state, message, created_at): (String, String, Option<String>, String) =
        (row.get(4)?, row.get(5)?, row.get(6)?, row.get(7)?);
    let blank: Option<String> = row.get(8)?;
    Ok((|| {
        Ok(AttachmentRow {
            id: parse("attachments.id", &id)?,
            volume: parse("attachments.volume", &volume)?,
            node: parse("attachments.node", &node)?,
            read_only,
            access: from_word("attachments.access", &access)?,
            state: from_word("attachments.state", &state)?,
            message,
            created_at,
            blank: Blank::from_column(blank.as_deref())?,
        })
    })())
}

/// WHERE clause by node and volume. One text per combination, so that SQLite uses an index.
pub(super) fn filter(node: bool, volume: bool) -> &'static str {
    match (node, volume) {
        (false, false) => "CAST(?1 AS TEXT) IS NULL AND CAST(?2 AS TEXT) IS NULL",
        (true, false) => "node = ?1 AND CAST(?2 AS TEXT) IS NULL",
        (false, true) => "CAST(?1 AS TEXT) IS NULL AND volume = ?2",
        (true, true) => "node = ?1 AND volume = ?2",
    }
}

/// Condition of attachments that are being detached.
pub(super) const DETACHING: &str = "state = 'detaching'";

impl Tx<'_> {
    /// Reads one attachment.
    pub fn attachment(&self, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM attachments WHERE id = ?1"))?
            .query_row([id.as_str()], read)
            .optional()?
            .transpose()
    }

    /// Reads all attachments, or those of a node, a volume, or both, ordered by ID.
    pub fn attachments(&self, node: Option<Uuid>, volume: Option<&VolumeId>) -> Result<Vec<AttachmentRow>> {
        let filter = filter(node.is_some(), volume.is_some());
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM attachments WHERE {filter} ORDER BY id"))?
            .query_map(params![node.map(|uuid| uuid.to_string()), volume.map(VolumeId::as_str)], read)?
            .map(|row| row?)
            .collect()
    }

    /// Reads the attachments that are being detached.
    pub fn detaching_attachments(&self) -> Result<Vec<AttachmentRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM attachments WHERE {DETACHING}"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Inserts an attachment. Fails if the volume would have a second writer.
    pub fn insert_attachment(&self, row: &AttachmentRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO attachments ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)"
            ))?
            .execute(params![
                row.id.as_str(),
                row.volume.as_str(),
                row.node.to_string(),
                row.read_only,
                row.access.to_string(),
                row.state.to_string(),
                row.message,
                row.created_at,
                row.blank.to_column(),
            ])?;
        Ok(())
    }

    /// Sets an attachment's state and last error.
    pub fn set_attachment_state(
        &self,
        id: &AttachmentId,
        state: AttachmentState,
        message: Option<&str>,
    ) -> Result<()> {
        self.0
            .prepare_cached("UPDATE attachments SET state = ?2, message = ?3 WHERE id = ?1")?
            .execute(params![id.as_str(), state.to_string(), message])?;
        Ok(())
    }

    /// Records whether an attachment's disk was blank before it was attached.
    pub fn set_attachment_blank(&self, id: &AttachmentId, blank: Blank) -> Result<()> {
        self.0
            .prepare_cached("UPDATE attachments SET blank = ?2 WHERE id = ?1")?
            .execute(params![id.as_str(), blank.to_column()])?;
        Ok(())
    }

    /// Deletes an attachment, if it exists, and records its ID as ended now.
    pub fn end_attachment(&self, id: &AttachmentId) -> Result<()> {
        self.delete_attachment(id)?;
        self.0
            .prepare_cached(
                "INSERT INTO ended_attachments (id, ended_at) SELECT ?1, seconds FROM served_time WHERE TRUE \
                 ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at",
            )?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Whether an attachment of this ID was detached or its detach was requested.
    pub fn is_attachment_ended(&self, id: &AttachmentId) -> Result<bool> {
        let mut found = self.0.prepare_cached("SELECT 1 FROM ended_attachments WHERE id = ?1")?;
        Ok(found.exists([id.as_str()])?)
    }

    /// Whether the disk of an attachment of this ID is out of its VM: it was detached or was never attached.
    pub fn is_attachment_ended_or_refused(&self, id: &AttachmentId) -> Result<bool> {
        let mut refused = self.0.prepare_cached("SELECT 1 FROM refused_attachments WHERE id = ?1")?;
        Ok(refused.exists([id.as_str()])? || self.is_attachment_ended(id)?)
    }

    /// Removes IDs that ended longer ago than this, in seconds of service.
    pub fn forget_ended_attachments(&self, seconds: u64) -> Result<()> {
        for table in ["ended_attachments", "refused_attachments"] {
            let forget =
                format!("DELETE FROM {table} WHERE ended_at < (SELECT seconds FROM served_time) - ?1");
            self.0.prepare_cached(&forget)?.execute([seconds])?;
        }
        Ok(())
    }

    /// Renames an attachment. Its old ID is recorded as ended now.
    pub fn rename_attachment(&self, from: &AttachmentId, to: &AttachmentId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE attachments SET id = ?2 WHERE id = ?1")?
            .execute([from.as_str(), to.as_str()])?;
        self.end_attachment(from)
    }

    /// Deletes an attachment whose disk was confirmed not attached, and records that.
    /// Its ID can be used again.
    pub fn refuse_attachment(&self, id: &AttachmentId) -> Result<()> {
        self.delete_attachment(id)?;
        self.0
            .prepare_cached(
                "INSERT INTO refused_attachments (id, ended_at) SELECT ?1, seconds FROM served_time WHERE TRUE \
                 ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at",
            )?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Deletes an attachment that was never admitted; its ID can be used again.
    pub fn delete_attachment(&self, id: &AttachmentId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM attachments WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }
}
