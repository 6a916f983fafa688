//! The catalog's tables and how an older catalog becomes a newer one.

use rusqlite::Connection;

use super::CatalogError;

/// Each entry brings the schema from its index to the next version. Entries are never edited once released.
const MIGRATIONS: &[&str] = &["
CREATE TABLE pools (
    name      TEXT PRIMARY KEY,
    uuid      TEXT NOT NULL UNIQUE,
    engine    TEXT NOT NULL,
    path      TEXT NOT NULL UNIQUE,
    labels    TEXT NOT NULL,
    cordoned  INTEGER NOT NULL,
    -- 0 until the marker file is in the directory: from then on a missing marker means a missing pool.
    marked    INTEGER NOT NULL
) STRICT;

CREATE TABLE volumes (
    id          TEXT PRIMARY KEY,
    pool        TEXT NOT NULL REFERENCES pools(name),
    capacity    INTEGER NOT NULL,
    -- Set while the volume grows; the space is reserved from then on.
    grow_to     INTEGER,
    disk_uuid   TEXT NOT NULL UNIQUE,
    state       TEXT NOT NULL CHECK (state IN ('creating', 'ready', 'deleting')),
    -- The request as it came, to tell a repetition from a conflict.
    spec        TEXT NOT NULL,
    created_at  TEXT NOT NULL
) STRICT;
CREATE INDEX volumes_by_pool ON volumes(pool);

CREATE TABLE nodes (
    uuid        TEXT PRIMARY KEY,
    hypervisor  TEXT NOT NULL,
    spec        TEXT NOT NULL
) STRICT;

CREATE TABLE attachments (
    id          TEXT PRIMARY KEY,
    volume      TEXT NOT NULL REFERENCES volumes(id),
    node        TEXT NOT NULL REFERENCES nodes(uuid),
    read_only   INTEGER NOT NULL,
    access      TEXT NOT NULL CHECK (access IN ('single-node', 'multi-node-read-only')),
    state       TEXT NOT NULL CHECK (state IN ('attaching', 'attached', 'detaching')),
    message     TEXT,
    created_at  TEXT NOT NULL,
    UNIQUE (volume, node),
    CHECK (access = 'single-node' OR read_only)
) STRICT;
CREATE INDEX attachments_by_node ON attachments(node);
-- One writer at most, whatever the code above does: a single-node attachment excludes every other.
CREATE UNIQUE INDEX one_single_node_attachment ON attachments(volume) WHERE access = 'single-node';
CREATE TRIGGER single_node_excludes_others BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM attachments a WHERE a.volume = NEW.volume AND a.id <> NEW.id
             AND (a.access = 'single-node' OR NEW.access = 'single-node'))
BEGIN SELECT RAISE(ABORT, 'the volume is attached elsewhere'); END;
CREATE TRIGGER attached_volumes_stay BEFORE DELETE ON volumes
WHEN OLD.state <> 'deleting'
BEGIN SELECT RAISE(ABORT, 'only a volume in state deleting can be removed'); END;
"];

/// Brings the schema up to date, one transaction per version.
pub(super) fn migrate(connection: &mut Connection) -> Result<(), CatalogError> {
    let found: usize = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > MIGRATIONS.len() {
        return Err(CatalogError::Unusable(format!(
            "the catalog has schema version {found}, this program knows up to {}: run the version that wrote it, or a newer one",
            MIGRATIONS.len()
        )));
    }
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(found) {
        let tx = connection.transaction()?;
        tx.execute_batch(sql)?;
        tx.pragma_update(None, "user_version", index + 1)?;
        tx.commit()?;
    }
    Ok(())
}
