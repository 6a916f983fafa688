//! Tests of the schema in both databases.

use super::super::postgres::testing::{self, Backend, Scratch};
use super::super::postgres::{self, import, outside_the_runtime};
use super::super::{attachments, records, snapshots, volumes};
use super::*;

#[test]
fn a_migration_keeps_the_rows_and_turns_the_zone_into_a_list() {
    let mut connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(FIRST).unwrap();
    connection.pragma_update(None, "user_version", 1).unwrap();
    connection
        .execute_batch(
            r#"INSERT INTO pools VALUES ('p', 'u', 'file', '/p', '{}', 0, 1);
            INSERT INTO volumes VALUES ('v', 'p', 4096, NULL, 'd', 'ready',
                '{"capacityBytes":1,"placement":{"zone":"z1"},"labels":{}}', 'now');
            INSERT INTO volumes VALUES ('w', 'p', 4096, NULL, 'e', 'ready',
                '{"capacityBytes":1,"placement":{},"labels":{}}', 'now');
            INSERT INTO nodes VALUES ('n', 'h', '{}');
            INSERT INTO attachments VALUES ('a', 'v', 'n', 0, 'single-node', 'attached', NULL, 'now');"#,
        )
        .unwrap();
    migrate(&mut connection).unwrap();
    let text = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, String>(0)).unwrap();
    let spec: infra_api::VolumeSpec =
        serde_json::from_str(&text("SELECT spec FROM volumes WHERE id = 'v'")).unwrap();
    assert_eq!(spec.placement.zones, ["z1"]);
    let spec: infra_api::VolumeSpec =
        serde_json::from_str(&text("SELECT spec FROM volumes WHERE id = 'w'")).unwrap();
    assert!(spec.placement.zones.is_empty());
    assert_eq!(text("SELECT family FROM volumes WHERE id = 'v'"), "d");
    assert_eq!(text("SELECT volume FROM attachments"), "v");
}

#[test]
fn a_migration_computes_the_reserved_sums() {
    let mut connection = Connection::open_in_memory().unwrap();
    for sql in &MIGRATIONS[..4] {
        connection.execute_batch(sql).unwrap();
    }
    connection.pragma_update(None, "user_version", 4).unwrap();
    let volume = |id: &str, pool: &str, bytes: u64, grow_to: &str| {
        format!(
            "INSERT INTO volumes (id, pool, capacity, grow_to, disk_uuid, state, spec, created_at) \
             VALUES ('{id}', '{pool}', {bytes}, {grow_to}, '{id}', 'deleting', '{{}}', 'now');"
        )
    };
    let snapshot = |id: &str, bytes: u64| {
        format!(
            "INSERT INTO snapshots (id, volume, pool, capacity, reserved, family, copying, state, labels, created_at) \
             VALUES ('{id}', 'a', 'p', 900, {bytes}, 'f', 0, 'ready', '{{}}', 'now');"
        )
    };
    let old = [
        "INSERT INTO pools VALUES ('p', 'u', 'file', '/p', '{}', 0, 1);".to_owned(),
        "INSERT INTO pools VALUES ('q', 'w', 'file', '/q', '{}', 0, 1);".to_owned(),
        volume("a", "p", 100, "NULL"),
        volume("b", "p", 10, "20"),
        snapshot("s", 7),
    ];
    connection.execute_batch(&old.concat()).unwrap();
    migrate(&mut connection).unwrap();
    let sum = |pool: &str| {
        let sql = "SELECT reserved FROM pools WHERE name = ?1";
        connection.query_row(sql, [pool], |row| row.get::<_, u64>(0)).unwrap()
    };
    assert_eq!((sum("p"), sum("q")), (127, 0));
}

#[test]
fn triggers_maintain_the_reserved_sums() {
    Backend::each().iter().for_each(|backend| backend.scratch(maintain_sums));
}

fn maintain_sums(catalog: &Scratch<'_>) {
    let pool = |name: &str| {
        format!(
            "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
             VALUES ('{name}', '{name}', 'file', '/{name}', '{{}}', FALSE, TRUE);"
        )
    };
    let volume = |id: &str, pool: &str, bytes: u64, grow_to: &str| {
        format!(
            "INSERT INTO volumes (id, pool, capacity, grow_to, disk_uuid, state, spec, created_at) \
             VALUES ('{id}', '{pool}', {bytes}, {grow_to}, '{id}', 'deleting', '{{}}', 'now');"
        )
    };
    let snapshot = |id: &str, bytes: u64| {
        format!(
            "INSERT INTO snapshots (id, volume, pool, capacity, reserved, family, copying, state, labels, created_at) \
             VALUES ('{id}', 'a', 'p', 900, {bytes}, 'f', FALSE, 'ready', '{{}}', 'now');"
        )
    };
    let sum = |pool: &str| catalog.value::<u64>("SELECT reserved FROM pools WHERE name = ?1", [pool]);
    catalog.run(&[pool("p"), pool("q")].concat());
    let steps = [
        (volume("a", "p", 100, "NULL"), 100, 0),
        (volume("b", "p", 10, "20"), 120, 0),
        (snapshot("s", 7), 127, 0),
        (volume("c", "q", 5, "NULL"), 127, 5),
        (snapshot("t", 3), 130, 5),
        ("UPDATE volumes SET grow_to = 50 WHERE id = 'c'".to_owned(), 130, 50),
        ("UPDATE volumes SET capacity = grow_to, grow_to = NULL WHERE id = 'c'".to_owned(), 130, 50),
        ("UPDATE snapshots SET reserved = 1 WHERE id = 't'".to_owned(), 128, 50),
        (
            "INSERT INTO moves (volume, pool, phase, reserved, started_at) VALUES ('c', 'p', 'copying', 50, 'now')"
                .to_owned(),
            178,
            50,
        ),
        ("UPDATE volumes SET pool = 'p' WHERE id = 'c'".to_owned(), 228, 0),
        ("UPDATE moves SET pool = 'q', phase = 'removing'".to_owned(), 178, 50),
        ("DELETE FROM moves".to_owned(), 178, 0),
        ("DELETE FROM volumes WHERE id = 'b'".to_owned(), 158, 0),
        ("DELETE FROM snapshots".to_owned(), 150, 0),
        ("DELETE FROM volumes".to_owned(), 0, 0),
    ];
    for (step, p, q) in steps {
        catalog.run(&step);
        assert_eq!((sum("p"), sum("q")), (p, q), "{step}");
    }
}

#[test]
fn a_group_is_found_although_another_row_cannot_be_decoded() {
    let mut connection = Connection::open_in_memory().unwrap();
    migrate(&mut connection).unwrap();
    let volume = |id: &str, spec: &str| {
        format!(
            "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at) \
             VALUES ('{id}', 'p', 1, '{id}', 'ready', '{spec}', 'now');"
        )
    };
    let rows = [
        "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
         VALUES ('p', 'u', 'file', '/p', '{}', 0, 1);"
            .to_owned(),
        volume("a", r#"{"placement":{"antiAffinityId":"db"}}"#),
        volume("b", "{}"),
        volume("c", "{"),
    ];
    connection.execute_batch(&rows.concat()).unwrap();
    let sql = format!("SELECT id FROM volumes WHERE {}", volumes::OF_GROUP);
    assert_eq!(connection.query_row(&sql, ["db"], |row| row.get::<_, String>(0)).unwrap(), "a");
}

#[test]
fn a_group_is_found_in_postgresql_and_a_spec_that_is_no_json_is_refused() {
    Backend::each()[1].scratch(|catalog| {
        catalog.run(
            "INSERT INTO pools (name, uuid, engine, path, labels, cordoned, marked) \
             VALUES ('p', 'u', 'file', '/p', '{}', FALSE, TRUE)",
        );
        let insert = "INSERT INTO volumes (id, pool, capacity, disk_uuid, state, spec, created_at) \
                      VALUES (?1, 'p', 1, ?1, 'ready', ?2, 'now')";
        catalog.execute(insert, ["a", r#"{"placement":{"antiAffinityId":"db"}}"#]).unwrap();
        catalog.execute(insert, ["b", "{}"]).unwrap();
        catalog.execute(insert, ["c", "{"]).unwrap_err();
        let sql = format!("SELECT id FROM volumes WHERE {}", volumes::OF_GROUP);
        assert_eq!(catalog.value::<String>(&sql, ["db"]), "a");
        let group = infra_api::PoolName::new("p").unwrap();
        assert_eq!(catalog.tx().count_by_pool("db").unwrap()[&group], 1);
    });
}

#[test]
fn both_databases_have_the_same_tables_and_columns_at_the_same_version() {
    assert_eq!(MIGRATIONS.len(), postgres::schema::FIRST_VERSION + postgres::schema::MIGRATIONS.len());
    let mut connection = Connection::open_in_memory().unwrap();
    migrate(&mut connection).unwrap();
    let list = |sql: &str| -> Vec<String> {
        let mut select = connection.prepare(sql).unwrap();
        select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    let mut tables = list("SELECT name FROM sqlite_schema WHERE type = 'table'");
    let mut imported: Vec<&str> = import::tables().collect();
    tables.sort();
    imported.sort_unstable();
    assert_eq!(tables, imported);
    let columns = |table: &str| list(&format!("SELECT name FROM pragma_table_info('{table}') ORDER BY name"));
    let expected: Vec<Vec<String>> = tables.iter().map(String::as_str).map(columns).collect();
    let found = outside_the_runtime(|| {
        let session = testing::database().connect()?;
        postgres::schema::migrate(&session)?;
        let columns = |table: &String| import::columns(&session, table);
        tables.iter().map(columns).collect::<super::super::Result<Vec<_>>>()
    });
    let mut found = found.unwrap();
    found.iter_mut().for_each(|columns| columns.sort());
    assert_eq!(found, expected);
}

#[test]
fn frequent_queries_use_an_index() {
    let mut connection = Connection::open_in_memory().unwrap();
    migrate(&mut connection).unwrap();
    let of_volume = format!("attachments WHERE {}", attachments::filter(false, true));
    let of_node = format!("attachments WHERE {}", attachments::filter(true, false));
    let of_both = format!("attachments WHERE {}", attachments::filter(true, true));
    let queries = [
        ("INDEX unfinished_volumes", format!("volumes WHERE {} ORDER BY id", volumes::RESUMABLE)),
        ("INDEX exports_by_volume", "exports WHERE volume = ?1".to_owned()),
        ("INDEX unfinished_snapshots", format!("snapshots WHERE {} ORDER BY id", snapshots::UNFINISHED)),
        ("INDEX copied_volumes", format!("volumes WHERE {} AND spec ->> '$.a' = ?1", volumes::COPIED)),
        ("INDEX snapshots_by_volume", format!("snapshots WHERE {} AND volume = ?1", volumes::COPIED)),
        ("INDEX volumes_by_group", format!("volumes WHERE {}", volumes::OF_GROUP)),
        ("INDEX volumes_to_note", format!("volumes WHERE {}", records::DUE)),
        ("INDEX snapshots_to_note", format!("snapshots WHERE {}", records::DUE)),
        ("INDEX leaving_attachments", format!("attachments WHERE {}", attachments::DETACHING)),
        ("SEARCH attachments", of_volume),
        ("SEARCH attachments", of_both),
        ("INDEX attachments_by_node", of_node),
    ];
    for (index, query) in queries {
        let sql = format!("EXPLAIN QUERY PLAN SELECT * FROM {query}");
        let mut plan = connection.prepare(&sql).unwrap();
        let count = plan.parameter_count();
        let arguments = rusqlite::params_from_iter(std::iter::repeat_n("x", count));
        let steps = plan.query_map(arguments, |row| row.get::<_, String>("detail")).unwrap();
        let steps: Vec<String> = steps.map(Result::unwrap).collect();
        assert!(steps.iter().any(|step| step.contains(index)), "{query}: {steps:?}");
    }
}
