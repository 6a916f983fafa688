//! Adoptions and releases, against the real server with real loop devices, on filesystems with and without reflink. Runs
//! as root.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::*;
use infra_api::{
    Account, Adoption, BudgetSpec, ClientError, Owner, PoolName, PoolSpec, ProblemCode, Qos, Release,
    VolumeSource, VolumeState,
};
use uuid::Uuid;

const DATA: &[u8] = b"data of another storage system";

/// A site with a reflink pool, a pool on another filesystem, and a permitted directory beside them.
async fn site() -> (Site, Server, Uuid) {
    let mut site = Site::reflink();
    site.mount("far", &["mkfs.ext4", "-q", "-F"]);
    fs::create_dir(site.path("files")).unwrap();
    site.flags = vec!["--file-dir".to_owned(), text(&site.path("files")).to_owned()];
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let far = PoolSpec { path: text(&site.path("far")).to_owned(), ..site.pool_spec() };
    server.client.put_pool(&PoolName::new("far").unwrap(), &far).await.unwrap();
    (site, server, node)
}

/// Creates a raw file with data at 1 MiB.
fn raw(path: &Path) -> u64 {
    let file = fs::File::create(path).unwrap();
    file.set_len(8 * MIB).unwrap();
    file.write_all_at(DATA, MIB).unwrap();
    file.sync_all().unwrap();
    fs::metadata(path).unwrap().ino()
}

fn adoption(path: &Path) -> Adoption {
    Adoption {
        path: text(path).to_owned(),
        pool: None,
        qos: Qos::default(),
        shareable: false,
        owner: Owner::default(),
    }
}

fn in_pool(path: &Path, pool: &str) -> Adoption {
    Adoption { pool: Some(PoolName::new(pool).unwrap()), ..adoption(path) }
}

async fn adopt(server: &Server, id: &str, adoption: &Adoption) -> Result<(), ClientError> {
    let adopted = server.client.adopt(&volume(id), adoption, SOON).await?;
    assert_eq!((adopted.state, adopted.capacity_bytes), (VolumeState::Ready, 8 * MIB));
    Ok(())
}

/// The error of an adoption that must be refused, and changes nothing.
async fn refused(server: &Server, path: &Path) -> (ProblemCode, String) {
    let error = server.client.adopt(&volume("no"), &adoption(path), SOON).await.unwrap_err();
    assert_eq!(server.client.get_volume(&volume("no")).await.unwrap(), None);
    (error.code().unwrap(), error.to_string())
}

fn release_to(path: &Path) -> Release {
    Release { path: Some(text(path).to_owned()) }
}

/// A process that runs until it is dropped.
struct Running(Child);

impl Running {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(program);
        Self(command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_raw_file_in_the_pool_becomes_a_volume_without_a_copy_and_a_file_again() {
    let (site, server, node) = site().await;
    let path = site.path("pool/disk.img");
    let inode = raw(&path);
    let id = volume("v");
    adopt(&server, "v", &adoption(&path)).await.unwrap();
    assert!(!path.exists());
    let file = fs::metadata(site.file(&id)).unwrap();
    assert_eq!((file.ino(), file.mode() & 0o7777, file.uid()), (inode, 0o600, 0));
    assert_eq!(read_record(&site.file(&id)).unwrap()["written"], true);
    let pool = server.client.get_pool(&pool()).await.unwrap().unwrap();
    assert_eq!(pool.unknown_files, [""; 0]);
    // Repeated, it changes nothing; another request is refused.
    adopt(&server, "v", &adoption(&path)).await.unwrap();
    assert_eq!(code(adopt(&server, "v", &in_pool(&path, "far")).await), ProblemCode::Exists);
    assert_eq!(code(server.client.put_volume(&id, &size(8 * MIB), SOON).await), ProblemCode::Exists);

    let attached = server.client.attach(&attachment("a"), &writer(&id, node), SOON).await.unwrap();
    assert_eq!(attached.blank_attestation, None);
    assert_eq!(code(server.client.release(&id, &Release::default()).await), ProblemCode::InUse);
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    server.client.put_snapshot(&snapshot("s"), &of(&id), SOON).await.unwrap();
    let kept = server.client.release(&id, &Release::default()).await.unwrap_err().to_string();
    assert!(kept.contains("has snapshots, such as s"), "{kept}");
    server.client.delete_snapshot(&snapshot("s")).await.unwrap();
    let source = VolumeSource::Volume(id.clone());
    let released = server.client.release(&id, &Release::default()).await.unwrap();
    assert_eq!(released.path, text(&site.path("pool/v.img")));
    assert_eq!(server.client.get_volume(&id).await.unwrap(), None);
    assert_eq!(code(server.client.export(&source, None).await.map(drop)), ProblemCode::NotFound);
    let file = fs::metadata(&released.path).unwrap();
    assert_eq!((file.ino(), file.len()), (inode, 8 * MIB));
    assert_eq!(read_record(Path::new(&released.path)), None);
    assert_eq!(site.files(), ["v.img"]);
    // And again.
    adopt(&server, "w", &adoption(Path::new(&released.path))).await.unwrap();
    assert_eq!(site.read(&volume("w"), DATA.len(), MIB), DATA);
}

#[tokio::test]
async fn a_file_on_another_filesystem_is_copied_and_stays() {
    let (site, server, _) = site().await;
    let path = site.path("files/disk.img");
    raw(&path);
    adopt(&server, "v", &in_pool(&path, "far")).await.unwrap();
    adopt(&server, "w", &in_pool(&path, "pool")).await.unwrap();
    for file in [site.path("far/v.raw"), site.path("pool/w.raw")] {
        let meta = fs::metadata(&file).unwrap();
        assert!(meta.len() == 8 * MIB && meta.blocks() * 512 < MIB, "{meta:?}");
        assert_eq!(&fs::read(&file).unwrap()[MIB as usize..][..DATA.len()], DATA);
    }
    assert!(path.exists());
    let elsewhere =
        server.client.release(&volume("v"), &release_to(&site.path("files/v.img"))).await.unwrap_err();
    assert!(elsewhere.to_string().contains("another filesystem"), "{elsewhere}");
    let found = server.client.get_volume(&volume("v")).await.unwrap().unwrap();
    assert_eq!(found.state, VolumeState::Ready);
}

#[tokio::test]
async fn a_qcow2_image_is_converted_and_one_with_a_backing_file_is_refused() {
    let (site, server, _) = site().await;
    let (plain, image) = (site.path("files/plain.img"), site.path("pool/disk.qcow2"));
    raw(&plain);
    let convert = |arguments: &[&str]| {
        let status = Command::new("qemu-img").args(arguments).status().unwrap();
        assert!(status.success());
    };
    convert(&["convert", "-f", "raw", "-O", "qcow2", text(&plain), text(&image)]);
    adopt(&server, "v", &adoption(&image)).await.unwrap();
    assert_eq!(fs::read(site.file(&volume("v"))).unwrap(), fs::read(&plain).unwrap());
    assert!(image.exists());
    let backed = site.path("files/backed.qcow2");
    convert(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&image), text(&backed)]);
    let (code, why) = refused(&server, &backed).await;
    assert!(code == ProblemCode::Invalid && why.contains("backing file"), "{why}");
    // A damaged image leaves nothing.
    let damaged = site.path("files/damaged.qcow2");
    fs::copy(&image, &damaged).unwrap();
    fs::File::options().write(true).open(&damaged).unwrap().set_len(200).unwrap();
    assert_eq!(refused(&server, &damaged).await.0, ProblemCode::Invalid);
    assert_eq!(site.files(), ["disk.qcow2", "v.raw"]);
}

#[tokio::test]
async fn a_file_that_is_used_or_not_permitted_is_refused() {
    let (site, server, _) = site().await;
    let path = site.path("files/disk.img");
    raw(&path);
    let held = [("qemu-io", vec!["-f", "raw", text(&path)]), ("tail", vec!["-f", text(&path)])];
    for (program, arguments) in held {
        let running = Running::start(program, &arguments);
        let mut why = (ProblemCode::Internal, String::new());
        until("the process has the file open", async || {
            let opened = fs::read_dir(format!("/proc/{}/fd", running.0.id())).unwrap().flatten();
            opened.filter_map(|one| fs::read_link(one.path()).ok()).any(|target| target == path)
        })
        .await;
        until("the file is refused", async || {
            why = refused(&server, &path).await;
            why.0 == ProblemCode::InUse
        })
        .await;
        assert!(why.1.contains(program), "{}", why.1);
    }
    let outside = site.path("outside.img");
    raw(&outside);
    std::os::unix::fs::symlink(&outside, site.path("files/link.img")).unwrap();
    fs::create_dir(site.path("secret")).unwrap();
    raw(&site.path("secret/disk.img"));
    std::os::unix::fs::symlink(site.path("secret"), site.path("files/dir")).unwrap();
    server.client.put_volume(&volume("v"), &size(8 * MIB), SOON).await.unwrap();
    let link = site.path("files/hard.img");
    let hard = site.path("files/hard2.img");
    raw(&link);
    fs::hard_link(&link, &hard).unwrap();
    for (path, what) in [
        (outside, "neither in the directory of a pool"),
        (site.path("files/link.img"), "symbolic link"),
        (site.path("files/dir/disk.img"), "neither in the directory of a pool"),
        (site.path("files/../outside.img"), "must not contain .."),
        (site.path("files"), "neither in the directory"),
        (site.path("files/missing"), "does not exist"),
        (link, "2 hard links"),
        (site.file(&volume("v")), "the record of a volume"),
        (site.path("pool/.nestor-pool"), "the record of a volume, a snapshot or a pool"),
        ("relative".into(), "must be absolute"),
    ] {
        let (code, why) = refused(&server, &path).await;
        assert!(code == ProblemCode::Invalid && why.contains(what), "{}: {why}", path.display());
    }
}

#[tokio::test]
async fn a_release_never_replaces_a_file_and_a_name_of_the_pool_is_refused() {
    let (site, server, _) = site().await;
    let id = volume("v");
    server.client.put_volume(&id, &size(8 * MIB), SOON).await.unwrap();
    fs::write(site.path("pool/taken.img"), "kept").unwrap();
    for (path, what) in [
        (site.path("pool/taken.img"), "exists"),
        (site.path("pool/w.raw"), "suffix of files in pools"),
        (site.path("pool/none/v.img"), "cannot access"),
    ] {
        let error = server.client.release(&id, &release_to(&path)).await.unwrap_err();
        assert_eq!(error.code(), Some(ProblemCode::Invalid), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(fs::read(site.path("pool/taken.img")).unwrap(), b"kept");
    assert_eq!(server.client.get_volume(&id).await.unwrap().unwrap().state, VolumeState::Ready);
}

#[tokio::test]
async fn an_adopted_volume_counts_in_its_owners_budget_and_needs_no_second_space() {
    let (site, server, _) = site().await;
    let guest = Account::new("g1").unwrap();
    let limits = BudgetSpec { bytes: Some(10 * MIB), ..BudgetSpec::default() };
    server.client.put_budget(&guest, &limits).await.unwrap();
    let owner = Owner { account: guest.clone(), class: "gold".into() };
    let (one, two) = (site.path("pool/one.img"), site.path("pool/two.img"));
    raw(&one);
    raw(&two);
    adopt(&server, "v", &Adoption { owner: owner.clone(), ..adoption(&one) }).await.unwrap();
    assert_eq!(server.client.get_budget(&guest).await.unwrap().used.bytes, 8 * MIB);
    let beyond = Adoption { owner, ..adoption(&two) };
    assert_eq!(code(adopt(&server, "w", &beyond).await), ProblemCode::OverBudget);
    assert!(two.exists());
    // A file that takes most of the pool is adopted, although the pool has no space for another.
    let large = fs::File::create(site.path("pool/large.img")).unwrap();
    rustix::fs::fallocate(&large, rustix::fs::FallocateFlags::empty(), 0, 6 << 30).unwrap();
    drop(large);
    let adopted =
        server.client.adopt(&volume("large"), &adoption(&site.path("pool/large.img")), SOON).await.unwrap();
    assert_eq!(adopted.capacity_bytes, 6 << 30);
}
