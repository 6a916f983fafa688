//! Operations during which the server crashes: their preconditions, the request, and what must be there afterwards.

use std::fs;
use std::path::PathBuf;

use crate::support::*;
use infra_api::{
    Attachment, AttachmentId, Client, ClientError, MoveSpec, PoolName, PoolSpec, ProblemCode, Qos,
    SnapshotId, Volume, VolumeId, VolumeSize, VolumeSpec, VolumeState,
};
use uuid::Uuid;

const BYTES: &[u8] = b"every acknowledged byte";

/// Operation during which the server crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Create,
    Delete,
    Grow,
    Attach,
    Detach,
    Snapshot,
    DeleteSnapshot,
    Restore,
    CloneOf,
    Elsewhere,
    Limit,
    /// Of a disk that its VM releases.
    Fence,
    /// Of a disk that its VM, which is paused, does not release: the VM is powered off.
    PowerOff,
    AddPool,
    RemovePool,
    Import,
    Adopt,
    AdoptImage,
    Release,
    Move,
}

use Operation::{
    AddPool, Adopt, AdoptImage, Attach, CloneOf, Create, Delete, DeleteSnapshot, Detach, Elsewhere, Fence,
    Grow, Import, Limit, Move, PowerOff, Release, RemovePool, Restore, Snapshot,
};

/// Objects of an operation. Attachment IDs cannot be reused, so each round has its own names.
pub struct Round {
    volume: VolumeId,
    other: VolumeId,
    snapshot: SnapshotId,
    attachment: AttachmentId,
    pool: PoolName,
    dir: PathBuf,
    /// A raw file in the pool's directory.
    raw: PathBuf,
    /// An image elsewhere.
    image: PathBuf,
    node: Uuid,
}

impl Round {
    pub fn new(number: usize, site: &Site, node: Uuid) -> Self {
        Self {
            volume: volume(&format!("v{number}")),
            other: volume(&format!("w{number}")),
            snapshot: snapshot(&format!("s{number}")),
            attachment: attachment(&format!("a{number}")),
            pool: PoolName::new(format!("more{number}")).unwrap(),
            dir: site.path(&format!("more{number}")),
            raw: site.path(&format!("pool/raw{number}.img")),
            image: site.path(&format!("files/image{number}.qcow2")),
            node,
        }
    }

    fn more(&self) -> PoolSpec {
        PoolSpec {
            engine: infra_api::EngineKind::File,
            path: text(&self.dir).to_owned(),
            labels: infra_api::Labels::new(),
            cordoned: false,
            on_full: infra_api::OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        }
    }

    fn elsewhere(&self) -> VolumeSpec {
        let mut spec = cloned(&self.volume, MIB);
        spec.placement.pool = Some(PoolName::new("far").unwrap());
        spec
    }

    /// Creates the preconditions of the operation.
    pub async fn prepare(&self, operation: Operation, site: &Site, server: &Server) {
        let client = &server.client;
        match operation {
            Create => return,
            Adopt => {
                write_raw(&self.raw);
                return;
            }
            AdoptImage => {
                let raw = self.image.with_extension("raw");
                write_raw(&raw);
                let mut convert = std::process::Command::new("qemu-img");
                convert.args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&self.image);
                assert!(convert.status().unwrap().success());
                return;
            }
            AddPool | RemovePool => {
                fs::create_dir_all(&self.dir).unwrap();
                if operation == RemovePool {
                    client.put_pool(&self.pool, &self.more()).await.unwrap();
                }
                return;
            }
            _ => {}
        }
        client.put_volume(&self.volume, &near(), SOON).await.unwrap();
        site.write(&self.volume, BYTES, 4096);
        if matches!(operation, Grow | Detach | Limit | Fence | PowerOff) {
            client.attach(&self.attachment, &writer(&self.volume, self.node), SOON).await.unwrap();
        }
        if operation == PowerOff {
            site.set_power(self.node, "paused");
        }
        if matches!(operation, DeleteSnapshot | Restore) {
            client.put_snapshot(&self.snapshot, &of(&self.volume), SOON).await.unwrap();
        }
    }

    /// Sends the request and waits for the result.
    pub async fn act(&self, operation: Operation, client: &Client) -> Result<(), ClientError> {
        match operation {
            Create => client.put_volume(&self.volume, &near(), SOON).await.map(drop),
            Delete => client.delete_volume(&self.volume).await,
            Grow => {
                let size = VolumeSize { capacity_bytes: 2 * MIB, limit_bytes: None };
                client.expand_volume(&self.volume, &size).await.map(drop)
            }
            Attach => client.attach(&self.attachment, &writer(&self.volume, self.node), SOON).await.map(drop),
            Detach => client.detach(&self.attachment, SOON).await,
            Fence | PowerOff => client.fence(&self.attachment, SOON).await,
            Snapshot => client.put_snapshot(&self.snapshot, &of(&self.volume), SOON).await.map(drop),
            DeleteSnapshot => client.delete_snapshot(&self.snapshot).await,
            Restore => client.put_volume(&self.other, &restored(&self.snapshot, MIB), SOON).await.map(drop),
            CloneOf => client.put_volume(&self.other, &cloned(&self.volume, MIB), SOON).await.map(drop),
            Elsewhere => client.put_volume(&self.other, &self.elsewhere(), SOON).await.map(drop),
            Limit => client.put_qos(&self.volume, &limit()).await.map(drop),
            Import => self.import(client).await,
            Adopt => client.adopt(&self.volume, &adoption(&self.raw), SOON).await.map(drop),
            AdoptImage => client.adopt(&self.volume, &adoption(&self.image), SOON).await.map(drop),
            Release => {
                let to = infra_api::Release { path: Some(text(&self.raw).to_owned()) };
                match client.release(&self.volume, &to).await {
                    // It was released before the crash.
                    Err(error) if error.code() == Some(ProblemCode::NotFound) => Ok(()),
                    result => result.map(drop),
                }
            }
            Move => {
                let spec = MoveSpec { pool: PoolName::new("far").unwrap(), bytes_per_second: None };
                client.move_volume(&self.volume, &spec).await?;
                until("the move is complete", async || match client.get_volume(&self.volume).await {
                    Ok(found) => found.is_some_and(|volume| volume.moving.is_none()),
                    // The server crashed.
                    Err(_) => true,
                })
                .await;
                client.get_volume(&self.volume).await.map(drop)
            }
            AddPool => client.put_pool(&self.pool, &self.more()).await.map(drop),
            RemovePool => client.delete_pool(&self.pool).await,
        }
    }

    /// Checks that the requested objects exist, and no others.
    pub async fn check(&self, operation: Operation, site: &Site, server: &Server) {
        let client = &server.client;
        let volumes = client.list_volumes(None, None).await.unwrap().items;
        let snapshots = client.list_snapshots(None, None, None).await.unwrap().items;
        let attachments = client.list_attachments(None, None).await.unwrap();
        let mut ids: Vec<&VolumeId> = volumes.iter().map(|volume| &volume.id).collect();
        ids.sort();
        let expected = match operation {
            Delete | AddPool | RemovePool | Release => vec![],
            Restore | CloneOf | Elsewhere | Import => vec![&self.volume, &self.other],
            _ => vec![&self.volume],
        };
        assert_eq!(ids, expected);
        assert!(volumes.iter().all(|volume| volume.state == VolumeState::Ready && volume.condition.healthy));
        let snapshot = matches!(operation, Snapshot | Restore);
        assert_eq!(snapshots.len(), usize::from(snapshot));
        assert!(snapshots.iter().all(|snapshot| snapshot.state == VolumeState::Ready));
        let attached = matches!(operation, Grow | Attach | Limit);
        assert_eq!(attachments.len(), usize::from(attached));
        assert_eq!(site.devices().len(), usize::from(attached));
        assert!(volumes.iter().all(|volume| volume.attached_to.len() == usize::from(attached)));
        let given_away = operation == Release;
        // The last scan may be older.
        until("only a released file belongs to no volume", async || {
            client.list_pools().await.unwrap();
            client.health().await.unwrap().unknown_files == u64::from(given_away)
        })
        .await;
        if given_away {
            assert_eq!(&fs::read(&self.raw).unwrap()[4096..4096 + BYTES.len()], BYTES);
            assert_eq!(read_record(&self.raw), None);
        }
        assert!(operation != Adopt || !self.raw.exists());
        assert_eq!(client.list_pools().await.unwrap().len(), if operation == AddPool { 3 } else { 2 });
        let limits = if operation == Limit { limit() } else { Qos::default() };
        let size = if operation == Grow { 2 * MIB } else { MIB };
        if operation == Move {
            assert_eq!(volumes[0].pool.as_str(), "far");
            assert!(!site.path("pool").join(format!("{}.raw", self.volume)).exists());
        }
        for volume in &volumes {
            assert_eq!((volume.qos, volume.capacity_bytes), (limits, size));
            let path = site.path(volume.pool.as_str()).join(format!("{}.raw", volume.id));
            let bytes = fs::read(&path).unwrap();
            assert_eq!(bytes.len() as u64, size);
            let wrote = operation != Create;
            assert_eq!(&bytes[4096..4096 + BYTES.len()] == BYTES, wrote, "{}", volume.id);
            assert!(bytes[..4096].iter().chain(&bytes[4096 + BYTES.len()..]).all(|byte| *byte == 0));
        }
        for volume in &volumes {
            let link = site.link(self.node, volume.disk_uuid);
            assert_eq!(fs::symlink_metadata(&link).is_ok(), attached);
        }
        self.recoverable(&volumes, &attachments, site);
    }

    /// Imports a volume from the other, from where an earlier attempt ended.
    async fn import(&self, client: &Client) -> Result<(), ClientError> {
        use futures::TryStreamExt;
        let source = infra_api::VolumeSource::Volume(self.volume.clone());
        let stream: Vec<u8> = client.export(&source, None).await?.try_concat().await?;
        if client.put_import(&self.other, &near()).await?.complete {
            return Ok(());
        }
        client.send_import(&self.other, false, futures::stream::iter([Ok(stream)])).await.map(drop)
    }

    /// Checks that the on-disk records in the pools equal the catalog.
    fn recoverable(&self, volumes: &[Volume], attachments: &[Attachment], site: &Site) {
        for volume in volumes {
            let path = site.path(volume.pool.as_str()).join(format!("{}.raw", volume.id));
            let record = read_record(&path).unwrap();
            assert_eq!(record["diskUuid"], volume.disk_uuid.to_string());
            let holders = record["holders"].as_array().unwrap();
            let ids: Vec<&str> = holders.iter().map(|holder| holder["id"].as_str().unwrap()).collect();
            let expected: Vec<&str> = attachments
                .iter()
                .filter(|attachment| attachment.volume == volume.id)
                .map(|attachment| attachment.id.as_str())
                .collect();
            assert_eq!(ids, expected, "{}", volume.id);
        }
    }

    /// Deletes everything and checks that nothing is left.
    pub async fn clear(&self, site: &Site, server: &Server) {
        let client = &server.client;
        client.detach(&self.attachment, SOON).await.unwrap();
        let _ = fs::remove_file(site.path("by-id").join(format!("{}.state", self.node)));
        client.delete_volume(&self.other).await.unwrap();
        client.delete_snapshot(&self.snapshot).await.unwrap();
        client.delete_volume(&self.volume).await.unwrap();
        let _ = fs::remove_file(&self.raw);
        client.delete_pool(&self.pool).await.unwrap();
        assert!(client.list_volumes(None, None).await.unwrap().items.is_empty());
        assert!(site.devices().is_empty());
        for dir in ["pool", "far"] {
            let names = fs::read_dir(site.path(dir)).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.filter(|name| name != "lost+found").collect();
            names.sort();
            assert_eq!(names, [".nestor-pool"], "{dir}");
        }
        assert!(!self.dir.join(".nestor-pool").exists());
    }
}

fn near() -> VolumeSpec {
    let mut spec = size(MIB);
    spec.placement.pool = Some(pool());
    spec
}

fn write_raw(path: &std::path::Path) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::create(path).unwrap();
    file.set_len(MIB).unwrap();
    file.write_all_at(BYTES, 4096).unwrap();
}

fn adoption(path: &std::path::Path) -> infra_api::Adoption {
    let path = text(path).to_owned();
    infra_api::Adoption {
        path,
        pool: Some(pool()),
        qos: Qos::default(),
        shareable: false,
        owner: Default::default(),
    }
}

fn limit() -> Qos {
    Qos { iops: Some(100), bytes_per_second: None }
}
