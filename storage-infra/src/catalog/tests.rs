//! Tests of the catalog.

use infra_api::*;
use uuid::Uuid;

use super::postgres::testing::Backend;
use super::*;

fn volume(id: &str) -> VolumeRow {
    VolumeRow {
        id: VolumeId::new(id).unwrap(),
        pool: PoolName::new("p").unwrap(),
        capacity: 1 << 20,
        grow_to: None,
        disk_uuid: Uuid::new_v4(),
        state: VolumeState::Ready,
        spec: VolumeSpec::of_size(1),
        created_at: "2026-01-01T00:00:00Z".into(),
        family: Uuid::new_v4(),
        copying: false,
        qos: Qos::default(),
        qos_due: false,
        format_token: FormatToken::random(),
        written: false,
        owner: Owner::default(),
        origin: Origin::Created,
    }
}

fn attachment(id: &str, volume: &VolumeRow, node: Uuid, access: Access) -> AttachmentRow {
    AttachmentRow {
        id: AttachmentId::new(id).unwrap(),
        volume: volume.id.clone(),
        node,
        read_only: access == Access::MultiNodeReadOnly,
        access,
        state: AttachmentState::Attaching,
        message: None,
        created_at: "2026-01-01T00:00:00Z".into(),
        blank: Blank::Undecided,
    }
}

async fn catalog(backend: &Backend, dir: &Path, volume: &VolumeRow, nodes: &[Uuid]) -> Catalog {
    let catalog = backend.open(dir).unwrap();
    let (volume, nodes) = (volume.clone(), nodes.to_vec());
    catalog
        .run::<_, CatalogError, _>(move |tx| {
            tx.insert_pool(&PoolRow {
                name: volume.pool.clone(),
                uuid: Uuid::new_v4(),
                spec: PoolSpec {
                    engine: EngineKind::File,
                    path: "/p".into(),
                    labels: Labels::new(),
                    cordoned: false,
                    on_full: infra_api::OnFull::default(),
                    hosts: infra_api::PoolHosts::default(),
                },
                marked: true,
                generation: 0,
                suspension: None,
            })?;
            tx.insert_volume(&volume)?;
            for uuid in nodes {
                let spec =
                    NodeSpec { name: "n".into(), hypervisor: "h".into(), zone: None, labels: Labels::new() };
                tx.put_node(&NodeRow { uuid, spec })?;
            }
            Ok(())
        })
        .await
        .unwrap();
    catalog
}

#[tokio::test]
async fn the_schema_rejects_a_second_writer() {
    for backend in Backend::each() {
        reject_second_writer(&backend).await;
    }
}

async fn reject_second_writer(backend: &Backend) {
    let dir = tempfile::tempdir().unwrap();
    let v = volume("v");
    let (a, b) = (Uuid::new_v4(), Uuid::new_v4());
    let catalog = catalog(backend, dir.path(), &v, &[a, b]).await;
    let insert = |row: AttachmentRow| catalog.run::<_, CatalogError, _>(move |tx| tx.insert_attachment(&row));
    insert(attachment("one", &v, a, Access::SingleNode)).await.unwrap();
    insert(attachment("two", &v, b, Access::SingleNode)).await.unwrap_err();
    insert(attachment("three", &v, b, Access::MultiNodeReadOnly)).await.unwrap_err();
    let id = AttachmentId::new("one").unwrap();
    catalog.run::<_, CatalogError, _>(move |tx| tx.delete_attachment(&id)).await.unwrap();
    insert(attachment("four", &v, a, Access::MultiNodeReadOnly)).await.unwrap();
    insert(attachment("five", &v, b, Access::MultiNodeReadOnly)).await.unwrap();
}

#[tokio::test]
async fn the_schema_allows_several_writers_only_on_shareable_volumes_and_no_readers_beside_them() {
    for backend in Backend::each() {
        allow_sharing(&backend).await;
    }
}

async fn allow_sharing(backend: &Backend) {
    let dir = tempfile::tempdir().unwrap();
    let mut v = volume("v");
    let (a, b, c) = (Uuid::new_v4(), Uuid::new_v4(), Uuid::new_v4());
    let catalog = catalog(backend, dir.path(), &v, &[a, b, c]).await;
    let insert = |row: AttachmentRow| catalog.run::<_, CatalogError, _>(move |tx| tx.insert_attachment(&row));
    insert(attachment("one", &v, a, Access::MultiNode)).await.unwrap_err();
    v.id = VolumeId::new("w").unwrap();
    v.disk_uuid = Uuid::new_v4();
    v.spec.shareable = true;
    let row = v.clone();
    catalog.run::<_, CatalogError, _>(move |tx| tx.insert_volume(&row)).await.unwrap();
    insert(attachment("one", &v, a, Access::MultiNode)).await.unwrap();
    insert(attachment("two", &v, b, Access::MultiNode)).await.unwrap();
    insert(attachment("three", &v, c, Access::MultiNodeReadOnly)).await.unwrap_err();
    insert(attachment("four", &v, c, Access::SingleNode)).await.unwrap_err();
}

#[tokio::test]
async fn every_change_of_an_on_disk_record_increases_the_revision() {
    for backend in Backend::each() {
        raise_revision(&backend).await;
    }
}

async fn raise_revision(backend: &Backend) {
    let dir = tempfile::tempdir().unwrap();
    let v = volume("v");
    let node = Uuid::new_v4();
    let catalog = catalog(backend, dir.path(), &v, &[node]).await;
    let revisions = async || {
        let id = v.id.clone();
        let read = move |tx: &Tx<'_>| Ok((tx.revision()?, tx.volume_revision(&id)?.unwrap()));
        catalog.read::<_, CatalogError, _>(read).await.unwrap()
    };
    let mut before = revisions().await;
    assert_eq!(before.0, before.1);
    let row = attachment("one", &v, node, Access::SingleNode);
    let (id, of) = (row.id.clone(), v.id.clone());
    type Change = Box<dyn FnOnce(&Tx<'_>) -> Result<()> + Send>;
    let changes: [Change; 4] = [
        Box::new(move |tx| tx.insert_attachment(&row)),
        Box::new(move |tx| tx.delete_attachment(&id)),
        Box::new({
            let of = of.clone();
            move |tx| tx.begin_expand(&of, 2 << 20)
        }),
        Box::new(move |tx| tx.set_volume_state(&of, VolumeState::Deleting)),
    ];
    for change in changes {
        catalog.run::<_, CatalogError, _>(change).await.unwrap();
        let after = revisions().await;
        assert!(after.0 > before.0 && after.1 == after.0, "{before:?} {after:?}");
        before = after;
    }
    let id = AttachmentId::new("one").unwrap();
    let refuse = move |tx: &Tx<'_>| {
        tx.refuse_attachment(&id)?;
        assert!(tx.is_attachment_ended_or_refused(&id)? && !tx.is_attachment_ended(&id)?);
        tx.add_served_time(3)?;
        tx.forget_ended_attachments(2)?;
        assert!(!tx.is_attachment_ended_or_refused(&id)?);
        Ok(())
    };
    catalog.run::<_, CatalogError, _>(refuse).await.unwrap();
    let raise = |tx: &Tx<'_>| {
        tx.raise_revision(1)?;
        tx.raise_revision(1000)
    };
    catalog.run::<_, CatalogError, _>(raise).await.unwrap();
    assert_eq!(revisions().await.0, 1000);
}

#[tokio::test]
async fn a_volume_row_is_removed_only_in_state_deleting_and_without_attachments() {
    for backend in Backend::each() {
        keep_volume(&backend).await;
    }
}

async fn keep_volume(backend: &Backend) {
    let dir = tempfile::tempdir().unwrap();
    let v = volume("v");
    let node = Uuid::new_v4();
    let catalog = catalog(backend, dir.path(), &v, &[node]).await;
    let row = attachment("one", &v, node, Access::SingleNode);
    catalog.run::<_, CatalogError, _>(move |tx| tx.insert_attachment(&row)).await.unwrap();
    let remove = |id: VolumeId| catalog.run::<_, CatalogError, _>(move |tx| tx.delete_volume(&id));
    remove(v.id.clone()).await.unwrap_err();
    let id = v.id.clone();
    catalog
        .run::<_, CatalogError, _>(move |tx| tx.set_volume_state(&id, VolumeState::Deleting))
        .await
        .unwrap();
    remove(v.id.clone()).await.unwrap_err();
    let id = AttachmentId::new("one").unwrap();
    catalog.run::<_, CatalogError, _>(move |tx| tx.delete_attachment(&id)).await.unwrap();
    remove(v.id).await.unwrap();
}

#[tokio::test]
async fn a_failed_transaction_is_rolled_back_and_a_second_server_is_refused() {
    for backend in Backend::each() {
        roll_back(&backend).await;
    }
}

async fn roll_back(backend: &Backend) {
    let dir = tempfile::tempdir().unwrap();
    let v = volume("v");
    let catalog = catalog(backend, dir.path(), &v, &[]).await;
    let id = v.id.clone();
    catalog
        .run::<(), CatalogError, _>(move |tx| {
            tx.set_volume_state(&id, VolumeState::Deleting)?;
            Err(CatalogError::Corrupt("stop".into()))
        })
        .await
        .unwrap_err();
    let id = v.id.clone();
    let found = catalog.run::<_, CatalogError, _>(move |tx| tx.volume(&id)).await.unwrap().unwrap();
    assert_eq!(found.state, VolumeState::Ready);
    catalog.probe().await.unwrap();
    let error = Catalog::open(dir.path(), Duration::ZERO).err().unwrap().to_string();
    assert!(error.contains("another server"), "{error}");
    drop(catalog);
    backend.open(dir.path()).unwrap();
}
