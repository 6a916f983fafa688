//! Tables of budgets and of what each account uses. Triggers maintain the usage, so that a check reads a few rows.

use std::collections::BTreeMap;

use infra_api::{Account, BudgetSpec, ClassUsage, Owner, Usage, VolumeId};

use super::db::{self, OptionalExtension, Row, params};
use super::{Result, Tx, from_json, parse, to_json};

/// Migration.
pub(super) const ACCOUNTS: &str = "
-- The guest that an object counts for, and its class.
ALTER TABLE volumes ADD COLUMN account TEXT NOT NULL DEFAULT '';
ALTER TABLE volumes ADD COLUMN class TEXT NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN account TEXT NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN class TEXT NOT NULL DEFAULT '';
-- mgmt-csi labels objects with their guest.
UPDATE volumes SET account = CASE WHEN json_valid(spec) THEN coalesce(spec ->> '$.labels.guest', '') ELSE '' END;
UPDATE snapshots SET account = CASE WHEN json_valid(labels) THEN coalesce(labels ->> '$.guest', '') ELSE '' END;
UPDATE volumes SET account = '' WHERE account NOT GLOB '[a-zA-Z0-9]*' OR account NOT GLOB '*[a-zA-Z0-9]'
    OR account GLOB '*[^-_.a-zA-Z0-9]*' OR length(account) > 63;
UPDATE snapshots SET account = '' WHERE account NOT GLOB '[a-zA-Z0-9]*' OR account NOT GLOB '*[a-zA-Z0-9]'
    OR account GLOB '*[^-_.a-zA-Z0-9]*' OR length(account) > 63;

CREATE TABLE budgets (
    account  TEXT PRIMARY KEY,
    limits   TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE account_usage (
    account    TEXT NOT NULL,
    class      TEXT NOT NULL,
    -- Sizes of volumes, and reserved bytes of snapshots.
    bytes      INTEGER NOT NULL,
    volumes    INTEGER NOT NULL,
    snapshots  INTEGER NOT NULL,
    PRIMARY KEY (account, class)
) STRICT, WITHOUT ROWID;
INSERT INTO account_usage
    SELECT account, class, sum(bytes), sum(volumes), sum(snapshots) FROM (
        SELECT account, class, max(capacity, coalesce(grow_to, 0)) AS bytes, 1 AS volumes, 0 AS snapshots FROM volumes
        UNION ALL SELECT account, class, reserved, 0, 1 FROM snapshots)
    GROUP BY account, class;

CREATE TRIGGER new_volume_counts AFTER INSERT ON volumes
BEGIN
    INSERT INTO account_usage VALUES (NEW.account, NEW.class, max(NEW.capacity, coalesce(NEW.grow_to, 0)), 1, 0)
        ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes, volumes = volumes + 1;
END;
CREATE TRIGGER old_volume_counts_no_more AFTER DELETE ON volumes
BEGIN
    UPDATE account_usage SET bytes = bytes - max(OLD.capacity, coalesce(OLD.grow_to, 0)), volumes = volumes - 1
        WHERE account = OLD.account AND class = OLD.class;
    DELETE FROM account_usage
        WHERE account = OLD.account AND class = OLD.class AND volumes = 0 AND snapshots = 0;
END;
CREATE TRIGGER changed_volume_counts AFTER UPDATE OF capacity, grow_to, account, class ON volumes
BEGIN
    INSERT INTO account_usage VALUES (NEW.account, NEW.class, max(NEW.capacity, coalesce(NEW.grow_to, 0)), 1, 0)
        ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes, volumes = volumes + 1;
    UPDATE account_usage SET bytes = bytes - max(OLD.capacity, coalesce(OLD.grow_to, 0)), volumes = volumes - 1
        WHERE account = OLD.account AND class = OLD.class;
    DELETE FROM account_usage
        WHERE account = OLD.account AND class = OLD.class AND volumes = 0 AND snapshots = 0;
END;
CREATE TRIGGER new_snapshot_counts AFTER INSERT ON snapshots
BEGIN
    INSERT INTO account_usage VALUES (NEW.account, NEW.class, NEW.reserved, 0, 1)
        ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes, snapshots = snapshots + 1;
END;
CREATE TRIGGER old_snapshot_counts_no_more AFTER DELETE ON snapshots
BEGIN
    UPDATE account_usage SET bytes = bytes - OLD.reserved, snapshots = snapshots - 1
        WHERE account = OLD.account AND class = OLD.class;
    DELETE FROM account_usage
        WHERE account = OLD.account AND class = OLD.class AND volumes = 0 AND snapshots = 0;
END;
CREATE TRIGGER changed_snapshot_counts AFTER UPDATE OF reserved ON snapshots
BEGIN
    UPDATE account_usage SET bytes = bytes - OLD.reserved + NEW.reserved
        WHERE account = NEW.account AND class = NEW.class;
END;

CREATE TRIGGER record_due_after_new_owner AFTER UPDATE OF account, class ON volumes
BEGIN UPDATE volumes SET record_due = 1 WHERE id = OLD.id; END;
CREATE TRIGGER revision_after_new_owner AFTER UPDATE OF account, class ON volumes
BEGIN
    UPDATE revision SET number = number + 1;
    UPDATE volumes SET revision = (SELECT number FROM revision) WHERE id = NEW.id;
END;
";

fn read_usage(row: &Row<'_>) -> db::Result<(String, String, ClassUsage)> {
    let used = ClassUsage { bytes: row.get(2)?, volumes: row.get(3)?, snapshots: row.get(4)? };
    Ok((row.get(0)?, row.get(1)?, used))
}

impl Tx<'_> {
    /// The limits of an account; None without a budget.
    pub fn budget(&self, account: &Account) -> Result<Option<BudgetSpec>> {
        let limits: Option<String> = self
            .0
            .prepare_cached("SELECT limits FROM budgets WHERE account = ?1")?
            .query_row([account.as_str()], |row| row.get(0))
            .optional()?;
        limits.map(|text| from_json("budgets.limits", &text)).transpose()
    }

    /// The limits of all accounts.
    pub fn budgets(&self) -> Result<BTreeMap<Account, BudgetSpec>> {
        self.0
            .prepare_cached("SELECT account, limits FROM budgets")?
            .query_map([], |row| Ok((row.get::<String>(0)?, row.get::<String>(1)?)))?
            .map(|row| {
                let (account, limits) = row?;
                Ok((parse("budgets.account", &account)?, from_json("budgets.limits", &limits)?))
            })
            .collect()
    }

    /// Sets the limits of an account.
    pub fn put_budget(&self, account: &Account, limits: &BudgetSpec) -> Result<()> {
        self.0
            .prepare_cached(
                "INSERT INTO budgets (account, limits) VALUES (?1, ?2) \
                 ON CONFLICT (account) DO UPDATE SET limits = excluded.limits",
            )?
            .execute(params![account.as_str(), to_json(limits)?])?;
        Ok(())
    }

    /// Removes the limits of an account. False if it has none.
    pub fn delete_budget(&self, account: &Account) -> Result<bool> {
        let mut delete = self.0.prepare_cached("DELETE FROM budgets WHERE account = ?1")?;
        Ok(delete.execute([account.as_str()])? > 0)
    }

    /// What an account uses.
    pub fn usage(&self, account: &Account) -> Result<Usage> {
        let mut used = Usage::default();
        let mut rows = self.0.prepare_cached("SELECT * FROM account_usage WHERE account = ?1")?;
        for row in rows.query_map([account.as_str()], read_usage)? {
            let (_, class, of_class) = row?;
            used.add(class, of_class);
        }
        Ok(used)
    }

    /// What each account uses.
    pub fn usages(&self) -> Result<BTreeMap<Account, Usage>> {
        let mut all: BTreeMap<Account, Usage> = BTreeMap::new();
        for row in self.0.prepare_cached("SELECT * FROM account_usage")?.query_map([], read_usage)? {
            let (account, class, of_class) = row?;
            all.entry(parse("account_usage.account", &account)?).or_default().add(class, of_class);
        }
        Ok(all)
    }

    /// Number of snapshots that an account has of a volume.
    pub fn count_snapshots(&self, volume: &VolumeId, account: &Account) -> Result<u64> {
        let mut count =
            self.0.prepare_cached("SELECT count(*) FROM snapshots WHERE volume = ?1 AND account = ?2")?;
        Ok(count.query_row([volume.as_str(), account.as_str()], |row| row.get(0))?)
    }

    /// Sets whom a volume counts for.
    pub fn set_owner(&self, id: &VolumeId, owner: &Owner) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET account = ?2, class = ?3 WHERE id = ?1")?
            .execute(params![id.as_str(), owner.account.as_str(), owner.class])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::super::postgres::testing::{Backend, Scratch};
    use super::super::schema;
    use super::*;

    fn insert_volume(id: &str, account: &str, bytes: u64) -> String {
        format!(
            "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at, account, class) \
             VALUES ('{id}', 'p', {bytes}, '{id}', 'deleting', '{{}}', 'now', '{account}', 'c');"
        )
    }

    fn insert_snapshot(id: &str, account: &str, bytes: u64) -> String {
        format!(
            "INSERT INTO snapshots (id, volume, pool, capacity, reserved, family, copying, state, labels, created_at, \
             account, class) VALUES ('{id}', 'v', 'p', 9, {bytes}, 'f', FALSE, 'ready', '{{}}', 'now', '{account}', 'c');"
        )
    }

    const POOL: &str = "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
                        VALUES ('p', 'u', 'file', '/p', '{}', FALSE, TRUE);";

    #[test]
    fn the_usage_follows_every_change() {
        Backend::each().iter().for_each(|backend| backend.scratch(follows));
    }

    fn follows(catalog: &Scratch<'_>) {
        catalog.run(POOL);
        let steps = [
            (insert_volume("v", "a", 100), [(100, 1, 0), (0, 0, 0)]),
            (insert_snapshot("s", "a", 7), [(107, 1, 1), (0, 0, 0)]),
            ("UPDATE volumes SET grow_to = 150".to_owned(), [(157, 1, 1), (0, 0, 0)]),
            ("UPDATE volumes SET grow_to = NULL".to_owned(), [(107, 1, 1), (0, 0, 0)]),
            ("UPDATE snapshots SET reserved = 3".to_owned(), [(103, 1, 1), (0, 0, 0)]),
            ("UPDATE volumes SET account = 'b'".to_owned(), [(3, 0, 1), (100, 1, 0)]),
            ("UPDATE volumes SET account = 'b', class = 'd'".to_owned(), [(3, 0, 1), (100, 1, 0)]),
            ("DELETE FROM snapshots".to_owned(), [(0, 0, 0), (100, 1, 0)]),
            ("DELETE FROM volumes".to_owned(), [(0, 0, 0), (0, 0, 0)]),
        ];
        for (step, expected) in steps {
            catalog.run(&step);
            let used = ["a", "b"].map(|account| {
                let used = catalog.tx().usage(&Account::new(account).unwrap()).unwrap();
                (used.bytes, used.volumes, used.snapshots)
            });
            assert_eq!(used, expected, "{step}");
        }
        assert!(catalog.tx().usages().unwrap().is_empty());
    }

    #[test]
    fn the_migration_counts_existing_objects_for_the_guest_in_their_labels() {
        let mut connection = Connection::open_in_memory().unwrap();
        schema::migrate_to(&mut connection, 9).unwrap();
        let volume = |id: &str, spec: &str| {
            format!(
                "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at) \
                 VALUES ('{id}', 'p', 10, '{id}', 'ready', '{spec}', 'now');"
            )
        };
        let snapshot = "INSERT INTO snapshots \
            (id, volume, pool, capacity, reserved, family, copying, state, labels, created_at) \
            VALUES ('s', 'v', 'p', 9, 5, 'f', 0, 'ready', '{\"guest\":\"g1\"}', 'now');";
        let rows = [
            POOL.to_owned(),
            volume("v", r#"{"labels":{"guest":"g1"}}"#),
            volume("w", r#"{"labels":{"guest":"no/account"}}"#),
            volume("x", "{"),
            snapshot.to_owned(),
        ];
        connection.execute_batch(&rows.concat()).unwrap();
        schema::migrate(&mut connection).unwrap();
        let all = Tx::of(&connection).usages().unwrap();
        let of = |account: &str| &all[&Account::new(account).unwrap()];
        assert_eq!((of("g1").bytes, of("g1").volumes, of("g1").snapshots), (15, 1, 1));
        assert_eq!((of("").bytes, of("").volumes, of("").snapshots), (20, 2, 0));
    }
}
