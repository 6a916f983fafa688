//! Exports and imports, against the real server with real loop devices. Runs as root.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::*;
use futures::StreamExt;
use infra_api::{
    Account, Attachment, BudgetSpec, Client, ClientError, Owner, ProblemCode, VolumeSize, VolumeSource,
    VolumeState,
};
use uuid::Uuid;

/// Runs a client command of the program; returns whether it succeeded, and its output.
fn cli(site: &Site, server: &Server, arguments: &[&str]) -> Output {
    cli_with_input(site, server, arguments, None)
}

fn cli_with_input(site: &Site, server: &Server, arguments: &[&str], input: Option<&Path>) -> Output {
    let pki = site.path("pki");
    let mut command = Command::new(BINARY);
    command.args(arguments).env("NESTOR_INFRA_URL", format!("https://{}", server.api));
    for (name, file) in [("CA", "ca.crt"), ("CERT", "operator.crt"), ("KEY", "operator.key")] {
        command.env(format!("NESTOR_INFRA_{name}"), pki.join(file));
    }
    command.stdin(input.map_or(Stdio::null(), |path| fs::File::open(path).unwrap().into()));
    command.output().unwrap()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", stderr(output));
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The error of a command that must fail.
fn failed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    stderr(output)
}

/// A volume with data and holes.
async fn filled(site: &Site, server: &Server, id: &str) {
    server.client.put_volume(&volume(id), &size(64 * MIB), SOON).await.unwrap();
    let pattern: Vec<u8> = (0..3 * MIB).map(|at| (at % 251) as u8).collect();
    site.write(&volume(id), &pattern, 8 * MIB);
    site.write(&volume(id), b"last bytes", 64 * MIB - 10);
}

fn content(site: &Site, id: &str) -> Vec<u8> {
    fs::read(site.file(&volume(id))).unwrap()
}

async fn attach(server: &Server, id: &str, of: &str, node: Uuid) -> Result<Attachment, ClientError> {
    server.client.attach(&attachment(id), &writer(&volume(of), node), SOON).await
}

/// The stream of a volume.
async fn exported(client: &Client, id: &str) -> Vec<u8> {
    let stream = client.export(&VolumeSource::Volume(volume(id)), None).await.unwrap();
    stream.map(Result::unwrap).concat().await
}

/// Sends these bytes as the stream of an import, in one piece.
async fn send(client: &Client, id: &str, resume: bool, bytes: Vec<u8>) -> Result<(), ClientError> {
    let stream = futures::stream::iter([Ok(bytes)]);
    client.send_import(&volume(id), resume, stream).await.map(drop)
}

#[tokio::test]
async fn a_volume_is_exported_without_its_holes_and_imported_as_another() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    filled(&site, &server, "v").await;
    let file = site.path("v.export");
    succeeded(&cli(&site, &server, &["volume", "export", "v", "--to", text(&file)]));
    assert!(fs::metadata(&file).unwrap().len() < 4 * MIB);
    succeeded(&cli(&site, &server, &["volume", "import", "w", "--from", text(&file), "--pool", "pool"]));
    assert_eq!(content(&site, "w"), content(&site, "v"));
    let allocated = |id: &str| fs::metadata(site.file(&volume(id))).unwrap().blocks();
    assert!(allocated("w") <= allocated("v") + 64, "{} {}", allocated("w"), allocated("v"));
    assert_eq!(site.files(), ["v.raw", "w.raw"]);
    // An import holds data, whatever it reads as.
    let attached = attach(&server, "a", "w", node).await.unwrap();
    assert_eq!(attached.blank_attestation, None);
    // An existing file is not overwritten.
    failed(&cli(&site, &server, &["volume", "export", "v", "--to", text(&file)]));

    let piped = cli(&site, &server, &["volume", "export", "v"]);
    succeeded(&piped);
    assert_eq!(piped.stdout, fs::read(&file).unwrap());
    let larger = ["volume", "import", "x", "--size", "65Mi"];
    succeeded(&cli_with_input(&site, &server, &larger, Some(&file)));
    assert_eq!(content(&site, "x").len() as u64, 65 * MIB);
    assert_eq!(content(&site, "x")[..64 * MIB as usize], content(&site, "v"));
    let smaller = ["volume", "import", "y", "--size", "1Mi", "--from", text(&file)];
    assert!(failed(&cli(&site, &server, &smaller)).contains("--size is smaller"));
}

#[tokio::test]
async fn an_empty_import_is_not_blank() {
    let site = Site::new();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let stream = exported(&server.client, "v").await;
    server.client.put_import(&volume("w"), &size(MIB)).await.unwrap();
    send(&server.client, "w", false, stream).await.unwrap();
    let attached = attach(&server, "a", "w", node).await.unwrap();
    assert_eq!(attached.blank_attestation, None);
}

#[tokio::test]
async fn an_attached_volume_is_refused_and_its_snapshot_is_exported() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    filled(&site, &server, "v").await;
    let before = content(&site, "v");
    attach(&server, "a", "v", node).await.unwrap();
    let refused = failed(&cli(&site, &server, &["volume", "export", "v", "--to", text(&site.path("no"))]));
    assert!(refused.contains("take a snapshot") && refused.contains("node-0"), "{refused}");
    server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    site.write(&volume("v"), b"later", 0);
    let file = site.path("s.export");
    succeeded(&cli(&site, &server, &["snapshot", "export", "s", "--to", text(&file)]));
    succeeded(&cli(&site, &server, &["volume", "import", "w", "--from", text(&file)]));
    assert_eq!(content(&site, "w"), before);
}

#[tokio::test]
async fn an_export_holds_its_volume_until_it_ends_or_the_server_does() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    // More than fits into the buffers between the server and a client that does not read.
    server.client.put_volume(&volume("v"), &size(128 * MIB), SOON).await.unwrap();
    site.write(&volume("v"), &vec![7; 128 * MIB as usize], 0);
    let source = VolumeSource::Volume(volume("v"));
    let stream = server.client.export(&source, None).await.unwrap();
    assert_eq!(code(attach(&server, "a", "v", node).await), ProblemCode::Unavailable);
    assert_eq!(code(server.client.delete_volume(&volume("v")).await), ProblemCode::InUse);
    let larger = VolumeSize { capacity_bytes: 129 * MIB, limit_bytes: None };
    assert_eq!(code(server.client.expand_volume(&volume("v"), &larger).await), ProblemCode::InUse);
    // Reading does no harm: another export, a snapshot, a reader.
    drop(server.client.export(&source, None).await.unwrap());
    server.client.put_snapshot(&snapshot("s"), &of(&volume("v")), SOON).await.unwrap();
    server.client.attach(&attachment("r"), &reader(&volume("v"), node), SOON).await.unwrap();
    server.client.detach(&attachment("r"), SOON).await.unwrap();
    drop(stream);
    until("the hold ends with its client", async || attach(&server, "b", "v", node).await.is_ok()).await;
    server.client.detach(&attachment("b"), SOON).await.unwrap();

    let _stream = server.client.export(&source, None).await.unwrap();
    assert!(attach(&server, "c", "v", node).await.is_err());
    server.kill();
    let server = site.start();
    attach(&server, "d", "v", node).await.unwrap();
}

#[tokio::test]
async fn an_export_is_resumed_after_its_last_valid_extent_unless_the_source_changed() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    filled(&site, &server, "v").await;
    let file = site.path("v.export");
    let export = ["volume", "export", "v", "--to", text(&file), "--resume"];
    succeeded(&cli(&site, &server, &export));
    let whole = fs::read(&file).unwrap();
    let mut corrupt = whole.clone();
    corrupt[2 * MIB as usize] ^= 1;
    for partial in
        [&whole[..0], &whole[..100], &whole[..2 * MIB as usize], &whole[..whole.len() - 1], &corrupt]
    {
        fs::write(&file, partial).unwrap();
        succeeded(&cli(&site, &server, &export));
        assert!(fs::read(&file).unwrap() == whole, "{} bytes", partial.len());
    }
    assert!(String::from_utf8_lossy(&cli(&site, &server, &export).stdout).contains("is complete"));
    fs::write(&file, &whole[..2 * MIB as usize]).unwrap();
    attach(&server, "a", "v", node).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let refused = failed(&cli(&site, &server, &export));
    assert!(refused.contains("not in the state") && refused.contains("start a new export"), "{refused}");
    fs::write(&file, b"not an export").unwrap();
    assert!(failed(&cli(&site, &server, &export)).contains("no volume stream"));
}

#[tokio::test]
async fn a_damaged_stream_is_refused_with_its_offset_and_the_volume_is_never_ready() {
    let site = Site::reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let client = &server.client;
    filled(&site, &server, "v").await;
    let whole = exported(client, "v").await;
    let mut corrupt = whole.clone();
    corrupt[2 * MIB as usize] ^= 1;
    client.put_import(&volume("w"), &size(64 * MIB)).await.unwrap();
    let truncated = whole[..whole.len() - 1].to_vec();
    let more = [&whole[..], b"x"].concat();
    for (bytes, what) in [
        (b"x".to_vec(), "no volume stream".to_owned()),
        (corrupt, "corrupt at byte".to_owned()),
        (truncated, format!("truncated: it ends at byte {}", whole.len() - 1)),
        (more, format!("more bytes after its end at byte {}", whole.len())),
    ] {
        let refused = send(client, "w", false, bytes).await.unwrap_err();
        assert_eq!(refused.code(), Some(ProblemCode::Invalid), "{refused}");
        assert!(refused.to_string().contains(&what), "{refused}");
        let found = client.get_volume(&volume("w")).await.unwrap().unwrap();
        assert_eq!(found.state, VolumeState::Creating);
        assert_eq!(code(attach(&server, "a", "w", node).await), ProblemCode::Unavailable);
    }
    assert_eq!(site.files(), ["v.raw", "w.vpart"]);
    assert_eq!(code(client.put_volume(&volume("w"), &size(64 * MIB), SOON).await), ProblemCode::Exists);
    // Neither repair nor a restart makes it ready.
    let server = {
        server.kill();
        site.start()
    };
    let found = server.client.get_volume(&volume("w")).await.unwrap().unwrap();
    assert_eq!(found.state, VolumeState::Creating);
    server.client.delete_volume(&volume("w")).await.unwrap();
    assert_eq!(site.files(), ["v.raw"]);
    // The command finds the fault before the server does.
    let file = site.path("bad");
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let refused = failed(&cli(&site, &server, &["volume", "import", "w", "--from", text(&file)]));
    assert!(refused.contains(&format!("ends at byte {}", whole.len() / 2)), "{refused}");
}

#[tokio::test]
async fn an_import_is_resumed_after_a_crash_and_only_with_the_same_stream() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    filled(&site, &server, "v").await;
    filled(&site, &server, "other").await;
    let (whole, other) = (exported(&server.client, "v").await, exported(&server.client, "other").await);
    let (good, bad) = (site.path("good"), site.path("bad"));
    fs::write(&good, &whole).unwrap();
    fs::write(&bad, &other).unwrap();
    server.client.put_import(&volume("w"), &size(64 * MIB)).await.unwrap();
    send(&server.client, "w", false, whole[..2 * MIB as usize].to_vec()).await.unwrap_err();
    let state = server.client.get_import(&volume("w")).await.unwrap().unwrap();
    assert!(!state.complete && state.received_bytes >= 9 * MIB, "{state:?}");
    server.kill();
    let server = site.start();
    assert_eq!(server.client.get_import(&volume("w")).await.unwrap(), Some(state));
    let import = |from: &Path, more: &[&str]| {
        cli(&site, &server, &[&["volume", "import", "w", "--from", text(from)], more].concat())
    };
    assert!(failed(&import(&good, &[])).contains("--resume"));
    assert!(failed(&import(&bad, &["--resume"])).contains("is not the export"));
    succeeded(&import(&good, &["--resume"]));
    assert_eq!(content(&site, "w"), content(&site, "v"));
    // Repeated, it changes nothing.
    succeeded(&import(&good, &["--resume"]));
    assert!(failed(&import(&good, &[])).contains("imported before"));
    assert_eq!(server.client.get_import(&volume("v")).await.unwrap(), None);
}

#[tokio::test]
async fn an_import_counts_in_its_owners_budget() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    filled(&site, &server, "v").await;
    let file = site.path("v.export");
    succeeded(&cli(&site, &server, &["volume", "export", "v", "--to", text(&file)]));
    let guest = Account::new("g1").unwrap();
    let limits = BudgetSpec { bytes: Some(100 * MIB), ..BudgetSpec::default() };
    server.client.put_budget(&guest, &limits).await.unwrap();
    let import = |id: &str| {
        cli(
            &site,
            &server,
            &["volume", "import", id, "--from", text(&file), "--account", "g1", "--class", "gold"],
        )
    };
    succeeded(&import("a"));
    let owner = Owner { account: guest.clone(), class: "gold".into() };
    assert_eq!(server.client.get_volume(&volume("a")).await.unwrap().unwrap().owner, owner);
    assert_eq!(server.client.get_budget(&guest).await.unwrap().used.bytes, 64 * MIB);
    assert!(failed(&import("b")).contains("over-budget"));
    assert_eq!(server.client.get_volume(&volume("b")).await.unwrap(), None);
}
