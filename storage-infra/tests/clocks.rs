//! The wall clock may jump: nothing is forgotten or removed by it. The server runs with libfaketime, which only its wall clock
//! follows.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::*;
use infra_api::{AttachmentId, ProblemCode};
use uuid::Uuid;

/// The library that fakes the time of a program.
fn library() -> String {
    format!("/usr/lib/{}-linux-gnu/faketime/libfaketime.so.1", std::env::consts::ARCH)
}

/// A server whose wall clock follows a file.
async fn with_clock(node: Uuid) -> (Site, Server) {
    assert!(Path::new(&library()).exists(), "install the package libfaketime");
    let mut site = Site::new();
    let file = site.path("offset");
    fs::write(&file, "+0").unwrap();
    site.env = vec![
        ("LD_PRELOAD", library()),
        ("FAKETIME_TIMESTAMP_FILE", text(&file).to_owned()),
        ("FAKETIME_NO_CACHE", "1".to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let server = site.ready(&[node]).await;
    (site, server)
}

/// The wall clock of the server, by the creation of a volume.
async fn day(server: &Server, id: &str) -> String {
    let made = server.client.put_volume(&volume(id), &size(MIB), SOON).await.unwrap();
    made.created_at[..10].to_owned()
}

/// Whether an attachment with this id is made; the code of the refusal otherwise.
async fn attach(server: &Server, id: &AttachmentId, node: Uuid) -> Result<(), ProblemCode> {
    let made = server.client.attach(id, &writer(&volume("v"), node), SOON).await;
    made.map(drop).map_err(|error| error.code().unwrap_or_else(|| panic!("{error}")))
}

/// Waits until the server has compared its catalog with the node once more, which is when it forgets ids: it attaches a lost
/// disk again then.
async fn compared(site: &Site, disk: Uuid, node: Uuid) {
    let link = site.link(node, disk);
    let device = fs::canonicalize(&link).unwrap();
    assert!(Command::new("losetup").arg("--detach").arg(device).status().unwrap().success());
    fs::remove_file(&link).unwrap();
    until("the lost disk is attached again", async || link.exists()).await;
}

#[tokio::test]
async fn a_jump_of_the_wall_clock_forgets_no_ended_id_in_either_direction() {
    let node = Uuid::new_v4();
    let (site, server) = with_clock(node).await;
    let mut before = day(&server, "v").await;
    attach(&server, &attachment("a"), node).await.unwrap();
    server.client.detach(&attachment("a"), SOON).await.unwrap();
    let kept = server.client.put_volume(&volume("kept"), &size(MIB), SOON).await.unwrap().disk_uuid;
    server.client.attach(&attachment("kept"), &writer(&volume("kept"), node), SOON).await.unwrap();
    for (number, jump) in ["+3d", "+0", "+2d"].into_iter().enumerate() {
        fs::write(site.path("offset"), jump).unwrap();
        let now = day(&server, &format!("later-{number}")).await;
        assert_ne!(now, before, "the clock of the server has jumped");
        before = now;
        compared(&site, kept, node).await;
        assert!(attach(&server, &attachment("a"), node).await.is_err(), "the id was forgotten at {jump}");
    }
    server.stop();
    // Nor does a start forget it. A client needs a certificate that is valid at the server's time to connect again.
    fs::write(site.path("offset"), "+0").unwrap();
    let server = site.start();
    attach(&server, &attachment("a"), node).await.unwrap_err();
    attach(&server, &attachment("b"), node).await.unwrap();
}
