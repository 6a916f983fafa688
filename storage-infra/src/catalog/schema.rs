//! Catalog schema and its migrations.

use rusqlite::Connection;

use super::CatalogError;
use super::altered::ALTERED_DISKS;
use super::budgets::ACCOUNTS;
use super::moves::MOVES;
use super::suspensions::SUSPENSIONS;
use super::transfers::TRANSFERS;

/// Each entry migrates the schema from its index to the next version. The SQL of released entries is never changed.
const MIGRATIONS: &[&str] = &[
    FIRST,
    SNAPSHOTS_AND_SHARING,
    ENDED_ATTACHMENTS,
    RECORDS,
    SUMS_AND_INDEXES,
    SAVED_NODES,
    BLANK_DISKS,
    FULL_POOLS,
    REVISIONS,
    ACCOUNTS,
    TRANSFERS,
    SUSPENSIONS,
    MOVES,
    POOL_HOSTS,
    ALTERED_DISKS,
];

const FIRST: &str = "
CREATE TABLE pools (
    name      TEXT PRIMARY KEY,
    uuid      TEXT NOT NULL UNIQUE,
    engine    TEXT NOT NULL,
    path      TEXT NOT NULL UNIQUE,
    labels    TEXT NOT NULL,
    cordoned  INTEGER NOT NULL,
    -- 1 once the marker file is in the directory: from then on a missing marker means a missing pool.
    marked    INTEGER NOT NULL
) STRICT;

CREATE TABLE volumes (
    id          TEXT PRIMARY KEY,
    pool        TEXT NOT NULL REFERENCES pools(name),
    capacity    INTEGER NOT NULL,
    -- Set during an expansion; the space is reserved from then on.
    grow_to     INTEGER,
    disk_uuid   TEXT NOT NULL UNIQUE,
    state       TEXT NOT NULL CHECK (state IN ('creating', 'ready', 'deleting')),
    -- The original request, to tell a retry from a conflict.
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
-- At most one writer, independent of the code above: a single-node attachment excludes all others.
CREATE UNIQUE INDEX one_single_node_attachment ON attachments(volume) WHERE access = 'single-node';
CREATE TRIGGER single_node_excludes_others BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM attachments a WHERE a.volume = NEW.volume AND a.id <> NEW.id
             AND (a.access = 'single-node' OR NEW.access = 'single-node'))
BEGIN SELECT RAISE(ABORT, 'the volume is attached elsewhere'); END;
CREATE TRIGGER attached_volumes_stay BEFORE DELETE ON volumes
WHEN OLD.state <> 'deleting'
BEGIN SELECT RAISE(ABORT, 'only a volume in state deleting can be removed'); END;
";

const SNAPSHOTS_AND_SHARING: &str = "
-- Objects that may share blocks: copies of each other by reflink.
ALTER TABLE volumes ADD COLUMN family TEXT NOT NULL DEFAULT '';
UPDATE volumes SET family = disk_uuid;
-- 1 if the bytes are copied block by block from a source that must not be written meanwhile.
ALTER TABLE volumes ADD COLUMN copying INTEGER NOT NULL DEFAULT 0;
ALTER TABLE volumes ADD COLUMN qos TEXT NOT NULL DEFAULT '{}';
-- 1 until the limits are applied in every VM that has the volume.
ALTER TABLE volumes ADD COLUMN qos_due INTEGER NOT NULL DEFAULT 0;
UPDATE volumes SET spec = json_remove(
    CASE WHEN spec ->> '$.placement.zone' IS NULL THEN spec
         ELSE json_set(spec, '$.placement.zones', json_array(spec ->> '$.placement.zone')) END,
    '$.placement.zone');

CREATE TABLE snapshots (
    id          TEXT PRIMARY KEY,
    -- Not a foreign key: the volume may be deleted first.
    volume      TEXT NOT NULL,
    pool        TEXT NOT NULL REFERENCES pools(name),
    capacity    INTEGER NOT NULL,
    -- Upper bound of its allocated bytes.
    reserved    INTEGER NOT NULL,
    family      TEXT NOT NULL,
    copying     INTEGER NOT NULL,
    state       TEXT NOT NULL CHECK (state IN ('creating', 'ready', 'deleting')),
    labels      TEXT NOT NULL,
    created_at  TEXT NOT NULL
) STRICT;
CREATE INDEX snapshots_by_volume ON snapshots(volume);
CREATE INDEX snapshots_by_pool ON snapshots(pool);

CREATE TABLE attachments_new (
    id          TEXT PRIMARY KEY,
    volume      TEXT NOT NULL REFERENCES volumes(id),
    node        TEXT NOT NULL REFERENCES nodes(uuid),
    read_only   INTEGER NOT NULL,
    access      TEXT NOT NULL CHECK (access IN ('single-node', 'multi-node-read-only', 'multi-node')),
    state       TEXT NOT NULL CHECK (state IN ('attaching', 'attached', 'detaching')),
    message     TEXT,
    created_at  TEXT NOT NULL,
    UNIQUE (volume, node),
    CHECK (access <> 'multi-node-read-only' OR read_only)
) STRICT;
INSERT INTO attachments_new SELECT id, volume, node, read_only, access, state, message, created_at FROM attachments;
DROP TABLE attachments;
ALTER TABLE attachments_new RENAME TO attachments;
CREATE INDEX attachments_by_node ON attachments(node);
CREATE UNIQUE INDEX one_single_node_attachment ON attachments(volume) WHERE access = 'single-node';
-- Attachments of one volume must have the same access mode: all read-only, or all multi-writer.
CREATE TRIGGER only_the_like_share BEFORE INSERT ON attachments
WHEN EXISTS (SELECT 1 FROM attachments a WHERE a.volume = NEW.volume AND a.id <> NEW.id
             AND (a.access = 'single-node' OR a.access <> NEW.access))
BEGIN SELECT RAISE(ABORT, 'the volume is attached elsewhere'); END;
CREATE TRIGGER only_shareable_volumes_have_many_writers BEFORE INSERT ON attachments
WHEN NEW.access = 'multi-node'
     AND NOT (SELECT coalesce(spec ->> '$.shareable', 0) FROM volumes WHERE id = NEW.volume)
BEGIN SELECT RAISE(ABORT, 'the volume is not shareable'); END;
";

const ENDED_ATTACHMENTS: &str = "
-- Ids of deleted attachments: a late request must not recreate them.
CREATE TABLE ended_attachments (
    id        TEXT PRIMARY KEY,
    -- Seconds since 1970.
    ended_at  INTEGER NOT NULL
) STRICT;
CREATE INDEX ended_attachments_by_time ON ended_attachments(ended_at);
";

const RECORDS: &str = "
-- 1 while the on-disk record may be older than the row. Objects from before this version have no record yet.
ALTER TABLE volumes ADD COLUMN record_due INTEGER NOT NULL DEFAULT 1;
ALTER TABLE snapshots ADD COLUMN record_due INTEGER NOT NULL DEFAULT 1;
-- Not for new writers: the record is written before their disk is attached.
CREATE TRIGGER record_due_after_detach AFTER DELETE ON attachments
BEGIN UPDATE volumes SET record_due = 1 WHERE id = OLD.volume; END;
CREATE TRIGGER record_due_after_change AFTER UPDATE OF id, node, access, read_only ON attachments
BEGIN UPDATE volumes SET record_due = 1 WHERE id = OLD.volume; END;
-- New readers are recorded asynchronously.
CREATE TRIGGER record_due_after_new_reader AFTER INSERT ON attachments WHEN NEW.read_only
BEGIN UPDATE volumes SET record_due = 1 WHERE id = NEW.volume; END;
CREATE TRIGGER record_due_after_new_size AFTER UPDATE OF qos, capacity ON volumes
BEGIN UPDATE volumes SET record_due = 1 WHERE id = OLD.id; END;
";

const SUMS_AND_INDEXES: &str = "
-- Bytes reserved for the pool's volumes and snapshots, so that placement need not read all of them.
ALTER TABLE pools ADD COLUMN reserved INTEGER NOT NULL DEFAULT 0;
UPDATE pools SET reserved =
    (SELECT coalesce(sum(max(v.capacity, coalesce(v.grow_to, 0))), 0) FROM volumes v WHERE v.pool = pools.name)
    + (SELECT coalesce(sum(s.reserved), 0) FROM snapshots s WHERE s.pool = pools.name);
CREATE TRIGGER new_volume_reserves AFTER INSERT ON volumes
BEGIN UPDATE pools SET reserved = reserved + max(NEW.capacity, coalesce(NEW.grow_to, 0)) WHERE name = NEW.pool; END;
CREATE TRIGGER old_volume_frees AFTER DELETE ON volumes
BEGIN UPDATE pools SET reserved = reserved - max(OLD.capacity, coalesce(OLD.grow_to, 0)) WHERE name = OLD.pool; END;
CREATE TRIGGER changed_volume_reserves AFTER UPDATE OF pool, capacity, grow_to ON volumes
BEGIN
    UPDATE pools SET reserved = reserved - max(OLD.capacity, coalesce(OLD.grow_to, 0)) WHERE name = OLD.pool;
    UPDATE pools SET reserved = reserved + max(NEW.capacity, coalesce(NEW.grow_to, 0)) WHERE name = NEW.pool;
END;
CREATE TRIGGER new_snapshot_reserves AFTER INSERT ON snapshots
BEGIN UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool; END;
CREATE TRIGGER old_snapshot_frees AFTER DELETE ON snapshots
BEGIN UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool; END;
CREATE TRIGGER changed_snapshot_reserves AFTER UPDATE OF pool, reserved ON snapshots
BEGIN
    UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool;
    UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool;
END;

-- Partial indexes for queries that are repeated often and match few rows.
CREATE INDEX unfinished_volumes ON volumes(id) WHERE state <> 'ready' OR grow_to IS NOT NULL OR qos_due;
CREATE INDEX unfinished_snapshots ON snapshots(id) WHERE state <> 'ready';
CREATE INDEX copied_volumes ON volumes(id) WHERE copying AND state = 'creating';
CREATE INDEX volumes_to_note ON volumes(id) WHERE record_due AND state = 'ready';
CREATE INDEX snapshots_to_note ON snapshots(id) WHERE record_due AND state = 'ready';
-- A row that cannot be decoded must not fail queries for other rows.
CREATE INDEX volumes_by_group
    ON volumes(CASE WHEN json_valid(spec) THEN spec ->> '$.placement.antiAffinityId' END, pool)
    WHERE CASE WHEN json_valid(spec) THEN spec ->> '$.placement.antiAffinityId' END IS NOT NULL;
CREATE INDEX leaving_attachments ON attachments(id) WHERE state = 'detaching';
";

const SAVED_NODES: &str = "
-- VMs whose memory was saved and that were not observed running since: libvirt may have forgotten it.
CREATE TABLE saved_nodes (
    node   TEXT PRIMARY KEY REFERENCES nodes(uuid) ON DELETE CASCADE,
    -- RFC 3339.
    since  TEXT NOT NULL
) STRICT;
-- The host of each hypervisor: an absent domain counts as gone only on the same host.
CREATE TABLE hypervisor_hosts (
    hypervisor  TEXT PRIMARY KEY,
    host        TEXT NOT NULL
) STRICT;
";

const BLANK_DISKS: &str = "
-- The secret from which the marker of a running format is derived.
ALTER TABLE volumes ADD COLUMN format_token TEXT NOT NULL DEFAULT '';
-- 1 once the volume was observed to contain data.
ALTER TABLE volumes ADD COLUMN written INTEGER NOT NULL DEFAULT 0;
UPDATE volumes SET format_token = lower(hex(randomblob(16))), record_due = 1;
-- 'no', or the UUID of the attestation that the disk held no data before it was attached; NULL until that is
-- decided. Disks attached before this version were not checked.
ALTER TABLE attachments ADD COLUMN blank TEXT;
UPDATE attachments SET blank = 'no';
";

const FULL_POOLS: &str = "
-- Behaviour of a VM that writes while the pool is full.
ALTER TABLE pools ADD COLUMN on_full TEXT NOT NULL DEFAULT 'pause' CHECK (on_full IN ('pause', 'fail'));
";

const POOL_HOSTS: &str = "
-- The hosts that reach the pool, as JSON; all hosts for the pools of earlier versions.
ALTER TABLE pools ADD COLUMN hosts TEXT NOT NULL DEFAULT '{}';
";

const REVISIONS: &str = "
-- Incremented with every change that is recorded in the pools, so that a restored catalog is detected as older than the pools.
CREATE TABLE revision (
    only    INTEGER PRIMARY KEY CHECK (only = 0),
    number  INTEGER NOT NULL
) STRICT;
INSERT INTO revision VALUES (0, 1);
-- Revision of the volume's last change.
ALTER TABLE volumes ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
-- 1 if on-disk records are newer than the catalog. It is never cleared.
ALTER TABLE pools ADD COLUMN behind INTEGER NOT NULL DEFAULT 0;
ALTER TABLE volumes ADD COLUMN behind INTEGER NOT NULL DEFAULT 0;
-- Attachments whose disk was confirmed not attached; the id may be requested again. A holder recorded with such an id has no disk.
CREATE TABLE refused_attachments (
    id        TEXT PRIMARY KEY,
    -- Seconds since 1970.
    ended_at  INTEGER NOT NULL
) STRICT;
CREATE INDEX refused_attachments_by_time ON refused_attachments(ended_at);
CREATE TRIGGER asked_for_again AFTER INSERT ON attachments
BEGIN DELETE FROM refused_attachments WHERE id = NEW.id; END;
CREATE TRIGGER revision_after_new_volume AFTER INSERT ON volumes
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = NEW.id;
END;
CREATE TRIGGER revision_after_change AFTER UPDATE OF state, capacity, grow_to, qos ON volumes
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = NEW.id;
END;
CREATE TRIGGER revision_after_deletion AFTER DELETE ON volumes
BEGIN UPDATE revision SET number = number + 1; END;
CREATE TRIGGER revision_after_attach AFTER INSERT ON attachments
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = NEW.volume;
END;
CREATE TRIGGER revision_after_reattach AFTER UPDATE OF id, node, access, read_only ON attachments
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = NEW.volume;
END;
CREATE TRIGGER revision_after_detach AFTER DELETE ON attachments
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = OLD.volume;
END;
";

/// The schema version of a catalog. Fails if it is newer than this program.
pub(super) fn supported_version(connection: &Connection) -> Result<usize, CatalogError> {
    let found: usize = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > MIGRATIONS.len() {
        return Err(CatalogError::Unusable(format!(
            "the catalog has schema version {found}, this program supports up to {}: run the version that wrote it, or a newer one",
            MIGRATIONS.len()
        )));
    }
    Ok(found)
}

/// Applies outstanding migrations, one transaction per version.
pub(super) fn migrate(connection: &mut Connection) -> Result<(), CatalogError> {
    migrate_to(connection, MIGRATIONS.len())
}

/// Applies outstanding migrations up to a version.
pub(super) fn migrate_to(connection: &mut Connection, version: usize) -> Result<(), CatalogError> {
    let found = supported_version(connection)?;
    for (index, sql) in MIGRATIONS.iter().enumerate().take(version).skip(found) {
        let tx = connection.transaction()?;
        tx.execute_batch(sql)?;
        tx.pragma_update(None, "user_version", index + 1)?;
        tx.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
