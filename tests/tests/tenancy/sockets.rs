//! Attempts at the sockets of the drivers and at the port of the storage infra: huge, slow and malformed requests.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use csi::proto::ControllerGetCapabilitiesRequest;
use futures::future::{BoxFuture, try_join_all};
use infra_api::{Account, Client, ClientOptions, Labels, Role, SnapshotId, SnapshotSpec, VolumeId};
use tests::bytes::noise;
use tests::driver::{Driver, new_volume};
use tests::{MIB, PATIENCE, Scenario, unique};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request};

use super::attempt::Outcome::{Bounded, Refused};
use super::attempt::{Attempt, By, Outcome, Seen, everywhere};

/// An attempt at the socket of a driver.
pub(super) type SocketAct = for<'a> fn(&'a Path) -> BoxFuture<'a, Result<Seen>>;
/// An attempt at the storage infra.
pub(super) type InfraAct = for<'a> fn(&'a Scenario) -> BoxFuture<'a, Result<Seen>>;

/// Connections that are opened at once.
const CONNECTIONS: usize = 200;
/// The start of an HTTP/2 connection (RFC 9113, 3.4), and the header of a frame whose 64 bytes never come.
const HALF_A_REQUEST: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x40\x01\x04\x00\x00\x00\x01";

const SERVER: Outcome = Refused(By::GrpcServer);
const SERVES: Outcome = Bounded("other calls are served meanwhile, and silent connections are closed");

fn at_driver(name: &'static str, act: SocketAct, expected: Outcome) -> Attempt<SocketAct> {
    Attempt { name, act, expected: everywhere(expected) }
}

fn at_infra(name: &'static str, act: InfraAct, expected: Outcome) -> Attempt<InfraAct> {
    Attempt { name, act, expected: everywhere(expected) }
}

/// Attempts at the socket of a driver.
pub(super) fn at_drivers() -> Vec<Attempt<SocketAct>> {
    vec![
        at_driver("send bytes that are not gRPC", |socket| Box::pin(send(socket, noise(3, 1 << 16))), SERVER),
        at_driver(
            "send HTTP/1.1",
            |socket| Box::pin(send(socket, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec())),
            SERVER,
        ),
        at_driver("send a message of 5 MiB", |socket| Box::pin(send_a_huge_message(socket)), SERVER),
        at_driver("send a header of 1 MiB", |socket| Box::pin(send_a_huge_header(socket)), SERVER),
        at_driver(
            "open many connections and send nothing",
            |socket| Box::pin(open(socket, Vec::new())),
            SERVES,
        ),
        at_driver(
            "open many connections and send half of a request",
            |socket| Box::pin(open(socket, HALF_A_REQUEST.to_vec())),
            SERVES,
        ),
    ]
}

/// Attempts at the storage infra from where its port can be reached.
pub(super) fn at_the_infra() -> Vec<Attempt<InfraAct>> {
    vec![
        at_infra("send HTTP without TLS", |s| Box::pin(http_without_tls(s)), Refused(By::Tls)),
        at_infra(
            "connect without a client certificate",
            |s| Box::pin(https_without_a_certificate(s)),
            Refused(By::Tls),
        ),
        at_infra("open many connections and send nothing", |s| Box::pin(open_to_the_infra(s)), SERVES),
        at_infra(
            "read another guest's volume with the certificate of the own backup",
            |s| Box::pin(read_as_a_backup(s)),
            Refused(By::StorageInfra),
        ),
        at_infra(
            "take a snapshot of another guest's volume with the certificate of the own backup",
            |s| Box::pin(snapshot_as_a_backup(s)),
            Refused(By::StorageInfra),
        ),
        at_infra(
            "delete another guest's snapshot with the certificate of the own backup",
            |s| Box::pin(delete_as_a_backup(s)),
            Refused(By::StorageInfra),
        ),
    ]
}

/// Fails unless a driver answers a call.
pub(super) async fn serves(socket: &Path) -> Result<()> {
    let driver = Driver::connect(socket).await?;
    driver.calls().controller_get_capabilities(ControllerGetCapabilitiesRequest::default()).await?;
    Ok(())
}

/// Sends bytes to a driver, and reads until it closes the connection.
async fn send(socket: &Path, bytes: Vec<u8>) -> Result<Seen> {
    let (mut reader, mut writer) = UnixStream::connect(socket).await?.into_split();
    // The driver may close the connection before it has read everything.
    let sent = writer.write_all(&bytes).await;
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, reader.read_to_end(&mut answer));
    let read = read.await.context("the driver keeps the connection")?;
    let is_success = answer.starts_with(b"HTTP/1.1 2");
    ensure!(!is_success, "the driver answered {:?}", String::from_utf8_lossy(&answer));
    Ok(Seen::Refused(By::GrpcServer, format!("sent: {sent:?}, read: {read:?}")))
}

async fn send_a_huge_message(socket: &Path) -> Result<Seen> {
    let driver = Driver::connect(socket).await?;
    let request = new_volume(&"x".repeat(5 << 20), MIB, "nestor");
    let refused = driver.create(request).await.err().context("a volume was created")?;
    let codes = [Code::OutOfRange, Code::ResourceExhausted];
    ensure!(codes.contains(&refused.code()), "{refused}");
    Ok(Seen::Refused(By::GrpcServer, refused.message().to_owned()))
}

async fn send_a_huge_header(socket: &Path) -> Result<Seen> {
    let driver = Driver::connect(socket).await?;
    let mut request = Request::new(ControllerGetCapabilitiesRequest::default());
    request.metadata_mut().insert("x-long", MetadataValue::try_from("x".repeat(1 << 20))?);
    request.set_timeout(PATIENCE);
    let refused =
        driver.calls().controller_get_capabilities(request).await.err().context("it was answered")?;
    Ok(Seen::Refused(By::GrpcServer, refused.message().to_owned()))
}

/// Opens connections to a driver, sends the same bytes over each, and checks that the driver serves another one.
async fn open(socket: &Path, bytes: Vec<u8>) -> Result<Seen> {
    let mut connections =
        try_join_all((0..CONNECTIONS).map(|_| UnixStream::connect(socket))).await.context("connections")?;
    for connection in &mut connections {
        connection.write_all(&bytes).await?;
    }
    serves(socket).await?;
    Ok(Seen::Permitted)
}

fn address(s: &Scenario) -> Result<String> {
    let infra = s.lab.state().infra.as_ref().context("the lab has no storage infra")?;
    Ok(infra.url.trim_start_matches("https://").to_owned())
}

async fn http_without_tls(s: &Scenario) -> Result<Seen> {
    let mut stream = TcpStream::connect(address(s)?).await?;
    stream.write_all(b"GET /v1/volumes HTTP/1.1\r\nHost: infra\r\n\r\n").await?;
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer));
    let read = read.await.context("the storage infra keeps the connection")?;
    ensure!(!answer.starts_with(b"HTTP/"), "it answered {:?}", String::from_utf8_lossy(&answer));
    Ok(Seen::Refused(By::Tls, format!("read: {read:?}")))
}

async fn https_without_a_certificate(s: &Scenario) -> Result<Seen> {
    let mut config = kube::Config::new(format!("https://{}", address(s)?).parse()?);
    config.accept_invalid_certs = true;
    let client = kube::Client::try_from(config)?;
    let request = http::Request::get("/v1/volumes").body(Vec::new())?;
    match client.request_text(request).await {
        Ok(_) | Err(kube::Error::Api(_)) => Ok(Seen::Permitted),
        Err(error) => Ok(Seen::Refused(By::Tls, error.to_string())),
    }
}

/// The backup of another account, and a volume of the lab's guest.
async fn backup_and_volume(s: &Scenario) -> Result<(Client, VolumeId)> {
    let infra = s.lab.state().infra.as_ref().context("the lab has no storage infra")?;
    let backup = Client::new(&ClientOptions::from_pki_dir(&infra.url, &infra.pki, Role::Backup))?;
    let volume = s.infra_volume(&s.volume().await?).await?;
    ensure!(volume.owner.account.as_str() == s.cluster_id, "{volume:?}");
    Ok((backup, volume.id))
}

async fn read_as_a_backup(s: &Scenario) -> Result<Seen> {
    let (backup, volume) = backup_and_volume(s).await?;
    let listed = backup.list_volumes(None, None).await?.items;
    let is_listed = listed.iter().any(|one| one.id == volume);
    let seen = backup.get_volume(&volume).await?;
    Ok(match seen {
        None if !is_listed => Seen::Refused(By::StorageInfra, "it does not exist".to_owned()),
        _ => Seen::Permitted,
    })
}

async fn snapshot_as_a_backup(s: &Scenario) -> Result<Seen> {
    let (backup, volume) = backup_and_volume(s).await?;
    let id = SnapshotId::new(unique("attempt"))?;
    let refused = match backup.put_snapshot(&id, &snapshot_of(volume.clone()), PATIENCE).await {
        Ok(_) => return Ok(Seen::Permitted),
        Err(error) => error.problem().with_context(|| error.to_string())?.clone(),
    };
    let expected = format!("the volume {volume} does not exist");
    ensure!(refused.status == 404 && refused.detail == expected, "{refused:?}");
    ensure!(s.infra.get_snapshot(&id).await?.is_none(), "the snapshot exists");
    Ok(Seen::Refused(By::StorageInfra, refused.detail))
}

async fn delete_as_a_backup(s: &Scenario) -> Result<Seen> {
    let (backup, volume) = backup_and_volume(s).await?;
    let id = SnapshotId::new(unique("victim"))?;
    s.infra.put_snapshot(&id, &snapshot_of(volume), PATIENCE).await?;
    let deleted = backup.delete_snapshot(&id).await;
    let kept = s.infra.get_snapshot(&id).await?;
    s.infra.delete_snapshot(&id).await?;
    // As for a snapshot that does not exist.
    deleted?;
    Ok(match kept {
        Some(_) => Seen::Refused(By::StorageInfra, "it does not exist".to_owned()),
        None => Seen::Permitted,
    })
}

fn snapshot_of(volume: VolumeId) -> SnapshotSpec {
    SnapshotSpec { volume, account: Account::default(), labels: Labels::new() }
}

async fn open_to_the_infra(s: &Scenario) -> Result<Seen> {
    let address = address(s)?;
    let connections = try_join_all((0..CONNECTIONS).map(|_| TcpStream::connect(&address))).await?;
    s.infra.health().await?;
    drop(connections);
    Ok(Seen::Permitted)
}
