-- The catalog's schema in PostgreSQL at version 14: the same tables, constraints, indexes and triggers as in SQLite.
-- Later versions are migrations. Text is compared by bytes, as in SQLite.

CREATE TABLE schema_version (
    single   INTEGER PRIMARY KEY CHECK (single = 0),
    version  BIGINT NOT NULL
);

CREATE TABLE pools (
    name      TEXT COLLATE "C" PRIMARY KEY,
    uuid      TEXT COLLATE "C" NOT NULL UNIQUE,
    engine    TEXT COLLATE "C" NOT NULL,
    path      TEXT COLLATE "C" NOT NULL UNIQUE,
    labels    TEXT COLLATE "C" NOT NULL,
    cordoned  BOOLEAN NOT NULL,
    -- Set once the marker file is in the directory: from then on a missing marker means a missing pool.
    marked    BOOLEAN NOT NULL,
    -- Bytes reserved for the pool's volumes and snapshots, so that placement need not read all of them.
    reserved  BIGINT NOT NULL DEFAULT 0,
    -- Behaviour of a VM that writes while the pool is full.
    on_full   TEXT COLLATE "C" NOT NULL DEFAULT 'pause' CHECK (on_full IN ('pause', 'fail')),
    -- On-disk records are newer than the catalog. It is never cleared.
    behind    BOOLEAN NOT NULL DEFAULT FALSE,
    -- The hosts that reach the pool, as JSON.
    hosts     TEXT COLLATE "C" NOT NULL DEFAULT '{}'
);

CREATE TABLE volumes (
    id            TEXT COLLATE "C" PRIMARY KEY,
    pool          TEXT COLLATE "C" NOT NULL REFERENCES pools(name),
    capacity      BIGINT NOT NULL,
    -- Set during an expansion; the space is reserved from then on.
    grow_to       BIGINT,
    disk_uuid     TEXT COLLATE "C" NOT NULL UNIQUE,
    state         TEXT COLLATE "C" NOT NULL CHECK (state IN ('creating', 'ready', 'deleting')),
    -- The original request, to tell a retry from a conflict. The type keeps the text, and refuses what is no JSON.
    spec          JSON NOT NULL,
    created_at    TEXT COLLATE "C" NOT NULL,
    -- Objects that may share blocks: copies of each other by reflink.
    family        TEXT COLLATE "C" NOT NULL DEFAULT '',
    -- The bytes are copied block by block from a source that must not be written meanwhile.
    copying       BOOLEAN NOT NULL DEFAULT FALSE,
    qos           TEXT COLLATE "C" NOT NULL DEFAULT '{}',
    -- Set until the limits are applied in every VM that has the volume.
    qos_due       BOOLEAN NOT NULL DEFAULT FALSE,
    -- The on-disk record may be older than the row.
    record_due    BOOLEAN NOT NULL DEFAULT TRUE,
    -- The secret from which the marker of a running format is derived.
    format_token  TEXT COLLATE "C" NOT NULL DEFAULT '',
    -- Set once the volume was observed to contain data.
    written       BOOLEAN NOT NULL DEFAULT FALSE,
    -- Revision of the volume's last change.
    revision      BIGINT NOT NULL DEFAULT 0,
    behind        BOOLEAN NOT NULL DEFAULT FALSE,
    -- The guest that it counts for, and its class.
    account       TEXT COLLATE "C" NOT NULL DEFAULT '',
    class         TEXT COLLATE "C" NOT NULL DEFAULT '',
    -- Where the content came from.
    origin        TEXT COLLATE "C" NOT NULL DEFAULT 'created' CHECK (origin IN ('created', 'imported', 'adopted'))
);

CREATE TABLE nodes (
    uuid        TEXT COLLATE "C" PRIMARY KEY,
    hypervisor  TEXT COLLATE "C" NOT NULL,
    spec        TEXT COLLATE "C" NOT NULL
);

CREATE TABLE snapshots (
    id          TEXT COLLATE "C" PRIMARY KEY,
    -- Not a foreign key: the volume may be deleted first.
    volume      TEXT COLLATE "C" NOT NULL,
    pool        TEXT COLLATE "C" NOT NULL REFERENCES pools(name),
    capacity    BIGINT NOT NULL,
    -- Upper bound of its allocated bytes.
    reserved    BIGINT NOT NULL,
    family      TEXT COLLATE "C" NOT NULL,
    copying     BOOLEAN NOT NULL,
    state       TEXT COLLATE "C" NOT NULL CHECK (state IN ('creating', 'ready', 'deleting')),
    labels      TEXT COLLATE "C" NOT NULL,
    created_at  TEXT COLLATE "C" NOT NULL,
    record_due  BOOLEAN NOT NULL DEFAULT TRUE,
    account     TEXT COLLATE "C" NOT NULL DEFAULT '',
    class       TEXT COLLATE "C" NOT NULL DEFAULT ''
);

CREATE TABLE attachments (
    id          TEXT COLLATE "C" PRIMARY KEY,
    volume      TEXT COLLATE "C" NOT NULL REFERENCES volumes(id),
    node        TEXT COLLATE "C" NOT NULL REFERENCES nodes(uuid),
    read_only   BOOLEAN NOT NULL,
    access      TEXT COLLATE "C" NOT NULL CHECK (access IN ('single-node', 'multi-node-read-only', 'multi-node')),
    state       TEXT COLLATE "C" NOT NULL CHECK (state IN ('attaching', 'attached', 'detaching')),
    message     TEXT COLLATE "C",
    created_at  TEXT COLLATE "C" NOT NULL,
    -- 'no', or the UUID of the attestation that the disk held no data before it was attached; NULL until that is decided.
    blank       TEXT COLLATE "C",
    UNIQUE (volume, node),
    CHECK (access <> 'multi-node-read-only' OR read_only)
);

-- Ids of deleted attachments: a late request must not recreate them.
CREATE TABLE ended_attachments (
    id        TEXT COLLATE "C" PRIMARY KEY,
    -- Seconds since 1970.
    ended_at  BIGINT NOT NULL
);

-- Attachments whose disk was confirmed not attached; the id may be requested again.
CREATE TABLE refused_attachments (
    id        TEXT COLLATE "C" PRIMARY KEY,
    ended_at  BIGINT NOT NULL
);

-- VMs whose memory was saved and that were not observed running since: libvirt may have forgotten it.
CREATE TABLE saved_nodes (
    node   TEXT COLLATE "C" PRIMARY KEY REFERENCES nodes(uuid) ON DELETE CASCADE,
    since  TEXT COLLATE "C" NOT NULL
);

-- The host of each hypervisor: an absent domain counts as gone only on the same host.
CREATE TABLE hypervisor_hosts (
    hypervisor  TEXT COLLATE "C" PRIMARY KEY,
    host        TEXT COLLATE "C" NOT NULL
);

-- Incremented with every change that is recorded in the pools, so that a restored catalog is detected as older than them.
CREATE TABLE revision (
    "only"  INTEGER PRIMARY KEY CHECK ("only" = 0),
    number  BIGINT NOT NULL
);

CREATE TABLE budgets (
    account  TEXT COLLATE "C" PRIMARY KEY,
    limits   TEXT COLLATE "C" NOT NULL
);

CREATE TABLE account_usage (
    account    TEXT COLLATE "C" NOT NULL,
    class      TEXT COLLATE "C" NOT NULL,
    -- Sizes of volumes, and reserved bytes of snapshots.
    bytes      BIGINT NOT NULL,
    volumes    BIGINT NOT NULL,
    snapshots  BIGINT NOT NULL,
    PRIMARY KEY (account, class)
);

-- Running exports of volumes. They end with the server, so its start removes them.
CREATE TABLE exports (
    id      TEXT COLLATE "C" PRIMARY KEY,
    volume  TEXT COLLATE "C" NOT NULL REFERENCES volumes(id) ON DELETE CASCADE
);

-- Imports that are not complete.
CREATE TABLE imports (
    volume    TEXT COLLATE "C" PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    -- Checksum of the stream's header; NULL until the first extents are durable.
    header    BYTEA,
    -- End of the last extent that is durable, and the checksum of the stream up to there.
    received  BIGINT NOT NULL DEFAULT 0,
    checksum  BYTEA,
    -- Set once all of the stream is verified and durable.
    verified  BOOLEAN NOT NULL DEFAULT FALSE
);

-- Adoptions that are not complete.
CREATE TABLE adoptions (
    volume  TEXT COLLATE "C" PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    path    TEXT COLLATE "C" NOT NULL,
    inode   BIGINT NOT NULL,
    method  TEXT COLLATE "C" NOT NULL CHECK (method IN ('rename', 'copy', 'convert'))
);

-- Releases that are not complete.
CREATE TABLE releases (
    volume  TEXT COLLATE "C" PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    path    TEXT COLLATE "C" NOT NULL,
    inode   BIGINT NOT NULL
);

CREATE TABLE suspended_volumes (
    volume  TEXT COLLATE "C" PRIMARY KEY REFERENCES volumes(id) ON DELETE CASCADE,
    reason  TEXT COLLATE "C" NOT NULL,
    since   TEXT COLLATE "C" NOT NULL
);

CREATE TABLE suspended_pools (
    pool    TEXT COLLATE "C" PRIMARY KEY REFERENCES pools(name) ON DELETE CASCADE,
    reason  TEXT COLLATE "C" NOT NULL,
    since   TEXT COLLATE "C" NOT NULL
);

-- Nodes that the server paused, or was about to pause, because of a suspension. Only these are resumed.
CREATE TABLE paused_nodes (
    node  TEXT COLLATE "C" PRIMARY KEY REFERENCES nodes(uuid) ON DELETE CASCADE
);

CREATE TABLE moves (
    volume      TEXT COLLATE "C" PRIMARY KEY REFERENCES volumes(id),
    -- The pool of the other file: the target until the volume's row names it, from then on the source.
    pool        TEXT COLLATE "C" NOT NULL REFERENCES pools(name),
    phase       TEXT COLLATE "C" NOT NULL CHECK (phase IN ('waiting', 'copying', 'mirroring', 'switching', 'removing')),
    -- Bytes reserved in that pool.
    reserved    BIGINT NOT NULL,
    -- Bytes per second.
    rate        BIGINT,
    -- Set once the cancellation was requested.
    cancelled   BOOLEAN NOT NULL DEFAULT FALSE,
    -- The node that is paused for the switch.
    paused      TEXT COLLATE "C",
    message     TEXT COLLATE "C",
    started_at  TEXT COLLATE "C" NOT NULL
);

INSERT INTO revision VALUES (0, 1);

-- The queries share their text with SQLite, where the column may hold anything. The type JSON refuses what is not valid.
CREATE FUNCTION json_valid(document JSON) RETURNS BOOLEAN LANGUAGE SQL IMMUTABLE PARALLEL SAFE AS 'SELECT TRUE';

CREATE INDEX volumes_by_pool ON volumes(pool);
CREATE INDEX volumes_by_group ON volumes((spec #>> '{placement,antiAffinityId}'), pool)
    WHERE spec #>> '{placement,antiAffinityId}' IS NOT NULL;
CREATE INDEX unfinished_volumes ON volumes(id) WHERE state <> 'ready' OR grow_to IS NOT NULL OR qos_due;
CREATE INDEX copied_volumes ON volumes(id) WHERE copying AND state = 'creating';
CREATE INDEX volumes_to_note ON volumes(id) WHERE record_due AND state = 'ready';
CREATE INDEX snapshots_by_volume ON snapshots(volume);
CREATE INDEX snapshots_by_pool ON snapshots(pool);
CREATE INDEX unfinished_snapshots ON snapshots(id) WHERE state <> 'ready';
CREATE INDEX snapshots_to_note ON snapshots(id) WHERE record_due AND state = 'ready';
CREATE INDEX attachments_by_node ON attachments(node);
CREATE INDEX leaving_attachments ON attachments(id) WHERE state = 'detaching';
CREATE INDEX ended_attachments_by_time ON ended_attachments(ended_at);
CREATE INDEX refused_attachments_by_time ON refused_attachments(ended_at);
CREATE INDEX exports_by_volume ON exports(volume);
CREATE INDEX moves_by_pool ON moves(pool);
-- At most one writer, independent of the code: a single-node attachment excludes all others.
CREATE UNIQUE INDEX one_single_node_attachment ON attachments(volume) WHERE access = 'single-node';

-- What must not be attached, independent of the code.
CREATE FUNCTION check_new_attachment() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    -- Attachments of one volume must have the same access mode: all read-only, or all multi-writer.
    IF EXISTS (SELECT 1 FROM attachments a WHERE a.volume = NEW.volume AND a.id <> NEW.id
               AND (a.access = 'single-node' OR a.access <> NEW.access)) THEN
        RAISE EXCEPTION 'the volume is attached elsewhere';
    END IF;
    IF NEW.access = 'multi-node'
       AND NOT (SELECT coalesce(spec #>> '{shareable}', 'false') = 'true' FROM volumes WHERE id = NEW.volume) THEN
        RAISE EXCEPTION 'the volume is not shareable';
    END IF;
    IF (NOT NEW.read_only AND EXISTS (SELECT 1 FROM exports WHERE volume = NEW.volume))
       OR EXISTS (SELECT 1 FROM releases WHERE volume = NEW.volume) THEN
        RAISE EXCEPTION 'the volume is being exported or released';
    END IF;
    IF EXISTS (SELECT 1 FROM suspended_volumes WHERE volume = NEW.volume)
       OR EXISTS (SELECT 1 FROM suspended_pools s JOIN volumes v ON v.pool = s.pool WHERE v.id = NEW.volume) THEN
        RAISE EXCEPTION 'the volume or its pool is suspended';
    END IF;
    IF EXISTS (SELECT 1 FROM moves WHERE volume = NEW.volume AND phase IN ('copying', 'switching')) THEN
        RAISE EXCEPTION 'the file of the volume is being moved';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_new_attachment BEFORE INSERT ON attachments
    FOR EACH ROW EXECUTE FUNCTION check_new_attachment();

CREATE FUNCTION attached_volumes_stay() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state <> 'deleting' THEN
        RAISE EXCEPTION 'only a volume in state deleting can be removed';
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER attached_volumes_stay BEFORE DELETE ON volumes FOR EACH ROW EXECUTE FUNCTION attached_volumes_stay();

-- The pool of a volume changes only by a move.
CREATE FUNCTION volumes_change_their_pool_by_moves() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.pool <> OLD.pool AND NOT EXISTS (SELECT 1 FROM moves WHERE volume = NEW.id AND pool = NEW.pool
                                            AND phase IN ('copying', 'switching')) THEN
        RAISE EXCEPTION 'the volume is not being moved to that pool';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER a_volumes_change_their_pool_by_moves BEFORE UPDATE OF pool ON volumes
    FOR EACH ROW EXECUTE FUNCTION volumes_change_their_pool_by_moves();

CREATE FUNCTION next_revision() RETURNS BIGINT LANGUAGE SQL AS
    'UPDATE revision SET number = number + 1 RETURNING number';

CREATE FUNCTION revise_volume() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    NEW.revision := next_revision();
    RETURN NEW;
END $$;
CREATE TRIGGER revision_after_new_volume BEFORE INSERT ON volumes FOR EACH ROW EXECUTE FUNCTION revise_volume();
CREATE TRIGGER revision_after_change BEFORE UPDATE OF state, capacity, grow_to, qos, account, class, pool ON volumes
    FOR EACH ROW EXECUTE FUNCTION revise_volume();

CREATE FUNCTION record_is_due() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    NEW.record_due := TRUE;
    RETURN NEW;
END $$;
CREATE TRIGGER record_due_after_change BEFORE UPDATE OF qos, capacity, account, class, pool ON volumes
    FOR EACH ROW EXECUTE FUNCTION record_is_due();

CREATE FUNCTION revision_after_deletion() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    PERFORM next_revision();
    RETURN NULL;
END $$;
CREATE TRIGGER revision_after_deletion AFTER DELETE ON volumes FOR EACH ROW EXECUTE FUNCTION revision_after_deletion();

-- The record of a new writer is written before its disk is attached; new readers are recorded later.
CREATE FUNCTION revision_after_attach() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM refused_attachments WHERE id = NEW.id;
    UPDATE volumes SET revision = next_revision(), record_due = record_due OR NEW.read_only WHERE id = NEW.volume;
    RETURN NULL;
END $$;
CREATE TRIGGER revision_after_attach AFTER INSERT ON attachments FOR EACH ROW EXECUTE FUNCTION revision_after_attach();

CREATE FUNCTION revision_after_detach() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    UPDATE volumes SET revision = next_revision(), record_due = TRUE WHERE id = OLD.volume;
    RETURN NULL;
END $$;
CREATE TRIGGER revision_after_detach AFTER DELETE ON attachments FOR EACH ROW EXECUTE FUNCTION revision_after_detach();
CREATE TRIGGER revision_after_reattach AFTER UPDATE OF id, node, access, read_only ON attachments
    FOR EACH ROW EXECUTE FUNCTION revision_after_detach();

CREATE FUNCTION record_due_after_move() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    UPDATE volumes SET record_due = TRUE WHERE id = OLD.volume;
    RETURN NULL;
END $$;
CREATE TRIGGER record_due_after_move AFTER DELETE ON moves FOR EACH ROW EXECUTE FUNCTION record_due_after_move();

-- Sums of reserved bytes per pool, and what each account uses.
CREATE FUNCTION count_for(owner TEXT, of_class TEXT, of_bytes BIGINT, of_volumes BIGINT, of_snapshots BIGINT)
RETURNS VOID LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO account_usage AS u VALUES (owner, of_class, of_bytes, of_volumes, of_snapshots)
        ON CONFLICT (account, class) DO UPDATE SET bytes = u.bytes + excluded.bytes,
            volumes = u.volumes + excluded.volumes, snapshots = u.snapshots + excluded.snapshots;
    DELETE FROM account_usage WHERE account = owner AND class = of_class AND volumes = 0 AND snapshots = 0;
END $$;

CREATE FUNCTION count_volume() RETURNS TRIGGER LANGUAGE plpgsql AS $$
DECLARE size BIGINT;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        size := greatest(OLD.capacity, coalesce(OLD.grow_to, 0));
        UPDATE pools SET reserved = reserved - size WHERE name = OLD.pool;
        PERFORM count_for(OLD.account, OLD.class, -size, -1, 0);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        size := greatest(NEW.capacity, coalesce(NEW.grow_to, 0));
        UPDATE pools SET reserved = reserved + size WHERE name = NEW.pool;
        PERFORM count_for(NEW.account, NEW.class, size, 1, 0);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER count_volume AFTER INSERT OR DELETE OR UPDATE OF pool, capacity, grow_to, account, class ON volumes
    FOR EACH ROW EXECUTE FUNCTION count_volume();

CREATE FUNCTION count_snapshot() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool;
        PERFORM count_for(OLD.account, OLD.class, -OLD.reserved, 0, -1);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool;
        PERFORM count_for(NEW.account, NEW.class, NEW.reserved, 0, 1);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER count_snapshot AFTER INSERT OR DELETE OR UPDATE OF pool, reserved, account, class ON snapshots
    FOR EACH ROW EXECUTE FUNCTION count_snapshot();

CREATE FUNCTION count_move() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE pools SET reserved = reserved - OLD.reserved WHERE name = OLD.pool;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE pools SET reserved = reserved + NEW.reserved WHERE name = NEW.pool;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER count_move AFTER INSERT OR DELETE OR UPDATE OF pool, reserved ON moves
    FOR EACH ROW EXECUTE FUNCTION count_move();

INSERT INTO schema_version VALUES (0, 14);
